"""Loggers of a run: Lightning's (`logger=csv|tensorboard|wandb`) receive the records of metrics.jsonl.

`RecordLogger` adds values that callbacks log (`self.log`, `trainer.logger`) to those records.
"""

import logging
import shutil
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger, WandbLogger
from torch import Tensor

from lightning_llm.config.config_hash import flatten
from lightning_llm.config.schema import Config
from lightning_llm.tracking.files import Record, Status, read_records

log = logging.getLogger(__name__)

WANDB_ID_FILE = "wandb_run_id.txt"


class LightningRunLogger:
    """`RunLogger` that passes every number of a record to one of Lightning's loggers, at the record's step.

    When a run resumes, `csv/metrics.csv` is written again from metrics.jsonl, `tensorboard/` hides steps after the
    checkpoint (SummaryWriter's purge_step), and wandb continues the run of the same id, offline unless logger.offline
    is false. A failure of a logger is reported once, and the logger is not used again.
    """

    def __init__(self, config: Config, run_dir: Path):
        self.config = config
        self.run_dir = Path(run_dir)
        self._logger: Logger | None = None
        self._problem = ""

    @property
    def experiment(self) -> Any:
        """TensorBoard's SummaryWriter or wandb's Run; None before the run begins."""
        return self._logger.experiment if self._logger is not None else None

    def open(self, facts: Mapping[str, Any], resumed_from_step: int | None) -> None:
        """Create the logger and log the config."""

        def make() -> None:
            self._logger = getattr(self, f"_{self.config.logger.name}")(resumed_from_step)
            self._logger.log_hyperparams(flatten(self.config.model_dump(mode="json")))
            if self.config.logger.name == "csv":
                for record in read_records(self.run_dir / "metrics.jsonl"):
                    self._write(record)

        self._attempt(make)

    def record(self, record: Record) -> None:
        """Log the numbers of one record."""
        if self._logger is not None:
            self._attempt(lambda: self._write(record))

    def close(self, status: Status, detail: str, figures: Mapping[str, Any]) -> None:
        """Flush and close the logger."""
        logger = self._logger
        if logger is None:
            return

        def end() -> None:
            logger.finalize("success" if status == "finished" else "failed")
            if isinstance(logger, WandbLogger):
                logger.experiment.summary.update(dict(figures))
                logger.experiment.finish(exit_code=int(status == "failed"))

        self._attempt(end)
        self._logger = None

    def summary_fields(self) -> dict[str, Any]:
        """Return the facts for `summary.json`: the name of the logger, and its problem, if any."""
        about = {"name": self.config.logger.name}
        return {"logger": about | ({"problem": self._problem} if self._problem else {})}

    def _csv(self, resumed_from_step: int | None) -> Logger:
        shutil.rmtree(self.run_dir / "csv", ignore_errors=True)
        return CSVLogger(self.run_dir, name="", version="csv")

    def _tensorboard(self, resumed_from_step: int | None) -> Logger:
        purge = None if resumed_from_step is None else resumed_from_step + 1
        return TensorBoardLogger(
            self.run_dir, name="", version="tensorboard", default_hp_metric=False, purge_step=purge
        )

    def _wandb(self, resumed_from_step: int | None) -> Logger:
        file, settings = self.run_dir / WANDB_ID_FILE, self.config.logger
        if not file.exists():
            file.write_text(uuid.uuid4().hex[:8])
        return WandbLogger(
            name=self.config.run.name,
            save_dir=self.run_dir,
            id=file.read_text().strip(),
            project=settings.project or self.config.run.experiment,
            offline=settings.offline,
            resume="allow",
        )

    def _write(self, record: Record) -> None:
        numbers = {key: value for key, value in record.items() if isinstance(value, int | float) and key != "time"}
        step = int(numbers.pop("step"))
        if self._logger is not None:
            self._logger.log_metrics(numbers, step)

    def _attempt(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:  # a failing logger must not stop the run
            self._problem, self._logger = f"{type(error).__name__}: {error}", None
            log.warning(
                "logger=%s failed and is disabled: %s. metrics.jsonl is complete.",
                self.config.logger.name,
                self._problem,
            )


OWN_PREFIXES = ("val_loss", "event")
"""Prefixes of keys that are reserved in all records."""


class RecordLogger(Logger):
    """The Trainer's only logger: collects values logged by callbacks until the next record is written (`take`).

    It exists on every rank; rank 0 writes its own values. `trainer.logger.log_metrics` (LearningRateMonitor,
    DeviceStatsMonitor) passes values. `self.log` passes a name, because only Lightning knows how the value is reduced.
    `experiment` is that of the chosen logger: TensorBoard's SummaryWriter or wandb's Run; None if there is none, and on
    ranks other than 0.
    """

    def __init__(self, run_dir: Path, loggers: Sequence[Any] = ()):
        super().__init__()
        self._run_dir = run_dir
        self._loggers = loggers
        self._values: dict[str, Any] = {}
        self._names: set[str] = set()

    @property
    def name(self) -> str:
        """Name of the run's folder."""
        return self._run_dir.name

    @property
    def version(self) -> str:
        """Empty, because a run's folder contains one run."""
        return ""

    @property
    def save_dir(self) -> str:
        """The run's folder, the value of `trainer.log_dir`."""
        return str(self._run_dir)

    @property
    def experiment(self) -> Any:
        """Experiment object of the logger chosen in the config, for callbacks; None if there is none."""
        found = (getattr(logger, "experiment", None) for logger in self._loggers)
        return next((each for each in found if each is not None), None)

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        """Do nothing, because hyperparameters are in config.yaml."""

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Keep `metrics` for the record of the step in progress."""
        self._values.update(metrics)

    def expect(self, name: str) -> None:
        """Add the value that Lightning computes for `self.log(name, ...)` to the next record in which it is
        available."""
        self._names.add(name)

    def take(self, metrics: Mapping[str, Any], record: Mapping[str, Any]) -> dict[str, float]:
        """Return the values logged since the last call, for `record`; `metrics` is `trainer.callback_metrics`.

        Raises:
            ValueError: a name is a key of the record, or has a reserved prefix.
            TypeError: a value is not a number.
        """
        found, self._values = self._values, {}
        for name in sorted(self._names):
            key = next((each for each in (name, f"{name}_step") if each in metrics), None)
            if key is not None:  # otherwise an average over the epoch, which is the whole run
                found[key] = metrics[key]
                self._names.discard(name)
        for name in found:
            if name in record or name.startswith(OWN_PREFIXES):
                raise ValueError(f"a callback logs '{name}', which is a key of the run's records. Use another name.")
        return {name: _number(name, value) for name, value in found.items()}


def _number(name: str, value: Any) -> float:
    value = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
    try:
        return value if isinstance(value, int | float) else float(value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"a callback logs '{name}' = {value!r}, which is not a number.") from error
