"""Sizes that the number of ranks must divide, and blocks of casts that ranks must not split. Imports no torch."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain

from lightning_llm.base.errors import Problem
from lightning_llm.config.schema import Config, ModelConfig
from lightning_llm.config.schema.precision import CastConfig
from lightning_llm.model.spec import LinearSpec, Size
from lightning_llm.model.structure import Same, linear_names, linears_of
from lightning_llm.plan.axes.axis import AXES
from lightning_llm.plan.degrees import Degrees
from lightning_llm.precision.module_rules import layers_of_casts

SHARD_AXES: dict[str, dict[str, int | None]] = {
    "column": {"x": None, "w": 0, "dy": 1},
    "vocabulary": {"x": None, "w": 0, "dy": 1},
    "row": {"x": 1, "w": 1, "dy": None},
    "replicate": {"x": None, "w": None, "dy": None},
    "per_head": {"x": None, "w": None, "dy": None},
    "duplicate": {"x": None, "w": None, "dy": None},
    "expert": {"x": None, "w": 0, "dy": None},  # whole experts, so that no operand of a GEMM is split
}
"""{role: {operand: split dimension}} of x [M, K], w [N, K] and dy [M, N], for the roles of `Decoder.roles` (Shoeybi et
al. 2019, arXiv 1909.08053, section 3). None: every rank has the whole operand."""
CONTRACTION = {"fprop.x": 1, "fprop.w": 1, "dgrad.dy": 1, "dgrad.w": 0, "wgrad.dy": 0, "wgrad.x": 0}
"""The axis of each slot's operand (x [M, K], w [N, K], dy [M, N]) that its GEMM sums over."""


@dataclass(frozen=True)
class ShardedAxis:
    """A dimension of length `whole` that the mesh axis `axis` splits into `parts`; `text` describes it.

    Its length is `times` the value of `key`.
    """

    text: str
    whole: int
    parts: int
    axis: str
    key: str
    times: int = 1

    def passing(self, size: int) -> int:
        """Return n such that each of the `parts` is a multiple of `size` if the value of `key` is a multiple of n."""
        return self.parts * size // math.gcd(self.times, self.parts * size)


def sharding_problems(config: Config, degrees: Degrees) -> Iterator[Problem]:
    """Yield a problem per size that `degrees` do not divide, and per block of a cast that ranks would split."""
    for axis in AXES.every().values():
        yield from axis.sharding_problems(config, degrees)
    yield from _block_problems(config, degrees)


def _block_problems(config: Config, degrees: Degrees) -> Iterator[Problem]:
    """Yield the blocks and rotations of casts that ranks would split, which would change them."""
    model, recipe = config.model, config.precision
    layers, every = layers_of_casts(linear_names(model), recipe, model.num_layers), linears_of(model)
    slots: dict[tuple[ShardedAxis, int], dict[str, None]] = {}
    for key, casts in recipe.cast_sets().items():
        linears = list(dict.fromkeys(every[name] for name in layers[key]))
        prefix = f"{key}." if key else ""
        for slot, cast in casts.items():
            if not (cast.quantizes and linears):
                continue
            operand = slot.rpartition(".")[2]
            cuts = (each.cut_operands(operand, linears, config, degrees) for each in AXES.values())
            for dimension, each in chain.from_iterable(cuts):
                for size, what in _extents(cast, dimension == CONTRACTION[slot]):
                    if (size > 1 and each.whole % (each.parts * size)) or (size == 0 and each.parts > 1):
                        slots.setdefault((each, size), {})[f"{prefix}{slot} ({what})"] = None
    for (each, size), found in slots.items():
        if size == 0:
            text = (
                f"is {degrees.ranks(each.axis)}: it splits {each.text}, along which precision.{', '.join(found)} have "
                f"one scale. Set parallel.{each.axis}=1, or blocks such as 1x128."
            )
            yield Problem(f"parallel.{each.axis}", text)
            continue
        share = f"{each.whole} / {each.parts} = {each.whole / each.parts:g}"
        text = (
            f"is {degrees.ranks(each.axis)}: each part of {each.text} has length {share}, not a multiple of {size}, "
            f"which would split precision.{', '.join(found)}. Set parallel.{each.axis}=1, or {each.key} to a "
            f"multiple of {each.passing(size)}."
        )
        yield Problem(f"parallel.{each.axis}", text)


def _extents(cast: CastConfig, contraction: bool) -> Iterator[tuple[int, str]]:
    """Yield the elements of an axis that a block and a rotation span, 0 for all of it; blocks are across x along."""
    if cast.block_size is not None:
        across, along = cast.block_size
        yield along if contraction else across, "rows" if cast.block == "row" else f"blocks of {cast.block}"
    if cast.amax == "row" and contraction:
        yield 0, "amax: row"
    if cast.hadamard is not None and contraction:
        yield cast.hadamard.size, f"rotations of {cast.hadamard.size}"


def part_widths(model: ModelConfig, tp: int) -> dict[str, int]:
    """Return {description: length} of the parts of linears' inputs or outputs on a rank; {} if `tp` is 1."""
    return dict(_part_widths(Same(model), tp)) if tp > 1 else {}


@lru_cache(maxsize=64)
def _part_widths(same: Same, tp: int) -> dict[str, int]:
    shared = [shared_side(linear) for linear in linears_of(same.model).values() if _is_cut(linear)]
    return {f"{side.text} / tp={tp}": side.length // tp for side in shared}


def _is_cut(linear: LinearSpec) -> bool:
    return linear.role != "expert" and any(axis is not None for axis in SHARD_AXES[linear.role].values())


def shared_side(linear: LinearSpec) -> Size:
    """Return the side of `linear` that tensor-parallel ranks split."""
    return linear.outputs if linear.role == "column" else linear.inputs
