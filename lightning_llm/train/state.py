"""Progress of a run and metrics of its newest step."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass
class TrainState:
    """Progress of a run, the same on every rank. A checkpoint stores the counts."""

    step_tokens: int
    """Tokens of one step, over all ranks."""
    completed_steps: int = 0
    """Optimizer steps since the first start, including those before resumes."""
    skipped_steps: int = 0
    """Completed steps without an update, skipped by the loss scaler or `spikes`: they do not advance the schedule."""
    skipped_in_a_row: int = 0
    """Consecutive skipped updates up to the last step; 0 after an update."""
    record: dict[str, Any] = field(default_factory=dict)
    """Metrics of the step in progress, or of the last one: a line of metrics.jsonl."""
    micro_batch_losses: Tensor = field(default_factory=lambda: torch.zeros(0))
    """Contribution of each global micro-batch to the step's loss, [micro-batches], fp32."""

    @property
    def updates(self) -> int:
        """Number of updates of the weights."""
        return self.completed_steps - self.skipped_steps

    def open_record(self, learning_rate: float) -> dict[str, Any]:
        """Return the new record of the step in progress; `loss` is set once the step has read it."""
        step = self.completed_steps + 1
        self.record = {"step": step, "tokens": step * self.step_tokens, "loss": None, "lr": learning_rate}
        return self.record

    def count_step(self, skipped: bool) -> None:
        """Count the step in progress as completed."""
        self.completed_steps += 1
        self.skipped_steps += skipped
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if skipped else 0
