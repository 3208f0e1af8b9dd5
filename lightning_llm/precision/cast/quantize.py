"""Quantize a 2-D tensor by a cast: rotation, blocks along an axis, a scale per block, elements in a small format.

Three pure stages, so that a reduction over ranks can come between the first two and each fuses into one kernel:
`tensor_amax` (where the cast has a tensor-level scale) and `scale` of `scales.py`, and `round_blocks`. `quantize`
runs all of them and returns all intermediate results.

A cast with a transform is preceded by `rotate`. Both operands of a GEMM are rotated by the same orthogonal
diag(signs) S_g along the contraction axis, so (A S)(S^T B) = A B and nothing needs to be undone. An axis that is no
multiple of g is padded with zeros to whole groups, in both operands, which leaves the product the same.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_llm.config.schema.cast_kinds import TRANSFORMS
from lightning_llm.config.schema.number_formats import NumberFormat
from lightning_llm.config.schema.precision import CastConfig
from lightning_llm.linalg.gemm import operand, product
from lightning_llm.precision.cast.random_bits import Origin, keyed_noise, scale_noise
from lightning_llm.precision.cast.rounding import copy_sign, encode, round_to_format
from lightning_llm.precision.cast.scales import (
    BlockShape,
    axes_within,
    block_shape,
    blocked,
    check_blocked,
    per_block,
    scale_blocks,
    tensor_amax,
    unblocked,
    whole_axes,
)


class BlockScales(NamedTuple):
    """fp32 block scales of an operand [R, C] that multiply partial sums of a GEMM, because code times scale needs fp32.

    `scales`: [R, ceil(C / width)] for contraction `axis` 1, [ceil(R / width), C] for axis 0.
    """

    scales: Tensor
    width: int
    axis: int

    def at(self, start: int) -> Tensor:
        """Return the scales of the contraction axis's element `start`: [R, 1], or [1, C] for axis 0."""
        return self.scales.narrow(self.axis, start // self.width, 1)


class Operand(NamedTuple):
    """Operand of a quantized GEMM: a `tensor` [R, C], and the scales that are applied within and after the GEMM.

    `blocks` multiply partial sums, `factor` the product; both are None if not needed. `factor` is fp32: a scalar, or
    [R, 1] or [1, C] for contraction axis 1 or 0. `inside` [R, C] bf16: derivative of the cast, None if it is 1
    (straight-through).
    """

    tensor: Tensor
    factor: Tensor | None = None
    inside: Tensor | None = None
    blocks: BlockScales | None = None

    @property
    def flipped(self) -> "Operand":
        """The transposed operand [C, R], without `inside`."""
        blocks = self.blocks
        if blocks is not None:
            blocks = BlockScales(blocks.scales.T, blocks.width, 1 - blocks.axis)
        factor = self.factor if self.factor is None or self.factor.dim() == 0 else self.factor.T
        return Operand(self.tensor.T, factor, None, blocks)

    def dequantized(self) -> Tensor:
        """Return the dequantized operand, fp32 [R, C], with all scales applied."""
        numbers = self.tensor.float()
        if self.blocks is not None:
            scales, width, axis = self.blocks
            numbers = numbers * scales.repeat_interleave(width, axis).narrow(axis, 0, numbers.shape[axis])
        return numbers if self.factor is None else numbers * self.factor


@dataclass(frozen=True)
class Quantized:
    """Result of `quantize`: a quantized 2-D tensor, and all that can be compared with other implementations.

    `values` [R, C] fp32: numbers of the format. `dequantized` [R, C] fp32: these times their scales. `stored_scale`:
    one per block, [R / rows, C / columns] (a scalar per tensor); `inside` [R, C]: true where the scaled element was
    within the format's range.
    """

    values: Tensor
    stored_scale: Tensor
    dequantized: Tensor
    inside: Tensor
    format: NumberFormat

    @property
    def codes(self) -> Tensor:
        """The bit patterns of `values` [R, C], one integer per element; see `encode`."""
        return encode(self.values, self.format)


def read_by_cast(cast: CastConfig) -> CastConfig:
    """Return `cast` with defaults for keys that `cast_blocks` does not read, so that equal casts share a kernel."""
    kept = {"format", "block", "scale", "prescale", "rounding", "clip_gradient", "gradient", "headroom"}
    kept |= {"amax", "scale_max", "candidates"}
    kept |= {"noise_bits"} if cast.stochastic else set()
    kept |= {"hadamard"} if cast.scale_kind.by_rotation else set()
    return CastConfig.model_construct(**{key: value for key, value in cast if key in kept})


def _elements(blocks: Tensor, cast: CastConfig, multiplier: Tensor, noise: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return (grid values, scaled elements before rounding): one fp32 product, one rounding each."""
    elements = blocks.float() * multiplier
    return round_to_format(elements, cast.number_format, cast.rounding, noise), elements


def round_blocks(
    blocks: Tensor,
    cast: CastConfig,
    shape: BlockShape,
    multiplier: Tensor,
    block: Tensor | None,
    key: Tensor | None = None,
    origin: Origin = Origin(),  # noqa: B008  (immutable)
) -> tuple[Tensor, Tensor | None]:
    """Round a tensor `blocked` to `shape`; return (operand, inside), blocked bf16 tensors.

    The operand is rounded value times block scale, exact in bf16, or the rounded value alone if block scales multiply
    partial sums (`scales_partial_sums`). `inside`: the derivative of the cast, None if it is 1. A mask is not bool:
    Inductor's C++ for CPUs does not vectorize writes of bools (torch 2.13). `origin`: its `row_stride` is needed if
    `shape` pads columns.
    """
    values, elements = _elements(blocks, cast, multiplier, keyed_noise(blocks, cast, key, origin, shape))
    product = values if block is None or cast.scales_partial_sums else values * block
    operand = product.to(torch.bfloat16)
    rule = cast.gradient_kind
    if rule.is_one:
        return operand, None
    return operand, rule.factor(elements, cast.number_format).to(torch.bfloat16)


class CastBlocks(NamedTuple):
    """Result of `cast_blocks`: `operand` and `inside` of `round_blocks`, and the fields of `Scaled`, all blocked.

    `multiplier` is None for a delayed scale, which the caller has.
    """

    operand: Tensor
    inside: Tensor | None
    multiplier: Tensor | None
    block: Tensor | None
    tensor: Tensor | None


def cast_blocks(
    blocks: Tensor,
    cast: CastConfig,
    shape: BlockShape,
    amax: Tensor | None,
    delayed: Tensor | None,
    key: Tensor | None,
    origin: Origin,
    wide: bool = False,
) -> CastBlocks:
    """Compute scales and rounded elements of a tensor `blocked` to `shape` in one function, which can be compiled.

    `amax`: of the whole tensor; None: that of `blocks`. `delayed`: the multiplier of a delayed scale. `key`, `origin`:
    for random bits (`keyed_noise`). `wide`: the operand is fp32 instead of bf16, with the same numbers.
    """
    check_blocked(blocks, shape)
    if amax is None and cast.needs_tensor_amax:
        amax = tensor_amax(blocks)
    noise = scale_noise(blocks, cast, key, origin, shape)
    scaled = scale_blocks(blocks, cast, shape, amax, delayed, noise)
    operand, inside = round_blocks(blocks, cast, shape, scaled.multiplier, scaled.block, key, origin)
    operand = operand.float() if wide else operand
    multiplier = None if cast.scale_kind.from_history else scaled.multiplier
    return CastBlocks(operand, inside, multiplier, scaled.block, scaled.factor)


def block_amax(x: Tensor, cast: CastConfig, axis: int) -> Tensor:
    """Return the largest magnitude of every block of `x` [R, C], fp32 with size-1 block axes ([1, 1] per tensor)."""
    shape = block_shape(cast.block, axis)
    return blocked(x, shape).float().abs().amax(dim=axes_within(shape), keepdim=True)


def count_beyond(x: Tensor, cast: CastConfig, axis: int, multiplier: Tensor, limit: float) -> Tensor:
    """Return the number of elements of `x` [R, C] that exceed `limit` in magnitude after scaling by `multiplier`."""
    return (blocked(x, block_shape(cast.block, axis)).float().abs() * multiplier > limit).sum()


def contraction_scales(block: Tensor, cast: CastConfig, axis: int, x: Tensor) -> BlockScales:
    """Return scales `block` of a blocked `x` [R, C] as `BlockScales`: one per block and row (axis 0: column)."""
    shape = block_shape(cast.block, axis)
    if shape is None:
        raise ValueError("a scale per tensor is a factor, not a block scale")
    across = 1 - axis
    per_row = per_block(block, shape).repeat_interleave(shape[across], across).narrow(across, 0, x.shape[across])
    return BlockScales(per_row, whole_axes(shape, x)[axis], axis)


def quantize(
    x: Tensor,
    cast: CastConfig,
    axis: int = 1,
    *,
    noise: Tensor | None = None,
    amax: Tensor | None = None,
    delayed: Tensor | None = None,
) -> Quantized:
    """Return `x` [R, C] (bf16, fp16 or fp32) quantized by `cast`, with blocks along the contraction `axis`.

    No Hadamard transform is applied here. Stochastic rounding takes `noise` [R, C] in [0, 1), see `keyed_noise`. `amax`
    replaces the tensor's own. Raises ValueError where `noise` or `delayed` is missing.
    """
    if amax is None and cast.needs_tensor_amax:
        amax = tensor_amax(x)
    shape = block_shape(cast.block, axis)
    noise = None if noise is None else blocked(noise, shape)
    scaled = scale_blocks(blocked(x, shape), cast, shape, amax, delayed, noise)
    values, elements = _elements(blocked(x, shape), cast, scaled.multiplier, noise)
    stored = cast.scale_kind.stored(scaled)
    # Transformer Engine's E2M1 codes are negative where x < 0: not for -0, nor for NaN, which +6 replaces.
    sign = elements if cast.number_format.has_nan else torch.where(elements < 0, -1.0, 1.0)
    return Quantized(
        unblocked(copy_sign(values.abs(), sign), x, shape),
        stored if shape is None else per_block(stored, shape),
        unblocked(scaled.dequantized(values), x, shape),
        unblocked(elements.abs() < cast.number_format.max, x, shape),
        cast.number_format,
    )


@lru_cache(maxsize=32)  # also for GPU tensors: a copy in each cast would wait for all queued work
def _matrix(transform: str, size: int, device: torch.device) -> Tensor:
    """Return the matrix of a registered transform, [size, size] fp32."""
    made: Tensor = TRANSFORMS.instance(transform).matrix(size)
    return made.to(device)


@lru_cache(maxsize=32)
def fixed_signs(vector: tuple[int, ...], device: torch.device) -> Tensor:
    """Return a recipe's fixed rotation signs as a cached tensor on `device`, fp32 [len(vector)]."""
    return torch.tensor(vector, dtype=torch.float32, device=device)


def rotation(size: int, signs: Tensor | None, device: torch.device, transform: str = "hadamard") -> Tensor:
    """Return the rotation matrix diag(signs) S, fp32 [size, size], with S of `transform`.

    `signs`: [size] of +1 and -1; None for all +1.
    """
    s = _matrix(transform, size, device)
    return s if signs is None else s * signs.float()[:, None]


def rotate(x: Tensor, s: Tensor, axis: int, round_to: torch.dtype, transform: str = "hadamard") -> Tensor:
    """Rotate 2-D `x`: multiply each group of g elements along `axis` by `s` [g, g]; return it in the dtype `round_to`.

    The axis is padded with zeros to whole groups. fp32 accumulation. With `round_to` bf16 and a bf16 x the GEMM itself
    runs in bf16 if the entries of s are exact in it (of Hadamard matrices g = 4, 16, 64, 256), and rounds once, at the
    end.
    """
    size = s.shape[0]
    if missing := -x.shape[axis] % size:
        x = F.pad(x, (0, missing) if axis == 1 else (0, 0, 0, missing))
    rows, columns = x.shape
    exact_in_bf16 = TRANSFORMS.instance(transform).exact_in_bf16(size)
    dtype = torch.bfloat16 if x.dtype == round_to == torch.bfloat16 and exact_in_bf16 else torch.float32
    x, s = operand(x.to(dtype)), operand(s.to(dtype))
    if axis == 1:
        return product(x.reshape(-1, size), s).reshape(rows, columns).to(round_to)
    return product(s.T, x.reshape(rows // size, size, columns)).reshape(rows, columns).to(round_to)
