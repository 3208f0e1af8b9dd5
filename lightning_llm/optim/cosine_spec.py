"""The schedule that falls by half a cosine over all updates after the warm-up."""

import math
from typing import Literal

from lightning_llm.config.schema.optim import SCHEDULES, ScheduleConfig
from lightning_llm.optim.schedule import progress


@SCHEDULES.register
class CosineConfig(ScheduleConfig):
    """f + (1 - f) (1 + cos(pi t)) / 2 (Loshchilov & Hutter 2017, eq. 5); f = `floor`, at `total_steps`."""

    name: Literal["cosine"] = "cosine"

    def after_warmup(self, updates: int, total: int) -> float:
        falling = (1 + math.cos(math.pi * progress(updates, self.warmup_steps, total))) / 2
        return self.floor + (1 - self.floor) * falling
