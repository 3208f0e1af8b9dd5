"""Tensor parallelism by the model's roles, with Megatron's sequence parallelism between the cut parts.

Weights become DTensors: names, initial values, FSDP2 and checkpoints see one tensor with a layout. The forward pass
works on each rank's plain local tensors, and all communication of the group is explicit here (`collectives`).
Quantizers need plain tensors and their offsets in the whole, which DTensor's dispatch does not provide. Tokens are
gathered once for all linears of a part (q, k and v; gate and up). The partial sums of its row-parallel linear are
scattered back, and then the bias is added.

With sequence parallelism a rank holds T / R tokens between parts, so norms, row-parallel biases and positions see
only those. Their gradients are partial sums, which `gradient_sync` adds over the group once per step (Megatron-LM's
`finalize_model_grads`).
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from lightning_llm.base.errors import AgreedError, Problem
from lightning_llm.linalg import local
from lightning_llm.linalg.gemm import Reduce
from lightning_llm.model.decoder import Decoder
from lightning_llm.model.experts.moe import Experts
from lightning_llm.model.loss import IGNORED_LABEL, chunk_rows, compiled_loss_sum, next_token_loss_sum
from lightning_llm.model.spec import Part
from lightning_llm.model.structure import block_parts, replicated_within
from lightning_llm.parallel.axis import AxisOnRanks, Reduction, Works, all_reduce
from lightning_llm.parallel.collectives import Region, copy_to_group
from lightning_llm.parallel.layout import Layout
from lightning_llm.plan.divisibility import SHARD_AXES


class TensorParallel(AxisOnRanks):
    """Cuts a stage by the roles of its modules, and reduces gradients of parameters that all ranks hold whole."""

    def cut(self, stage: Decoder) -> None:
        """Cut the parameters of `stage` and give its modules a forward pass on this rank's part.

        Raises:
            AgreedError: a module that ranks hold whole has no `normalise`.
        """
        mesh = self.layout.mesh
        if mesh is None:
            raise ValueError("a group has a mesh")
        region = Region(self.group, self.layout.config.sequence_parallel)
        sharing = [] if region.sequence else _sharing_parts(stage)
        shared = {name: Region(self.group, sequence=False, shares=True) for name in sharing}
        stage.auxiliary.factors = dict.fromkeys(_summed_losses(stage), self.group.size())
        stage.token_shards = self.group.size() if region.sequence else 1
        stage.first_id = self.group.rank() * stage.config.padded_vocab_size // self.group.size()
        for name, role in stage.roles().items():
            module = stage.get_submodule(name)
            for key, parameter in list(module.named_parameters(recurse=False)):
                # A bias belongs to the outputs: cut if the weight's rows are cut, whole if its columns are.
                axis = None if (key, role) == ("bias", "row") else SHARD_AXES[role]["w"]
                sharded = shard_parameter(parameter, mesh["tp"], axis)
                module.register_parameter(key, nn.Parameter(sharded, requires_grad=parameter.requires_grad))
            part, kind = ".".join(name.split(".")[:3]), _kind_of(stage, module, role)
            if kind is _Norm and not hasattr(module, "normalise"):
                raise AgreedError(_no_normalise(name, module, self.group.size()))
            _become(module, kind, shared.get(part, region))
        for name, block in stage.blocks.items():
            for key, module in block.named_children():
                own = shared.get(f"{name}.{key}", region)
                if getattr(module, "roles", None) or f"{name}.{key}" in shared:
                    _become(module, _Part, own)
                for inner in module.modules():
                    if isinstance(inner, Experts):
                        _become(inner, _Experts, own)
                        inner.first = self.group.rank() * inner.local_count

    def reductions(self, stage: Decoder) -> Callable[[nn.Parameter], Sequence[Reduction]]:
        """Return the reductions of gradients of parameters that all ranks hold whole.

        Gradients are summed if each rank computed them from its own tokens, heads or columns. If all ranks computed the
        same gradient from the same data, the first rank's is broadcast: kernels without a fixed order of sums would let
        the copies of the parameter drift apart.
        """
        roles = stage.roles() | dict.fromkeys(_replicated_within(stage), "per_head")
        role_of = {id(p): roles[name.rpartition(".")[0]] for name, p in stage.named_parameters()}
        summed, alike = (partial(all_reduce, group=self.group),), (partial(_from_first, group=self.group),)
        sequence = self.layout.config.sequence_parallel
        partial_roles = {"per_head", "replicate", "row"} if sequence else {"per_head"}

        def reductions(parameter: nn.Parameter) -> Sequence[Reduction]:
            if is_tp_shard(parameter):
                return ()
            return summed if role_of[id(parameter)] in partial_roles else alike

        return reductions


def _no_normalise(name: str, module: nn.Module, tp: int) -> Problem:
    text = f"is {tp}, and {name} ({type(module).__name__}) has parameters that these ranks hold whole."
    remedy = "Give the class a method normalise(x, weight, bias), as norms have, or set parallel.tp=1."
    return Problem("parallel.tp", f"{text} {remedy}")


def _parts(stage: Decoder) -> dict[str, Part]:
    """Return the parts of the blocks of `stage` by full name."""
    return {
        f"layers.{index}.{name}": part
        for index in stage.layers
        for name, part in block_parts(stage.config, int(index)).items()
    }


def _sharing_parts(stage: Decoder) -> list[str]:
    """Return the names of the parts with `Region.shares`: with auxiliary losses or replicated parameters."""
    parts = _parts(stage).items()
    return [name for name, part in parts if part.auxiliary_losses or replicated_within(part, stage.config)]


def _replicated_within(stage: Decoder) -> list[str]:
    """Return the names of the modules within parts that all ranks hold whole.

    A rank's gradient is a share there, before the cut linears as well as after them.
    """
    return [
        f"{name}.{each.name.rpartition('.')[0]}"
        for name, part in _parts(stage).items()
        for each in replicated_within(part, stage.config)
    ]


def _summed_losses(stage: Decoder) -> set[str]:
    """Return the auxiliary losses that are sums over columns or heads, and so over ranks."""
    declared = [part.auxiliary_losses for part in _parts(stage).values()]
    return {name for each in declared if isinstance(each, Mapping) for name, over in each.items() if over == "sum"}


def _from_first(flat: Tensor, group: dist.ProcessGroup) -> Works:
    yield dist.broadcast(flat, group=group, group_src=0, async_op=True)


def shard_parameter(parameter: Tensor, mesh: DeviceMesh, axis: int | None) -> DTensor:
    """Return `parameter` as a DTensor: sharded over `mesh` along `axis`, or replicated if `axis` is None."""
    local = parameter.detach()
    if axis is not None:
        local = local.chunk(mesh.size(), axis)[mesh.get_local_rank()].contiguous()
    placement: Placement = Replicate() if axis is None else Shard(axis)
    return DTensor.from_local(
        local, mesh, [placement], run_check=False, shape=parameter.shape, stride=parameter.stride()
    )


def is_tp_shard(parameter: Tensor) -> bool:
    """Return whether the ranks of a tensor-parallel group hold different parts of `parameter`."""
    if not isinstance(parameter, DTensor):
        return False
    names = parameter.device_mesh.mesh_dim_names or ()
    return "tp" in names and parameter.placements[names.index("tp")].is_shard()


class _TensorParallel(nn.Module):
    """Base class of forward passes on a rank's part; the module's original class follows in the MRO (`_become`)."""

    region: Region


class _Part(_TensorParallel):
    """Attention or feed-forward: its column-parallel linears take all tokens, gathered once for all of them."""

    def forward(self, x: Tensor, *rest: Any) -> Tensor:
        return self.region.share(super().forward(self.region.enter(x), *rest))


class _Column(_TensorParallel):
    weight: Tensor
    bias: Tensor | None
    multiply: Callable[[Tensor, Tensor | None, Tensor | None], Tensor]

    def forward(self, x: Tensor) -> Tensor:
        return self.multiply(x, local(self.weight), local(self.bias))


class _Duplicate(_TensorParallel):
    """A narrow linear before column-parallel ones, computed whole on every rank.

    Each rank gets the partial gradient of its own columns, so the gradients are summed here, and casts of the backward
    pass see the whole gradient as on one rank. The gradient of the input is then whole on every rank, so only the
    first rank contributes it to the sum of the part's `Region.enter`, and the others zeros.
    """

    weight: Tensor
    bias: Tensor | None
    multiply: Callable[[Tensor, Tensor | None, Tensor | None], Tensor]

    def forward(self, x: Tensor) -> Tensor:
        first = self.region.group.rank == 0
        y = self.multiply(x if first else x.detach(), local(self.weight), local(self.bias))
        y = copy_to_group(y, self.region.group)
        return y if first else _WithZeroGradient.apply(y, x)


class _WithZeroGradient(torch.autograd.Function):
    """`y`; the backward pass also gives `x` a gradient of zeros, so that its collectives run on every rank."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, x: Tensor) -> Tensor:
        ctx.like = x.shape, x.dtype, x.device
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        shape, dtype, device = ctx.like
        return gradient, torch.zeros(shape, dtype=dtype, device=device)


class _Head(_Column):
    """Column-parallel head; it gathers its own input, because it is not within a part of a block."""

    reduced: Callable[[Tensor, Tensor | None, Tensor | None, Reduce | None], Tensor]

    def forward(self, x: Tensor, reduce: Reduce | None = None) -> Tensor:
        return self.reduced(self.region.enter(x), local(self.weight), local(self.bias), reduce)


class _Row(_TensorParallel):
    weight: Tensor
    bias: Tensor | None
    multiply: Callable[[Tensor, Tensor | None, Tensor | None], Tensor]

    def forward(self, x: Tensor) -> Tensor:
        y = self.region.leave(self.multiply(x, local(self.weight), None))
        bias = local(self.bias)
        # Added in fp32, so that its gradient is summed over tokens in fp32 and then rounded, as in an uncut linear.
        return self.region.unshare(y if bias is None else (y.float() + bias.to(y.dtype).float()).to(y.dtype))


class _Experts(_TensorParallel):
    """Experts of which each rank holds some, whole: it computes its share of each token's sum."""

    def forward(self, x: Tensor, *rest: Any) -> Tensor:
        return self.region.unshare(self.region.leave(super().forward(x, *rest)))


class _Norm(_TensorParallel):
    weight: Tensor
    bias: Tensor | None
    normalise: Callable[[Tensor, Tensor | None, Tensor | None], Tensor]

    def forward(self, x: Tensor) -> Tensor:
        return self.normalise(x, local(self.weight), local(getattr(self, "bias", None)))


class _TokenEmbedding(_TensorParallel):
    weight: DTensor
    reduced: Callable[[Tensor, Tensor, Tensor | None, Reduce | None], Tensor]

    def forward(self, tokens: Tensor) -> Tensor:
        """Look up the tokens. One rank has each token's row and the others add zeros, so the sum is exact."""
        rows = self.weight.to_local()
        own = tokens - self.region.group.rank * rows.shape[0]
        elsewhere = (own < 0) | (own >= rows.shape[0])  # [B, T]
        x = F.embedding(own.masked_fill(elsewhere, 0), rows).masked_fill(elsewhere[..., None], 0)  # [B, T, D]
        return self.region.leave(x)

    def project(self, x: Tensor, reduce: Reduce | None = None) -> Tensor:
        return self.reduced(self.region.enter(x), self.weight.to_local(), None, reduce)


class _PositionEmbedding(_TensorParallel):
    weight: DTensor

    def forward(self, positions: Tensor) -> Tensor:
        return F.embedding(self.region.own(positions), self.weight.to_local())


def _kind_of(model: Decoder, module: nn.Module, role: str) -> type[_TensorParallel]:
    if module is model.embedding:
        return _TokenEmbedding
    if module is model.position_embedding:
        return _PositionEmbedding
    return _KINDS[role]


_KINDS: dict[str, type[_TensorParallel]] = {
    "replicate": _Norm,
    "per_head": _Norm,
    "duplicate": _Duplicate,
    "row": _Row,
    "column": _Column,
    "vocabulary": _Head,
    "expert": _TensorParallel,
}


def _become(module: nn.Module, kind: type[_TensorParallel], region: Region) -> None:
    """Give `module` the forward pass of `kind` by changing its class, as FSDP2 does.

    A separate forward function per module would make the compiler build another graph for every block.
    """
    own = type(module)
    if (kind, own) not in _CLASSES:
        _CLASSES[kind, own] = type(f"{kind.__name__.strip('_')}{own.__name__}", (kind, own), {})
    module.__class__ = _CLASSES[kind, own]
    replaced: Any = module
    replaced.region = region


_CLASSES: dict[tuple[type, type], type] = {}
"""Classes made by `_become`, one for all modules of a kind: the compiler treats each class separately."""


def loss_sum_of(layout: Layout, device: torch.device, z_loss: float = 0.0) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a function: (logits, labels) -> sum of the losses of this rank's tokens, a scalar.

    It takes whole logits, or with tensor parallelism the part of the vocabulary on this rank. If blocks are compiled
    for a GPU, the loss of whole logits is compiled, too; the other one needs communication and is not.
    `z_loss`: see `next_token_loss_sum`.
    """
    group = layout.group("tp")
    if group is not None:
        return partial(vocabulary_parallel_loss_sum, group=group, z_loss=z_loss)
    if layout.config.compile and device.type == "cuda":
        return compiled_loss_sum(z_loss)
    return partial(next_token_loss_sum, z_loss=z_loss)


def vocabulary_parallel_loss_sum(
    logits: Tensor, labels: Tensor, group: dist.ProcessGroup, z_loss: float = 0.0
) -> Tensor:
    """Return the sum of `-log softmax(logits)[label]` over all labels except -100, in fp32 (fp64 for fp64).

    `logits` `[B, T, V / R]` are those of this rank's token ids, in rank order; `labels` int64 `[B, T]` the same on all.
    `z_loss`: see `next_token_loss_sum`.
    """
    loss: Tensor = _CrossEntropySum.apply(logits.flatten(0, -2), labels.flatten(), group, z_loss)
    return loss


class _CrossEntropySum(torch.autograd.Function):
    """As `model.loss`: rows in chunks, all in fp32; saves only the logits and one number per row for backward."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, group: dist.ProcessGroup, z_loss: float) -> Tensor:
        ctx.z_loss = z_loss
        wide = torch.promote_types(logits.dtype, torch.float32)
        width = logits.shape[-1]
        largest = logits.amax(-1).to(wide)  # [N]
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        here = labels - group.rank() * width  # [N] the target's column on this rank, if in range
        here = here.masked_fill((here < 0) | (here >= width), -1)
        sums = torch.zeros(2, len(labels), dtype=wide, device=logits.device)  # of exponentials; the target's logit
        rows = chunk_rows(logits)
        chunks = (each.split(rows) for each in (logits, largest, here, sums[0], sums[1]))
        for row, top, column, exponentials, target in zip(*chunks, strict=True):  # [R, V / R], then [R] each
            shifted = row.to(wide) - top[:, None]
            exponentials.copy_(shifted.exp().sum(-1))
            target.copy_(shifted.gather(-1, column.clamp(min=0)[:, None])[:, 0] * (column >= 0))
            del shifted  # free it before the next chunk is computed
        dist.all_reduce(sums, group=group)
        counted = labels != IGNORED_LABEL
        ctx.save_for_backward(logits, largest + sums[0].log(), here, counted)
        return ((sums[0].log() - sums[1]) * counted).sum()

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None, None]:
        logits, log_sums, here, counted = ctx.saved_tensors
        grad_logits = torch.empty_like(logits)
        rows = chunk_rows(logits)
        chunks = (each.split(rows) for each in (logits, log_sums, here, counted, grad_logits))
        for row, log_sum, column, count, out in zip(*chunks, strict=True):
            grad = (row.to(log_sum.dtype) - log_sum[:, None]).exp_()  # softmax
            if ctx.z_loss:
                grad.mul_(1 + 2 * ctx.z_loss * log_sum[:, None])
            grad.scatter_add_(-1, column.clamp(min=0)[:, None], -(column >= 0).to(grad.dtype)[:, None])
            out.copy_(grad.mul_((count * grad_output)[:, None]))
            del grad
        return grad_logits, None, None, None
