"""Ends of a run before its last step: a callback stops it early, or too many skipped updates make it fail."""

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import EarlyStopping, Timer

from lightning_llm.tracking.final_figures import stalled
from lightning_llm.train.spikes import NoUpdateError


class EarlyEnd(pl.Callback):
    """Callback that lets other callbacks stop a run before its last step.

    Any callback on any rank may set `trainer.should_stop`. All ranks then stop after the same step, and
    `pl_module.ended_early` has its number, the callback and the reason. It must come after the config's callbacks
    (`chosen`, by name) and before those that write files.
    """

    def __init__(self, chosen: Mapping[str, pl.Callback]):
        self.chosen = dict(chosen)
        # Lightning's own callbacks synchronize by themselves, and ours never stop a run here.
        self.must_agree = any(not _is_known(each) for each in chosen.values())

    def on_fit_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self._agree(trainer, pl_module)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        self._agree(trainer, pl_module)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self._agree(trainer, pl_module)

    def _agree(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if self.must_agree:
            trainer.should_stop = trainer.strategy.reduce_boolean_decision(trainer.should_stop, all=False)
        step = pl_module.completed_steps
        if trainer.should_stop and step < pl_module.config.trainer.max_steps and pl_module.ended_early is None:
            pl_module.ended_early = {"step": step, **self._who(trainer)}

    def _who(self, trainer: pl.Trainer) -> dict[str, str | None]:
        for name, each in self.chosen.items():
            if isinstance(each, EarlyStopping) and each.stopping_reason_message:
                reason = each.stopping_reason_message.removesuffix(" Signaling Trainer to stop.")
                return {"callback": f"callbacks.{name}", "reason": reason}
            left = each.time_remaining() if isinstance(each, Timer) else None
            if left is not None and left <= 0:
                return {"callback": f"callbacks.{name}", "reason": f"its time is up ({each.time_elapsed():.0f} s)"}
        return {"callback": None, "reason": "a callback set trainer.should_stop"}


def _is_known(callback: pl.Callback) -> bool:
    return type(callback).__module__.partition(".")[0] in ("lightning", "lightning_llm")


class FailStalledRun(pl.Callback):
    """Callback that raises `NoUpdateError` on every rank at the end of a run whose last updates were all skipped.

    The last checkpoint has been written by then. A run that is resumed with no step left is checked at its start, so
    that resuming does not turn it into a finished one. A run stopped by a signal is not checked, because it has steps
    left.
    """

    def __init__(self, begun_at_step: int = 0):
        """`begun_at_step`: steps of the parent run, which are not counted."""
        self.begun_at_step = begun_at_step

    def on_fit_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if pl_module.completed_steps >= pl_module.config.trainer.max_steps:
            self._judge(pl_module)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        """End the run early if the loss scale is at its minimum and updates are still skipped: no step would differ."""
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
