"""Scales of NVFP4 blocks, E4M3 under one fp32 scale per tensor: standard, Four Over Six, and MS-EDEN.

- Standard: Transformer Engine >= 2.15 (`core_nvfp4.cuh`).
- Four Over Six (arXiv 2512.02010): the better of several scales. Elements scaled to 4 have finer steps near the largest
  than those scaled to 6, so a scale 1.5 times as large is often better. The order of operations is that of Transformer
  Engine's `reference_nvfp4.py` (2.20).
- MS-EDEN of Quartet II (arXiv 2601.22813): nearest rounding, and block scales that make the result unbiased. EDEN
  (Vargaftik et al., arXiv 2108.08842) scales a rotated, rounded vector q by |x|^2 / <x, q>, so that its mean over
  random rotations is x. Here each rotation group has such a factor. It multiplies the group's block scales, which are
  then rounded stochastically. Source: `eden_1x16s_fp4_kernel` of IST-DASLab's Quartet-II at 8776a90b.
"""

import functools
import math

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_llm.config.schema.casts import CandidatesConfig
from lightning_llm.precision.cast.rounding import FLOAT_MAX, nearest_number, round_to_format
from lightning_llm.precision.cast.scales import (
    E4M3,
    BlockShape,
    BlocksToScale,
    Scaled,
    divide,
    sum_in_order,
)

NVFP4_RANGE = 2688.0
"""448 * 6: the largest block scale times the largest element."""


def two_level(of: BlocksToScale) -> Scaled:
    """Return the scales of `of.blocks`: standard ones, or the best candidates if the cast has any."""
    amax = of.tensor_amax() if of.cast.amax == "tensor" else of.row_amax()
    whole = of.cast.scale_max * of.cast.largest
    tensor_scale = nvfp4_tensor_scale(amax, whole)
    if of.cast.candidates is not None:
        return four_over_six(of, of.cast.candidates, amax, tensor_scale, whole)
    block, multiplier = nvfp4_block_scale(of.block_amax(), tensor_scale, of.cast.largest)
    return Scaled(multiplier, block, amax, 1.0 / whole)


def nvfp4_tensor_scale(amax: Tensor, whole: float = NVFP4_RANGE) -> Tensor:
    """Return NVFP4's tensor-level multiplier, `whole` / `amax` in fp32; 1 where `amax` is 0 or Inf.

    `whole`: the largest block scale times the largest element, 448 * 6.
    """
    scale = divide(whole, amax)
    scale = torch.where(scale < FLOAT_MAX, scale, torch.full_like(scale, FLOAT_MAX))  # fminf: NaN too
    return torch.where((amax == 0) | (scale == 0), torch.ones_like(scale), scale)


def nvfp4_block_scale(block_amax: Tensor, tensor_scale: Tensor, largest: float = 6.0) -> tuple[Tensor, Tensor]:
    """Return (sf, multiplier): block scales on the E4M3 grid, and the factor of elements before the cast to E2M1.

    Transformer Engine >= 2.15: sd = a * (S * fp32(1 / largest)); sf = E4M3(sd); multiplier = 1 / (sf * (1/S)), both
    capped at the largest fp32. sf may be subnormal or 0.
    """
    scale = round_to_format((block_amax * (tensor_scale * (1.0 / largest))).clamp(max=FLOAT_MAX), E4M3, "even")
    multiplier = divide(1.0, scale * divide(1.0, tensor_scale)).clamp(max=FLOAT_MAX)
    return scale, multiplier


def four_over_six(
    of: BlocksToScale, config: CandidatesConfig, amax: Tensor, tensor_scale: Tensor, whole: float
) -> Scaled:
    """Return two-level scales with each block's best candidate.

    `config`: the candidates' factors, and the measure of error. `amax`: of the tensor, or of each row. `tensor_scale`:
    `whole` / amax. `whole`: the product of the largest block scale and the largest element.
    """
    x = _across(of.blocks, of.shape)
    base = _quotient(of.block_amax(), of.cast.largest) * tensor_scale
    decode = _stored(divide(1.0, tensor_scale))
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    for factor in config.factors:
        block = _stored(round_to_format((base * factor).clamp(max=E4M3.max), E4M3, "even"))
        multiplier = _stored(divide(1.0, block * decode).clamp(max=FLOAT_MAX))
        error = _error(x, of, block, multiplier, amax, whole)
        error = error * error if config.by == "mse" else error.abs()
        total = error.amax(tuple(range(1, error.dim() - 1)), keepdim=True) if config.by == "max" else _total(error)
        found.append((_view_across(total, of.shape), block, multiplier))
    total, block, multiplier = found[0]
    for other, its_block, its_multiplier in found[1:]:
        better = other < total
        total = torch.where(better, other, total)
        block, multiplier = torch.where(better, its_block, block), torch.where(better, its_multiplier, multiplier)
    return Scaled(multiplier, block, amax, 1.0 / whole)


def _error(x: Tensor, of: BlocksToScale, block: Tensor, multiplier: Tensor, amax: Tensor, whole: float) -> Tensor:
    """Return fl(code * block * amax / whole) - x of each element of `x`, which is `of.blocks` as `_across`, in fp32."""
    wide, fmt = x.float(), of.fmt
    elements = wide * _view_across(multiplier, of.shape)
    if of.cast.rounding == "even":  # without the code of a NaN, whose error is NaN with any code
        values = nearest_number(elements.clamp(-fmt.max, fmt.max), fmt)
    else:
        values = round_to_format(elements, fmt, of.cast.rounding)
    if (parts := _reciprocal_parts(whole)) is None or of.blocks.dtype != torch.bfloat16:
        made = values * _view_across(block, of.shape) * _view_across(amax, of.shape)
        return _quotient(made, whole) - wide
    high, low = (_view_across(_stored(block * amax * part), of.shape) for part in parts)
    return (values * high + values * low) - wide


def _reciprocal_parts(whole: float) -> tuple[float, float] | None:
    """Return (high, low) with 1 / whole = high + low and high of 10 bits, if fp32 sums with them divide exactly.

    For n = code * block * amax of 2 + 4 + 8 bits (amax: bf16), fl(n high + fl(n low)) is n / whole rounded once. n high
    is exact (24 bits); n low is within 3 * 2^-24 of its value, which is below 2^-9 n / whole: within 0.006 units in
    the last place. A quotient by an odd factor d of `whole` that is no fp32 number is at least 1 / (2 d) units away
    from where rounding changes, 1 / 42 for 448 * 6 and 1 / 6 for 256 * 6. Of tensors with an amax above 2^-100.
    """
    if whole != int(whole) or int(whole) // (int(whole) & -int(whole)) > 64:
        return None
    step = 2.0 ** (math.frexp(1 / whole)[1] - 10)
    high = math.floor(1 / whole / step) * step
    return high, 1 / whole - high


def _quotient(numerator: Tensor, denominator: float) -> Tensor:
    """Return numerator / denominator, rounded once to fp32, eager and compiled.

    A product in fp64 is within 2^-52 of the quotient, which is no nearer than 2^-25 / 2^11 to a midpoint of fp32 for
    denominators of at most 11 significant bits, such as 2688, 1536 and 6.
    """
    return (numerator.double() * (1.0 / denominator)).float()


def _stored(x: Tensor) -> Tensor:
    """Return `x`. Compiled code stores it, and does not compute it again for every element of a block that reads it."""
    x = x.contiguous()
    return x.as_strided(x.shape, x.stride())


def _view_across(x: Tensor, shape: BlockShape) -> Tensor:
    """Return a blocked tensor, or its scales, with the blocks of a row as the last axis. Raises ValueError for None."""
    if shape is None:
        raise ValueError("a whole tensor has no block scales")
    return x if shape[1] == 1 or x.dim() == 0 else x.transpose(-1, -2)


def _across(blocks: Tensor, shape: BlockShape) -> Tensor:
    """Return `blocks` with neighboring blocks side by side in memory, so that sums over blocks are vectorized."""
    across = _view_across(blocks, shape)
    return across if across is blocks else _stored(across)


def _total(error: Tensor) -> Tensor:
    """Return the sum over each block of `error`, as `_across`: along rows in order, then over rows by halves.

    Inductor's C++ sums in order along an axis that is not the innermost, and need not store the errors for it.
    """
    if torch.compiler.is_compiling() and error.device.type == "cpu" and error.shape[-1] != 1:
        total = error.sum(-2, keepdim=True)
    else:
        total = functools.reduce(torch.add, error.split(1, -2))
    return total if error.dim() == 3 else sum_in_order(total, 1, total.shape[1])


def ms_eden(of: BlocksToScale) -> Scaled:
    """Return the corrected scales of MS-EDEN for `of.blocks`, which are 1x16.

    Elements are rounded under the scales before the correction. A block's scale is rounded with the noise of its first
    element in `of.noise`. Raises ValueError if the noise is missing.
    """
    if of.noise is None:
        raise ValueError(f"scale: {of.cast.scale} needs noise")
    amax, largest = of.tensor_amax(), of.cast.largest
    whole = of.cast.scale_max * largest
    tensor_scale = nvfp4_tensor_scale(amax, whole)
    block = round_to_format(of.block_amax() * (tensor_scale * (1.0 / largest)), E4M3, "even")
    block = torch.where(block == 0, torch.ones_like(block), block)
    multiplier = _stored(divide(1.0, block * divide(1.0, tensor_scale)).clamp(max=FLOAT_MAX))
    x = _across(of.blocks, of.shape).float() * _view_across(multiplier, of.shape)
    values = round_to_format(x, of.fmt, of.cast.rounding)
    axis = 2 if of.shape is not None and of.shape[0] == 1 else 1
    sums = [_view_across(sum_in_order(each, 1, each.shape[1]), of.shape) for each in (x * x, x * values)]
    count = 1 if of.cast.hadamard is None else max(of.cast.hadamard.size // x.shape[1], 1)
    squares, products = (sum_in_order(_groups(each, axis - 1, count), axis, count) for each in sums)
    usable = products > 0
    correction = (squares.double() / torch.where(usable, products, torch.ones_like(products)).double()).float()
    correction = _stored(torch.where(usable, correction, torch.ones_like(correction)))
    corrected = _stored((_groups(block, axis - 1, count) * correction).flatten(axis - 1, axis))
    first = of.noise.narrow(axis, 0, 1)
    corrected = corrected.narrow(axis - 1, 0, block.shape[axis - 1])
    return Scaled(multiplier, round_to_format(corrected, E4M3, "stochastic_compare", first), amax, 1.0 / whole)


def _groups(scales: Tensor, axis: int, count: int) -> Tensor:
    """Return numbers of blocks with their `axis` split into groups of `count` blocks, that of a rotation."""
    if missing := -scales.shape[axis] % count:  # only of tensors that no rotation has padded
        scales = F.pad(scales, (0, 0, 0, missing) if axis == 1 else (0, 0, 0, 0, 0, missing))
    return _stored(scales).unflatten(axis, (-1, count))
