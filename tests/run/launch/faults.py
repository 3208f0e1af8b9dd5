"""A callback that makes one rank fail, for runs that are started as a user starts them."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl


class Fail(pl.Callback):
    """Raises, or dies by SIGKILL, or is stopped by SIGSTOP, or is stuck in Python, on `rank` after `step`.

    `marks`: a folder where it notes that it has done so, and does so `times` times; None: each time.
    """

    def __init__(
        self,
        rank: int,
        step: int,
        kill: bool = False,
        stop: bool = False,
        stick: bool = False,
        marks: str | None = None,
        times: int = 1,
    ):
        self.rank, self.step, self.kill, self.stop, self.stick = rank, step, kill, stop, stick
        self.marks, self.times = marks, times

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        if trainer.global_rank == self.rank and pl_module.completed_steps == self.step and self._is_due():
            if self.stop:
                os.kill(os.getpid(), signal.SIGSTOP)
                return
            if self.stick:
                time.sleep(600)
            if self.kill:
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError("planted failure")

    def _is_due(self) -> bool:
        if self.marks is None:
            return True
        made = len(list(Path(self.marks).glob("mark-*")))
        if made < self.times:
            (Path(self.marks) / f"mark-{made}").touch()
        return made < self.times


class Signal(pl.Callback):
    """Sends `number` to the process of `pid` (0: the parent) after `step`; a job that is queued again does not."""

    def __init__(self, number: int, pid: int, step: int):
        self.number, self.pid, self.step = number, pid, step

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        due = trainer.global_rank == 0 and pl_module.completed_steps == self.step
        if due and "SLURM_RESTART_COUNT" not in os.environ:
            os.kill(self.pid or os.getppid(), self.number)
