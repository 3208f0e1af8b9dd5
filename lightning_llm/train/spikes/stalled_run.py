"""The end of a run that skipped its last updates: it fails, whichever recovery skipped them."""

from typing import Any

import lightning.pytorch as pl

from lightning_llm.tracking.final_figures import stalled
from lightning_llm.train.spikes.nonfinite import NoUpdateError


class FailStalledRun(pl.Callback):
    """Raises `NoUpdateError` at the end of a stalled run, on every rank. Runs after the last checkpoint is written.

    A run that is resumed with no step left to make is judged as it starts, so that resuming does not turn it into a
    finished one. A run that is stopped by a signal is not judged: it has steps left.
    """

    def __init__(self, begun_at_step: int = 0):
        """`begun_at_step`: steps of the run that this one branched off, which are not judged."""
        self.begun_at_step = begun_at_step

    def on_fit_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if pl_module.completed_steps >= pl_module.config.trainer.max_steps:
            self._judge(pl_module)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        """End a run early whose loss scale is at its floor and skips on: no step to come can differ."""
        scaler, state = pl_module.scaler, pl_module.state
        by_scaler = scaler.state is not None and not scaler.can_back_off and not pl_module.spikes.state.skips_in_a_row
        if by_scaler and stalled(pl_module.config.trainer.max_steps, state.skipped_in_a_row):
            self._judge(pl_module)

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self._judge(pl_module)

    def _judge(self, pl_module: Any) -> None:
        state = pl_module.state
        if stalled(state.completed_steps - self.begun_at_step, state.skipped_in_a_row):
            raise NoUpdateError(state.skipped_in_a_row, state.completed_steps)
