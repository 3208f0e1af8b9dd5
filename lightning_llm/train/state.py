"""Progress of a run, and figures of its newest step."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass
class TrainState:
    """How far a run is, the same on every rank. A checkpoint keeps the counts."""

    step_tokens: int
    """Tokens of one step, over all ranks."""
    completed_steps: int = 0
    """Optimizer steps since the very start, over all resumes."""
    skipped_steps: int = 0
    """Those of them whose update the loss scaler or `spikes` left out: they do not advance the schedule."""
    skipped_in_a_row: int = 0
    """Steps up to the last one whose updates were skipped; 0 after an update."""
    record: dict[str, Any] = field(default_factory=dict)
    """What is known of the step in progress, or of the last one: a line of metrics.jsonl."""
    micro_batch_losses: Tensor = field(default_factory=lambda: torch.zeros(0))
    """What each global micro-batch contributed to the step's loss, [micro-batches], fp32."""

    @property
    def updates(self) -> int:
        """How many updates the weights have had."""
        return self.completed_steps - self.skipped_steps

    def open_record(self, learning_rate: float) -> dict[str, Any]:
        """Return the new record of the step in progress; its `loss` is known once the step has read it."""
        step = self.completed_steps + 1
        self.record = {"step": step, "tokens": step * self.step_tokens, "loss": None, "lr": learning_rate}
        return self.record

    def count_step(self, skipped: bool) -> None:
        """Count the step in progress as made."""
        self.completed_steps += 1
        self.skipped_steps += skipped
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if skipped else 0
