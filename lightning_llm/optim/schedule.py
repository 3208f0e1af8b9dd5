"""Learning-rate schedules: the rate as a pure function of the updates made, and the built-in kinds. No torch."""

import math
from typing import Literal

from lightning_llm.config.schema.optim import SCHEDULES, ScheduleConfig


def learning_rate_factor(config: ScheduleConfig, updates: int, max_steps: int) -> float:
    """Return the factor of `optim.learning_rate` for the update after `updates` previous ones.

    Warm-up is linear, to `config.peak`, and its first update is not zero: (updates + 1) / warmup_steps of that. What
    follows is the schedule's. `config` is `relative_to` the learning rate.
    """
    if updates < config.warmup_steps:
        return config.peak * ((updates + 1) / config.warmup_steps)
    return config.peak * config.after_warmup(updates, config.total_steps or max_steps)


def progress(updates: int, start: int, total: int) -> float:
    """Return the position of `updates` between `start` (0) and the last update of `total` (1), clipped to [0, 1]."""
    if updates < start:
        return 0.0
    return min(1.0, (updates - start + 1) / max(1, total - start))


@SCHEDULES.register
class ConstantConfig(ScheduleConfig):
    """Factor 1 after the warm-up."""

    name: Literal["constant"] = "constant"

    def after_warmup(self, updates: int, total: int) -> float:
        return 1.0


@SCHEDULES.register
class CosineConfig(ScheduleConfig):
    """f + (1 - f) (1 + cos(pi t)) / 2 (Loshchilov & Hutter 2017, eq. 5); f = `floor`, at `total_steps`."""

    name: Literal["cosine"] = "cosine"

    def after_warmup(self, updates: int, total: int) -> float:
        falling = (1 + math.cos(math.pi * progress(updates, self.warmup_steps, total))) / 2
        return self.floor + (1 - self.floor) * falling


@SCHEDULES.register
class WSDConfig(ScheduleConfig):
    """1, then linearly to `floor` over the last `decay_fraction` (MiniCPM: Hu et al. 2024, section 4.2)."""

    name: Literal["wsd"] = "wsd"

    def after_warmup(self, updates: int, total: int) -> float:
        start = max(self.warmup_steps, round(total * (1 - self.decay_fraction)))
        return 1 - (1 - self.floor) * progress(updates, start, total)
