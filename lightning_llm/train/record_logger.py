"""Lightning's road from a callback to `metrics.jsonl`: the Trainer's one logger, and `self.log`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers.logger import Logger
from torch import Tensor

OWN_PREFIXES = ("val_loss", "event")
"""Of keys that records have a meaning for, whichever line they stand in."""


class RecordLogger(Logger):
    """Keeps what callbacks log until the next record is written, on every rank; rank 0's reach the run's folder.

    `trainer.logger.log_metrics` (LearningRateMonitor, DeviceStatsMonitor) hands over values. `self.log` hands over a
    name, since only Lightning knows what becomes of the value. `experiment` is that of the logger that was chosen:
    TensorBoard's SummaryWriter, wandb's Run; None where there is none, and on other ranks than 0.
    """

    def __init__(self, run_dir: Path, loggers: Sequence[Any] = ()):
        super().__init__()
        self._run_dir = run_dir
        self._loggers = loggers
        self._values: dict[str, Any] = {}
        self._names: set[str] = set()

    @property
    def name(self) -> str:
        """The run's folder's name."""
        return self._run_dir.name

    @property
    def version(self) -> str:
        """Empty: a run's folder holds one run."""
        return ""

    @property
    def save_dir(self) -> str:
        """The run's folder, which `trainer.log_dir` is."""
        return str(self._run_dir)

    @property
    def experiment(self) -> Any:
        """What the chosen logger writes to."""
        found = (getattr(logger, "experiment", None) for logger in self._loggers)
        return next((each for each in found if each is not None), None)

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        """Do nothing: config.yaml holds them."""

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Keep `metrics` for the next record, whose step is the one in progress."""
        self._values.update(metrics)

    def expect(self, name: str) -> None:
        """Have the value that Lightning makes of `self.log(name, ...)` taken into the next record that can have it."""
        self._names.add(name)

    def take(self, metrics: Mapping[str, Any], record: Mapping[str, Any]) -> dict[str, float]:
        """Return what was logged since the last call, for `record`; `metrics` is `trainer.callback_metrics`.

        Raises:
            ValueError: a name is one of the record's own, or of a kind that has a meaning of its own.
            TypeError: a value is no number.
        """
        found, self._values = self._values, {}
        for name in sorted(self._names):
            key = next((each for each in (name, f"{name}_step") if each in metrics), None)
            if key is not None:  # else an average over the epoch, which is the whole run
                found[key] = metrics[key]
                self._names.discard(name)
        for name in found:
            if name in record or name.startswith(OWN_PREFIXES):
                raise ValueError(f"a callback logs '{name}', a key of the run's own records. Give it another name.")
        return {name: _number(name, value) for name, value in found.items()}


def _number(name: str, value: Any) -> float:
    value = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
    try:
        return value if isinstance(value, int | float) else float(value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"a callback logs '{name}' = {value!r}, which is no number.") from error
