"""Offsets of each rank's part of an operand in the whole, so that quantization gives the same bits on any layout."""

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_llm.model.decoder import Decoder
from lightning_llm.model.structure import linears_of
from lightning_llm.parallel.cp import positions_of
from lightning_llm.parallel.layout import Layout
from lightning_llm.plan.divisibility import SHARD_AXES
from lightning_llm.precision.cast.random_bits import Origin
from lightning_llm.precision.linear.module import quantized_layers
from lightning_llm.precision.linear.plan import Shard


def place_shards(model: Decoder, layout: Layout, sequence_length: int, device: torch.device) -> None:
    """Set in quantized layers of `model` which part of x, w and dy this rank holds, and which groups hold the rest.

    Stochastic rounding is then keyed by an element's position in the whole tensor, and an amax is that of the whole
    tensor. So this rank's quantized operands are bitwise equal to the same parts in a single process.
    `sequence_length`: tokens of a whole sequence.
    """
    if layout.degrees.tp == layout.degrees.cp == 1:
        return
    roles, own, every, cp = model.roles(), None, None, layout.degrees.cp
    if cp > 1:
        parts = [positions_of(rank, cp, sequence_length) for rank in range(cp)]
        own, every = parts[layout.coordinates.cp].to(device), torch.cat(parts).to(device)
    gathering = {name for name, linear in linears_of(model.config).items() if linear.all_tokens}
    for layer in quantized_layers(model):
        if layer.place != layer.name:  # one of several experts, which a rank holds whole
            continue
        size, gathers = (layer.out_features, layer.in_features), layer.name in gathering
        positions = every if gathers else own
        shards = _shards(size, roles[layer.name], layout, positions, sequence_length, gathers)
        layer.plan = replace(layer.plan, shards=shards)


def shared_parts(layout: Layout) -> list[dict[str, Shard]]:
    """Return the distinct ways in which `layout` cuts a linear, each as {operand: `Shard`} without positions."""
    kinds = [_shards((0, 0), role, layout, None, 0) for role in ("column", "row")]
    groups = [tuple(id(shard.group) for shard in kind.values()) for kind in kinds]
    kinds = kinds[:1] if groups[0] == groups[1] else kinds
    return [kind for kind in kinds if any(shard.group is not None for shard in kind.values())]


def _shards(
    size: tuple[int, int],
    role: str,
    layout: Layout,
    positions: Tensor | None,
    sequence_length: int,
    gathers: bool = False,
) -> dict[str, Shard]:
    """Return the shards of a linear with a weight of `size` [N, K]; this rank has the tokens at `positions`.

    `gathers`: they are those of all context-parallel ranks, with this rank's part of the gradient.
    """
    (outputs, inputs), ranks, here = size, layout.degrees.tp, layout.coordinates
    shards = {}
    for operand, width in (("x", inputs), ("w", inputs), ("dy", outputs)):
        axis = SHARD_AXES[role][operand]
        column = here.tp * width // ranks if axis == 1 else 0
        row = here.tp * outputs // ranks if axis == 0 else 0
        tokens = None if operand == "w" else positions
        origin = Origin(row, column, width, tokens, sequence_length)
        cut = {"tp": axis is not None, "cp": operand == "dy" or (operand == "x" and not gathers)}
        # Another rank counts a whole tensor, or the same part of one.
        counts = (cut["tp"] or here.tp == 0) and (cut["cp"] or here.cp == 0)
        group = layout.joint_group(*(name for name, is_cut in cut.items() if is_cut))
        part = (here.tp if cut["tp"] else 0) + (ranks * here.cp if cut["cp"] else 0)
        shards[operand] = Shard(origin, _maximum_over(group), counts, group, part)
    return shards


def _maximum_over(group: dist.ProcessGroup | None) -> Callable[[Tensor], Tensor] | None:
    def reduce(amax: Tensor) -> Tensor:
        dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=group)
        return amax

    return None if group is None else reduce
