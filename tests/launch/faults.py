"""A callback that makes one rank fail, for runs that are started as a user starts them."""

import os
import signal
from typing import Any

import lightning.pytorch as pl


class Fail(pl.Callback):
    """Raises, or dies by SIGKILL, or is stopped by SIGSTOP, on `rank` after `step`."""

    def __init__(self, rank: int, step: int, kill: bool = False, stop: bool = False):
        self.rank, self.step, self.kill, self.stop = rank, step, kill, stop

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        if trainer.global_rank == self.rank and pl_module.completed_steps == self.step:
            if self.stop:
                os.kill(os.getpid(), signal.SIGSTOP)
                return
            if self.kill:
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError("planted failure")
