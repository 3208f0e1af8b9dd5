"""The schedule that stays at its peak after the warm-up."""

from typing import Literal

from lightning_llm.config.schema.optim import SCHEDULES, ScheduleConfig


@SCHEDULES.register
class ConstantConfig(ScheduleConfig):
    """Factor 1."""

    name: Literal["constant"] = "constant"

    def after_warmup(self, updates: int, total: int) -> float:
        return 1.0
