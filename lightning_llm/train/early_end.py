"""A run that a callback ends before its last step: the same on every rank, and with the reason."""

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import EarlyStopping, Timer


class EarlyEnd(pl.Callback):
    """Stands behind the callbacks of the config, `chosen` by name, and before those that write.

    Any callback on any rank may set `trainer.should_stop`. All ranks then stop after the same step, and
    `pl_module.ended_early` says by whom and why.
    """

    def __init__(self, chosen: Mapping[str, pl.Callback]):
        self.chosen = dict(chosen)
        # Lightning's own agree by themselves, and ours never stop a run here.
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
