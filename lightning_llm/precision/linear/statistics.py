"""Statistics of casts: sums that add up over layers, micro-batches and ranks, and figures from these.

With x the input of a cast (after a rotation), q its result, and sums over finite elements:

    underflow   elements with x != 0 and q = 0, over those with x != 0
    saturation  elements beyond the format's largest number times their scale, over all
    SQNR        sum x^2 / sum (q - x)^2, in dB (Widrow and Kollar, "Quantization Noise", 2008, section 3.2)
    bias        sum sign(x) (q - x) / sum |x|: below 0 magnitudes shrink, by clipping or by rounding to zero
    scale       1 / the factor of elements: the value of one unit of the format

Blocks of zeros have a scale by convention only and are left out of its range.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from lightning_llm.precision.cast.quantize import block_amax, count_beyond
from lightning_llm.precision.cast.rounding import FLOAT_MAX
from lightning_llm.precision.linear.plan import CastRecord

SUMS = (
    "elements",
    "non_zero",
    "underflowed",
    "saturated",
    "non_finite",
    "signal",
    "noise",
    "magnitude",
    "drift",
    "scales_compared",
    "scales_changed",
)
LOWEST, HIGHEST = "scale_log2_min", "scale_log2_max"
PRODUCT_SLACK = 1 + 2.0**-20
"""amax times its own scale may exceed the largest number by a rounding, which clips nothing."""


def cast_sums(seen: CastRecord) -> tuple[Tensor, Tensor]:
    """Return the `SUMS` of one cast, fp64 [len(SUMS)], and log2 of its smallest and largest scale, fp64 [2].

    The last two sums, which need a history, are 0; the scales are (inf, -inf) where all blocks are zero.
    """
    x, made, multiplier = seen.rounded.detach().float(), seen.operand.dequantised(), seen.scaled.multiplier
    largest = block_amax(x, seen.cast, seen.axis)
    sums = _sums(x, made, largest.amax())
    if not bool(torch.isfinite(sums).all()):
        usable = torch.isfinite(x) & torch.isfinite(made)
        x, made = x.where(usable, 0.0), made.where(usable, 0.0)
        largest = block_amax(x, seen.cast, seen.axis)
        sums = _sums(x, made, largest.amax())
        sums[SUMS.index("elements")] = usable.sum()
        sums[SUMS.index("non_finite")] = seen.given.numel() - torch.isfinite(seen.given).sum()
    limit = seen.cast.number_format.max * PRODUCT_SLACK
    real = multiplier < FLOAT_MAX  # which is NVFP4's stand-in for 1 / 0, where a block's scale vanished
    if bool((real & (largest * multiplier > limit)).any()):
        zeroed = multiplier.where(real, 0.0)
        sums[SUMS.index("saturated")] = count_beyond(x, seen.cast, seen.axis, zeroed, limit)
    return sums, _scale_range(multiplier, real & (largest > 0))


def _sums(x: Tensor, made: Tensor, largest: Tensor) -> Tensor:
    """Return the sums of whole tensors. A cast flips no sign and keeps zeros, so two counts and two sums suffice.

    fp32 within a row or a dot product, fp64 beyond. Squares are taken of elements over `largest`, the largest
    magnitude: those of gradients would vanish in fp32.
    """
    buffer = torch.empty_like(x)
    unit = torch.where(largest > 0, largest, 1.0)
    non_zero, magnitude = _total(torch.ne(x, 0, out=buffer)), _total(torch.abs(x, out=buffer))
    signal = _energy(torch.div(x, unit, out=buffer))
    noise = _energy(torch.sub(made, x, out=buffer).div_(unit))
    left, kept = _total(torch.ne(made, 0, out=buffer)), _total(torch.abs(made, out=buffer))
    zero, square = torch.zeros_like(magnitude), unit.double() ** 2
    elements = torch.full_like(magnitude, x.numel())
    sums = (elements, non_zero, non_zero - left, zero, zero, signal * square, noise * square, magnitude)
    return torch.stack([*sums, kept - magnitude, zero, zero])


def _total(x: Tensor) -> Tensor:
    return x.sum(1).sum(dtype=torch.float64)


def _energy(x: Tensor) -> Tensor:
    flat = x.flatten()
    return torch.dot(flat, flat).double()


def _scale_range(multiplier: Tensor, used: Tensor) -> Tensor:
    exponent = -torch.log2(multiplier.double())
    used = used & torch.isfinite(exponent)
    infinity = torch.full_like(exponent, math.inf)
    return torch.stack([torch.where(used, exponent, infinity).amin(), torch.where(used, exponent, -infinity).amax()])


def figures(sums: Mapping[str, float], lowest: float, highest: float) -> dict[str, float]:
    """Return the figures for `SUMS` and the extreme scales; a figure without data is absent."""
    made = {"non_finite": sums["non_finite"]}
    if sums["non_zero"]:
        made["underflow_percent"] = 100 * sums["underflowed"] / sums["non_zero"]
    if sums["elements"]:
        made["saturation_percent"] = 100 * sums["saturated"] / sums["elements"]
    if sums["noise"] > 0 and sums["signal"] > 0:  # a cast that lost nothing has no finite ratio
        made["sqnr_db"] = 10 * math.log10(sums["signal"] / sums["noise"])
    if sums["magnitude"]:
        made["bias"] = sums["drift"] / sums["magnitude"]
    if math.isfinite(lowest) and math.isfinite(highest):
        made |= {LOWEST: lowest, HIGHEST: highest}
    if sums["scales_compared"]:
        made["scales_changed_percent"] = 100 * sums["scales_changed"] / sums["scales_compared"]
    return made
