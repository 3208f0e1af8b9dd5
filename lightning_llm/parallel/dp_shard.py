"""FSDP2 for ZeRO-1, 2, 3 and their hybrids, including mixed precision of sharded parameters.

Master weights are sharded in the recipe's master dtype and gathered in the compute dtype. An unsharded model makes the
same cast on use, so the bits are the same (Zhao et al. 2023, arXiv 2304.11277; torchtitan). If gradients must not be
rounded, weights are gathered in the master dtype instead (`PrecisionConfig.gather_dtype`). Token and position
embeddings are gathered uncast, because a lookup's gradient must not be summed in 16 bits.

Quantized weights may be gathered as FP8 codes, one byte per element (`precision.linear.gathered`), through FSDP2's
documented extension `fsdp_pre_all_gather` and `fsdp_post_all_gather`, which it looks up in the first forward pass.
torchao gathers float8 weights this way; Transformer Engine's `fp8_param_gather` has its own. A scale belongs to
the whole weight, or to a block of which several ranks may have rows, so ranks reduce all amaxes of a step at once,
before its first forward pass.
"""

from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from lightning_llm.config.schema.precision import CastConfig
from lightning_llm.linalg import local
from lightning_llm.model.decoder import Decoder
from lightning_llm.parallel.coded_sums import scatter_of
from lightning_llm.parallel.ep import DividedExperts, divided_experts
from lightning_llm.parallel.layout import Layout
from lightning_llm.parallel.torch_private import flattened, fsdp_parameters, keeping_version, side_by_side
from lightning_llm.parallel.tree import TreeReduceScatter, tree_reduce_scatter
from lightning_llm.plan.degrees import replica_axes, shard_axes
from lightning_llm.precision.cast.scales import Scaled
from lightning_llm.precision.linear.gathered import GatheredWeight
from lightning_llm.precision.linear.module import QuantizedLinear, quantized_layers


def shard_decoder(
    model: Decoder, layout: Layout, gather_dtype: torch.dtype, reduce_dtype: torch.dtype
) -> list[TreeReduceScatter]:
    """Shard `model` in place, on the meta device: each block, the head and the embedding separately, the rest together.

    A tied embedding belongs to the root group, which stays gathered for the whole step. Returns one `TreeReduceScatter`
    per FSDP2 group; an empty list for parallel.reduction=native.
    """
    if layout.mesh is None:
        raise ValueError("sharding requires a process group, but this rank has not joined one")
    mesh = layout.mesh["dp_shard"] if layout.shared_mesh is None else layout.shared_mesh
    replicas = [] if layout.tree else [axis for axis in replica_axes() if axis not in layout.left_out]
    replicas = [axis for axis in replicas if layout.degrees.ranks(axis) > 1]
    if layout.shared_mesh is None and replicas == ["dp_replicate"]:
        mesh = layout.mesh[("dp_replicate", "dp_shard")]
    elif replicas:  # an axis made of two cannot be sliced together with another
        several = len(replicas) > 1
        outer = flattened(layout.mesh, tuple(replicas), "replicas") if several else layout.mesh[replicas[0]]
        mesh = side_by_side(outer, mesh)
    kept = MixedPrecisionPolicy(reduce_dtype=reduce_dtype, cast_forward_inputs=False)
    cast = MixedPrecisionPolicy(param_dtype=gather_dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False)
    after_forward = layout.config.zero_stage == 3
    frozen = {parameter for parameter in model.parameters() if not parameter.requires_grad}  # whole, in fp32
    for experts in divided_experts(model):  # in the master dtype: senders' gradients are summed before FSDP2 has them
        whole: Any = layout.expert_mesh
        of_experts = whole[("dp_replicate", "dp_shard")] if replicas else whole["dp_shard"]
        fully_shard(experts, mesh=of_experts, mp_policy=kept, reshard_after_forward=after_forward)
    for block in model.blocks.values():
        ignored = frozen.intersection(block.parameters())
        fully_shard(
            block, mesh=mesh, mp_policy=cast, reshard_after_forward=after_forward, ignored_params=ignored or None
        )
    if model.head is not None:
        fully_shard(model.head, mesh=mesh, mp_policy=cast, reshard_after_forward=False)  # backward wants it at once
    if model.embedding is not None and not model.config.tie_embeddings:
        embedding = fully_shard(model.embedding, mesh=mesh, mp_policy=kept, reshard_after_forward=after_forward)
        embedding.set_unshard_in_backward(False)  # a lookup's backward pass needs no weight
    fully_shard(model, mesh=mesh, mp_policy=kept, reshard_after_forward=False, ignored_params=frozen or None)
    _prefetch_in_forward(model)
    scatters: list[TreeReduceScatter] = []
    for module in sharded_modules(model):
        # The loss is a mean over the whole step's tokens already, so gradients are summed, never averaged.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        if layout.tree:
            divided = isinstance(module, DividedExperts)  # summed in one stage
            scatter = partial(tree_reduce_scatter, subtrees=None) if divided else scatter_of(layout, *shard_axes())
            scatters.append(TreeReduceScatter(scatter))
            own: Any = scatters[-1]
            module.set_custom_reduce_scatter(own)  # FSDP2 declares an abstract class, and calls these two methods
    return scatters


def _prefetch_in_forward(model: Decoder) -> None:
    """Make each group prefetch the next one before its own forward pass is queued. FSDP2 does so in the backward pass.

    By default FSDP2 starts to gather a group only when the host reaches it, which is late if the host is slow.
    """
    order: list[Any] = [
        each for each in (model.embedding, *model.blocks.values(), model.head) if isinstance(each, FSDPModule)
    ]
    for module, following in pairwise(order):
        module.set_modules_to_forward_prefetch([following])


def sharded_modules(model: nn.Module) -> list[FSDPModule]:
    """Return every module that FSDP2 shards as a separate group."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def reshard(model: nn.Module) -> None:
    """Reshard the parameters that a forward pass without a backward pass left gathered."""
    for module in sharded_modules(model):
        module.reshard()


Travels = tuple[CastConfig, Scaled] | None
"""Cast and scales that decode a weight gathered as codes; None if the weight is gathered in the compute dtype."""


def gather_codes(model: Decoder, layout: Layout, compute_dtype: torch.dtype) -> None:
    """Make FSDP2 gather quantized weights of `model` as codes instead of 16-bit numbers, while their casts are active.

    Call it once, after `model` is sharded and allocated. Weights that FSDP2 does not shard are left unchanged.
    """
    group = layout.group("fsdp")
    if group is None:
        return
    layers = {id(layer): layer for layer in quantized_layers(model)}
    shards = []
    for state in (state for module in sharded_modules(model) for state in fsdp_parameters(module)):
        layer = layers.get(id(state._module_info.module))
        if layer is not None and state._module_info.param_name == "weight":
            shards.append(WeightShard(layer, state, group.rank(), compute_dtype))
    amaxes = AgreedAmaxes(shards, group, layout.group("width"))
    model.register_forward_pre_hook(amaxes.before_forward, prepend=True)


class WeightShard:
    """One rank's rows of a quantized layer's weight, with FSDP2's hooks that gather them as codes."""

    def __init__(self, layer: QuantizedLinear, state: Any, rank: int, compute_dtype: torch.dtype):
        """`state`: FSDP2's state of the weight; `rank`: this one among those that share it."""
        self.weight, self.rank, self.compute_dtype = GatheredWeight(layer), rank, compute_dtype
        self._state, self._whole, self._bytes = state, torch.empty(0), True
        layer.plan = layer.plan.with_weight_casts(self.weight)
        state.reset_sharded_param()  # pads a shard of fewer rows, which makes a new tensor of it; it does so once
        shard: Any = state.sharded_param._local_tensor  # the object itself: `to_local` makes another
        shard.fsdp_pre_all_gather, shard.fsdp_post_all_gather = self._before, self._after

    def cast(self) -> Tensor:
        """Return this rank's rows in the compute dtype, [n, K]."""
        return local(self._state.sharded_param).detach().to(self.compute_dtype)

    @property
    def row(self) -> int:
        """Index of this rank's first row in the whole weight; all shards except the last have equally many rows."""
        first: int = self.rank * self._state.padded_sharded_param_size[0]
        return first

    def amax(self, cast: CastConfig) -> Tensor:
        """Return the amaxes of this rank's rows, see `GatheredWeight.amax_of`."""
        return self.weight.amax_of(self.cast(), cast, self.row, self._state._orig_size[0])

    def _before(
        self, mesh: Any, size: torch.Size, stride: tuple[int, ...], module: nn.Module, policy: Any
    ) -> tuple[tuple[Tensor], Travels]:
        """Return (this rank's tensors to gather, padded to equal rows on all ranks; how to decode them)."""
        shard, cast = self.cast(), self.weight.cast
        travels = None if cast is None else (cast, self.weight.scales(shard, cast))
        given = shard if travels is None else self.weight.codes(shard, *travels, self.row)
        if self._bytes != (travels is not None):  # FSDP2 keeps the tensors that it gathers into, by dtype
            self._state.all_gather_outputs, self._bytes = [], travels is not None
        missing = self._state.padded_sharded_param_size[0] - len(given)
        return (F.pad(given, (0, 0, 0, missing)) if missing else given,), travels

    def _after(
        self, gathered: tuple[Tensor], travels: Travels, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """Decode the gathered codes, into `out` if given, a tensor that an earlier call returned."""
        (came,) = gathered
        if out is None:
            self._whole = torch.empty(came.shape, dtype=dtype, device=came.device)
        with keeping_version(self._whole):  # a graph may hold the tensor of an earlier gather, of the same numbers
            if travels is None:
                self._whole.copy_(came)
            else:
                self.weight.decode(came, self._whole, travels[0])
        self.weight.gathered = None if travels is None else travels[1]
        came.untyped_storage().resize_(0)  # FSDP2 allocates again before it gathers
        return (self._whole, (self._whole,)) if out is None else None


class AgreedAmaxes:
    """Maxima of the amaxes of sharded weights over the ranks of `group`, in one all-reduce for all weights.

    Amaxes of whole tensors with `amax_scope: logical` are also reduced over `tensor_group`, the tensor-parallel ranks.
    """

    def __init__(self, shards: list[WeightShard], group: dist.ProcessGroup, tensor_group: dist.ProcessGroup | None):
        self.shards, self.group, self.tensor_group = shards, group, tensor_group

    @torch.no_grad()
    def before_forward(self, model: nn.Module, _: Any) -> None:
        """Reduce the amaxes of weights that may have changed, before each forward pass. Collective.

        If the cast of a weight gathered as codes is no longer active, all weights are resharded and gathered anew.
        """
        weights = [shard.weight for shard in self.shards]
        if any(each.gathered is not None and each.cast is None for each in weights):
            reshard(model)
        casts = [(shard, shard.weight.cast) for shard in self.shards]
        moved = [(s, cast) for s, cast in casts if cast and (s.weight.amax is None or not s.weight.in_step)]
        if not moved:
            return
        moved.sort(key=lambda each: each[1].block != "tensor")  # so that those of whole tensors come first
        amaxes = [shard.amax(cast) for shard, cast in moved]
        flat = torch.cat([each.flatten() for each in amaxes])
        dist.all_reduce(flat, op=dist.ReduceOp.MAX, group=self.group)
        scopes = [cast.amax_scope == "logical" for _, cast in moved if cast.block == "tensor"]
        if self.tensor_group is not None and scopes:  # tensor-parallel ranks never share a block
            tensors = flat[: len(scopes)]
            largest = tensors.clone()
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.tensor_group)
            tensors.copy_(torch.where(torch.tensor(scopes, device=flat.device), largest, tensors))
        parts = flat.split([each.numel() for each in amaxes])
        for (shard, _), amax, part in zip(moved, amaxes, parts, strict=True):
            shard.weight.amax = part.view_as(amax)
