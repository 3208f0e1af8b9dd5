"""Progress of a run: a bar with loss, speed and time left on a terminal, a plain line now and then elsewhere."""

import statistics
import time
from collections import deque
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from lightning_llm.base.terminal import new_console

PACE_STEPS = 50


class ProgressLine(pl.Callback):
    """Shows step, loss, tokens per second and the time left, on rank 0.

    A terminal gets a bar, redrawn at most every `refresh_seconds`; anything else (a file, a batch system's log) a line
    every `line_seconds`. Validation losses are printed above it. The time left is estimated from the median of recent
    steps, without the first ones, which include compiling, and the duration of the latest validation.
    """

    def __init__(self, refresh_seconds: float = 0.5, line_seconds: float = 10.0):
        self.refresh_seconds = refresh_seconds
        self.line_seconds = line_seconds
        self._console: Console | None = None
        self._bar: Progress | None = None
        self._shown_at = 0.0
        self._step_seconds: deque[float] = deque(maxlen=PACE_STEPS)
        self._step_end: float | None = None
        self._counted_from: tuple[float, int] | None = None
        """Time of the last line, by a clock without validations, and the number of tokens trained on until then."""
        self._clock_stopped = 0.0
        self._validation_start = self._validation_seconds = 0.0

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Show the bar if there is a terminal."""
        if not trainer.is_global_zero:
            return
        self._console = new_console(highlight=False)
        self._shown_at = time.monotonic()
        self._step_seconds.clear()
        self._step_end = None
        self._counted_from = None
        if self._console.is_terminal:
            # Redrawn here, because rich's refresh thread would compete with the training loop for the interpreter.
            columns = (BarColumn(bar_width=24), TextColumn("{task.description}"))
            self._bar = Progress(*columns, console=self._console, auto_refresh=False)
            self._bar.add_task("first step", total=pl_module.config.trainer.max_steps)
            self._bar.start()

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        """Show the step if it is due."""
        if self._console is None:
            return
        now = time.monotonic()
        step, max_steps = pl_module.step_record["step"], pl_module.config.trainer.max_steps
        if self._step_end is not None:
            self._step_seconds.append(now - self._step_end)
        self._step_end = now
        if self._counted_from is None:  # the first step compiles
            self._counted_from = (now - self._clock_stopped, pl_module.step_record["tokens"])
        interval = self.refresh_seconds if self._bar else self.line_seconds
        if now - self._shown_at < interval and step != max_steps:
            return
        self._shown_at = now
        line = self._line(pl_module, now - self._clock_stopped)
        if self._bar:
            self._bar.update(self._bar.task_ids[0], completed=step, description=line)
            self._bar.refresh()
        else:
            self._print(line)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Record the start time of the validation."""
        self._validation_start = time.monotonic()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Print the validation losses above the bar."""
        if self._console is None or trainer.sanity_checking:
            return
        self._validation_seconds = time.monotonic() - self._validation_start
        self._clock_stopped += self._validation_seconds
        if self._step_end is not None:
            self._step_end += self._validation_seconds
        record = pl_module.validation_record
        sources = ", ".join(
            f"{key.removeprefix('val_loss/')} {value:.4f}"
            for key, value in record.items()
            if key.startswith("val_loss/")
        )
        line = f"step {record['step']} | validation loss {record['val_loss']:.4f}"
        several = sum(key.startswith("val_loss/") for key in record) > 1  # with one source, its loss is the loss
        self._print(f"{line} ({sources})" if several else line)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Remove the bar."""
        self._stop()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Remove the bar before the error is printed."""
        self._stop()

    def _stop(self) -> None:
        if self._bar:
            self._bar.stop()
            self._bar = None

    def _print(self, line: str) -> None:
        if self._console:
            self._console.print(line, markup=False, soft_wrap=True)

    def _line(self, pl_module: Any, clock: float) -> str:
        record, max_steps = pl_module.step_record, pl_module.config.trainer.max_steps
        parts = [f"step {record['step']}/{max_steps}", f"loss {record['loss']:.4f}"]
        if (speed := self._mean_speed(record, clock)) is not None:
            parts.append(f"{speed:,.0f} tokens/s")
        if self._step_seconds:
            left = self._seconds_left(record["step"], max_steps, pl_module.config.trainer.validate_every_steps)
            parts.append(f"{timedelta(seconds=round(left))} left")
        return " | ".join(parts)

    def _mean_speed(self, record: dict[str, Any], clock: float) -> float | None:
        """Return tokens per second since the last line, or since the first step, without validations.

        The first step's line has the speed of that step, if it was measured. Averaging keeps one slow step, e.g. one
        that waited for a checkpoint, from distorting the log.
        """
        before, self._counted_from = self._counted_from, (clock, record["tokens"])
        if before is None or clock <= before[0]:
            speed: float | None = record.get("tokens_per_second")
            return speed
        return (record["tokens"] - before[1]) / (clock - before[0])

    def _seconds_left(self, step: int, max_steps: int, validate_every: int | None) -> float:
        every = validate_every or max_steps
        validations = -(-max_steps // every) - (step - 1) // every  # including that of this step, if it has one
        return statistics.median(self._step_seconds) * (max_steps - step) + self._validation_seconds * validations
