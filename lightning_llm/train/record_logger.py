"""Values that callbacks log (by `self.log` or `trainer.logger`) become entries of the records in metrics.jsonl."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers.logger import Logger
from torch import Tensor

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
