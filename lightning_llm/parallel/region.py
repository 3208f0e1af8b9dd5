"""Communication where hidden states enter and leave a part of a block that a tensor-parallel group shares."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_llm.parallel.collectives import (
    GroupRef,
    copy_to_group,
    gather_tokens,
    reduce_from_group,
    reduce_scatter_tokens,
)


class Region:
    """Communication at the input and output of a cut part.

    `shares`: within the part, each of R ranks computes 1/R of the gradient of replicated tensors. Then the sum over
    ranks is the gradient of a replicated parameter, and an auxiliary loss counts once, because each rank adds 1/R of
    it. This covers the part's input, where gradients are summed over the group, and the output of its row-parallel
    linear, where they are not. `shares` is not needed with sequence parallelism, where no two ranks hold the same
    tokens between parts.
    """

    def __init__(self, group: dist.ProcessGroup, sequence: bool, shares: bool = False):
        self.group, self.sequence, self.shares = GroupRef.from_group(group), sequence, shares

    def enter(self, x: Tensor) -> Tensor:
        """Return the part's input with all tokens `[B, T, D]`, gathered from the group with sequence parallelism."""
        return (gather_tokens if self.sequence else copy_to_group)(x, self.group)

    def leave(self, x: Tensor) -> Tensor:
        """Return the part's output `x` summed over the group; with sequence parallelism, only this rank's tokens."""
        return (reduce_scatter_tokens if self.sequence else reduce_from_group)(x, self.group)

    def share(self, y: Tensor) -> Tensor:
        """Return the output `y` of a part; with `shares`, its gradient is divided by the number of ranks R."""
        return self._scaled(y, 1 / self.group.size) if self.shares else y

    def unshare(self, y: Tensor) -> Tensor:
        """Return `y`, computed from cut tensors; with `shares`, its gradient is multiplied by R (undoes `share`)."""
        return self._scaled(y, float(self.group.size)) if self.shares else y

    def _scaled(self, y: Tensor, factor: float) -> Tensor:
        same: Tensor = _ScaledGradient.apply(y, factor)
        return same

    def own(self, positions: Tensor) -> Tensor:
        """Return the positions `[..., T]` of the tokens that this rank holds between parts."""
        if not self.sequence:
            return positions
        length = positions.shape[-1] // self.group.size
        return positions.narrow(-1, self.group.rank * length, length)


class _ScaledGradient(torch.autograd.Function):
    """Identity; the backward pass multiplies the gradient by a constant."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.factor, None
