"""Dynamic loss scaling as a state machine of plain numbers: it touches no gradient and no optimizer.

One rule covers torch.amp.GradScaler (hysteresis 1, no floor) and Megatron's DynamicGradScaler (hysteresis 2, floor 1).
"""

from dataclasses import dataclass, replace

from lightning_llm.config.schema.precision import LossScalingConfig

_FLOAT_MAX = 3.4028234663852886e38


@dataclass(frozen=True)
class LossScale:
    """State of loss scaling. `scale` multiplies the loss.

    `good_steps`: steps without overflow since the scale changed. `patience`: overflows left until the scale shrinks.
    """

    scale: float
    good_steps: int
    patience: int

    @classmethod
    def initial(cls, config: LossScalingConfig) -> "LossScale":
        """Return the state before the first step."""
        return cls(config.init_scale, 0, config.hysteresis)

    def after_step(self, overflow: bool, config: LossScalingConfig) -> "LossScale":
        """Return the state after a step. `overflow`: a gradient on any rank was not finite, so the step is skipped.

        Patience is restored by growth alone, not by a good step; once spent, every overflow shrinks the scale.
        """
        if overflow:
            patience = self.patience - 1
            scale = self.scale
            if patience <= 0:
                scale = max(self.scale * config.backoff_factor, config.floor)
            return LossScale(scale, 0, patience)
        if self.good_steps + 1 < config.growth_interval:
            return replace(self, good_steps=self.good_steps + 1)
        grown = self.scale * config.growth_factor
        return LossScale(grown if grown <= _FLOAT_MAX else self.scale, 0, config.hysteresis)
