from typing import Literal

from lightning_llm.config.schema.optim import SCHEDULES, ScheduleConfig
from lightning_llm.optim.kinds import progress


@SCHEDULES.register
class WSDSqrt(ScheduleConfig):
    """1, then 1 - sqrt over the last `decay_fraction` of the updates."""

    name: Literal["wsd_sqrt"] = "wsd_sqrt"

    def after_warmup(self, updates: int, total: int) -> float:
        start = max(self.warmup_steps, round(total * (1 - self.decay_fraction)))
        return 1 - (1 - self.floor) * progress(updates, start, total) ** 0.5
