"""Choice among several scales of a block by their error: Four Over Six (arXiv 2512.02010).

Elements scaled to 4 have finer steps near the largest than those scaled to 6, so a scale 1.5 times as large is often
the better one. The order of all operations is that of Transformer Engine's `reference_nvfp4.py` (2.20), of which
vectors are recorded.
"""

import torch
from torch import Tensor

from lightning_llm.precision.cast.rounding import FLOAT_MAX, round_to_format
from lightning_llm.precision.cast.scales import E4M3, BlockShape, BlocksToScale, Scaled, axes_within, divide


def best(of: BlocksToScale, amax: Tensor, tensor_scale: Tensor, whole: float) -> Scaled:
    """Return two-level scales with each block's best candidate.

    `amax`: of the tensor, or of each row; `tensor_scale`: `whole` / amax; `whole`: the product of the largest block
    scale and the largest element.
    """
    config, x = of.cast.candidates, of.blocks.float()
    if config is None:
        raise ValueError("the cast has no candidates")
    base = _quotient(of.block_amax(), of.cast.largest) * tensor_scale
    decode = divide(1.0, tensor_scale)
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    for factor in config.factors:
        block = round_to_format((base * factor).clamp(max=E4M3.max), E4M3, "even")
        multiplier = divide(1.0, block * decode).clamp(max=FLOAT_MAX)
        made = round_to_format(x * multiplier, of.fmt, of.cast.rounding) * block * amax
        error = _quotient(made, whole) - x
        error = error * error if config.by == "mse" else error.abs()
        total = error.amax(axes_within(of.shape), keepdim=True) if config.by == "max" else _total(error, of.shape)
        found.append((total, block, multiplier))
    total, block, multiplier = found[0]
    for other, its_block, its_multiplier in found[1:]:
        better = other < total
        total = torch.where(better, other, total)
        block, multiplier = torch.where(better, its_block, block), torch.where(better, its_multiplier, multiplier)
    return Scaled(multiplier, block, amax, 1.0 / whole)


def _quotient(numerator: Tensor, denominator: float) -> Tensor:
    """Return numerator / denominator, rounded once to fp32, eager and compiled.

    A product in fp64 is within 2^-52 of the quotient, which is no nearer than 2^-25 / 2^11 to a midpoint of fp32 for
    denominators of at most 11 significant bits, such as 2688, 1536 and 6.
    """
    return (numerator.double() * (1.0 / denominator)).float()


def _total(error: Tensor, shape: BlockShape) -> Tensor:
    """Return the sum over each block, with size-1 block axes: along rows in order, then over rows by halves."""
    if shape is None:
        raise ValueError("a whole tensor has no candidates")
    height, width = shape
    if height == 1:
        return _in_order(error, 2)
    if width == 1:
        return _in_order(error, 1)
    rows = _in_order(error, 3)
    while rows.shape[1] > 1:
        half = rows.shape[1] // 2
        rows = rows.narrow(1, 0, half) + rows.narrow(1, half, half)
    return rows


def _in_order(x: Tensor, axis: int) -> Tensor:
    total = x.narrow(axis, 0, 1)
    for index in range(1, x.shape[axis]):
        total = total + x.narrow(axis, index, 1)
    return total
