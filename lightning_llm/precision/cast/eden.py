"""MS-EDEN of Quartet II (arXiv 2601.22813): nearest rounding, and block scales that make the result unbiased.

EDEN (Vargaftik et al., arXiv 2108.08842) scales a rotated, rounded vector q by |x|^2 / <x, q>, by which its mean over
random rotations is x. Here that factor, one of each rotation group, multiplies the group's E4M3 block scales, which are
rounded stochastically. Source: `eden_1x16s_fp4_kernel` of IST-DASLab's Quartet-II at 8776a90b.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_llm.precision.cast.rounding import FLOAT_MAX, round_to_format
from lightning_llm.precision.cast.scales import E4M3, BlocksToScale, Scaled, divide, nvfp4_tensor_scale, sum_in_order


def corrected(of: BlocksToScale) -> Scaled:
    """Return the scales of `of.blocks` in 1x16 blocks; elements are rounded under the scales before the correction.

    `of.noise`: that of a block's first element rounds its scale. Raises ValueError if it is missing.
    """
    if of.noise is None:
        raise ValueError(f"scale: {of.cast.scale} needs noise")
    amax, largest = of.tensor_amax(), of.cast.largest
    whole = of.cast.scale_max * largest
    tensor_scale = nvfp4_tensor_scale(amax, whole)
    block = round_to_format(of.block_amax() * (tensor_scale * (1.0 / largest)), E4M3, "even")
    block = torch.where(block == 0, torch.ones_like(block), block)
    multiplier = divide(1.0, block * divide(1.0, tensor_scale)).clamp(max=FLOAT_MAX)
    x = of.blocks.float() * multiplier
    values = round_to_format(x, of.fmt, of.cast.rounding)
    axis = 2 if of.shape is not None and of.shape[0] == 1 else 1
    squares, products = _per_group(x * x, of, axis), _per_group(x * values, of, axis)
    usable = products > 0
    correction = (squares.double() / torch.where(usable, products, torch.ones_like(products)).double()).float()
    correction = torch.where(usable, correction, torch.ones_like(correction))
    first = of.noise.narrow(axis, 0, 1)
    return Scaled(multiplier, round_to_format(block * correction, E4M3, "stochastic_compare", first), amax, 1.0 / whole)


def _per_group(x: Tensor, of: BlocksToScale, axis: int) -> Tensor:
    """Return the sum of `x` over each group of the rotation, for each of its blocks, with a size-1 block axis."""
    size = x.shape[axis]
    sums, blocks_axis = sum_in_order(x, axis, size), axis - 1
    count = 1 if of.cast.hadamard is None else max(of.cast.hadamard.size // size, 1)
    if count == 1:
        return sums
    blocks = sums.shape[blocks_axis]
    if missing := -blocks % count:  # only of tensors that no rotation has padded
        sums = F.pad(sums, (0, 0, 0, missing) if axis == 2 else (0, 0, 0, 0, 0, missing))
    groups = sums.unflatten(blocks_axis, (-1, count))
    total = sum_in_order(groups, blocks_axis + 1, count)
    return total.expand(groups.shape).reshape(sums.shape).narrow(blocks_axis, 0, blocks)
