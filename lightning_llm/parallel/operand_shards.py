"""Offsets of each rank's part of an operand in the whole, so that quantization gives the same bits on any layout."""

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_llm.model.decoder import Decoder
from lightning_llm.parallel.cp import positions_of
from lightning_llm.parallel.layout import Layout
from lightning_llm.plan.divisibility import SHARD_AXES
from lightning_llm.precision.cast.random_bits import Origin
from lightning_llm.precision.linear.module import QuantisedLinear, quantised_layers
from lightning_llm.precision.linear.plan import Shard


def place_shards(model: Decoder, layout: Layout, sequence_length: int, device: torch.device) -> None:
    """Set in every quantized layer of `model` the part of x, w and dy that this rank holds, and the groups of the rest.

    Stochastic rounding is then keyed by an element's position in the whole tensor, and amaxes are of the whole tensor.
    So operands are bitwise the parts of a single process's. `sequence_length`: of a whole sequence, in tokens.
    """
    if layout.degrees.tp == layout.degrees.cp == 1:
        return
    roles = model.roles()
    for layer in quantised_layers(model):
        layer.plan = replace(layer.plan, shards=_shards(layer, roles[layer.name], layout, sequence_length, device))


def _shards(
    layer: QuantisedLinear, role: str, layout: Layout, sequence_length: int, device: torch.device
) -> dict[str, Shard]:
    ranks, tp_rank, tensor_group, context_group = (
        layout.degrees.tp,
        layout.coordinates.tp,
        layout.group("tp"),
        layout.group("cp"),
    )
    widths = {"x": layer.in_features, "w": layer.in_features, "dy": layer.out_features}
    positions = None
    if context_group is not None:
        positions = positions_of(layout.coordinates.cp, layout.degrees.cp, sequence_length).to(device)
    shards = {}
    for operand, width in widths.items():
        groups, counts = [], True
        column = row = 0
        axis = SHARD_AXES[role][operand]
        if axis == 1:
            column = tp_rank * width // ranks
        elif axis == 0:
            row = tp_rank * layer.out_features // ranks
        if axis is not None:
            groups.append(tensor_group)
        else:
            counts = tp_rank == 0
        tokens = None if operand == "w" else positions
        if tokens is not None:
            groups.append(context_group)
        else:
            counts &= layout.coordinates.cp == 0
        origin = Origin(row, column, width, tokens, sequence_length)
        maximum = _maximum_over([group for group in groups if group is not None])
        shards[operand] = Shard(origin, maximum, counts)
    return shards


def _maximum_over(groups: list[dist.ProcessGroup]) -> Callable[[Tensor], Tensor] | None:
    def reduce(amax: Tensor) -> Tensor:
        for group in groups:
            dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=group)
        return amax

    return reduce if groups else None
