"""Quantise a 2-D tensor by a cast: blocks along an axis, a scale per block, elements rounded to a small format.

Three pure stages, so that a reduction over ranks can come between the first two and each fuses into one kernel:
`tensor_amax` (where the cast has a tensor-level scale), `scale`, and `round_blocks`. `quantise` runs all of them and
returns everything that can be looked at.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_llm.config.schema.precision import CastConfig
from lightning_llm.precision import scales
from lightning_llm.precision.formats import FLOAT_MAX, FORMATS, copy_sign, encode
from lightning_llm.precision.operand import BlockScales
from lightning_llm.precision.random_bits import uniform_noise, word
from lightning_llm.precision.rounding import round_to_format

BlockShape = tuple[int, int] | None


class Origin(NamedTuple):
    """Where a shard lies in the whole tensor, so that its elements keep their random bits; stride 0: all columns.

    Where rows are tokens of sequences that ranks share, `positions` (int64) are those of a sequence's tokens that the
    shard has, of `length` in all.
    """

    row: int = 0
    column: int = 0
    row_stride: int = 0
    positions: Tensor | None = None
    length: int = 0

    def rows(self, count: int, device: torch.device) -> Tensor:
        """Return the row in the whole tensor, int64 [count], of each of the shard's `count` rows."""
        rows = torch.arange(count, device=device, dtype=torch.int64)
        if self.positions is not None:
            own = self.positions.shape[0]
            rows = rows // own * self.length + self.positions[rows % own]
        return rows + self.row


class Scaled(NamedTuple):
    """Scales with size-1 block axes. Elements times `multiplier` are rounded; the result, times `block`, times
    `tensor` where there is one, is the quantised number. `stored`: the form kernels keep (E8M0: biased exponents).
    """

    multiplier: Tensor
    block: Tensor | None
    tensor: Tensor | None
    stored: Tensor


@dataclass(frozen=True)
class Quantised:
    """A quantised 2-D tensor. `values` [R, C] fp32 on the format's grid; `dequantised` [R, C] fp32, both exact.

    `stored_scale`: one per block, [R / rows, C / columns] (a scalar per tensor); `inside` [R, C]: true where the
    scaled element was within the format's range.
    """

    values: Tensor
    stored_scale: Tensor
    dequantised: Tensor
    inside: Tensor
    format: str

    @property
    def codes(self) -> Tensor:
        """The uint8 codes, [R, C]; four-bit codes unpacked."""
        return encode(self.values, self.format)


def block_shape(block: str, axis: int) -> BlockShape:
    """Return the (rows, columns) of a block whose contraction axis is `axis` of a 2-D tensor; None for the whole."""
    if block == "tensor":
        return None
    across, along = (int(each) for each in block.split("x"))
    return (across, along) if axis == 1 else (along, across)


def needs_tensor_amax(cast: CastConfig) -> bool:
    """Whether the cast's scale depends on the whole tensor's amax, which shards must agree on."""
    return cast.scale == "two_level_e4m3" or (cast.block == "tensor" and cast.scale != "delayed")


def read_by_scale(cast: CastConfig) -> CastConfig:
    """Return `cast` with defaults for all that `scale` does not read: one kernel serves all casts of one such."""
    kept = {"format", "block", "scale", "prescale", "delayed"}
    return CastConfig.model_construct(**{key: value for key, value in cast if key in kept})


def read_by_rounding(cast: CastConfig) -> CastConfig:
    """Return `cast` with defaults for all that `round_blocks` does not read."""
    kept = {"format", "block", "rounding", "clip_gradient"} | ({"noise_bits"} if cast.stochastic else set())
    read: dict[str, Any] = {key: value for key, value in cast if key in kept}
    return CastConfig.model_construct(**read, scale="fp32" if cast.scales_partial_sums else "power_of_two")


def _missing(length: int, size: int) -> int:
    """Return by how much `length` falls short of a multiple of `size`.

    Not -length % size, though it is the same: of that, Inductor (torch 2.13) leaves a symbolic crop of padding out.
    """
    return (length + size - 1) // size * size - length


def _blocked(x: Tensor, shape: BlockShape) -> tuple[Tensor, tuple[int, ...]]:
    """Return `x` zero-padded to whole blocks and viewed with block axes, and which axes lie within a block."""
    if shape is None:
        return x, (0, 1)
    (rows, columns), (height, width) = x.shape, shape
    down, right = _missing(rows, height), _missing(columns, width)
    if down or right:
        x = F.pad(x, (0, right, 0, down))
        rows, columns = x.shape
    if height == 1:
        return x.reshape(rows, columns // width, width), (2,)
    if width == 1:
        return x.reshape(rows // height, height, columns), (1,)
    return x.reshape(rows // height, height, columns // width, width), (1, 3)


def _unblocked(x: Tensor, like: Tensor, shape: BlockShape) -> Tensor:
    """Undo `_blocked`: [R, C], the padding cropped."""
    if shape is None:
        return x
    (rows, columns), (height, width) = like.shape, shape
    down, right = _missing(rows, height), _missing(columns, width)
    if down or right:
        return x.reshape(rows + down, columns + right)[:rows, :columns].contiguous()
    return x.reshape(rows, columns)


def tensor_amax(x: Tensor) -> Tensor:
    """Return the largest magnitude of `x`, an fp32 scalar; NaN is ignored, Inf is not."""
    return scales.magnitudes(x).amax()


def scale(x: Tensor, cast: CastConfig, axis: int, amax: Tensor | None = None, delayed: Tensor | None = None) -> Scaled:
    """Return the scale of every block of `x` [R, C] by `cast.scale`; see `scales` for each kind's source.

    `amax`: the whole tensor's (fp32 scalar), where `needs_tensor_amax`. `delayed`: the multiplier kept from earlier
    steps. Raises ValueError where one is missing.
    """
    if cast.scale == "delayed":
        if delayed is None:
            raise ValueError("scale: delayed needs the scale kept from earlier steps")
        return Scaled(delayed, None, scales.divide(1.0, delayed), delayed)
    if needs_tensor_amax(cast) and amax is None:
        raise ValueError(f"scale: {cast.scale} of block {cast.block} needs the tensor's amax")
    blocked, axes = _blocked(x, block_shape(cast.block, axis))
    if cast.scale == "quest":
        return _quest(blocked, axes, int(cast.block.split("x")[1]))
    if cast.block == "tensor" and amax is not None:
        return _plain(amax, cast, FLOAT_MAX)
    magnitude = blocked.float().abs()
    # microxcaling's maximum propagates NaN into the block's exponent; CUDA's ignores it.
    ignored = float("inf") if cast.scale == "e8m0_floor" else 0.0
    block_amax = torch.where(magnitude == magnitude, magnitude, ignored).amax(dim=axes, keepdim=True)
    if cast.scale == "two_level_e4m3" and amax is not None:
        sf, multiplier = scales.nvfp4_block_scale(block_amax, scales.nvfp4_tensor_scale(amax))
        return Scaled(multiplier, sf, amax * (1.0 / scales.NVFP4_RANGE), sf)
    if cast.scale in ("e8m0_ceil", "e8m0_floor"):
        exponent_of = scales.e8m0_ceil if cast.scale == "e8m0_ceil" else scales.e8m0_floor
        exponent = exponent_of(block_amax, cast.format)
        multiplier = scales.e8m0_reciprocal(exponent) * cast.prescale
        factor = None if cast.prescale == 1 else torch.full((), 1.0 / cast.prescale, device=x.device)
        return Scaled(multiplier, scales.e8m0_value(exponent), factor, exponent)
    return _plain(block_amax, cast, torch.finfo(x.dtype).max)


def _plain(amax: Tensor, cast: CastConfig, value_for_inf: float) -> Scaled:
    """Return fp32 or power-of-two scales. A power of two stays with the operand, where it is exact."""
    multiplier = scales.scale_from_amax(amax, cast.format, cast.scale == "power_of_two", value_for_inf)
    inverse = scales.divide(1.0, multiplier)
    if cast.block == "tensor" and cast.scale == "fp32":
        return Scaled(multiplier, None, inverse, multiplier)
    return Scaled(multiplier, inverse, None, inverse)


def _quest(blocked: Tensor, axes: tuple[int, ...], size: int) -> Scaled:
    """Return QuEST's scales from the first two moments of blocks of `size` (a power of two) along one axis."""
    x, axis = blocked.float(), axes[0]
    mean, square = (_sum_in_order(each, axis, size) * (1.0 / size) for each in (x, x * x))  # exact: no division
    power = scales.quest_scale(mean, square)
    return Scaled(scales.divide(1.0, power), power, None, power)


def _sum_in_order(x: Tensor, axis: int, size: int) -> Tensor:
    """Return the sum over an axis of `size` by halving: one order whatever the backend. The axis stays, of size 1."""
    while size > 1:
        size //= 2
        x = x.narrow(axis, 0, size) + x.narrow(axis, size, size)
    return x


def keyed_noise(x: Tensor, cast: CastConfig, key: Tensor | None, origin: Origin) -> Tensor | None:
    """Return noise [R, C] for `x`: a function of `key` (int64 scalar) and each element's place in the whole tensor.

    None where `cast` draws no random bits. Raises ValueError where it does and there is no key.
    """
    if not cast.stochastic:
        return None
    if key is None:
        raise ValueError(f"rounding '{cast.rounding}' draws random bits and needs a key; none was set for this step")
    first = origin.rows(x.shape[0], x.device) * (origin.row_stride or x.shape[1]) + origin.column  # of each row, int64
    columns = torch.arange(x.shape[1], device=x.device, dtype=torch.int32)
    return uniform_noise(key, word(first)[:, None] + columns[None, :], cast.noise_bits)


def _elements(
    x: Tensor, cast: CastConfig, axis: int, multiplier: Tensor, noise: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return (grid values, scaled elements before rounding), both blocked: one fp32 product, one rounding each."""
    shape = block_shape(cast.block, axis)
    elements = _blocked(x, shape)[0].float() * multiplier
    noise = None if noise is None else _blocked(noise, shape)[0]
    return round_to_format(elements, cast.format, cast.rounding, noise), elements


def round_blocks(
    x: Tensor,
    cast: CastConfig,
    axis: int,
    multiplier: Tensor,
    block: Tensor | None,
    key: Tensor | None = None,
    origin: Origin = Origin(),  # noqa: B008  (immutable)
) -> tuple[Tensor, Tensor | None]:
    """Return (operand, inside): grid value times block scale [R, C], exact in bf16; or see `scales_partial_sums`.

    `inside` [R, C] bf16, for `clip_gradient` only: 1 where the scaled element was within the format's range, else 0.
    No bool: Inductor's C++ for a CPU takes elements one by one where it writes bools (torch 2.13).
    """
    shape = block_shape(cast.block, axis)
    values, elements = _elements(x, cast, axis, multiplier, keyed_noise(x, cast, key, origin))
    product = values if block is None or cast.scales_partial_sums else values * block
    operand = product.to(torch.bfloat16)
    if not cast.clip_gradient:
        return _unblocked(operand, x, shape), None
    inside = torch.where(elements.abs() < FORMATS[cast.format].max, 1.0, 0.0).to(torch.bfloat16)
    return _unblocked(operand, x, shape), _unblocked(inside, x, shape)


def block_amax(x: Tensor, cast: CastConfig, axis: int) -> Tensor:
    """Return the largest magnitude of every block of `x`, fp32, shaped as a blocked multiplier ([1, 1] per tensor)."""
    blocked, axes = _blocked(x, block_shape(cast.block, axis))
    return blocked.float().abs().amax(dim=axes, keepdim=True)


def count_beyond(x: Tensor, cast: CastConfig, axis: int, multiplier: Tensor, limit: float) -> Tensor:
    """Return how many elements of `x` [R, C], times their multiplier, are larger than `limit` in magnitude."""
    return (_blocked(x, block_shape(cast.block, axis))[0].float().abs() * multiplier > limit).sum()


def contraction_scales(block: Tensor, cast: CastConfig, axis: int, x: Tensor) -> BlockScales:
    """Return the blocks' scales of `x` [R, C], one for each row (or column, for axis 0) and block along `axis`."""
    shape = block_shape(cast.block, axis)
    if shape is None:
        raise ValueError("a scale per tensor is a factor, not a block scale")
    across = 1 - axis
    per_row = _per_block(block, shape).repeat_interleave(shape[across], across).narrow(across, 0, x.shape[across])
    return BlockScales(per_row, shape[axis], axis)


def quantise(
    x: Tensor,
    cast: CastConfig,
    axis: int = 1,
    *,
    noise: Tensor | None = None,
    amax: Tensor | None = None,
    delayed: Tensor | None = None,
) -> Quantised:
    """Return `x` [R, C] (bf16, fp16 or fp32) quantised by `cast` with blocks along the contraction `axis`.

    No Hadamard transform is applied here. Stochastic rounding takes `noise` [R, C] in [0, 1), see `keyed_noise`. `amax`
    replaces the tensor's own. Raises ValueError where `noise` or `delayed` is missing.
    """
    if amax is None and needs_tensor_amax(cast):
        amax = tensor_amax(x)
    scaled = scale(x, cast, axis, amax, delayed)
    values, elements = _elements(x, cast, axis, scaled.multiplier, noise)
    if cast.scale == "two_level_e4m3" and amax is not None and scaled.block is not None:
        dequantised = values * ((scaled.block * amax) * (1.0 / scales.NVFP4_RANGE))
    else:
        dequantised = values if scaled.block is None else values * scaled.block
        dequantised = dequantised if scaled.tensor is None else dequantised * scaled.tensor
    shape = block_shape(cast.block, axis)
    # Transformer Engine's E2M1 codes are negative where x < 0: not for -0, nor for NaN, whose stand-in is +6.
    sign = elements if FORMATS[cast.format].has_nan else torch.where(elements < 0, -1.0, 1.0)
    return Quantised(
        _unblocked(copy_sign(values.abs(), sign), x, shape),
        scaled.stored if shape is None else _per_block(scaled.stored, shape),
        _unblocked(dequantised, x, shape),
        _unblocked(elements.abs() < FORMATS[cast.format].max, x, shape),
        cast.format,
    )


def _per_block(stored: Tensor, shape: tuple[int, int]) -> Tensor:
    """Return blocked scales with their size-1 block axes dropped: [R / rows, C / columns]."""
    height, width = shape
    if height == 1:
        return stored.squeeze(2)
    return stored.squeeze(1) if width == 1 else stored.squeeze(3).squeeze(1)
