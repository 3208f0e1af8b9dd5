"""Statistics of casts: sums that add up over layers, micro-batches and ranks, and figures of these (`figures`).

x is the input of a cast (after a rotation), q its result. Sums are over finite elements.
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
    """Return (sums of one cast, fp64 in the order of `SUMS`; log2 of its smallest and largest scale, fp64 [2]).

    The last two sums, which need a history, are 0; the scales are (inf, -inf) where all blocks are zero.
    """
    x, made, multiplier = seen.rounded.detach().float(), seen.operand.dequantized(), seen.scaled.multiplier
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
    """Return figures by name from total `sums` ({name of `SUMS`: sum}) and the log2 of the extreme scales.

    A figure without data is absent.

    - `underflow_percent`: elements with x ≠ 0 and q = 0, over those with x ≠ 0. A few large elements set the scale. Use
      scales per block (`mxfp8`, `fp8_subchannel`) or E5M2 for gradients, or keep the layer unquantized.
    - `saturation_percent`: elements larger than the format's largest number times their scale, over all. Clipping
      biases: use `e8m0_ceil` for `e8m0_floor`, `prescale: 0.75`, or a shorter history for delayed scaling.
    - `sqnr_db`: 10 log₁₀ (Σ x² / Σ (q - x)²); each mantissa bit is worth 6 dB (Widrow and Kollár, Quantization Noise,
      2008, section 3.2). Far below its slot's median there are outliers: rotate (`hadamard`), or keep it unquantized.
    - `bias`: Σ sign(x) (q - x) / Σ |x|. Below 0 magnitudes shrink, by clipping, underflow or ties. Nearest rounding to
      four bits is biased in gradients; `stochastic` is not (Gupta et al., arXiv 1502.02551).
    - `scale_log2_min`, `scale_log2_max`: log₂ of the smallest and largest scale, 1 / the factor of elements; blocks of
      zeros are left out. This is the range that one scale per tensor would have to cover.
    - `scales_changed_percent`: scales of weights and of delayed scaling that differ from the previous look. Delayed
      scales that stay while losses move were frozen by an Inf.
    - `non_finite`: NaN or Inf elements, which casts turn into numbers. The first is warned of by name; look at the
      layer before it.
    """
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
