"""Lightning's Precision plugin: loss scaling, and whether a step's update is made or skipped."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import Precision
from torch import nn

from lightning_llm.config.schema import PrecisionConfig
from lightning_llm.parallel.gradient_sync import local
from lightning_llm.parallel.layout import Layout
from lightning_llm.precision.loss_scale import LossScale


class TrainPrecision(Precision):
    """Casts nothing itself: the model casts where it computes. It owns the loss scale and the decision to step.

    Handed to the Trainer as a plugin instance; Lightning's own `precision=` stays "32-true" and its autocast unused.
    """

    def __init__(self, config: PrecisionConfig):
        self.config = config.loss_scaling
        self.state = LossScale.initial(self.config) if self.config else None
        self.overflow = False
        self.skip = False

    @property
    def loss_scale(self) -> float:
        """What the loss is multiplied by before backward; 1 without loss scaling."""
        return self.state.scale if self.state else 1.0

    @property
    def can_back_off(self) -> bool:
        """Whether an overflow may yet be cured by a smaller scale."""
        return self.config is not None and self.loss_scale > self.config.floor

    def unscale(self, parameters: list[nn.Parameter], layout: Layout, overflow: bool) -> bool:
        """Divide all gradients by the loss scale, once and before clipping; return whether any rank saw an overflow.

        As torch.amp.GradScaler does, Inf and NaN are looked for in the unscaled gradients; `overflow` is what else this
        rank has seen.
        """
        if self.state is None:
            return False
        gradients = [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
        torch._foreach_mul_(gradients, 1.0 / self.state.scale)
        found = torch.tensor(overflow, device=gradients[0].device)
        filled = [gradient for gradient in gradients if gradient.numel()]  # a rank's shard may have no row
        if filled:
            largest = torch.stack([norm.float() for norm in torch._foreach_norm(filled, float("inf"))])
            found |= ~torch.isfinite(largest).all()
        return bool(layout.reduce(found.int(), dist.ReduceOp.MAX, "world").item())

    def optimizer_step(
        self, optimizer: Any, model: pl.LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """Run forward, backward and clipping; then update, or where the step is skipped leave weights and moments."""
        result = closure()
        self._after_closure(model, optimizer)  # unscales and clips, in the module's configure_gradient_clipping
        if not self.skip:
            optimizer.step(**kwargs)
        if self.state is not None and self.config is not None:
            self.state = self.state.after_step(self.overflow, self.config)
        return result
