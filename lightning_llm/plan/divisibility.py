"""Divisibility of what tensor and context parallelism shard, reported with the arithmetic. Imports no torch."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from lightning_llm.base.errors import Problem
from lightning_llm.config.schema import Config, ModelConfig
from lightning_llm.config.schema.precision import CastConfig
from lightning_llm.model.spec import LinearSpec, Size
from lightning_llm.model.structure import Same, block_parts, for_layers, linear_names, linears_of, mixer_of
from lightning_llm.plan.degrees import Degrees
from lightning_llm.plan.shard_axes import SHARD_AXES
from lightning_llm.precision.recipe.module_rules import layers_of_casts

CONTRACTION = {"fprop.x": 1, "fprop.w": 1, "dgrad.dy": 1, "dgrad.w": 0, "wgrad.dy": 0, "wgrad.x": 0}
"""The axis of each slot's operand (x [M, K], w [N, K], dy [M, N]) that its GEMM sums over."""


@dataclass(frozen=True)
class ShardedAxis:
    """An axis of length `whole` in `parts`; `text` says what it is, `axis` of the mesh cuts it.

    Its length is `times` the value of `key`.
    """

    text: str
    whole: int
    parts: int
    axis: str
    key: str
    times: int = 1

    def passing(self, size: int) -> int:
        """Return of what `key` must be a multiple, so that each part is a multiple of `size`."""
        return self.parts * size // math.gcd(self.times, self.parts * size)


def sharding_problems(config: Config, degrees: Degrees) -> Iterator[Problem]:
    """Yield everything that the tensor- and context-parallel ranks of `degrees` do not divide."""
    if degrees.cp > 1 and degrees.pp > 1:
        yield Problem(
            "parallel.cp", f"is {degrees.cp} with pp={degrees.pp}; stages take whole sequences. Set one to 1."
        )
    yield from _weight_problems(config.model, degrees.tp)
    if degrees.cp > 1:
        yield from _mixer_problems(config.model, degrees.cp)
    yield from _sequence_problems(config, degrees)
    yield from _block_problems(config, degrees)
    yield from _optimizer_problems(config, degrees.tp)


def _weight_problems(model: ModelConfig, tp: int) -> Iterator[Problem]:
    sizes: dict[str, tuple[int, str]] = {}
    for parts in for_layers(model, range(model.num_layers), lambda index: list(block_parts(model, index).values())):
        for part in parts:
            sizes |= part.divisions(model)
    sizes["the padded vocabulary"] = model.padded_vocab_size, "its rows are shared out; see model.vocab_multiple"
    for name, (size, why) in sizes.items():
        if size % tp:
            text = (
                f"is {tp}, which does not divide {name} = {size} ({size} = {size // tp} x {tp} + {size % tp}): {why}."
            )
            yield Problem("parallel.tp", f"{text} Take a divisor of {size}.")


def _mixer_problems(model: ModelConfig, cp: int) -> Iterator[Problem]:
    mixers = for_layers(model, range(model.num_layers), lambda index: mixer_of(model, index))
    names = [model.layer_name(index) for index, mixer in enumerate(mixers) if not mixer.context_parallel]
    for name in dict.fromkeys(names):
        text = (
            f"is {cp}, and the mixer of '{name}' in model.layers takes whole sequences. Set 1, and share out weights, "
            "heads or layers instead (parallel.dp_shard, tp, pp)."
        )
        yield Problem("parallel.cp", text)


def _sequence_problems(config: Config, degrees: Degrees) -> Iterator[Problem]:
    length, cp, tp = config.data.sequence_length, degrees.cp, degrees.tp
    if cp > 1 and length % (2 * cp):
        text = f"is {length}, and cp={cp} cuts sequences into 2 x {cp} chunks; take a multiple of {2 * cp}."
        yield Problem("data.sequence_length", text)
    if tp > 1 and config.parallel.sequence_parallel and length % (cp * tp):
        text = (
            f"is {length}, of which {cp} context-parallel rank(s) have {length / cp:g} tokens each, and tp={tp} does "
            f"not divide those. Take a multiple of {cp * tp}, or set parallel.sequence_parallel=false."
        )
        yield Problem("data.sequence_length", text)


def _block_problems(config: Config, degrees: Degrees) -> Iterator[Problem]:
    """Yield where ranks would cut blocks or rotations, which would then be others than one rank's, and whose."""
    model, recipe = config.model, config.precision
    layers, every = layers_of_casts(linear_names(model), recipe, model.num_layers), linears_of(model)
    slots: dict[tuple[ShardedAxis, int], dict[str, None]] = {}
    for key, casts in recipe.cast_sets().items():
        linears = list(dict.fromkeys(every[name] for name in layers[key]))
        prefix = f"{key}." if key.startswith("modules.") else ""
        for slot, cast in casts.items():
            if not (cast.quantises and linears):
                continue
            for axis, each in _sharded_axes(slot.rpartition(".")[2], linears, config, degrees):
                for size, what in _extents(cast, axis == CONTRACTION[slot]):
                    if size > 1 and each.whole % (each.parts * size):
                        slots.setdefault((each, size), {})[f"{prefix}{slot} ({what})"] = None
    for (each, size), found in slots.items():
        share = f"{each.whole} / {each.parts} = {each.whole / each.parts:g}"
        text = (
            f"is {getattr(degrees, each.axis)}, and each part of {each.text} is {share} long, no multiple of {size}: "
            f"that would cut precision.{', '.join(found)}. Set parallel.{each.axis}=1, or {each.key} to a multiple of "
            f"{each.passing(size)}."
        )
        yield Problem(f"parallel.{each.axis}", text)


def _optimizer_problems(config: Config, tp: int) -> Iterator[Problem]:
    """Yield where the optimizer's state cannot be cut as the rows of row-parallel weights are."""
    names = {each.inputs.length: each.name for each in linears_of(config.model).values() if each.role == "row"}
    for columns, name in names.items():
        if problem := config.optim.shard_problem(columns, tp):
            yield Problem("parallel.tp", f"is {tp}, and cuts the rows of {name} into parts {problem}, or tp=1.")


def _extents(cast: CastConfig, contraction: bool) -> Iterator[tuple[int, str]]:
    """Yield how many elements of an axis a block and a rotation span; a block's last number is along the GEMM."""
    if cast.block != "tensor":
        across, along = (int(each) for each in cast.block.split("x"))
        yield along if contraction else across, f"blocks of {cast.block}"
    if cast.hadamard is not None and contraction:
        yield cast.hadamard.size, f"rotations of {cast.hadamard.size}"


def _sharded_axes(
    operand: str, linears: list[LinearSpec], config: Config, degrees: Degrees
) -> Iterator[tuple[int, ShardedAxis]]:
    """Yield the axes of `operand` (x [M, K], w [N, K], dy [M, N]) of `linears` that ranks have parts of."""
    tp, cp, length = degrees.tp, degrees.cp, config.data.sequence_length
    if cp > 1 and operand != "w":
        yield 0, ShardedAxis("a sequence (two per rank)", length, 2 * cp, "cp", "data.sequence_length")
    if tp == 1:
        return
    alike: dict[tuple[int, str, str, int], list[LinearSpec]] = {}
    for linear in linears:
        axis = SHARD_AXES[linear.role][operand]
        if axis is not None:
            part, side = linear.name.partition(".")[0], "outputs" if linear.role == "column" else "inputs"
            alike.setdefault((axis, part, side, _shared_side(linear).length), []).append(linear)
    for (axis, _, side, width), several in alike.items():
        short = ", ".join(dict.fromkeys(linear.name.rpartition(".")[2] for linear in several))
        made_of = _shared_side(several[0])
        yield axis, ShardedAxis(f"the {side} of {short}", width, tp, "tp", made_of.key, made_of.times)


def part_widths(model: ModelConfig, tp: int) -> dict[str, int]:
    """Return how long each rank's part of a linear's inputs or outputs is, by what it is a part of; none where tp=1."""
    return dict(_part_widths(Same(model), tp)) if tp > 1 else {}


@lru_cache(maxsize=64)
def _part_widths(same: Same, tp: int) -> dict[str, int]:
    shared = [_shared_side(linear) for linear in linears_of(same.model).values() if _is_cut(linear)]
    return {f"{side.text} / tp={tp}": side.length // tp for side in shared}


def _is_cut(linear: LinearSpec) -> bool:
    return any(axis is not None for axis in SHARD_AXES[linear.role].values())


def _shared_side(linear: LinearSpec) -> Size:
    return linear.outputs if linear.role == "column" else linear.inputs
