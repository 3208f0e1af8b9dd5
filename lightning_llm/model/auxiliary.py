"""Auxiliary losses of a block's parts, such as a router's load-balancing loss.

A pipeline schedule takes the loss of the last stage only, so the auxiliary loss of an earlier stage cannot be added to
it. Instead the block's output passes through an autograd function that adds the gradient of the auxiliary loss in the
backward pass (Megatron-LM's `MoEAuxLossAutoScaler`, `moe_utils.py`), under every layout.
"""

from collections.abc import Iterable
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from lightning_llm.base.errors import ConfigError, Problem

ATTRIBUTE = "auxiliary_losses"
"""Attribute that a part sets in its forward pass: weighted scalars by name, each a mean over its tokens."""


@runtime_checkable
class Counts(Protocol):
    """Protocol of block parts that count over the micro-batches of a step, such as routers."""

    def begin_step(self) -> None:
        """Reset the counts before a step."""

    def count(self) -> None:
        """Add the counts of the last forward pass to those of the step."""


class AuxiliaryLosses:
    """Auxiliary losses of a decoder's blocks: attaches their gradients and sums their values over a step."""

    def __init__(self, names: Iterable[str]):
        """`names`: names of all losses that parts of the whole decoder declare, on any pipeline stage."""
        self.names = sorted(set(names))
        self.factors: dict[str, int] = {}
        """Number of ranks over which the values of a loss are summed instead of averaged, by name; 1 if absent."""
        self.sums: dict[str, Tensor] = {}
        """This rank's contribution to each loss of the step in progress, by name."""
        self._share, self._gradient = 1.0, 1.0

    def begin_step(self, share: float, loss_scale: float) -> None:
        """Start a step. `share`: weight of the loss of one micro-batch on one rank in the mean over the step."""
        self.sums.clear()
        self._share, self._gradient = share, share * loss_scale

    def attach(self, x: Tensor, y: Tensor, block: nn.Module) -> Tensor:
        """Return `y`, the output of `block` for `x`, with the gradients of the losses that its parts have set.

        A part that counts something (`count`, such as a router) does so here, once even if the block is recomputed.

        Raises:
            ConfigError: a part sets a loss that its config class does not declare.
        """
        for part in block.children():
            losses = part.__dict__.pop(ATTRIBUTE, {})
            if isinstance(part, Counts) and torch.is_grad_enabled():
                part.count()
            if unknown := losses.keys() - set(self.names):
                raise ConfigError(undeclared(type(part).__name__, unknown))
            if losses and torch.is_grad_enabled():
                for name, loss in losses.items():
                    factor = self.factors.get(name, 1)
                    share = factor * self._share * loss.detach()
                    self.sums[name] = self.sums[name] + share if name in self.sums else share
                    y = _Attached.apply(y, loss, factor * self._gradient)
                if x.requires_grad:  # recomputing the block sets them again: drop them at the end of its backward pass
                    x.register_hook(partial(_forget, part))
        return y


def check_declared(module: nn.Module, declared: Iterable[str]) -> None:
    """Check that a part's torch class sets only auxiliary losses that its config class declares.

    Raises:
        ConfigError: the torch class lists a loss in `auxiliary_losses` that is not in `declared`.
    """
    if missing := set(getattr(type(module), ATTRIBUTE, ())) - set(declared):
        raise ConfigError(undeclared(type(module).__name__, missing))


def undeclared(module: str, names: Iterable[str]) -> Problem:
    """Return the problem that the torch class `module` sets the losses `names` without a declaration in its config."""
    text = f"sets the auxiliary loss {', '.join(sorted(names))}, which its config class does not declare."
    remedy = (
        'Add `auxiliary_losses: ClassVar = {"NAME": "mean"}` (or "sum") to the config class (docs/howto/extend.md).'
    )
    return Problem(module, f"{text} {remedy}")


def _forget(part: nn.Module, gradient: Tensor) -> None:
    part.__dict__.pop(ATTRIBUTE, None)


class _Attached(torch.autograd.Function):
    """Identity of an activation; the backward pass gives the loss a constant gradient."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, loss: Tensor, gradient: float) -> Tensor:
        ctx.gradient, ctx.dtype, ctx.device = gradient, loss.dtype, loss.device
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        return gradient, torch.full((), ctx.gradient, dtype=ctx.dtype, device=ctx.device), None
