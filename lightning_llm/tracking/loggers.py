"""Lightning's loggers (`logger=csv|tensorboard|wandb`), which receive the records of metrics.jsonl."""

import logging
import shutil
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger, WandbLogger

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
