"""The scale of every block of a 2-D tensor: the stage of a cast before rounding, with the amax that shards agree on."""

from typing import NamedTuple

import torch
from torch import Tensor

from lightning_llm.config.schema.precision import CastConfig
from lightning_llm.precision.cast import scales
from lightning_llm.precision.cast.blocks import BlockShape, axes_within, block_shape, blocked
from lightning_llm.precision.cast.formats import FLOAT_MAX


class Scaled(NamedTuple):
    """Scales with size-1 block axes. Elements times `multiplier` are rounded; the result, times `block`, times
    `tensor` where there is one, is the quantised number.
    """

    multiplier: Tensor
    block: Tensor | None
    tensor: Tensor | None


def needs_tensor_amax(cast: CastConfig) -> bool:
    """Whether the cast's scale depends on the whole tensor's amax, which shards must agree on."""
    return cast.scale == "two_level_e4m3" or (cast.block == "tensor" and cast.scale != "delayed")


def tensor_amax(x: Tensor) -> Tensor:
    """Return the largest magnitude of `x`, an fp32 scalar; NaN is ignored, Inf is not."""
    return scales.magnitudes(x).amax()


def scale(x: Tensor, cast: CastConfig, axis: int, amax: Tensor | None = None, delayed: Tensor | None = None) -> Scaled:
    """Return the scale of every block of `x` [R, C] by `cast.scale`; see `scales` for each kind's source.

    `amax`: the whole tensor's (fp32 scalar), where `needs_tensor_amax`. `delayed`: the multiplier kept from earlier
    steps. Raises ValueError where one is missing.
    """
    shape = block_shape(cast.block, axis)
    return scale_blocks(x if cast.scale == "delayed" else blocked(x, shape), cast, shape, amax, delayed)


def scale_blocks(
    blocks: Tensor, cast: CastConfig, shape: BlockShape, amax: Tensor | None = None, delayed: Tensor | None = None
) -> Scaled:
    """Return the `scale` of every block of what is already `blocked` to `shape`."""
    if cast.scale == "delayed":
        if delayed is None:
            raise ValueError("scale: delayed needs the scale kept from earlier steps")
        return Scaled(delayed, None, scales.divide(1.0, delayed))
    if needs_tensor_amax(cast) and amax is None:
        raise ValueError(f"scale: {cast.scale} of block {cast.block} needs the tensor's amax")
    if cast.scale == "quest":
        return _quest(blocks, axes_within(shape), int(cast.block.split("x")[1]))
    if cast.block == "tensor" and amax is not None:
        return _plain(amax, cast, FLOAT_MAX)
    magnitude = blocks.float().abs()
    # microxcaling's maximum propagates NaN into the block's exponent; CUDA's ignores it.
    ignored = float("inf") if cast.scale == "e8m0_floor" else 0.0
    block_amax = torch.where(magnitude == magnitude, magnitude, ignored).amax(dim=axes_within(shape), keepdim=True)
    if cast.scale == "two_level_e4m3" and amax is not None:
        sf, multiplier = scales.nvfp4_block_scale(block_amax, scales.nvfp4_tensor_scale(amax))
        return Scaled(multiplier, sf, amax * (1.0 / scales.NVFP4_RANGE))
    if cast.scale in ("e8m0_ceil", "e8m0_floor"):
        exponent_of = scales.e8m0_ceil if cast.scale == "e8m0_ceil" else scales.e8m0_floor
        exponent = exponent_of(block_amax, cast.format)
        multiplier = scales.e8m0_reciprocal(exponent) * cast.prescale
        factor = None if cast.prescale == 1 else torch.full((), 1.0 / cast.prescale, device=blocks.device)
        return Scaled(multiplier, scales.e8m0_value(exponent), factor)
    return _plain(block_amax, cast, torch.finfo(blocks.dtype).max)


def _plain(amax: Tensor, cast: CastConfig, value_for_inf: float) -> Scaled:
    """Return fp32 or power-of-two scales. A power of two stays with the operand, where it is exact."""
    multiplier = scales.scale_from_amax(amax, cast.format, cast.scale == "power_of_two", value_for_inf)
    inverse = scales.divide(1.0, multiplier)
    if cast.block == "tensor" and cast.scale == "fp32":
        return Scaled(multiplier, None, inverse)
    return Scaled(multiplier, inverse, None)


def _quest(blocked: Tensor, axes: tuple[int, ...], size: int) -> Scaled:
    """Return QuEST's scales from the first two moments of blocks of `size` (a power of two) along one axis."""
    x, axis = blocked.float(), axes[0]
    mean, square = (_sum_in_order(each, axis, size) * (1.0 / size) for each in (x, x * x))  # exact: no division
    power = scales.quest_scale(mean, square)
    return Scaled(scales.divide(1.0, power), power, None)


def _sum_in_order(x: Tensor, axis: int, size: int) -> Tensor:
    """Return the sum over an axis of `size` by halving: one order whatever the backend. The axis stays, of size 1."""
    while size > 1:
        size //= 2
        x = x.narrow(axis, 0, size) + x.narrow(axis, size, size)
    return x
