"""`sweep.search=optuna`: trials that Optuna asks for, each a job per seed, told the mean gap to the baseline's runs.

All that Optuna knows lies in `search.db` beside `sweep.json`. A trial that was under way when the search was killed is
taken up again, and values are drawn with a seed that counts the trials: the search goes on as if nothing had happened.
"""

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING, Any

from lightning_llm.config.identity import hashed_values, training_hash, without_observers
from lightning_llm.config.schema.sweep import SweepConfig
from lightning_llm.errors import ConfigError, Problem
from lightning_llm.record.reading import read_run
from lightning_llm.record.search_results import ENDED_AT, write_results
from lightning_llm.record.state import SETTLED, state_of
from lightning_llm.record.sweep_definition import Job, Sweep, define, kind_of, tracked, write
from lightning_llm.record.sweep_file import OTHER_KEYS, SEARCH
from lightning_llm.run.relay import Relay, signals_passed_on
from lightning_llm.sweep.elsewhere import await_elsewhere
from lightning_llm.sweep.ending import close, print_where_to_judge
from lightning_llm.sweep.job_locks import Outcome, one_at_a_time
from lightning_llm.sweep.judged_metric import check_metric
from lightning_llm.sweep.progress import Leg
from lightning_llm.sweep.run import left_to_do, opened, start
from lightning_llm.sweep.search.curves import paired_curve, pruned_at, tail_gap
from lightning_llm.sweep.search.run import Asked, ComposedJob, check_launcher, without_repeats
from lightning_llm.sweep.search.space import corners_of, distributions_of, optuna_is_there, words_of
from lightning_llm.sweep.search.study import open_study, sampler_after
from lightning_llm.sweep.search.watch import watched

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override
    from optuna import Study

PRUNED_AFTER = 0.25
"""Share of the steps before which no trial is pruned: what a schedule's warm-up does says little of its end."""


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


def planned_search(asked: Asked, space: "Mapping[str, Override]") -> Search:
    """Return the search, nothing of it started.

    Raises:
        ConfigError: Optuna is missing, nothing can be searched, or a value at an edge of the space makes no run.
    """
    optuna_is_there()
    distributions = distributions_of(space)
    baseline, name, typed = asked.jobs_at([])
    check_launcher(baseline[0][1])
    keys = asked.keys
    check_metric(keys.metric, [config for _, config in baseline])
    said = {key: (each.input_line or "").partition("=")[2] for key, each in space.items() if key in distributions}
    about = {"search": "optuna", "space": said, "sampler": keys.sampler, "search_seed": keys.search_seed,
             "pruning": keys.pruning, "startup_trials": keys.startup_trials, "metric": keys.metric, "tail": keys.tail,
             "seeds": [config.seed for _, config in baseline],
             OTHER_KEYS: training_hash(baseline[0][1]),
             "derived": {OTHER_KEYS: hashed_values(without_observers(baseline[0][1]))}}  # fmt: skip
    first = define(baseline, name, typed, {SEARCH: about})
    if not first.folder.exists():  # else they were checked then
        _check_corners(asked, distributions)
    return Search(asked, first, baseline, distributions)


def _check_corners(asked: Asked, distributions: Mapping[str, Any]) -> None:
    """Raise ConfigError with all that is wrong with runs at the edges of the space."""
    problems: dict[Problem, None] = {}
    for corner in corners_of(distributions):
        try:
            asked.jobs_at(words_of(corner))
        except ConfigError as error:
            problems |= dict.fromkeys(error.problems)
    if problems:
        raise ConfigError(list(problems))


def search_values(asked: Asked, space: "Mapping[str, Override]") -> int:
    """Run the baseline and the trials that are left; return the exit code.

    Raises:
        ConfigError: as `planned_search`.
    """
    search = planned_search(asked, space)
    print(
        f"sweep  {search.keys.trials} trials over {', '.join(search.distributions)}; in {search.first.folder}",
        flush=True,
    )
    search.first = opened(lambda: search.whole() if search.trials else search.first)
    outcomes: list[Outcome] = []
    with signals_passed_on() as relay:
        await_elsewhere(search.jobs_of(search.baseline), relay, "trials are held against it")
        if todo := left_to_do(search.jobs_of(search.baseline)):
            outcomes += start(todo, relay)
        lost = [job.folder for job in search.jobs_of(search.baseline) if state_of(job.folder) != "finished"]
        study = None if lost else _study(search)
        while study is not None and (batch := _next_batch(study, search)):
            if not _run_batch(study, search, batch, relay, outcomes):
                break
    whole = search.whole()
    further = "" if study is None else _trials_to_come(study, search)
    code = close(whole, outcomes, relay.received, set(search.ended), further)
    if lost and not relay.received:
        print(
            f"error: the baseline did not finish ({', '.join(map(str, lost))}); no gap can be taken to it",
            file=sys.stderr,
        )
        return code or 1
    if study is not None:
        _print_best(study, whole)
    return code


def _study(search: Search) -> "Study":
    """Return Optuna's study in the sweep's folder, and compose the jobs of its trials again."""
    study = open_study(search.first.folder)
    for trial in study.trials:
        _compose(study, search, trial.number, trial.params)
    for trial in study.trials:
        if trial.state.name == "PRUNED":
            step = max(trial.intermediate_values, default=0)
            search.pruned[trial.number] = step, trial.intermediate_values.get(step, math.nan)
    return study


def _trials_to_come(study: "Study", search: Search) -> str:
    """Return how many of the trials have not come to their end, "" where all have."""
    left = search.keys.trials - sum(trial.state.is_finished() for trial in study.trials)
    return f"the search's rest of {left} trial{'s' * (left > 1)}" if left > 0 else ""


def _compose(study: "Study", search: Search, number: int, params: Mapping[str, Any]) -> None:
    """Compose the jobs of a trial; one that makes no run, or was killed before it had its values, has failed."""
    if set(params) != set(search.distributions):
        _tell_failed(study, number)
        return
    try:
        search.trials[number] = search.asked.jobs_at(words_of(params))[0]
    except ConfigError as error:
        print(f"note   trial {number} ({' '.join(words_of(params))}) makes no run: {error}", file=sys.stderr)
        _tell_failed(study, number)


def _tell_failed(study: "Study", number: int) -> None:
    from optuna.trial import TrialState

    study.tell(number, state=TrialState.FAIL, skip_if_finished=True)


def _next_batch(study: "Study", search: Search) -> list[int]:
    """Return the trials to run next: those that were under way, and new ones as long as there are to be more."""
    at_once = search.baseline[0][1].launcher.at_once
    while True:
        running = [each.number for each in study.trials if each.state.name == "RUNNING"]
        if len(running) >= at_once or len(study.trials) >= search.keys.trials:
            return running[:at_once]
        study.sampler = sampler_after(search.keys, len(study.trials))
        trial = study.ask(dict(search.distributions))
        _compose(study, search, trial.number, trial.params)


def _run_batch(study: "Study", search: Search, batch: list[int], relay: Relay, outcomes: list[Outcome]) -> bool:
    """Run the trials of a batch, seed by seed, and tell Optuna of each; return whether to go on."""
    with one_at_a_time(search.first.folder):
        write(search.whole())
    pruned: dict[int, tuple[int, float]] = {}
    for place in range(len(search.baseline)):
        jobs = {number: search.jobs_of(search.trials[number])[place] for number in batch if number not in pruned}
        over = _median_rule(study, search, place + 1, jobs, pruned)
        await_elsewhere(jobs.values(), relay, "its trial is told by it")
        if todo := [job for job in _once(jobs.values()) if state_of(job.folder) not in SETTLED]:
            with watched(todo, over, relay):
                outcomes += start(todo, relay, Leg(partial(_pruned, over)))
        for job in jobs.values() if place + 1 < len(search.baseline) else ():
            over(job)  # what ended before it was looked at gets no further seed
        if relay.received or any(state_of(job.folder) not in SETTLED for n, job in jobs.items() if n not in pruned):
            return False
    for number in batch:  # one that made its last step before the signal reached it was not ended early
        _tell(study, search, number, None if search.is_whole(number) else pruned.get(number))
    _write(study, search)
    return True


def _pruned(over: Callable[[Job], bool], job: Job) -> str | None:
    return "pruned" if over(job) else None


def _once(jobs: Any) -> list[Job]:
    """Return the jobs without those that two trials share."""
    return list({job.number: job for job in jobs}.values())


def _median_rule(
    study: "Study", search: Search, seeds: int, jobs: dict[int, Job], pruned: dict[int, tuple[int, float]]
) -> Any:
    """Return what says of a job under way whether its trial is to be ended, and notes it in `pruned`."""
    whole = [each.number for each in study.trials if each.state.name == "COMPLETE"]
    others = [search.curve(search.trials[number], seeds) for number in whole]
    steps = search.baseline[0][1].trainer.max_steps

    def over(job: Job) -> bool:
        trials = [number for number, each in jobs.items() if each.number == job.number]
        if search.keys.pruning == "none" or trials[0] in pruned:
            return trials[0] in pruned
        curve = {step: gap for step, gap in search.curve(search.trials[trials[0]], seeds).items() if step < steps}
        found = pruned_at(curve, others, round(PRUNED_AFTER * steps), search.keys.startup_trials)
        if found is not None:
            pruned.update(dict.fromkeys(trials, found))
        return found is not None

    return over


def _tell(study: "Study", search: Search, number: int, pruned: tuple[int, float] | None) -> None:
    """Tell Optuna the mean gap of a trial, or that it was pruned, with the paired curve as intermediate values."""
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


def _write(study: "Study", search: Search) -> None:
    rows = [
        {"trial": each.number, "state": each.state.name.lower(), "values": each.params, "gap": each.value,
         "jobs": [job.number for job in search.jobs_of(search.trials.get(each.number, []))],
         ENDED_AT: _ended_at(search.pruned.get(each.number))}
        for each in study.trials
    ]  # fmt: skip
    write_results(search.first.folder, rows, search.not_judged)


def _ended_at(pruned: tuple[int, float] | None) -> dict[str, Any] | None:
    """Return where a pruned trial's gap was taken; of any other, it was over the tail."""
    if pruned is None:
        return None
    step, gap = pruned
    return {"step": step, "gap": gap if math.isfinite(gap) else None}


def _print_best(study: "Study", whole: Sweep) -> None:
    whole_trials = sorted(
        (each for each in study.trials if each.state.name == "COMPLETE"), key=lambda each: each.value or 0.0
    )
    for each in whole_trials[:3]:
        print(f"best   trial {each.number}: gap {each.value:+.4f} to the baseline, {' '.join(words_of(each.params))}")
    print_where_to_judge(whole)
