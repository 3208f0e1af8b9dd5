"""When a run saves: every N steps, at its end, and when it is asked to stop."""

import os
import signal
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import lightning.pytorch as pl

from lightning_llm.base.errors import StorageError
from lightning_llm.base.signals import STOPPING, not_ignored, stop_reason
from lightning_llm.config.schema import CheckpointConfig
from lightning_llm.config.workspace import same_folder
from lightning_llm.tracking.files import read_records
from lightning_llm.train.checkpoint.manifest import RunIdentity
from lightning_llm.train.checkpoint.retention import supersede
from lightning_llm.train.checkpoint.saver import Saver
from lightning_llm.train.checkpoint.snapshot import CallbackState
from lightning_llm.train.spikes import SpikeStop
from lightning_llm.train.strategy import TrainStrategy


class StoppedBySignal(BaseException):
    """A signal ended the run between two steps."""

    def __init__(self, number: int, saved_step: int | None):
        """`number`: the signal. `saved_step`: step of the newest checkpoint; None: nothing was saved."""
        self.number = number
        self.saved_step = saved_step
        saved = "nothing was saved yet" if saved_step is None else f"state saved at step {saved_step}"
        super().__init__(f"stopped by {stop_reason(number)}, {saved}")

    def __reduce__(self) -> tuple[type["StoppedBySignal"], tuple[int, int | None]]:
        return type(self), (self.number, self.saved_step)  # pickled between ranks if it interrupts a load or a save


class Superseding(pl.Callback):
    """Callback that moves checkpoints after the resumed step aside once every rank has loaded.

    The first save then removes them. It must come before the callback that truncates metrics.jsonl. Otherwise a run
    that dies between the two would resume from a later checkpoint with missing records.
    """

    def __init__(self, folder: Path, damaged: Collection[Path] = ()):
        """`folder`: the run's checkpoints. `damaged`: checkpoints that were skipped and are never removed."""
        self.folder = folder
        self.damaged = damaged

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.is_global_zero:
            try:
                supersede(self.folder, pl_module.completed_steps, self.damaged)
            except OSError as error:
                raise StorageError(f"a later checkpoint could not be moved aside: {error}") from error


class Checkpointing(pl.Callback):
    """Callback that saves checkpoints (every N steps, at the end, after a signal) and deletes old ones.

    It must come after the callback that writes metrics.jsonl. If a validation follows a step, the checkpoint is saved
    after it, so that the step's validation record is written before the checkpoint. A run ended by spikes.policy is
    saved as it was before the step. After the first signal of `STOPPING`, sent to any rank, all ranks finish the step
    (and the validation after it), save and raise `StoppedBySignal`; a second SIGINT to this process stops it at once.
    `resumed_step`: step of the checkpoint in `folder` that the run resumes from. `about`, `check_folder`: see `Saver`.

    If an asynchronous save fails, all ranks raise the error after the same step. Every end of the run waits for the
    save in progress (`awaited`). A run's last save and those for a signal are synchronous.
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
        about: Callable[[int], Mapping[str, Any]] = lambda step: {},
        check_folder: Callable[[], None] = lambda: None,
    ):
        self.folder = folder
        self.config = config
        self.max_steps = max_steps
        self.validate_every = validate_every
        self.saver = Saver(folder, config, run, config_hash, resumed_step, about, check_folder)
        self._val_losses: dict[int, float] = {}
        self._asked = 0
        self._ended = self._at_once = False
        self._speaks = self._alone = False
        self._strategy: TrainStrategy | None = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._speaks, self._alone = trainer.is_global_zero, trainer.world_size == 1
        # Lightning has installed its own SIGTERM handler by now, which would raise between two of our hooks.
        for number in not_ignored(STOPPING):
            signal.signal(number, self._note)
        self._strategy = trainer.strategy
        if trainer.received_sigterm:  # by that handler, just before it is replaced
            trainer._signal_connector.received_sigterm = False
            self._note(signal.SIGTERM, None)
        CallbackState.from_trainer(trainer).encode()  # report a state that cannot be saved now, not at the first save
        start = trainer.strategy.resume_from
        elsewhere = start is not None and not same_folder(start.folder.parent, self.folder)
        self.saver.start(pl_module, None if elsewhere else pl_module.completed_steps or None)
        trainer.strategy.save_failed_here = lambda: self.saver.failed
        if self.config.keep_best is not None and trainer.is_global_zero:
            records = read_records(self.folder.parent / "metrics.jsonl")
            self._val_losses = {each["step"]: each["val_loss"] for each in records if "val_loss" in each}
        if elsewhere:
            self._save(trainer, pl_module)  # from here on this folder has a checkpoint of the run itself

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        if trainer.strategy.save_failed:
            self.saver.wait()  # raises if the save failed
        step = pl_module.completed_steps
        if self._validates_after(trainer, step):
            return
        self._stop_if_asked(trainer, pl_module)
        self._save_if_due(trainer, pl_module)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        record = pl_module.validation_record
        if "val_loss" in record:
            self._val_losses[record["step"]] = record["val_loss"]
        self._stop_if_asked(trainer, pl_module)
        self._save_if_due(trainer, pl_module)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._save(trainer, pl_module)
        self._ended = True

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        # All ranks raise it before the update: the state is that of the previous step, except for delayed scales, which
        # the step's micro-batches have changed.
        if isinstance(exception, SpikeStop) and pl_module.completed_steps:
            pl_module.quantization.undo_step()
            self._save(trainer, pl_module)

    @contextmanager
    def awaited(self) -> Iterator[None]:
        """Context that at its end waits for the save in progress, however the block ends; not after a second Ctrl-C."""
        try:
            yield
        finally:
            self.saver.close(self._at_once)

    @property
    def saved_step(self) -> int | None:
        """Step of the newest complete checkpoint, None if there is none."""
        return self.saver.saved_step

    def _save_if_due(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # Also after the last step, before on_train_end, in which WeightAveraging replaces the weights by averages.
        step, every = pl_module.completed_steps, self.config.every_steps
        if trainer.should_stop or step == self.max_steps:
            self._save(trainer, pl_module)
        elif every is not None and step % every == 0:
            self._save(trainer, pl_module, awaited=False)

    def _validates_after(self, trainer: pl.Trainer, step: int) -> bool:
        if not trainer.datamodule.corpus.validation_sequences:
            return False
        every = self.validate_every
        # Lightning validates once more if a callback ends the run.
        return trainer.should_stop or step == self.max_steps or (every is not None and step % every == 0)

    def stop_outside_steps(self, number: int, frame: FrameType | None) -> None:
        """Signal handler outside of steps: before the first step it ends the run; after the last it only reports.

        Lightning puts this handler, in place before it starts, back before it calls on_fit_end.
        """
        if not self._ended:
            raise StoppedBySignal(number, self.saved_step)
        self._note(number, frame)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._asked == signal.SIGINT == number:
            self._at_once = True
            raise StoppedBySignal(number, self.saved_step)
        first, self._asked = not self._asked, self._asked or number  # before the report: the next may come at once
        if first and self._speaks and (self._alone or number == signal.SIGINT):
            # os.write, because the interrupted code may be using print's buffer
            with suppress(OSError):  # stderr is closed
                os.write(2, f"{self._what_follows(number)}\n".encode())
        if self._strategy is not None:
            self._strategy.ask_to_stop(self._asked)

    def _what_follows(self, number: int) -> str:
        """Return the line to print at once. A launcher of several ranks receives Ctrl-C itself and sends SIGTERMs."""
        if self._ended:
            return f"{stop_reason(number)}: the last step is completed and saved, and the run is about to end"
        text = f"{stop_reason(number)}: stopping after this step, which is saved"
        if number != signal.SIGINT or not self._alone:
            return text
        saved = "no step is saved yet" if self.saved_step is None else f"the last saved step is {self.saved_step}"
        return f"{text}; press Ctrl-C again to end at once without saving ({saved})"

    def _stop_if_asked(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        number = trainer.strategy.stop_signal
        if number:
            self._save(trainer, pl_module)
            raise StoppedBySignal(number, self.saved_step)

    def _save(self, trainer: pl.Trainer, pl_module: pl.LightningModule, awaited: bool = True) -> None:
        if pl_module.completed_steps != self.saver.taken_step:
            self.saver.save(pl_module, trainer.optimizers[0], self._val_losses, awaited=awaited)
        elif awaited:
            self.saver.wait()
