"""Saves of a run: every so many steps, at its end, and when it is asked to stop."""

import os
import signal
import sys
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import lightning.pytorch as pl

from lightning_llm.config.schema import CheckpointConfig
from lightning_llm.errors import StorageError
from lightning_llm.train.checkpoint.callback_state import CallbackState
from lightning_llm.train.checkpoint.ownership import RunIdentity
from lightning_llm.train.checkpoint.retention import prune, supersede
from lightning_llm.train.checkpoint.state import save
from lightning_llm.train.health.spike_policy import SpikeStop
from lightning_llm.train.strategy import TrainStrategy


class StoppedBySignal(BaseException):
    """The run was asked to stop by SIGINT or SIGTERM. `saved_step`: of the newest checkpoint, None without one."""

    def __init__(self, number: int, saved_step: int | None):
        self.number = number
        self.saved_step = saved_step
        saved = "nothing was saved yet" if saved_step is None else f"state saved at step {saved_step}"
        super().__init__(f"stopped by {signal.Signals(number).name}, {saved}")

    def __reduce__(self) -> tuple[type["StoppedBySignal"], tuple[int, int | None]]:
        return type(self), (self.number, self.saved_step)  # it goes from rank to rank where it ends a load or a save


class Superseding(pl.Callback):
    """Moves what a resumed run supersedes in `folder` aside once every rank has loaded; the first save removes it.

    Runs before the callback that cuts metrics.jsonl back: a run that dies between the two is not to go on from a later
    checkpoint, whose records are gone. `damaged`: checkpoints that were passed over.
    """

    def __init__(self, folder: Path, damaged: Collection[Path] = ()):
        self.folder = folder
        self.damaged = damaged

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.is_global_zero:
            try:
                supersede(self.folder, pl_module.completed_steps, self.damaged)
            except OSError as error:
                raise StorageError(f"a later checkpoint could not be moved aside: {error}") from error


class Checkpointing(pl.Callback):
    """Saves `checkpoints/step=N` and keeps the newest few. Runs after the callback that writes metrics.jsonl.

    Where a validation follows a step, the checkpoint waits for it, so that the step's validation line is written
    before the checkpoint that a resumed run is cut back to. A run that spikes.policy ends is saved as it was before the
    step. The first SIGINT or SIGTERM, sent to any rank, lets a step end on all of them (and the validation after it),
    saves and raises `StoppedBySignal`; a second SIGINT to this process stops it at once. `resumed_step`: of the
    checkpoint in `folder` that the run goes on from.
    """

    def __init__(
        self,
        folder: Path,
        config: CheckpointConfig,
        run: RunIdentity,
        config_hash: str,
        max_steps: int,
        validate_every: int | None,
        resumed_step: int | None = None,
    ):
        self.folder = folder
        self.config = config
        self.run = run
        self.config_hash = config_hash
        self.max_steps = max_steps
        self.validate_every = validate_every
        self.saved_step = resumed_step
        self._asked = 0
        self._ended = False
        self._speaks = self._alone = False
        self._strategy: TrainStrategy | None = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._speaks, self._alone = trainer.is_global_zero, trainer.world_size == 1
        # Lightning has put its own SIGTERM handler in place by now, which would raise between two of our hooks.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._note)
        self._strategy = trainer.strategy
        CallbackState.of_dicts(trainer).encode()  # one that cannot be kept is reported now, not at the first checkpoint
        step = pl_module.completed_steps
        self.saved_step = step or None
        start = trainer.strategy.resume_from
        if start is not None and start.folder.parent != self.folder:
            self.saved_step = None
            self._save(trainer, pl_module)  # it lies elsewhere: from here on this folder holds the run's own start

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        step = pl_module.completed_steps
        if self._validates_after(trainer, step):
            return
        self._stop_if_asked(trainer, pl_module)
        if self._due(step, trainer.should_stop):
            self._save(trainer, pl_module)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._stop_if_asked(trainer, pl_module)
        if self._due(pl_module.completed_steps, trainer.should_stop):
            self._save(trainer, pl_module)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._save(trainer, pl_module)
        self._ended = True

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        # All ranks raise it, before the update: the state is that after the step before, but for delayed scales that
        # have moved with its micro-batches.
        if isinstance(exception, SpikeStop) and pl_module.completed_steps:
            pl_module.quantisation.undo_step()
            self._save(trainer, pl_module)

    def _due(self, step: int, last: bool) -> bool:
        # The last one too, before on_train_end: WeightAveraging then puts its averages in the weights' place.
        every = self.config.every_steps
        return last or step == self.max_steps or (every is not None and step % every == 0)

    def _validates_after(self, trainer: pl.Trainer, step: int) -> bool:
        if not trainer.datamodule.corpus.validation_sequences:
            return False
        every = self.validate_every
        # Lightning validates once more where a callback ends the run.
        return trainer.should_stop or step == self.max_steps or (every is not None and step % every == 0)

    def stop_outside_steps(self, number: int, frame: FrameType | None) -> None:
        """Take a signal before the first step, which ends the run, or after the last, which it waits for.

        Lightning puts this handler, in place before it starts, back before it calls on_fit_end.
        """
        if not self._ended:
            raise StoppedBySignal(number, self.saved_step)
        self._note(number, frame)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._asked == signal.SIGINT == number:
            raise StoppedBySignal(number, self.saved_step)
        if not self._asked and self._speaks and (self._alone or number == signal.SIGINT):
            # not by print, whose buffer may be in use by what the signal has interrupted
            with suppress(OSError):  # nobody reads it any more
                os.write(2, f"{self._what_follows(number)}\n".encode())
        self._asked = self._asked or number
        if self._strategy is not None:
            self._strategy.ask_to_stop(self._asked)

    def _what_follows(self, number: int) -> str:
        """Return what to say at once: a launcher of several ranks hears Ctrl-C itself, and has SIGTERMs of its own."""
        if self._ended:
            return f"{signal.Signals(number).name}: the last step is made and saved, and the run is about to end"
        text = f"{signal.Signals(number).name}: stopping after this step, which is saved"
        if number != signal.SIGINT or not self._alone:
            return text
        saved = "no step is saved yet" if self.saved_step is None else f"the last one saved is step {self.saved_step}"
        return f"{text}; Ctrl-C again: end at once, with nothing more saved ({saved})"

    def _stop_if_asked(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        number = trainer.strategy.stop_signal
        if number:
            self._save(trainer, pl_module)
            raise StoppedBySignal(number, self.saved_step)

    def _save(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        step = pl_module.completed_steps
        if step == self.saved_step:
            return
        save(self.folder, pl_module, trainer.optimizers[0], self.run, self.config_hash)
        self.saved_step = step
        if trainer.is_global_zero:
            try:
                prune(self.folder, self.config.keep_last, self.run)
            except OSError as error:  # what is kept too long costs space, and no state
                print(f"note   an old checkpoint could not be removed: {error}", file=sys.stderr, flush=True)
