"""Tensor parallelism by the model's roles, with Megatron's sequence parallelism between the cut parts.

Weights become DTensors: names, initial values, FSDP2 and checkpoints see one tensor with a layout. The forward pass
works on each rank's own part, and what crosses the group is said here and nowhere else (`collectives`): a quantiser
must see a plain tensor and know where it lies, which no dispatch tells it. Tokens are gathered once for all linears
of a part (q, k and v; gate and up), and its row-parallel linear's partial sums are scattered back, then get its bias.

With sequence parallelism a rank holds T / R tokens between parts, so norms, row-parallel biases and positions see
only those: their gradients are partial sums, which `gradient_sync` adds over the group once per step (Megatron-LM's
`finalize_model_grads`).
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from lightning_llm.model.decoder import Decoder
from lightning_llm.parallel.collectives import copy_to_group, gather_tokens, reduce_from_group, reduce_scatter_tokens
from lightning_llm.parallel.cut_axes import CUT_AXES
from lightning_llm.parallel.layout import Layout


def shard_over_tensor_group(model: Decoder, layout: Layout) -> None:
    """Cut `model` in place, on the meta device, over the ranks of layout.degrees.tp; over one rank it stays as it is.

    What does not divide is refused earlier, in `divisibility`.
    """
    group = layout.group("tp")
    if group is None or layout.mesh is None:
        return
    edge = Edge(group, layout.config.sequence_parallel)
    model.token_shards = group.size() if edge.sequence else 1
    model.first_id = group.rank() * model.config.padded_vocab_size // group.size()
    for name, role in model.roles().items():
        module = model.get_submodule(name)
        for key, parameter in list(module.named_parameters(recurse=False)):
            # A bias lies with the outputs: cut where the weight's rows are, whole where its columns are.
            axis = None if (key, role) == ("bias", "row") else CUT_AXES[role]["w"]
            cut = cut_parameter(parameter, layout.mesh["tp"], axis)
            module.register_parameter(key, nn.Parameter(cut, requires_grad=parameter.requires_grad))
        replaced: Any = module
        replaced.forward = _forward_of(model, name, module, role, edge)
    if model.embedding is not None:
        tied: Any = model.embedding
        tied.project = partial(_vocabulary_project, tied, edge)
    for block in model.blocks.values():
        for part in block.children():
            if getattr(part, "roles", None):
                entered: Any = part
                entered.forward = partial(_part, part.forward, edge)


def cut_parameter(parameter: Tensor, mesh: DeviceMesh, axis: int | None) -> DTensor:
    """Return a DTensor of the shape of `parameter`, of which each rank of `mesh` has its part along `axis`, or all."""
    local = parameter.detach()
    if axis is not None:
        local = local.chunk(mesh.size(), axis)[mesh.get_local_rank()].contiguous()
    placement: Placement = Replicate() if axis is None else Shard(axis)
    return DTensor.from_local(
        local, mesh, [placement], run_check=False, shape=parameter.shape, stride=parameter.stride()
    )


def is_cut(parameter: Tensor) -> bool:
    """Return whether the ranks of a tensor-parallel group hold different parts of `parameter`."""
    if not isinstance(parameter, DTensor):
        return False
    names = parameter.device_mesh.mesh_dim_names or ()
    return "tp" in names and parameter.placements[names.index("tp")].is_shard()


class Edge:
    """The two sides of a cut part: what its input comes from, and what its output becomes."""

    def __init__(self, group: dist.ProcessGroup, sequence: bool):
        self.group, self.sequence = group, sequence

    def enter(self, x: Tensor) -> Tensor:
        """Return all tokens `[B, T, D]`."""
        return (gather_tokens if self.sequence else copy_to_group)(x, self.group)

    def leave(self, x: Tensor) -> Tensor:
        """Return the sum over the group, with sequence parallelism of this rank's tokens alone."""
        return (reduce_scatter_tokens if self.sequence else reduce_from_group)(x, self.group)

    def own(self, positions: Tensor) -> Tensor:
        """Return the positions `[..., T]` of the tokens that this rank holds between parts."""
        if not self.sequence:
            return positions
        length = positions.shape[-1] // self.group.size()
        return positions.narrow(-1, self.group.rank() * length, length)


def _forward_of(model: Decoder, name: str, module: nn.Module, role: str, edge: Edge) -> Callable[..., Tensor]:
    if module is model.embedding:
        return partial(_vocabulary_lookup, module, edge)
    if module is model.position_embedding:
        return partial(_position_lookup, module, edge)
    if role == "replicate":
        return partial(_norm, module)
    if role == "row":
        return partial(_row, module, edge)
    return partial(_column, module, edge if role == "vocabulary" else None)


def _local(parameter: Tensor | None) -> Tensor | None:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _part(forward: Callable[..., Tensor], edge: Edge, x: Tensor, *rest: Any) -> Tensor:
    return forward(edge.enter(x), *rest)


def _column(linear: Any, edge: Edge | None, x: Tensor) -> Tensor:
    x = x if edge is None else edge.enter(x)  # the head is no part of a block that has gathered for it
    y: Tensor = linear.multiply(x, _local(linear.weight), _local(linear.bias))
    return y


def _row(linear: Any, edge: Edge, x: Tensor) -> Tensor:
    y = edge.leave(linear.multiply(x, _local(linear.weight), None))
    bias = _local(linear.bias)
    # Added in fp32, so that its gradient is summed over all tokens in fp32 and then rounded, as in a whole linear.
    return y if bias is None else (y.float() + bias.to(y.dtype).float()).to(y.dtype)


def _norm(norm: Any, x: Tensor) -> Tensor:
    y: Tensor = norm.normalise(x, _local(norm.weight), _local(getattr(norm, "bias", None)))
    return y


def _vocabulary_lookup(embedding: Any, edge: Edge, tokens: Tensor) -> Tensor:
    """One rank has each token's row, the others add zeros: the sum is exact."""
    rows = _local(embedding.weight)
    if rows is None:
        raise ValueError("an embedding has a weight")
    own = tokens - edge.group.rank() * rows.shape[0]
    elsewhere = (own < 0) | (own >= rows.shape[0])  # [B, T]
    x = F.embedding(own.masked_fill(elsewhere, 0), rows).masked_fill(elsewhere[..., None], 0)  # [B, T, D]
    return edge.leave(x)


def _vocabulary_project(embedding: Any, edge: Edge, x: Tensor) -> Tensor:
    x = edge.enter(x)
    weight: Any = _local(embedding.weight)
    return torch.nn.functional.linear(x, weight.to(x.dtype))


def _position_lookup(embedding: Any, edge: Edge, positions: Tensor) -> Tensor:
    rows: Any = _local(embedding.weight)
    return F.embedding(edge.own(positions), rows)
