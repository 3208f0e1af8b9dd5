"""State of a search by Optuna: its study in the sweep's folder, its trials, and their reports.

The study and its samplers are the same after any interruption.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from lightning_llm.base.errors import ConfigError, Problem
from lightning_llm.base.sqlite_address import sqlite_address
from lightning_llm.config.schema.sweep import SweepConfig
from lightning_llm.sweep.search.curves import paired_curve, tail_gap
from lightning_llm.sweep.search.request import ComposedJob, SearchRequest, without_repeats
from lightning_llm.sweep.search.space import words_of
from lightning_llm.tracking.reading import read_run
from lightning_llm.tracking.run_state import SETTLED, state_of
from lightning_llm.tracking.sweep_definition import Job, Sweep, define, tracked
from lightning_llm.tracking.sweep_file import ENDED_AT, write_results
from lightning_llm.tracking.sweep_jobs import kind_of

if TYPE_CHECKING:
    from optuna import Study
    from optuna.samplers import BaseSampler
    from optuna.trial import FrozenTrial

STORAGE = "search.db"
STUDY = "search"


def open_study(folder: Path) -> "Study":
    """Return the study in `folder`, created if missing.

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
        text = f"cannot be opened ({type(error).__name__}). Move it away to restart the search; runs are kept."
        raise ConfigError(Problem(str(file), text)) from error
    return study


def sampler_after(keys: SweepConfig, trials: int) -> "BaseSampler":
    """Return the sampler with the random numbers for this number of earlier trials: the same after any interruption."""
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
    """A search. `baseline`: its composed jobs, one per seed; `trials`: those of each trial so far, by number.

    `first`: the sweep before any trial; `pruned`: {trial: (step, gap there)}.
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
        """Return the jobs of the sweep for these composed jobs."""
        known = self._made_now()[1]
        return [known[(kind_of(config), config.seed)] for _, config in composed]

    def is_whole(self, number: int) -> bool:
        """Return whether all jobs of a trial ended by themselves."""
        return all(state_of(job.folder) in SETTLED for job in self.jobs_of(self.trials[number]))

    @property
    def not_judged(self) -> dict[int, str]:
        """{job number: reason} of jobs of pruned trials, also finished ones, because their other seeds are not.

        Except jobs shared with another trial with equal values that was completed.
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
        """Return the paired curve over the first `seeds` seeds."""
        own, base = ([job.folder for job in self.jobs_of(each)[:seeds]] for each in (composed, self.baseline))
        return paired_curve(own, base, self.keys.metric)


def tell(study: "Study", search: Search, number: int, pruned: tuple[int, float] | None) -> None:
    """Report the mean gap of a trial to Optuna, or that it was pruned, with the paired curve as intermediate values."""
    from optuna.trial import Trial, TrialState

    frozen = study.trials[number]
    trial = Trial(study, frozen._trial_id)
    for step, gap in search.curve(search.trials[number], len(search.baseline)).items():
        if pruned is None:
            trial.report(gap, step)
    if pruned is not None:
        trial.report(pruned[1], pruned[0])
        study.tell(number, state=TrialState.PRUNED)
        search.pruned[number] = pruned
        print(
            f"trial  {number} {' '.join(words_of(frozen.params))}: pruned at step {pruned[0]}, gap {pruned[1]:+.4f}",
            flush=True,
        )
        return
    pairs = zip(search.jobs_of(search.trials[number]), search.jobs_of(search.baseline), strict=True)
    keys = search.keys
    gaps = [tail_gap(read_run(own.folder), read_run(base.folder), keys.metric, keys.tail) for own, base in pairs]
    study.tell(number, fmean(gaps))
    print(f"trial  {number} {' '.join(words_of(frozen.params))}: gap {fmean(gaps):+.4f}", flush=True)


def write_trials(study: "Study", search: Search) -> None:
    """Write the results of the trials to the sweep's folder, for `compare`."""
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
        print(f"best   trial {each.number}: gap {each.value:+.4f} to the baseline, {' '.join(words_of(each.params))}")
