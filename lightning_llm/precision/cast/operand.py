"""Operands of a GEMM: elements exact in the tensor's dtype, and the scales that are applied outside of them."""

from typing import NamedTuple

from torch import Tensor


class BlockScales(NamedTuple):
    """fp32 scales of an operand [R, C] whose code times scale fits no short format: applied to partial sums.

    `scales`: [R, ceil(C / width)] for contraction `axis` 1, [ceil(R / width), C] for axis 0.
    """

    scales: Tensor
    width: int
    axis: int

    def at(self, start: int) -> Tensor:
        """Return the scales of the contraction axis's element `start`: [R, 1], or [1, C] for axis 0."""
        return self.scales.narrow(self.axis, start // self.width, 1)


class Operand(NamedTuple):
    """`tensor` [R, C], times `blocks` where there are any; the product is multiplied by `factor` (an fp32 scalar).

    `inside` [R, C] bf16, for `clip_gradient`, a factor of the gradient: 1 where the scaled element was within the
    format's range, else 0.
    """

    tensor: Tensor
    factor: Tensor | None = None
    inside: Tensor | None = None
    blocks: BlockScales | None = None

    @property
    def flipped(self) -> "Operand":
        """The transpose, without `inside`."""
        blocks = self.blocks
        if blocks is not None:
            blocks = BlockScales(blocks.scales.T, blocks.width, 1 - blocks.axis)
        return Operand(self.tensor.T, self.factor, None, blocks)

    def dequantised(self) -> Tensor:
        """Return the numbers that the operand stands for, fp32 [R, C], all scales applied."""
        numbers = self.tensor.float()
        if self.blocks is not None:
            scales, width, axis = self.blocks
            numbers = numbers * scales.repeat_interleave(width, axis).narrow(axis, 0, numbers.shape[axis])
        return numbers if self.factor is None else numbers * self.factor
