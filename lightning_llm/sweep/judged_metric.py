"""The metric by which a sweep judges its own jobs as it goes, held against what they will record."""

from collections.abc import Iterable

from lightning_llm.base.errors import ConfigError, Problem, did_you_mean
from lightning_llm.config.schema import Config

LOSS, HIGH_PRECISION = "val_loss", "val_loss_high_precision"


def check_metric(metric: str, configs: Iterable[Config]) -> None:
    """Raise ConfigError where not every job's validations have `metric`: it would be missed after all had run."""
    known = set.intersection(*(set(_recorded(config)) for config in configs))
    if metric not in known:
        text = f"is '{metric}', which these jobs' validations do not record.{did_you_mean(metric, known)}"
        raise ConfigError(Problem("sweep.metric", f"{text} They have {', '.join(sorted(known))}."))


def _recorded(config: Config) -> list[str]:
    return [LOSS, HIGH_PRECISION, *(f"{LOSS}/{name}" for name in config.data.sources)]
