"""The blocks of a 2-D tensor that share a scale: as axes of their own, and back."""

import torch.nn.functional as F
from torch import Tensor

BlockShape = tuple[int, int] | None
"""Rows and columns of a block; None: the whole tensor is one."""


def block_shape(block: str, axis: int) -> BlockShape:
    """Return the (rows, columns) of a block whose contraction axis is `axis` of a 2-D tensor; None for the whole."""
    if block == "tensor":
        return None
    across, along = (int(each) for each in block.split("x"))
    return (across, along) if axis == 1 else (along, across)


def axes_within(shape: BlockShape) -> tuple[int, ...]:
    """Return which axes of a `blocked` tensor lie within a block."""
    if shape is None:
        return (0, 1)
    height, width = shape
    return (2,) if height == 1 else (1,) if width == 1 else (1, 3)


def blocked(x: Tensor, shape: BlockShape) -> Tensor:
    """Return `x` [R, C] viewed with block axes, zero-padded to whole blocks: [R, C / w, w] for blocks of one row,

    [R / h, h, C] for those of one column, [R / h, h, C / w, w] for others, and `x` where it is one block.
    """
    if shape is None:
        return x
    (rows, columns), (height, width) = x.shape, shape
    down, right = _missing(rows, height), _missing(columns, width)
    if down or right:
        x = F.pad(x, (0, right, 0, down))
        rows, columns = x.shape
    if height == 1:
        return x.reshape(rows, columns // width, width)
    if width == 1:
        return x.reshape(rows // height, height, columns)
    return x.reshape(rows // height, height, columns // width, width)


def check_blocked(x: Tensor, shape: BlockShape) -> None:
    """Raise ValueError where `x` is not `blocked` to `shape`; a compiler, too, then knows how large blocks are."""
    found = tuple(x.shape[axis] for axis in axes_within(shape))
    if shape is not None and found != tuple(size for size in shape if size > 1):
        raise ValueError(f"blocks of {shape} lie along axes of these sizes, not {found}")


def unblocked(x: Tensor, like: Tensor, shape: BlockShape) -> Tensor:
    """Undo `blocked`: [R, C] as `like`, the padding cropped."""
    if shape is None:
        return x
    (rows, columns), (height, width) = like.shape, shape
    down, right = _missing(rows, height), _missing(columns, width)
    if down or right:
        return x.reshape(rows + down, columns + right)[:rows, :columns].contiguous()
    return x.reshape(rows, columns)


def per_block(scales: Tensor, shape: tuple[int, int]) -> Tensor:
    """Return blocked scales with their size-1 block axes dropped: [R / rows, C / columns]."""
    height, width = shape
    if height == 1:
        return scales.squeeze(2)
    return scales.squeeze(1) if width == 1 else scales.squeeze(3).squeeze(1)


def _missing(length: int, size: int) -> int:
    """Return by how much `length` falls short of a multiple of `size`."""
    return -length % size
