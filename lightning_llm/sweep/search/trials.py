"""A search as it stands: its baseline, the jobs of its trials, and the sweep that they make so far."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lightning_llm.config.schema.sweep import SweepConfig
from lightning_llm.sweep.search.curves import paired_curve
from lightning_llm.sweep.search.run import Asked, ComposedJob, without_repeats
from lightning_llm.tracking.run_state import SETTLED, state_of
from lightning_llm.tracking.sweep_definition import Job, Sweep, define, tracked
from lightning_llm.tracking.sweep_jobs import kind_of


@dataclass
class Search:
    """A search. `baseline`: its jobs as composed, one per seed; `trials`: those of each trial so far, by its number.

    `first`: the sweep as it was before any trial; `pruned`: {trial: (step, the gap there)}.
    """

    asked: Asked
    first: Sweep
    baseline: list[ComposedJob]
    distributions: Mapping[str, Any]
    trials: dict[int, list[ComposedJob]] = field(default_factory=dict)
    pruned: dict[int, tuple[int, float]] = field(default_factory=dict)
    _made: dict[tuple[int, str | None], tuple[Sweep, dict[tuple[str, int], Job]]] = field(default_factory=dict)

    @property
    def keys(self) -> SweepConfig:
        """What was asked for below `sweep`."""
        return self.asked.keys

    def whole(self) -> Sweep:
        """Return the sweep of all jobs so far; trials that came to the same place share theirs."""
        return self._made_now()[0]

    def _made_now(self) -> tuple[Sweep, dict[tuple[str, int], Job]]:
        """Return the sweep, and its jobs by kind and seed; made once for as many trials."""
        key = len(self.trials), self.first.parent_run_id
        if key not in self._made:
            jobs = without_repeats([*self.baseline, *(job for jobs in self.trials.values() for job in jobs)])
            made = define(jobs, self.first.folder.name, self.first.typed, self.first.declared)
            made = tracked(replace(made, hash=self.first.hash), self.first.parent_run_id)
            self._made.clear()
            self._made[key] = made, {(kind_of(job.config), job.config.seed): job for job in made.jobs}
        return self._made[key]

    def jobs_of(self, composed: Sequence[ComposedJob]) -> list[Job]:
        """Return these composed jobs as jobs of the sweep."""
        known = self._made_now()[1]
        return [known[(kind_of(config), config.seed)] for _, config in composed]

    def is_whole(self, number: int) -> bool:
        """Return whether all jobs of a trial came to their end by themselves."""
        return all(state_of(job.folder) in SETTLED for job in self.jobs_of(self.trials[number]))

    @property
    def not_judged(self) -> dict[int, str]:
        """{Job number: why}, of pruned trials' jobs: of a seed that came to its end, too, as the others did not.

        Unless another trial at the same place, which shares its jobs, went to its end.
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
        """{Job number: why it was ended}, of jobs that had not come to their end by themselves."""
        numbers = {job.number for job in self.whole().jobs if state_of(job.folder) not in SETTLED}
        return {number: why for number, why in self.not_judged.items() if number in numbers}

    def curve(self, composed: Sequence[ComposedJob], seeds: int) -> dict[int, float]:
        """Return the paired curve over the first `seeds` seeds."""
        own, base = ([job.folder for job in self.jobs_of(each)[:seeds]] for each in (composed, self.baseline))
        return paired_curve(own, base, self.keys.metric)
