"""Forgetting: the rise of each source's validation loss since the start of the run."""

import logging
from typing import Any

import lightning.pytorch as pl
import torch

log = logging.getLogger(__name__)

LOSS = "val_loss/"
RISE = "forgetting/"
EVENT = "forgetting"


class Forgetting(pl.Callback):
    """Adds to each validation's record `forgetting/SOURCE`: `val_loss/SOURCE` minus its value at the start.

    In nats per token; negative if the source was learned. The start is the run's first validation: step 0 for a run
    that starts from weights or only watches a source. A resumed run keeps it.

    If a source rises above `alarm_above` or is not a number, a line is printed, and the record has `event: forgetting`,
    `event_action: log` and the sources in `event_sources`. This happens once until the source is below again. Training
    continues.
    """

    def __init__(self, alarm_above: float = 0.1):
        self.alarm_above = alarm_above
        self._start: dict[str, float] = {}
        self._start_step: int | None = None
        self._above: set[str] = set()

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Add the rises. The losses are already reduced over ranks, so every rank adds the same."""
        if trainer.state.fn != "fit" or trainer.sanity_checking:
            return
        record: dict[str, Any] = pl_module.validation_record
        losses = {key.removeprefix(LOSS): value for key, value in record.items() if key.startswith(LOSS)}
        if self._start_step is None:
            self._start, self._start_step = losses, record["step"]
        rises = {name: loss - self._start[name] for name, loss in losses.items() if name in self._start}
        shown = {f"{RISE}{name}": rise for name, rise in rises.items()}
        record.update(shown)
        trainer.callback_metrics.update({key: torch.tensor(rise, dtype=torch.float64) for key, rise in shown.items()})
        above = {name for name, rise in rises.items() if not rise <= self.alarm_above}
        if risen := sorted(above - self._above):
            record |= {"event": EVENT, "event_action": "log", "event_sources": risen}
            if trainer.is_global_zero:
                text = ", ".join(f"{name} by {rises[name]:.4f} to {losses[name]:.4f}" for name in risen)
                log.warning(
                    "step %d: forgetting: validation loss has risen above step %d's by more than "
                    "callbacks.forgetting.alarm_above=%g: %s",
                    record["step"], self._start_step, self.alarm_above, text,
                )  # fmt: skip
        self._above = above

    def state_dict(self) -> dict[str, Any]:
        """Return the losses at the start and the sources above the limit."""
        if self._start_step is None:
            return {}
        return {"start": self._start, "start_step": self._start_step, "above": sorted(self._above)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state."""
        self._start, self._start_step = dict(state_dict["start"]), state_dict["start_step"]
        self._above = set(state_dict["above"])
