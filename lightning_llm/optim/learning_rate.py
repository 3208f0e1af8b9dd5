"""The learning rate of every parameter group: its own base rate, times one factor of the schedule for all."""

import torch

from lightning_llm.config.schema import ScheduleConfig
from lightning_llm.optim.schedule import learning_rate_factor


class LearningRate:
    """Sets the rates of an optimizer before each update.

    Base rates are those that `optimizer`'s groups are made with, and kept here: a checkpoint that is loaded into it
    later brings the rates of its last update.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, schedule: ScheduleConfig, max_steps: int):
        self.optimizer = optimizer
        self.schedule, self.max_steps = schedule, max_steps
        self.base_rates: list[float] = [group["lr"] for group in optimizer.param_groups]

    def set(self, updates: int) -> float:
        """Set every group's rate for the update after `updates` made ones; return the first group's."""
        factor = learning_rate_factor(self.schedule, updates, self.max_steps)
        for group, base_rate in zip(self.optimizer.param_groups, self.base_rates, strict=True):
            group["lr"] = base_rate * factor
        return self.base_rates[0] * factor
