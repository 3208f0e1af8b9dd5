"""Optuna's part of a search: the space as its distributions, its study in the sweep's folder, trials and reports.

The study and its samplers are the same after any interruption.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep

from lightning_llm.base.errors import ConfigError, Problem
from lightning_llm.config.config_hash import in_hash
from lightning_llm.config.overrides import MOST_JOBS, values_of
from lightning_llm.config.schema.sweep import SweepConfig
from lightning_llm.sweep.jobs import ComposedJob, SearchRequest
from lightning_llm.sweep.running_jobs import paired_curve, tail_gap
from lightning_llm.tracking.mlflow.store import sqlite_address
from lightning_llm.tracking.reading import read_run
from lightning_llm.tracking.run_state import SETTLED, state_of
from lightning_llm.tracking.sweep_definition import Job, Sweep, define, tracked
from lightning_llm.tracking.sweep_file import ENDED_AT, kind_of, write_results

if TYPE_CHECKING:
    from optuna import Study
    from optuna.distributions import BaseDistribution
    from optuna.samplers import BaseSampler
    from optuna.trial import FrozenTrial

EQUAL_STEPS = ("trainer.max_steps", "trainer.validate_every_steps", "data.epochs")
SEED = "seed"
"""Key with values that are repeated in each trial, not searched."""
STORAGE = "search.db"
STUDY = "search"


def optuna_is_there() -> None:
    """Raise ConfigError if Optuna is not installed."""
    try:
        import optuna  # noqa: F401
    except ModuleNotFoundError as error:
        text = "requires Optuna, which is not installed: pip install 'lightning-llm[search]'."
        raise ConfigError(Problem("sweep.search", text)) from error


def distributions_of(space: Mapping[str, Override]) -> dict[str, "BaseDistribution"]:
    """Return {key: Optuna's distribution} of a search space; the seed is not searched.

    `space`: overrides with interval(a, b), tag(log, interval(a, b)), range(a, b) or choices. An interval of integers,
    int(interval(1, 8)), gives integers; a range keeps its step.

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


def overrides_of(params: Mapping[str, Any]) -> list[str]:
    """Return the values of a trial as overrides: {"a.b": 0.5} as ["a.b=0.5"]."""
    return [f"{key}={value!r}" if isinstance(value, float) else f"{key}={value}" for key, value in params.items()]


def corners_of(distributions: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return values at the edges of the space, to find invalid ones before the search.

    Each is {key: value} with one key at an end of its interval (or at one choice) and the others at their first value.
    """
    ends = {key: list(getattr(each, "choices", None) or (each.low, each.high)) for key, each in distributions.items()}
    first = {key: values[0] for key, values in ends.items()}
    return [{**first, key: value} for key, values in ends.items() for value in values]


def open_study(folder: Path) -> "Study":
    """Return the study in the sweep's `folder`, created if missing.

    Raises:
        ConfigError: its file is damaged.
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    file = folder / STORAGE
    try:
        study = optuna.create_study(
            storage=sqlite_address(file), study_name=STUDY, direction="minimize", load_if_exists=True
        )
    except Exception as error:  # SQLAlchemy's and Optuna's own, of a file that is damaged
        text = f"cannot be opened ({type(error).__name__}). Move it away to restart the search; its runs are kept."
        raise ConfigError(Problem(str(file), text)) from error
    return study


def sampler_after(keys: SweepConfig, trials: int) -> "BaseSampler":
    """Return the sampler for the next trial after `trials` earlier ones; its seed depends only on that number."""
    from optuna.samplers import GPSampler, RandomSampler, TPESampler

    seed = (keys.search_seed + trials) % 2**32
    if keys.sampler == "random":
        return RandomSampler(seed=seed)
    return GPSampler(seed=seed) if keys.sampler == "gp" else TPESampler(seed=seed, constant_liar=True)


def add_trial(study: "Study", keys: SweepConfig, distributions: Mapping[str, Any]) -> "FrozenTrial":
    """Return a new running trial, with values drawn by the sampler.

    `study.ask` writes the trial, and then one value at a time: a process killed in between would leave a trial without
    values. Here it is written at once, and drawn again if it was not.
    """
    import optuna
    from optuna.trial import TrialState, create_trial

    drawn = optuna.create_study(direction="minimize", sampler=sampler_after(keys, len(study.trials)))
    drawn.add_trials(study.trials)
    params = drawn.ask(dict(distributions)).params
    study.add_trial(create_trial(state=TrialState.RUNNING, params=params, distributions=dict(distributions)))
    return study.trials[-1]


@dataclass
class Search:
    """State of a search by Optuna.

    `first`: the sweep before any trial. `baseline`: the composed jobs of the baseline, one per seed. `trials`: {number
    of a trial: its composed jobs}. `pruned`: {number of a trial: (step at which it was stopped, gap there)}.
    """

    asked: SearchRequest
    first: Sweep
    baseline: list[ComposedJob]
    distributions: Mapping[str, Any]
    trials: dict[int, list[ComposedJob]] = field(default_factory=dict)
    pruned: dict[int, tuple[int, float]] = field(default_factory=dict)
    _made: dict[tuple[int, str | None], tuple[Sweep, dict[tuple[str, int], Job]]] = field(default_factory=dict)

    @property
    def keys(self) -> SweepConfig:
        """The requested `sweep` keys."""
        return self.asked.keys

    def whole(self) -> Sweep:
        """Return the sweep of all jobs so far; trials with equal values share their jobs."""
        return self._made_now()[0]

    def _made_now(self) -> tuple[Sweep, dict[tuple[str, int], Job]]:
        """Return the sweep, and its jobs by kind and seed; cached until there are more trials."""
        key = len(self.trials), self.first.parent_run_id
        if key not in self._made:
            jobs = without_repeats([*self.baseline, *(job for jobs in self.trials.values() for job in jobs)])
            made = define(jobs, self.first.folder.name, self.first.typed, self.first.declared)
            made = tracked(replace(made, hash=self.first.hash), self.first.parent_run_id)
            self._made.clear()
            self._made[key] = made, {(kind_of(job.config), job.config.seed): job for job in made.jobs}
        return self._made[key]

    def jobs_of(self, composed: Sequence[ComposedJob]) -> list[Job]:
        """Return the jobs of the sweep, with numbers and folders, that `composed` jobs became."""
        known = self._made_now()[1]
        return [known[(kind_of(config), config.seed)] for _, config in composed]

    def is_whole(self, number: int) -> bool:
        """Return whether all jobs of trial `number` finished or diverged."""
        return all(state_of(job.folder) in SETTLED for job in self.jobs_of(self.trials[number]))

    @property
    def not_judged(self) -> dict[int, str]:
        """{job number: reason} of the jobs of pruned trials, which must not be judged.

        Also finished ones, because the other seeds of the trial are not. Jobs that a completed trial with equal values
        shares are excepted.
        """
        whole = {job.number for n in self.trials if self.is_whole(n) for job in self.jobs_of(self.trials[n])}
        return {
            job.number: f"trial {number}, pruned at step {step}"
            for number, (step, _) in self.pruned.items()
            for job in self.jobs_of(self.trials.get(number, []))
            if job.number not in whole
        }

    @property
    def ended(self) -> dict[int, str]:
        """{job number: reason} of jobs that were stopped before their end."""
        numbers = {job.number for job in self.whole().jobs if state_of(job.folder) not in SETTLED}
        return {number: why for number, why in self.not_judged.items() if number in numbers}

    def curve(self, composed: Sequence[ComposedJob], seeds: int) -> dict[int, float]:
        """Return {step: mean gap to the baseline} of a trial's `composed` jobs, over its first `seeds` seeds."""
        own, base = ([job.folder for job in self.jobs_of(each)[:seeds]] for each in (composed, self.baseline))
        return paired_curve(own, base, self.keys.metric)


def without_repeats(jobs: Sequence[ComposedJob]) -> list[ComposedJob]:
    """Return the jobs without those of equal config and seed, since a search may draw equal values twice."""
    seen: dict[tuple[str, int], ComposedJob] = {}
    for job in jobs:
        seen.setdefault((kind_of(job[1]), job[1].seed), job)
    return list(seen.values())


def tell(study: "Study", search: Search, number: int, pruned: tuple[int, float] | None) -> None:
    """Report the result of trial `number` to Optuna, and print it.

    `pruned`: (step, gap) at which it was stopped; None: it is complete, and its value is the mean gap over the tail.
    """
    from optuna.trial import Trial, TrialState

    frozen = study.trials[number]
    named = f"trial  {number} {' '.join(overrides_of(frozen.params))}"
    trial = Trial(study, frozen._trial_id)
    for step, gap in search.curve(search.trials[number], len(search.baseline)).items():
        if pruned is None:
            trial.report(gap, step)
    if pruned is not None:
        trial.report(pruned[1], pruned[0])
        study.tell(number, state=TrialState.PRUNED)
        search.pruned[number] = pruned
        print(f"{named}: pruned at step {pruned[0]}, gap {pruned[1]:+.4f}", flush=True)
        return
    pairs = zip(search.jobs_of(search.trials[number]), search.jobs_of(search.baseline), strict=True)
    keys = search.keys
    gaps = [tail_gap(read_run(own.folder), read_run(base.folder), keys.metric, keys.tail) for own, base in pairs]
    study.tell(number, fmean(gaps))
    print(f"{named}: gap {fmean(gaps):+.4f}", flush=True)


def write_trials(study: "Study", search: Search) -> None:
    """Write the results of the trials to `search.json` in the sweep's folder, for `compare`."""
    rows = [
        {"trial": each.number, "state": each.state.name.lower(), "values": each.params, "gap": each.value,
         "jobs": [job.number for job in search.jobs_of(search.trials.get(each.number, []))],
         ENDED_AT: _ended_at(search.pruned.get(each.number))}
        for each in study.trials
    ]  # fmt: skip
    write_results(search.first.folder, rows, search.not_judged)


def _ended_at(pruned: tuple[int, float] | None) -> dict[str, Any] | None:
    """Return the step and gap at which a trial was pruned; None for any other."""
    if pruned is None:
        return None
    step, gap = pruned
    return {"step": step, "gap": gap if math.isfinite(gap) else None}


def print_best(study: "Study") -> None:
    """Print the three trials with the smallest gap."""
    whole_trials = sorted(
        (each for each in study.trials if each.state.name == "COMPLETE"), key=lambda each: each.value or 0.0
    )
    for each in whole_trials[:3]:
        print(
            f"best   trial {each.number}: gap {each.value:+.4f} to the baseline, {' '.join(overrides_of(each.params))}"
        )
