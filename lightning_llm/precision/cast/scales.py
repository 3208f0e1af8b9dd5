"""Scales from the largest magnitude of a tensor or block. All arithmetic is fp32 in the order the kernels use.

Sources: Transformer Engine `recipe_common.cuh` (fp32, power of two), `ptx_arch_spec.cuh` (E8M0 by ceil),
OCP Microscaling v1.0 and microxcaling (E8M0 by floor); Quartet's kernel (QuEST).
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_llm.config.schema.number_formats import NUMBER_FORMATS, NumberFormat
from lightning_llm.config.schema.precision import CastConfig, block_size
from lightning_llm.precision.cast.rounding import EXPONENT_MASK, FLOAT_MAX

BlockShape = tuple[int, int] | None
"""Rows and columns of a block, 0: all of the axis; None: the whole tensor is one."""


def block_shape(block: str, axis: int) -> BlockShape:
    """Return the (rows, columns) of blocks ("1x32") in a 2-D tensor with contraction axis `axis`; None for "tensor"."""
    size = block_size(block)
    return size if size is None or axis == 1 else (size[1], size[0])


def axes_within(shape: BlockShape) -> tuple[int, ...]:
    """Return the axes of a tensor `blocked` to `shape` that run within a block."""
    if shape is None:
        return (0, 1)
    height, width = shape
    return (2,) if height == 1 else (1,) if width == 1 else (1, 3)


def blocked(x: Tensor, shape: BlockShape) -> Tensor:
    """Return `x` [R, C], zero-padded to whole blocks, with its axes split into blocks.

    [R, C / w, w] for blocks of one row, [R / h, h, C] for those of one column, [R / h, h, C / w, w] for others, and `x`
    itself if the whole tensor is one block.
    """
    if shape is None:
        return x
    (rows, columns), (height, width) = x.shape, whole_axes(shape, x)
    down, right = _missing(rows, height), _missing(columns, width)
    if down or right:
        x = F.pad(x, (0, right, 0, down))
        rows, columns = x.shape
    if height == 1:
        return x.reshape(rows, columns // width, width)
    if width == 1:
        return x.reshape(rows // height, height, columns)
    return x.reshape(rows // height, height, columns // width, width)


def whole_axes(shape: tuple[int, int], x: Tensor) -> tuple[int, int]:
    """Return (rows, columns) of a block of `x` [R, C]: `shape` with 0 replaced by the length of the axis."""
    return shape[0] or max(x.shape[0], 1), shape[1] or max(x.shape[1], 1)


def check_blocked(x: Tensor, shape: BlockShape) -> None:
    """Raise ValueError if `x` is not `blocked` to `shape`. From the check a compiler also knows the sizes of blocks."""
    if shape is None or 0 in shape:
        return
    found = tuple(x.shape[axis] for axis in axes_within(shape))
    if found != _sizes_within(shape):
        raise ValueError(f"expected the block axes of {shape}, got {found}")


def _sizes_within(shape: tuple[int, int]) -> tuple[int, ...]:
    height, width = shape
    return (width,) if height == 1 else (height,) if width == 1 else shape


def unblocked(x: Tensor, like: Tensor, shape: BlockShape) -> Tensor:
    """Undo `blocked`: return `x` in the shape [R, C] of `like`, without the padding."""
    if shape is None:
        return x
    (rows, columns), (height, width) = like.shape, whole_axes(shape, like)
    down, right = _missing(rows, height), _missing(columns, width)
    if down or right:
        return x.reshape(rows + down, columns + right)[:rows, :columns].contiguous()
    return x.reshape(rows, columns)


def per_block(scales: Tensor, shape: tuple[int, int]) -> Tensor:
    """Return scales without their size-1 block axes: [R / rows, C / columns]."""
    height, width = shape
    if height == 1:
        return scales.squeeze(2)
    return scales.squeeze(1) if width == 1 else scales.squeeze(3).squeeze(1)


def _missing(length: int, size: int) -> int:
    """Return by how much `length` falls short of a multiple of `size`."""
    return -length % size


E4M3 = NUMBER_FORMATS["e4m3"]
E8M0_NAN = 255
QUEST_GAUSSIAN_CLIP = 2.92247856  # MSE-optimal clip of a Gaussian on the E2M1 grid, in standard deviations


def magnitudes(x: Tensor) -> Tensor:
    """Return |x| in fp32, with NaN replaced by 0 (CUDA's fmaxf ignores NaN); Inf stays."""
    x = x.float().abs()
    return torch.where(x == x, x, torch.zeros_like(x))


def divide(numerator: float, denominator: Tensor) -> Tensor:
    """Return the correctly rounded fp32 quotient of two fp32 numbers, in eager and compiled code.

    torch's scalar / tensor is a reciprocal times a scalar, and fp32 division in a Triton kernel is div.full.f32, up to
    2 ulp off, unless a flag prevents it; in fp64 both divide as IEEE 754 does. Rounding twice does no harm: it is
    innocuous for quotients where the wider format has at least 2 p + 2 bits (Figueroa, "When is double rounding
    innocuous?", SIGNUM Newsletter 30(3), 1995), and 53 >= 2 x 24 + 2. Below fp32's normal range a result has q < 24
    bits: a quotient n / d that is no midpoint m of two such is |n - m d| / (m d) > 2^-(q + 25) of m from it, which is
    more than fp64's 2^-53, and a midpoint itself fits in fp64.
    """
    wide = denominator.double()
    return torch.div(torch.full_like(wide, numerator), wide).float()


def scale_from_amax(amax: Tensor, largest: float, power_of_two: bool, value_for_inf: float) -> Tensor:
    """Return the multiplier `largest` / `amax` (fp32), which scales `amax` to the largest number of the format.

    `compute_scale_from_amax` of Transformer Engine: 1 where amax is 0, Inf or NaN; `value_for_inf` where the quotient
    overflows; `power_of_two` rounds it down to one (clears the mantissa bits).
    """
    scale = divide(largest, amax)
    scale = torch.where(torch.isinf(scale), torch.full_like(scale, value_for_inf), scale)
    if power_of_two:
        scale = (scale.view(torch.int32) & EXPONENT_MASK).view(torch.float32)
    usable = (amax > 0) & (amax < float("inf"))
    return torch.where(usable, scale, torch.ones_like(scale))


def e8m0_ceil(amax: Tensor, largest: float) -> Tensor:
    """Return the smallest power of two >= amax / `largest`, as int32 biased exponents 0..255 (Transformer Engine)."""
    return float_to_e8m0(amax * (1.0 / largest))


def float_to_e8m0(value: Tensor) -> Tensor:
    """Return fp32 `value` (>= 0) rounded up to a power of two, as int32 biased exponents: NaN -> 255, Inf -> 254."""
    bits = value.view(torch.int32)
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    stays = (mantissa == 0) | (exponent == 254) | ((exponent == 0) & (mantissa <= 0x400000))
    up = torch.where(stays, exponent, exponent + 1)
    special = torch.where(mantissa > 0, torch.full_like(bits, E8M0_NAN), torch.full_like(bits, 254))
    return torch.where(exponent == 255, special, up)


def e8m0_floor(amax: Tensor, fmt: NumberFormat) -> Tensor:
    """Return biased exponents (int32) floor(log2 amax) - emax + 127, in 0..254; 255 (NaN) for Inf and NaN (OCP)."""
    exponent = amax.view(torch.int32) >> 23
    shared = (exponent - fmt.max_exponent).clamp(0, 254)
    return torch.where(exponent == 255, torch.full_like(shared, E8M0_NAN), shared)


def e8m0_even(amax: Tensor, fmt: NumberFormat) -> Tensor:
    """Return `e8m0_floor` of amax rounded half up to the mantissa bits of `fmt` (torchao's EVEN)."""
    bits = amax.view(torch.int32)
    shared = (((bits + (1 << (22 - fmt.mantissa_bits))) >> 23) - fmt.max_exponent).clamp(0, 254)
    return torch.where(bits >> 23 == 255, torch.full_like(shared, E8M0_NAN), shared)


def e8m0_value(biased: Tensor) -> Tensor:
    """Return 2^(e - 127) in fp32 of int32 biased exponents 0..254 (0 is the subnormal 2^-127); NaN for 255."""
    bits = torch.where(biased == 0, torch.full_like(biased, 0x00400000), biased << 23)
    return torch.where(biased == E8M0_NAN, torch.full_like(biased, 0x7FC00000), bits).view(torch.float32)


def e8m0_exponent(value: Tensor) -> Tensor:
    """Return the biased exponents, int32, of results of `e8m0_value`: 0 for the subnormal, 255 for NaN."""
    return value.view(torch.int32) >> 23


def e8m0_reciprocal(biased: Tensor) -> Tensor:
    """Return 2^(127 - e) in fp32, exact (e = 254 gives the subnormal 2^-127); NaN for 255."""
    return e8m0_value(torch.where(biased == E8M0_NAN, biased, 254 - biased))


def quest_scale(mean: Tensor, mean_of_squares: Tensor) -> Tensor:
    """Return QuEST's power-of-two scale of blocks: 2^floor(log2(clip / 6 * std + 1e-8)), fp32."""
    variance = (mean_of_squares - mean * mean).clamp(min=0)
    deviation = variance.double().sqrt().float()  # as in `divide`: Figueroa's bound is the square root's as well
    scale = (QUEST_GAUSSIAN_CLIP / 6.0) * deviation + 1e-8
    return (scale.view(torch.int32) & EXPONENT_MASK).view(torch.float32)


class Scaled(NamedTuple):
    """Scales of a blocked tensor, with size-1 block axes.

    Elements times `multiplier` are rounded to values of the number format. The dequantized number is value * `block` *
    `tensor` * `unit`. `tensor` is fp32, a scalar or one number per row. `block` and `tensor` are None if they are 1.
    """

    multiplier: Tensor
    block: Tensor | None
    tensor: Tensor | None
    unit: float = 1.0

    @property
    def factor(self) -> Tensor | None:
        """fp32 factor of the whole tensor, or of each row, that is applied after the GEMM; None if it is 1."""
        return self.tensor if self.tensor is None or self.unit == 1.0 else self.tensor * self.unit

    def dequantized(self, values: Tensor) -> Tensor:
        """Return blocked `values` times their scales.

        Scales are multiplied first, and rounded, as the references do.
        """
        scale = self.tensor if self.block is None else self.block
        if self.block is not None and self.tensor is not None:
            scale = self.block * self.tensor
        if scale is None:
            return values
        return values * (scale if self.unit == 1.0 else scale * self.unit)


class BlocksToScale(NamedTuple):
    """Input of a `ScaleKind`: a tensor `blocked` to `shape`, its cast, and inputs that only some kinds need.

    `amax`: the whole tensor's (fp32 scalar), where the kind needs it; `kept`: the multiplier kept from earlier steps;
    `noise`: uniform in [0, 1) of the shape of `blocks`, where the kind draws random bits.
    """

    blocks: Tensor
    cast: CastConfig
    shape: BlockShape
    amax: Tensor | None = None
    kept: Tensor | None = None
    noise: Tensor | None = None

    @property
    def fmt(self) -> NumberFormat:
        """The number format of the cast."""
        return self.cast.number_format

    def tensor_amax(self) -> Tensor:
        """Return the largest magnitude of the whole tensor, an fp32 scalar. Raises ValueError if it was not given."""
        if self.amax is None:
            raise ValueError(f"scale: {self.cast.scale} of block {self.cast.block} needs the tensor's amax")
        return self.amax

    def row_amax(self) -> Tensor:
        """Return the largest magnitude of each row (axis 0: column), fp32 with size-1 block axes.

        Raises ValueError if the whole tensor is one block.
        """
        if self.shape is None:
            raise ValueError("amax: row needs blocks of one row")
        axes = (1, 2) if self.shape[0] == 1 else (0, 1)
        return magnitudes(self.blocks).amax(axes, keepdim=True)

    def kept_multiplier(self) -> Tensor:
        """Return the multiplier that delayed scaling kept from earlier steps. Raises ValueError if it was not given."""
        if self.kept is None:
            raise ValueError(f"scale: {self.cast.scale} needs the scale kept from earlier steps")
        return self.kept

    def block_amax(self, nan: float = 0.0) -> Tensor:
        """Return the largest magnitude of each block, fp32 with size-1 block axes; NaN counts as `nan`."""
        magnitude = self.blocks.float().abs()
        return torch.where(magnitude == magnitude, magnitude, nan).amax(dim=axes_within(self.shape), keepdim=True)

    def moments(self) -> tuple[Tensor, Tensor]:
        """Return the means of elements and of their squares in blocks of one row, fp32 with a size-1 block axis."""
        (axis, *_) = axes_within(self.shape)
        x, size = self.blocks.float(), self.blocks.shape[axis]
        mean, square = (sum_in_order(each, axis, size) * (1.0 / size) for each in (x, x * x))  # exact: no division
        return mean, square

    def from_amax(self, power_of_two: bool) -> Scaled:
        """Return scales with the multiplier largest number / amax, of the tensor or of each block.

        `power_of_two`: round the multiplier down to a power of two. Its inverse is exact in the operand.
        """
        tensor = self.shape is None
        amax = self.tensor_amax() if tensor else self.block_amax()
        value_for_inf = FLOAT_MAX if tensor else torch.finfo(self.blocks.dtype).max
        multiplier = scale_from_amax(amax, self.cast.largest, power_of_two, value_for_inf)
        inverse = divide(1.0, multiplier)
        if tensor and not power_of_two:
            return Scaled(multiplier, None, inverse)
        return Scaled(multiplier, inverse, None)


def scaled_by_exponents(exponent: Tensor, prescale: float) -> Scaled:
    """Return E8M0 scales with biased exponents `exponent` (int32).

    Elements are multiplied by `prescale` before rounding, and the product of the GEMM is divided by it.
    """
    multiplier = e8m0_reciprocal(exponent) * prescale
    factor = None if prescale == 1 else torch.full((), 1.0 / prescale, device=exponent.device)
    return Scaled(multiplier, e8m0_value(exponent), factor)


def tensor_amax(x: Tensor) -> Tensor:
    """Return the largest magnitude of `x`, an fp32 scalar; NaN is ignored, Inf is not."""
    return magnitudes(x).amax()


def scale(x: Tensor, cast: CastConfig, axis: int, amax: Tensor | None = None, delayed: Tensor | None = None) -> Scaled:
    """Return the scales that `cast.scale` gives the blocks of `x` [R, C] along contraction `axis`.

    `amax`: the whole tensor's (fp32 scalar), where `needs_tensor_amax`. `delayed`: the multiplier kept from earlier
    steps. Raises ValueError where one is missing.
    """
    shape = block_shape(cast.block, axis)
    return scale_blocks(blocked(x, shape), cast, shape, amax, delayed)


def scale_blocks(
    blocks: Tensor,
    cast: CastConfig,
    shape: BlockShape,
    amax: Tensor | None = None,
    delayed: Tensor | None = None,
    noise: Tensor | None = None,
) -> Scaled:
    """Return the scales that `cast.scale` gives a tensor `blocked` to `shape`; `noise`: see `BlocksToScale`."""
    scaled: Scaled = cast.scale_kind.scale(BlocksToScale(blocks, cast, shape, amax, delayed, noise))
    return scaled


def sum_in_order(x: Tensor, axis: int, size: int) -> Tensor:
    """Return the sum over an axis of `size` by halving, in one order on all backends. The axis stays, of size 1."""
    while size > 1:
        size //= 2
        x = x.narrow(axis, 0, size) + x.narrow(axis, size, size)
    return x
