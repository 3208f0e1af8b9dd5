"""The schedule of warm-up, stable phase and decay."""

from typing import Literal

from lightning_llm.config.schema.optim import SCHEDULES, ScheduleConfig
from lightning_llm.optim.schedule import progress


@SCHEDULES.register
class WSDConfig(ScheduleConfig):
    """1, then linearly to `floor` over the last `decay_fraction` (MiniCPM: Hu et al. 2024, section 4.2)."""

    name: Literal["wsd"] = "wsd"

    def after_warmup(self, updates: int, total: int) -> float:
        start = max(self.warmup_steps, round(total * (1 - self.decay_fraction)))
        return 1 - (1 - self.floor) * progress(updates, start, total)
