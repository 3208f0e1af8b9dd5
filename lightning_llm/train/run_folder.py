"""The run's folder: one record per step as it happens, and a summary with how the run ended."""

import errno
import logging
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import lightning.pytorch as pl

from lightning_llm.base.errors import ConfigError, Problem, StorageError
from lightning_llm.base.hardware import describe_device
from lightning_llm.base.integrity import RECORDS, ChainHead, RecordChain
from lightning_llm.base.terminal import escaped
from lightning_llm.config.redact import redacted
from lightning_llm.tracking.files import (
    RESTARTS,
    Record,
    Status,
    chain_of,
    cut_back,
    encode,
    overwrite_json,
    read_records,
    sealed_records,
    summary_of,
    write_json,
)
from lightning_llm.tracking.final_figures import draw_losses, final_figures
from lightning_llm.tracking.provenance import code_hash, git_state, process_mark, versions
from lightning_llm.tracking.run_state import Heartbeat, HeldFolder
from lightning_llm.tracking.sweep_file import title_of
from lightning_llm.train.loggers import RecordLogger

__all__ = ["RunFolder", "RunLogger", "Status", "cut_back"]

log = logging.getLogger(__name__)

CHECKED_EVERY_SECONDS = 1.0
"""Seconds between two checks, at writes, that the folder still exists at its path."""


@runtime_checkable
class RunLogger(Protocol):
    """Protocol of loggers: further destinations of a run's records. No method may raise or delay training.

    A callback with these methods is used as a logger, too.
    """

    def open(self, facts: Mapping[str, Any], resumed_from_step: int | None) -> None:
        """Start logging. `facts`: initial content of summary.json; `resumed_from_step`: None for a new run.

        `metrics.jsonl` exists by then.
        """

    def record(self, record: Record) -> None:
        """Log one record (of a step or a validation), which is already in `metrics.jsonl`."""

    def close(self, status: Status, detail: str, figures: Mapping[str, Any]) -> None:
        """Stop logging, within a bounded time. `status`, `detail`: how the run ended; `figures`: its final figures.

        All files of the folder are written by then.
        """

    def summary_fields(self) -> dict[str, Any]:
        """Return this logger's entries of `summary.json`, as far as they are known."""


class RunFolder(pl.Callback):
    """Writes `metrics.jsonl`, `summary.json` and `loss.png` of one run, on rank 0. The last of the callbacks.

    `resumed_from_step`: step of the checkpoint that the run resumes from (0: starts over in a folder that already has
    records), None for a new run. `facts`: summary entries about the origin of the numbers that the config does not
    contain. The code around the trainer calls `close` for events outside of training; the first status is kept.
    `goodput` in the summary is the share of the wall time since the folder's first start, including time between a stop
    and the next start, that was spent in steps that were kept. `chain`: the hash chain over the records; an earlier
    release wrote those up to `unverified_steps`. A resumed run changes nothing in the folder until the checkpoint has
    loaded on every rank; then `adopt` is called.
    """

    def __init__(
        self,
        run_dir: Path,
        loggers: Sequence[RunLogger] = (),
        resumed_from_step: int | None = None,
        facts: Mapping[str, Any] | None = None,
        adopt: Callable[[], None] | None = None,
        unverified_steps: int = 0,
    ):
        self.run_dir = Path(run_dir)
        self.loggers = list(loggers)
        self.resumed_from_step = resumed_from_step
        self.facts = dict(facts or {})
        self.adopt = adopt
        self.metrics_path = self.run_dir / "metrics.jsonl"
        self.chain = RecordChain(ChainHead(unverified_steps=unverified_steps))
        self.held = HeldFolder(self.run_dir)
        self._heartbeat = Heartbeat(self.held)
        self._checked = 0.0
        self._file: Any = None
        self._summary: dict[str, Any] = {}
        self._started = self._began = 0.0

    def open(self, device: str) -> None:
        """Begin the run: truncate `metrics.jsonl`, write the first `summary.json`, open the loggers.

        `device`: description of the device for the summary.

        Raises:
            ConfigError: the folder cannot be written, or has records of a run that is not being resumed.
            StorageError: writing fails only after records have been truncated.
        """
        self._started, self._began = time.time(), time.monotonic()
        try:
            self.run_dir.mkdir(parents=True, exist_ok=True)
            self.held.open()
            if self.resumed_from_step is not None:
                cut_back(self.metrics_path, self.resumed_from_step, self._unseal_summary)
                found = chain_of(self.metrics_path)
                self.chain = RecordChain(replace(found, unverified_steps=self.chain.head.unverified_steps))
            elif self.metrics_path.exists() and self.metrics_path.stat().st_size:
                raise ConfigError(
                    Problem(
                        "run.dir",
                        f"{self.run_dir} already contains the records of a run. Set resume=auto to continue it, or "
                        "another run.name; nothing was changed.",
                    )
                )
            self._file = self.metrics_path.open("ab", buffering=0)
        except ValueError as error:
            text = f"{error}. Repair or remove that line to resume, or choose another run.name."
            raise ConfigError(Problem("run.dir", text)) from error
        except OSError as error:
            raise ConfigError(
                Problem("run.dir", f"{self.run_dir} cannot be written ({error.strerror}). Choose a writable folder.")
            ) from error
        self._summary = {
            "status": "running",
            "host": platform.node(),
            "process": process_mark(),
            "started_at": datetime.fromtimestamp(self._started, UTC).isoformat(timespec="seconds"),
            **self._earlier_starts(),
            "resumed_from_step": self.resumed_from_step,
            "device": device,
            "versions": versions(),
            "git": git_state(),
            "code_hash": code_hash(),
            **self.facts,
        }
        try:
            self._write_summary()
            if self.adopt is not None:
                self.adopt()
        except OSError as error:
            raise StorageError(f"{self.run_dir} could not be written: {error.strerror}") from error
        self._heartbeat.start()
        for logger in self.loggers:
            logger.open(self._summary, self.resumed_from_step)

    def _unseal_summary(self) -> None:
        """Remove the previous end from the summary; otherwise a run killed before its next summary would contradict
        it."""
        if earlier := summary_of(self.run_dir):
            detail = f"interrupted while its records were being truncated to step {self.resumed_from_step} for a resume"
            ended = {key: value for key, value in earlier.items() if key not in (RECORDS, "ended_by")}
            write_json(self.run_dir / "summary.json", {**ended, "status": "stopped", "detail": detail})

    def _earlier_starts(self) -> dict[str, Any]:
        """Return `starts` (including this one), `first_started_at` (seconds since the epoch) and `restarts`, if any."""
        earlier = summary_of(self.run_dir)
        return {
            **({RESTARTS: earlier[RESTARTS]} if RESTARTS in earlier else {}),
            "starts": earlier.get("starts", 0) + 1,
            "first_started_at": earlier.get("first_started_at", round(self._started, 3)),
        }

    def write(self, record: Record) -> None:
        """Append one record with the wall-clock time, unbuffered, and pass it to the loggers.

        Raises:
            StorageError: it could not be written; no part of it was.
            FolderGoneError: it was written, but the folder is no longer at its path.
        """
        record = {**record, "time": round(time.time(), 3)}
        line = encode(record)
        self._append(line)
        self.chain.add(record["step"], line)
        for logger in self.loggers:
            logger.record(record)
        if time.monotonic() - self._checked > CHECKED_EVERY_SECONDS:
            self._checked = time.monotonic()
            self.held.check()

    def _append(self, line: bytes) -> None:
        try:
            written = self._file.write(line)
            if written < len(line):  # the disk is full; a partial line would damage the next one
                self._file.truncate(self._file.seek(0, os.SEEK_END) - written)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise StorageError(f"{self.metrics_path} could not be written: {error.strerror}") from error

    def close(self, status: Status, detail: str = "") -> None:
        """End the run: write `status`, `detail` and final figures to summary.json, draw the loss, close the loggers.

        Only the first call after `open` has an effect.
        """
        if self._file is None or self._file.closed:
            return
        self._file.close()
        detail = redacted(detail)
        where = self.held.now()
        self.held.close()
        if where is None:  # deleted; a folder at its path belongs to another run
            self._heartbeat.stop()
            for logger in self.loggers:
                logger.close(status, detail, {})
            return
        self.run_dir, self.metrics_path = where, where / self.metrics_path.name
        figures = final_figures(read_records(self.metrics_path))
        ended, wall = time.time(), time.monotonic() - self._began
        if figures.get("useful_seconds"):  # if the clock was set back, only the time of this start is known
            since_first = max(ended - self._summary["first_started_at"], wall)
            figures["goodput"] = min(figures["useful_seconds"] / since_first, 1.0)
        self._summary |= {
            "status": status,
            "detail": detail,
            "ended_at": datetime.fromtimestamp(ended, UTC).isoformat(timespec="seconds"),
            "wall_seconds": round(wall, 3),
            **figures,
        }
        self._summary[RECORDS] = sealed_records(self.chain.head, self._summary)
        self._write_last_summary()
        self._heartbeat.stop()
        self._draw()
        for logger in self.loggers:
            logger.close(status, detail, figures)
        if self.loggers:
            self._write_last_summary()

    def _write_last_summary(self) -> None:
        """Write how the run ended; overwrite the file in place if no new file can be created."""
        try:
            self._write_summary()
        except OSError:
            try:
                overwrite_json(self.run_dir / "summary.json", self._summary)
            except OSError as error:
                log.warning("summary.json could not be written (%s): the run is %s", error, self._summary["status"])

    def _write_summary(self) -> None:
        for logger in self.loggers:
            self._summary |= logger.summary_fields()
        write_json(self.run_dir / "summary.json", self._summary)

    def _draw(self) -> None:
        # A picture that fails (no space, no fonts) must not hide how the run itself ended.
        try:
            draw_losses(read_records(self.metrics_path), self.run_dir / "loss.png", title_of(self.run_dir))
        except Exception as error:
            log.warning("loss.png was not drawn: %s: %s", type(error).__name__, error)

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Open the folder of a new run, unless that was done before the trainer was started."""
        if stage == "fit" and not self.resumed_from_step:
            self._open_first(trainer)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Open the folder of a resumed run, after its state has loaded on every rank."""
        self._open_first(trainer)

    def _open_first(self, trainer: pl.Trainer) -> None:
        if trainer.is_global_zero and self._file is None:
            self.open(describe_device(trainer.strategy.root_device, trainer.world_size))

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        """Write the step's record, after all other callbacks have added to it, and the values that they logged."""
        pl_module.step_record |= self._logged(trainer, pl_module.step_record)
        if trainer.is_global_zero:
            self.write(pl_module.step_record)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Write the validation's record and the values that callbacks have logged since the step's."""
        if trainer.state.fn != "fit" or trainer.sanity_checking:
            return
        pl_module.validation_record |= self._logged(trainer, pl_module.validation_record)
        if trainer.is_global_zero:
            self.write(pl_module.validation_record)

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Keep the values that callbacks logged for the epoch, which is the whole run, for the summary."""
        if logged := self._logged(trainer, {}):
            self._summary["logged"] = logged

    @staticmethod
    def _logged(trainer: pl.Trainer, record: Record) -> dict[str, float]:
        logger = trainer.logger
        return logger.take(trainer.callback_metrics, record) if isinstance(logger, RecordLogger) else {}

    def on_fit_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Close the folder: finished, or stopped if the last step was not reached."""
        steps = pl_module.step_record.get("step", self.resumed_from_step or 0)
        max_steps = pl_module.config.trainer.max_steps
        ended = getattr(pl_module, "ended_early", None)
        if steps >= max_steps:
            self.close("finished")
        elif ended is not None:  # as configured by a callback
            self._summary["ended_by"] = ended
            who = ended["callback"] or "a callback"
            self.close("finished", f"ended by {who} after step {steps} of {max_steps}: {ended['reason']}")
        else:
            self.close("stopped", f"after step {steps} of {max_steps}")

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Close the folder: stopped for a signal, failed for anything else, including SystemExit.

        An error that ended the run within a step may have that step's record.
        """
        record = getattr(exception, "record", None)
        if record and self._file is not None and not self._file.closed:
            self.write(record)
        status: Status = "failed" if isinstance(exception, Exception | SystemExit | KeyboardInterrupt) else "stopped"
        self.close(status, escaped(f"{type(exception).__name__}: {exception}")[:2000])
