"""Round fp32 values to a number format, saturating, as cast instructions do; encode and decode its bit patterns.

A number v with 2^e <= |v| < 2^(e+1) has the grid step 2^(max(e, min_exponent) - mantissa_bits). Exponents never come
from log2, which in fp32 already errs at 2^10 (1 - 2^-24). The sign of a zero is not kept (`quantize` restores it).
"""

import functools

import torch
from torch import Tensor

from lightning_llm.config.schema.cast_kinds import ROUNDINGS, RoundingKind
from lightning_llm.config.schema.number_formats import NumberFormat

FLOAT_MAX = torch.finfo(torch.float32).max
EXPONENT_MASK = 0x7F800000
SIGN_MASK = -0x80000000


def power_of_two_floor(magnitude: Tensor) -> Tensor:
    """Return 2^floor(log2 x) of fp32 `magnitude`, from its bits; 0 for zero and subnormals, Inf for Inf and NaN."""
    return (magnitude.view(torch.int32) & EXPONENT_MASK).view(torch.float32)


def reciprocal_power_of_two(power: Tensor) -> Tensor:
    """Return 1/p of fp32 powers of two in [2^-126, 2^126], exact: the exponent field is mirrored at 254."""
    return (0x7F000000 - power.view(torch.int32)).view(torch.float32)


def copy_sign(magnitude: Tensor, sign: Tensor) -> Tensor:
    """Return fp32 `magnitude` (>= 0 or NaN) with the sign bit of fp32 `sign`, also on zeros."""
    return (magnitude.view(torch.int32) | (sign.view(torch.int32) & SIGN_MASK)).view(torch.float32)


def round_to_format(
    v: Tensor, fmt: NumberFormat, rounding: str, noise: Tensor | None = None, saturate: bool = True
) -> Tensor:
    """Return fp32 `v` rounded to the grid of `fmt`, same shape, saturating at its largest number.

    `rounding`: a registered rounding (`precision/cast/kinds.py`). `noise`: uniform in [0, 1), fp32, same shape,
    for one that draws it. Inf saturates; NaN stays, but becomes the largest number in formats without NaN
    (`cvt.satfinite`). `saturate=False` ("even" only): numbers that round beyond the largest become Inf in E5M2, NaN in
    E4M3. Raises ValueError if noise is missing.
    """
    if not saturate:
        return _overflowing(v, fmt)
    kind = ROUNDINGS.instance(rounding)
    if kind.draws and noise is None:
        raise ValueError(f"rounding '{rounding}' needs noise")
    rounded: Tensor = _by_steps(v, fmt, kind, noise) if kind.counts_steps else kind.round(v, fmt, noise)
    return rounded


def nearest_even(v: Tensor, fmt: NumberFormat) -> Tensor:
    """Return fp32 `v` rounded to the nearest number of `fmt`, ties to even, saturating."""
    rounded = nearest_number(v.clamp(-fmt.max, fmt.max), fmt)
    return rounded if fmt.has_nan else torch.where(v == v, rounded, fmt.max)


def nearest_number(v: Tensor, fmt: NumberFormat) -> Tensor:
    """Return `nearest_even` of `v` within the format's range; NaN stays.

    Lets fp32 addition do the rounding, without looking at exponents (bit casts are what Inductor's C++ is slow at).

    Normal range: Veltkamp's splitting (Boldo, "Pitfalls of a full floating-point proof", IJCAR 2006: the high part is
    a nearest one), which breaks ties to even here: for v of mantissa_bits + 2 bits the parity of c * v's last
    bit is that of the result, also where a compiler contracts it to an FMA. Subnormal range: one step throughout, so
    adding 1.5 * 2^23 steps rounds to it.
    """
    scaled = v * (2.0 ** (23 - fmt.mantissa_bits) + 1.0)
    normal = scaled + (v - scaled)
    shift = 1.5 * 2.0 ** (23 - fmt.mantissa_bits + fmt.min_exponent)
    return torch.where(v.abs() < 2.0**fmt.min_exponent, (v + shift) - shift, normal)


def _overflowing(v: Tensor, fmt: NumberFormat) -> Tensor:
    """Round to nearest even without saturation, as IEEE 754 (E5M2) or the FN formats (E4M3) define it."""
    beyond = torch.full_like(v, float("inf") if fmt.specials == "ieee" else float("nan"))
    rounded = nearest_number(v.clamp(-2 * fmt.max, 2 * fmt.max), fmt)
    return torch.where(rounded.abs() > fmt.max, torch.copysign(beyond, v), rounded)


def _binade(magnitude: Tensor, fmt: NumberFormat) -> tuple[Tensor, Tensor]:
    """Return a step of the grid at |v|, and its reciprocal; by comparisons where the format has few.

    The step is 2^(max(floor(log2 |v|), min_exponent) - mantissa_bits).
    """
    if fmt.max_exponent - fmt.min_exponent > 2:
        binade = power_of_two_floor(magnitude).clamp(min=2.0**fmt.min_exponent)
        return binade * 2.0**-fmt.mantissa_bits, reciprocal_power_of_two(binade) * 2.0**fmt.mantissa_bits
    step = 2.0 ** (fmt.min_exponent - fmt.mantissa_bits)
    steps, reciprocals = torch.full_like(magnitude, step), torch.full_like(magnitude, 1 / step)
    for exponent in range(fmt.min_exponent + 1, fmt.max_exponent + 1):
        above = magnitude >= 2.0**exponent
        steps = torch.where(above, 2.0 ** (exponent - fmt.mantissa_bits), steps)
        reciprocals = torch.where(above, 2.0 ** (fmt.mantissa_bits - exponent), reciprocals)
    return steps, reciprocals


def _by_steps(v: Tensor, fmt: NumberFormat, kind: RoundingKind, noise: Tensor | None) -> Tensor:
    """Round |v| counted in steps of its binade, then scale back. Every scaling here is by a power of two: exact.

    |v| is held to the largest number, a whole count of steps, which nothing rounds up from.
    """
    magnitude = v.abs()
    if fmt.has_nan:
        magnitude = torch.where(magnitude > fmt.max, fmt.max, magnitude)
    else:  # where NaN is taken for the largest number, too
        magnitude = torch.where(magnitude < fmt.max, magnitude, fmt.max)
    step, reciprocal = _binade(magnitude, fmt)
    rounded = kind.whole(magnitude * reciprocal, fmt, noise) * step
    return torch.where(v < 0, -rounded, rounded)


def torch_dtype(fmt: NumberFormat) -> torch.dtype:
    """Return the torch dtype with the bit patterns of `fmt`. Raises ValueError if torch has none."""
    if fmt.torch_dtype is None:
        raise ValueError(f"torch has no dtype with the codes of {fmt.name}")
    dtype: torch.dtype = getattr(torch, fmt.torch_dtype)
    return dtype


def encode(values: Tensor, fmt: NumberFormat) -> Tensor:
    """Return the bit patterns of fp32 `values`, which are numbers of `fmt`: uint8, or int16 for more than 8 bits."""
    if fmt.torch_dtype is not None:
        return values.to(torch_dtype(fmt)).view(torch.uint8)
    if fmt.integer:
        code = values.to(torch.int32) & (2**fmt.code_bits - 1)
    else:
        bits, magnitude = values.view(torch.int32), values.abs()
        exponent = (((bits >> 23) & 0xFF) - 127 + fmt.bias).clamp(max=2**fmt.exponent_bits - 1)  # Inf and NaN: the top
        mantissa = (bits >> (23 - fmt.mantissa_bits)) & (2**fmt.mantissa_bits - 1)
        steps = (magnitude * 2.0 ** (fmt.mantissa_bits - fmt.min_exponent)).to(torch.int32)
        code = torch.where(magnitude < 2.0**fmt.min_exponent, steps, (exponent << fmt.mantissa_bits) | mantissa)
        code = torch.where(bits < 0, code | 2 ** (fmt.code_bits - 1), code)
    return code.to(torch.uint8 if fmt.code_bits <= 8 else torch.int16)


def decode(codes: Tensor, fmt: NumberFormat) -> Tensor:
    """Return the fp32 values of bit patterns `codes` of `fmt` (inverse of `encode`)."""
    if fmt.torch_dtype is not None:
        return codes.view(torch_dtype(fmt)).float()
    return _values(fmt, codes.device)[codes.long() & (2**fmt.code_bits - 1)]


@functools.cache
def _values(fmt: NumberFormat, device: torch.device) -> Tensor:
    return torch.tensor([fmt.value(code) for code in range(2**fmt.code_bits)], device=device)
