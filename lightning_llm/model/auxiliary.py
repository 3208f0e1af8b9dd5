"""Auxiliary losses of a block's parts, such as a router's balance: their gradients are attached where they are made.

A part of a pipeline's stage cannot wait for the loss of the last stage, whose schedule takes no other. So the block's
output passes through an autograd function that adds the gradient of the part's own loss in the backward pass
(Megatron-LM's `MoEAuxLossAutoScaler`, `moe_utils.py`). It is the same under every layout.
"""

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

ATTRIBUTE = "auxiliary_losses"
"""What a part sets in its forward pass: scalars by name, means over its tokens, weighted."""


class AuxiliaryLosses:
    """Attaches the auxiliary losses of the blocks of a decoder, and sums their values over a step's micro-batches."""

    def __init__(self, names: Iterable[str]):
        """`names`: all that the parts of the whole decoder name (`Part.auxiliary_losses`), on this stage or not."""
        self.names = sorted(set(names))
        self.sums: dict[str, Tensor] = {}
        """Of the step in progress, by name: this rank's share of each loss in the step's."""
        self._share, self._gradient = 1.0, 1.0

    def begin_step(self, share: float, loss_scale: float) -> None:
        """Forget the last step. `share`: of the loss of one micro-batch on one rank in the step's, which is a mean."""
        self.sums.clear()
        self._share, self._gradient = share, share * loss_scale

    def attach(self, x: Tensor, y: Tensor, block: nn.Module) -> Tensor:
        """Return `y`, the output of `block` for `x`, with the gradients of the losses that its parts have set."""
        for part in block.children():
            losses = part.__dict__.pop(ATTRIBUTE, {})
            if unknown := losses.keys() - set(self.names):
                text = f"{type(part).__name__} sets the auxiliary loss {', '.join(sorted(unknown))}"
                remedy = "Add it there, to `auxiliary_losses: ClassVar[tuple[str, ...]]`."
                raise ValueError(f"{text}, which its config class does not name. {remedy}")
            if losses and torch.is_grad_enabled():
                for name, loss in losses.items():
                    share = self._share * loss.detach()
                    self.sums[name] = self.sums[name] + share if name in self.sums else share
                    y = _Attached.apply(y, loss, self._gradient)
                if x.requires_grad:  # a recomputed block sets them once more: they are not to outlive its backward pass
                    x.register_hook(partial(_forget, part))
        return y


def _forget(part: nn.Module, gradient: Tensor) -> None:
    part.__dict__.pop(ATTRIBUTE, None)


class _Attached(torch.autograd.Function):
    """Pass an activation through; in the backward pass give a loss its gradient, a number."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, loss: Tensor, gradient: float) -> Tensor:
        ctx.gradient, ctx.dtype, ctx.device = gradient, loss.dtype, loss.device
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        return gradient, torch.full((), ctx.gradient, dtype=ctx.dtype, device=ctx.device), None
