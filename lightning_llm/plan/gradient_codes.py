"""Gradients that ranks send as codes (`precision.gradient_reduction`): bytes, and where it is possible. No torch."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from lightning_llm.base.errors import Problem
from lightning_llm.config.schema import Config
from lightning_llm.config.schema.precision import CastConfig
from lightning_llm.optim.kinds import DTYPE_BYTES
from lightning_llm.plan.axes.axis import AXES
from lightning_llm.plan.memory.units import sums_in_tree
from lightning_llm.plan.nodes import TREE_SCATTER

if TYPE_CHECKING:
    from lightning_llm.plan.resolve import DerivedConfig

KEY = "precision.gradient_reduction"


def message_bytes(cast: CastConfig, elements: int) -> int:
    """Return the bytes of `elements` gradients as codes and scales of 1xN blocks; the last block is padded."""
    width = block_width(cast)
    blocks = -(-elements // width)
    return blocks * (width * cast.number_format.code_bits + cast.scale_kind.stored_bits) // 8


def block_width(cast: CastConfig) -> int:
    """Return the consecutive elements that share a scale. Raises ValueError for other blocks than 1xN."""
    size = cast.block_size
    if size is None or size[0] != 1 or size[1] == 0:
        raise ValueError(f"block={cast.block}: must be 1xN")
    return size[1]


def scatter_kind(config: Config) -> str:
    """Return the kind of collective that scatters gradient sums over data-parallel ranks."""
    if config.precision.gradient_reduction is not None:
        return "all_to_all"  # in one stage: sums within a machine would be rounded again between machines
    return TREE_SCATTER if sums_in_tree(config.parallel) else "reduce_scatter"


def scattered_bytes(config: Config, elements: int) -> int:
    """Return the bytes of a rank's gradient of `elements` that it sends to the rank that sums them."""
    codes = config.precision.gradient_reduction
    if codes is None:
        return DTYPE_BYTES[config.precision.main_grad_dtype] * elements
    return message_bytes(codes.cast, elements)


def gradient_reduction_problems(derived: "DerivedConfig") -> list[Problem]:
    """Return why gradients cannot be sent as these codes: because of the cast, or of the layout."""
    codes = derived.config.precision.gradient_reduction
    return [] if codes is None else [*_cast_problems(codes.cast), *_layout_problems(derived)]


def _cast_problems(cast: CastConfig) -> Iterator[Problem]:
    bits, size = cast.number_format.code_bits, cast.block_size
    if bits not in (4, 8):
        text = f"must have codes of 4 or 8 bits, which fill bytes, and has {bits}. Use e4m3, e5m2, e2m1, int8 or int4."
        yield Problem(f"{KEY}.format", text, cast.format)
    if size is None or size[0] != 1 or size[1] == 0 or size[1] % 2:
        text = "must be 1xN with an even N: blocks of consecutive elements. Use e.g. 1x128."
        yield Problem(f"{KEY}.block", text, cast.block)


def _layout_problems(derived: "DerivedConfig") -> Iterator[Problem]:
    config, degrees, parallel = derived.config, derived.likely_degrees, derived.config.parallel
    layouts = "Use ddp, zero1, zero2 or zero3 over several ranks, or set null"
    summed = [axis for axis in AXES.cutting("data") if degrees.ranks(axis) > 1]
    others = [axis for axis in (*AXES, *AXES.folded) if degrees.ranks(axis) > 1 and axis not in summed]
    if not summed:
        text = f"is set, and parallel={parallel.name} has one data-parallel rank, which sends none"
        yield Problem(KEY, f"{text}. {layouts}.")
    if len(summed) > 1:
        text = f"is set, and {' and '.join(f'{axis}={degrees.ranks(axis)}' for axis in summed)} sum one after the other"
        yield Problem(KEY, f"{text}, so sums of codes would be rounded again. {layouts}.")
    for axis in others:
        text = f"is set, and {axis}={degrees.ranks(axis)} cuts weights or sums gradients among its own ranks"
        yield Problem(KEY, f"{text}, so the rounded blocks would depend on {axis}. {layouts}.")
    if not sums_in_tree(parallel):
        text = "is native: the library sums while it sends, and cannot add codes. Set tree or auto"
        yield Problem("parallel.reduction", f"{text}, or {KEY} to null.")
    algorithm = config.chosen_algorithm
    if set(summed) - set(algorithm.summed_axes(AXES.cutting("data"))):
        text = f"is set, and algorithm={algorithm.name} does not sum gradients over ranks in each step"
        yield Problem(KEY, f"{text}. Set null.")
