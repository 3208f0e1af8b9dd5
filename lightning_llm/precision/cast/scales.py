"""Scales from the largest magnitude of a tensor or block. All arithmetic is fp32 in the order the kernels use.

Sources: Transformer Engine `recipe_common.cuh` (fp32, power of two), `ptx_arch_spec.cuh` (E8M0 by ceil),
`core_nvfp4.cuh` (two levels); OCP Microscaling v1.0 and microxcaling (E8M0 by floor); Quartet's kernel (QuEST).
"""

import torch
from torch import Tensor

from lightning_llm.precision.cast.formats import EXPONENT_MASK, FLOAT_MAX, FORMATS
from lightning_llm.precision.cast.rounding import round_to_format

E8M0_NAN = 255
QUEST_GAUSSIAN_CLIP = 2.92247856  # MSE-optimal clip of a Gaussian on the E2M1 grid, in standard deviations
NVFP4_RANGE = 2688.0  # 448 * 6: the largest block scale times the largest element


def magnitudes(x: Tensor) -> Tensor:
    """Return |x| in fp32 with NaN counted as 0, as CUDA's fmaxf does; Inf stays."""
    x = x.float().abs()
    return torch.where(x == x, x, torch.zeros_like(x))


def divide(numerator: float, denominator: Tensor) -> Tensor:
    """Return the correctly rounded fp32 quotient of two fp32 numbers, whoever compiles this.

    torch's scalar / tensor is a reciprocal times a scalar, and fp32 division in a Triton kernel is div.full.f32, up to
    2 ulp off, unless a flag says otherwise; in fp64 both divide as IEEE 754 does. Rounding twice does no harm: it is
    innocuous for quotients where the wider format has at least 2 p + 2 bits (Figueroa, "When is double rounding
    innocuous?", SIGNUM Newsletter 30(3), 1995), and 53 >= 2 x 24 + 2. Below fp32's normal range a result has q < 24
    bits: a quotient n / d that is no midpoint m of two such is |n - m d| / (m d) > 2^-(q + 25) of m from it, which is
    more than fp64's 2^-53, and a midpoint itself fits in fp64.
    """
    wide = denominator.double()
    return torch.div(torch.full_like(wide, numerator), wide).float()


def scale_from_amax(amax: Tensor, name: str, power_of_two: bool, value_for_inf: float, margin: int = 0) -> Tensor:
    """Return the multiplier that takes `amax` (fp32) to the largest number of format `name`.

    `compute_scale_from_amax` of Transformer Engine: 1 where amax is 0, Inf or NaN; `value_for_inf` where the quotient
    overflows; `power_of_two` rounds it down to one (clears the mantissa bits).
    """
    scale = divide(FORMATS[name].max * 2.0**-margin, amax)
    scale = torch.where(torch.isinf(scale), torch.full_like(scale, value_for_inf), scale)
    if power_of_two:
        scale = (scale.view(torch.int32) & EXPONENT_MASK).view(torch.float32)
    usable = (amax > 0) & (amax < float("inf"))
    return torch.where(usable, scale, torch.ones_like(scale))


def e8m0_ceil(amax: Tensor, name: str) -> Tensor:
    """Return biased exponents (int32, 0..255) of the smallest power of two >= amax / max (Transformer Engine)."""
    return float_to_e8m0(amax * (1.0 / FORMATS[name].max))


def float_to_e8m0(value: Tensor) -> Tensor:
    """Return fp32 `value` (>= 0) rounded up to a power of two, as biased exponents: NaN -> 255, Inf -> 254."""
    bits = value.view(torch.int32)
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    stays = (mantissa == 0) | (exponent == 254) | ((exponent == 0) & (mantissa <= 0x400000))
    up = torch.where(stays, exponent, exponent + 1)
    special = torch.where(mantissa > 0, torch.full_like(bits, E8M0_NAN), torch.full_like(bits, 254))
    return torch.where(exponent == 255, special, up)


def e8m0_floor(amax: Tensor, name: str) -> Tensor:
    """Return biased exponents (int32) floor(log2 amax) - emax + 127, at least 0; 255 (NaN) for Inf and NaN (OCP)."""
    exponent = amax.view(torch.int32) >> 23
    shared = (exponent - FORMATS[name].max_exponent).clamp(min=0)
    return torch.where(exponent == 255, torch.full_like(shared, E8M0_NAN), shared)


def e8m0_value(biased: Tensor) -> Tensor:
    """Return 2^(e - 127) in fp32 of int32 biased exponents 0..254 (0 is the subnormal 2^-127); NaN for 255."""
    bits = torch.where(biased == 0, torch.full_like(biased, 0x00400000), biased << 23)
    return torch.where(biased == E8M0_NAN, torch.full_like(biased, 0x7FC00000), bits).view(torch.float32)


def e8m0_exponent(value: Tensor) -> Tensor:
    """Return the biased exponents (int32) of `e8m0_value`s: the subnormal's is 0, and NaN's is 255."""
    return value.view(torch.int32) >> 23


def e8m0_reciprocal(biased: Tensor) -> Tensor:
    """Return 2^(127 - e) in fp32, exact (e = 254 gives the subnormal 2^-127); NaN for 255."""
    return e8m0_value(torch.where(biased == E8M0_NAN, biased, 254 - biased))


def nvfp4_tensor_scale(amax: Tensor) -> Tensor:
    """Return NVFP4's tensor-level multiplier 2688 / amax (fp32 scalar); 1 where amax is 0 or Inf."""
    scale = divide(NVFP4_RANGE, amax)
    scale = torch.where(scale < FLOAT_MAX, scale, torch.full_like(scale, FLOAT_MAX))  # fminf: NaN too
    return torch.where((amax == 0) | (scale == 0), torch.ones_like(scale), scale)


def nvfp4_block_scale(block_amax: Tensor, tensor_scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return (sf, multiplier): block scales on the E4M3 grid, and what elements are multiplied by before E2M1.

    Transformer Engine >= 2.15: sd = a * (S * fp32(1/6)); sf = E4M3(sd); multiplier = 1 / (sf * (1/S)), both held to
    the largest fp32. sf may be subnormal or 0.
    """
    scale = round_to_format((block_amax * (tensor_scale * (1.0 / 6.0))).clamp(max=FLOAT_MAX), "e4m3", "even")
    multiplier = divide(1.0, scale * divide(1.0, tensor_scale)).clamp(max=FLOAT_MAX)
    return scale, multiplier


def quest_scale(mean: Tensor, mean_of_squares: Tensor) -> Tensor:
    """Return QuEST's power-of-two scale of blocks: 2^floor(log2(clip / 6 * std + 1e-8)), fp32."""
    variance = (mean_of_squares - mean * mean).clamp(min=0)
    deviation = variance.double().sqrt().float()  # as in `divide`: Figueroa's bound is the square root's as well
    scale = (QUEST_GAUSSIAN_CLIP / 6.0) * deviation + 1e-8
    return (scale.view(torch.int32) & EXPONENT_MASK).view(torch.float32)
