"""Dynamic loss scaling of a run: one scale for all ranks, and what an overflow does to it."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_llm.config.schema.precision import LossScalingConfig
from lightning_llm.linalg.local_part import local
from lightning_llm.parallel.layout import Layout
from lightning_llm.precision.loss_scale import LossScale


class LossScaler:
    """What `torch.amp.GradScaler` is, over all ranks and with hysteresis and a floor. None in the recipe: scale 1."""

    def __init__(self, config: LossScalingConfig | None):
        self.config = config
        self.state = LossScale.initial(config) if config else None

    @property
    def scale(self) -> float:
        """What the loss is multiplied by before backward; 1 without loss scaling."""
        return self.state.scale if self.state else 1.0

    @property
    def can_back_off(self) -> bool:
        """Whether an overflow may yet be cured by a smaller scale."""
        return self.config is not None and self.scale > self.config.floor

    def describe(self) -> dict[str, Any]:
        """Return what a step's record says of it."""
        return {"loss_scale": self.scale} if self.state else {}

    def unscale(self, parameters: list[nn.Parameter], layout: Layout, overflow: Tensor | None) -> Tensor | None:
        """Divide all gradients by the scale, once and before clipping; return whether any rank saw an overflow.

        As GradScaler does, Inf and NaN are looked for in the unscaled gradients; `overflow` is what else this rank has
        seen, a bool. Returned is 1 or 0 on the device, None without a scale. Collective.
        """
        if self.state is None:
            return None
        gradients = [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
        torch._foreach_mul_(gradients, 1.0 / self.state.scale)
        found = gradients[0].new_zeros((), dtype=torch.bool) if overflow is None else overflow
        filled = [gradient for gradient in gradients if gradient.numel()]  # a rank's shard may have no row
        if filled:
            largest = torch.stack([norm.float() for norm in torch._foreach_norm(filled, float("inf"))])
            found = found | ~torch.isfinite(largest).all()
        return layout.reduce(found.int(), dist.ReduceOp.MAX, "world")

    def update(self, overflow: bool) -> None:
        """Move the scale on, after a step."""
        if self.state is not None and self.config is not None:
            self.state = self.state.after_step(overflow, self.config)
