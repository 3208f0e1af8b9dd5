"""Search space: Hydra's sweep syntax as Optuna's distributions, and values as overrides again."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep

from lightning_llm.base.errors import ConfigError, Problem
from lightning_llm.config.config_hash import in_hash
from lightning_llm.config.overrides import MOST_JOBS, values_of

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

EQUAL_STEPS = ("trainer.max_steps", "trainer.validate_every_steps", "data.epochs")
SEED = "seed"
"""Key with values that are repeated in each trial, not searched."""


def optuna_is_there() -> None:
    """Raise ConfigError if Optuna is not installed."""
    try:
        import optuna  # noqa: F401
    except ModuleNotFoundError as error:
        text = "requires Optuna, which is not installed: pip install 'lightning-llm[search]'."
        raise ConfigError(Problem("sweep.search", text)) from error


def distributions_of(space: Mapping[str, Override]) -> dict[str, "BaseDistribution"]:
    """Return Optuna's distribution of each key: of interval(a, b), tag(log, interval(a, b)), range(a, b), choice(a, b).

    An interval of integers, int(interval(1, 8)), gives integers; a range keeps its step.

    Raises:
        ConfigError: with each key with values that cannot be searched, or if there is nothing to search.
    """
    problems, found = [], {}
    for key, each in space.items():
        if key == SEED:
            continue
        if reason := _not_searched(key):
            problems.append(Problem(key, f"cannot be searched: {reason}. Give one value."))
            continue
        try:
            found[key] = _distribution(each)
        except ValueError as error:
            problems.append(Problem(key, f"cannot be searched: {str(error).rstrip('.')}."))
    if not found and not problems:
        example = "optim.learning_rate='tag(log, interval(1e-4, 1e-2))'"
        text = f"has nothing to search. Give a key an interval or a choice: {example}."
        problems.append(Problem("sweep.search", text))
    if problems:
        raise ConfigError(problems)
    return found


def _not_searched(key: str) -> str:
    """Return why no trial may differ from the baseline in `key`; "" if it may."""
    if key.startswith("sweep."):
        return "it configures the search itself"
    if key in EQUAL_STEPS:
        return "trials are compared with the baseline at equal steps"
    return "" if in_hash(key) else "it does not change training"


def _distribution(each: Override) -> "BaseDistribution":
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    value = each.value()
    if isinstance(value, IntervalSweep):
        low, high, log = value.start, value.end, "log" in value.tags
        if unknown := value.tags - {"log"}:
            raise ValueError(f"the only tag is log, not {', '.join(sorted(unknown))}")
        if log and low is not None and low <= 0:
            raise ValueError(f"a logarithmic interval must begin above 0, not at {low:g}")
        if low is None or high is None or not low < high:
            raise ValueError(f"the interval from {low} to {high} is empty")
        if isinstance(low, int) and isinstance(high, int):
            return IntDistribution(low, high, log=log)
        return FloatDistribution(float(low), float(high), log=log)
    if isinstance(value, RangeSweep):  # in any order
        start, stop, step = value.start, value.stop, value.step
        if isinstance(start, int) and isinstance(stop, int) and isinstance(step, int) and step > 0 and stop > start:
            last = start + (stop - start - 1) // step * step
            return IntDistribution(start, last, step=step)
    if not (values := values_of(each, MOST_JOBS + 1)):
        raise ValueError("it has no value")
    if len(values) > MOST_JOBS:
        raise ValueError(f"it has more than {MOST_JOBS:,} values, so use an interval")
    return CategoricalDistribution(values)


def words_of(params: Mapping[str, Any]) -> list[str]:
    """Return a trial's values as overrides."""
    return [f"{key}={value!r}" if isinstance(value, float) else f"{key}={value}" for key, value in params.items()]


def corners_of(distributions: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return one trial per key and end (or choice), all other keys at their first value: finds invalid values early."""
    ends = {key: list(getattr(each, "choices", None) or (each.low, each.high)) for key, each in distributions.items()}
    first = {key: values[0] for key, values in ends.items()}
    return [{**first, key: value} for key, values in ends.items() for value in values]
