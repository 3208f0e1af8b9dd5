"""`sweep.search=optuna`: trials suggested by Optuna, each a job per seed, with the mean gap to the baseline as value.

Optuna's state is in `search.db` beside `sweep.json`. A trial that was running when the search was killed is resumed,
and values are drawn with a seed that depends on the number of trials: an interrupted search continues unchanged.
"""

import math
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from lightning_llm.base.errors import ConfigError, Problem
from lightning_llm.base.signals import Relay, signals_passed_on
from lightning_llm.config.config_hash import hashed_values, training_hash, without_observers
from lightning_llm.sweep.decide import check_metric
from lightning_llm.sweep.ending import close
from lightning_llm.sweep.jobs import SearchRequest, check_launcher, left_to_do, opened, start
from lightning_llm.sweep.optuna_study import (
    Search,
    add_trial,
    corners_of,
    distributions_of,
    open_study,
    optuna_is_there,
    overrides_of,
    print_best,
    tell,
    write_trials,
)
from lightning_llm.sweep.progress import Outcome, SearchPhase, await_elsewhere, one_at_a_time
from lightning_llm.sweep.running_jobs import pruned_at, watched
from lightning_llm.tracking.run_state import SETTLED, state_of
from lightning_llm.tracking.sweep_definition import Job, define, write_sweep
from lightning_llm.tracking.sweep_file import OTHER_KEYS, SEARCH

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override
    from optuna import Study

PRUNED_AFTER = 0.25
"""Share of the steps before which no trial is pruned: losses during a schedule's warm-up are not predictive."""


def planned_search(asked: SearchRequest, space: "Mapping[str, Override]") -> Search:
    """Return the checked search without starting anything.

    Raises:
        ConfigError: Optuna is missing, there is nothing to search, or a value at an edge of the space is invalid.
    """
    optuna_is_there()
    distributions = distributions_of(space)
    baseline, name, typed = asked.jobs_at([])
    check_launcher(baseline[0][1])
    keys = asked.keys
    check_metric(keys.metric, [config for _, config in baseline])
    searched = {key: each for key, each in space.items() if key in distributions}
    typed_values = {key: (each.input_line or "").partition("=")[2] for key, each in searched.items()}
    about = {"search": "optuna", "space": typed_values, "sampler": keys.sampler, "search_seed": keys.search_seed,
             "pruning": keys.pruning, "startup_trials": keys.startup_trials, "metric": keys.metric, "tail": keys.tail,
             "seeds": [config.seed for _, config in baseline],
             OTHER_KEYS: training_hash(baseline[0][1]),
             "derived": {OTHER_KEYS: hashed_values(without_observers(baseline[0][1]))}}  # fmt: skip
    first = define(baseline, name, typed, {SEARCH: about})
    if not first.folder.exists():  # else they were checked before
        _check_corners(asked, distributions)
    return Search(asked, first, baseline, distributions)


def _check_corners(asked: SearchRequest, distributions: Mapping[str, Any]) -> None:
    """Raise ConfigError with all problems of runs at the edges of the space."""
    problems: dict[Problem, None] = {}
    for corner in corners_of(distributions):
        try:
            asked.jobs_at(overrides_of(corner))
        except ConfigError as error:
            problems |= dict.fromkeys(error.problems)
    if problems:
        raise ConfigError(list(problems))


def search_values(asked: SearchRequest, space: "Mapping[str, Override]") -> int:
    """Run the baseline and the remaining trials of a search; return the exit code, as `train` does.

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
        await_elsewhere(search.jobs_of(search.baseline), relay, "trials are compared with it")
        if todo := left_to_do(search.jobs_of(search.baseline)):
            outcomes += start(todo, relay)
        lost = [job.folder for job in search.jobs_of(search.baseline) if state_of(job.folder) != "finished"]
        study = None if lost else _study(search)
        while study is not None and (batch := _next_batch(study, search)):
            if not _run_batch(study, search, batch, relay, outcomes):
                break
    whole = search.whole()
    further = "" if study is None else _trials_to_come(study, search)
    if study is not None:
        print_best(study)
    code = close(whole, outcomes, relay.received, set(search.ended), further)
    if lost and not relay.received:
        print(
            f"error: the baseline did not finish ({', '.join(map(str, lost))}); no gap to it can be computed",
            file=sys.stderr,
        )
        return code or 1
    return code


def _study(search: Search) -> "Study":
    """Return Optuna's study in the sweep's folder; compose its trials' jobs again, and write their results."""
    study = open_study(search.first.folder)
    for trial in study.trials:
        _compose(study, search, trial.number, trial.params)
    for trial in study.trials:
        if trial.state.name == "PRUNED":
            step = max(trial.intermediate_values, default=0)
            search.pruned[trial.number] = step, trial.intermediate_values.get(step, math.nan)
    if study.trials:  # a killed start may not have written the last trial for `compare`
        write_trials(study, search)
    return study


def _trials_to_come(study: "Study", search: Search) -> str:
    """Return the number of remaining trials as text, "" if there are none."""
    left = search.keys.trials - sum(trial.state.is_finished() for trial in study.trials)
    return f"the remaining {left} trial{'s' * (left > 1)}" if left > 0 else ""


def _compose(study: "Study", search: Search, number: int, params: Mapping[str, Any]) -> None:
    """Compose the jobs of a trial; a trial that is invalid, or was killed before it had values, has failed."""
    if set(params) != set(search.distributions):
        _tell_failed(study, number)
        return
    try:
        search.trials[number] = search.asked.jobs_at(overrides_of(params))[0]
    except ConfigError as error:
        print(f"note   trial {number} ({' '.join(overrides_of(params))}) is invalid: {error}", file=sys.stderr)
        _tell_failed(study, number)


def _tell_failed(study: "Study", number: int) -> None:
    from optuna.trial import TrialState

    study.tell(number, state=TrialState.FAIL, skip_if_finished=True)


def _next_batch(study: "Study", search: Search) -> list[int]:
    """Return the next trials: those that were running, and new ones up to the limit."""
    at_once = search.baseline[0][1].launcher.at_once
    while True:
        running = [each.number for each in study.trials if each.state.name == "RUNNING"]
        if len(running) >= at_once or len(study.trials) >= search.keys.trials:
            return running[:at_once]
        trial = add_trial(study, search.keys, search.distributions)
        _compose(study, search, trial.number, trial.params)


def _run_batch(study: "Study", search: Search, batch: list[int], relay: Relay, outcomes: list[Outcome]) -> bool:
    """Run the trials of a batch, seed by seed, and report each to Optuna; return whether to continue."""
    with one_at_a_time(search.first.folder):
        write_sweep(search.whole())
    pruned: dict[int, tuple[int, float]] = {}
    for place in range(len(search.baseline)):
        jobs = {number: search.jobs_of(search.trials[number])[place] for number in batch if number not in pruned}
        over = _median_rule(study, search, place + 1, jobs, pruned)
        await_elsewhere(jobs.values(), relay, "its trial needs the result")
        if todo := [job for job in _once(jobs.values()) if state_of(job.folder) not in SETTLED]:
            with watched(todo, over, relay):
                outcomes += start(todo, relay, SearchPhase(partial(_pruned, over)))
        for job in jobs.values() if place + 1 < len(search.baseline) else ():
            over(job)  # also check jobs that ended before a poll
        if relay.received or any(state_of(job.folder) not in SETTLED for n, job in jobs.items() if n not in pruned):
            return False
    for number in batch:  # a trial that finished before the signal reached it is not pruned
        tell(study, search, number, None if search.is_whole(number) else pruned.get(number))
    write_trials(study, search)
    return True


def _pruned(over: Callable[[Job], bool], job: Job) -> str | None:
    return "pruned" if over(job) else None


def _once(jobs: Any) -> list[Job]:
    """Return the jobs without duplicates that two trials share."""
    return list({job.number: job for job in jobs}.values())


def _median_rule(
    study: "Study", search: Search, seeds: int, jobs: dict[int, Job], pruned: dict[int, tuple[int, float]]
) -> Any:
    """Return a function that decides whether to stop the trial of a running job, and records it in `pruned`."""
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
