"""`sweep.search=halving`: recipes over a few seeds, of which the clearly worse ones are ended at rungs on the way.

Successive halving (K. Jamieson and A. Talwalkar, AISTATS 2016) keeps the better half at each rung, by rank. Here one is
ended only where the interval of its gap to the best so far is above the margin (`rungs`).
"""

import math
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lightning_llm.base.errors import ConfigError, Problem
from lightning_llm.config.schema.sweep import SweepConfig
from lightning_llm.run.launch.relay import Relay, signals_passed_on
from lightning_llm.sweep.decide import check_metric
from lightning_llm.sweep.ending import close
from lightning_llm.sweep.job_locks import Outcome, await_elsewhere, runs_elsewhere
from lightning_llm.sweep.jobs import left_to_do, opened, start
from lightning_llm.sweep.progress import SearchPhase
from lightning_llm.sweep.search.curves import run_in, watched
from lightning_llm.sweep.search.request import SearchRequest, check_launcher
from lightning_llm.sweep.search.rungs import Dropped, dropped_before, losses_at, worse_than_best
from lightning_llm.tracking.files import summary_of
from lightning_llm.tracking.liveness import whose
from lightning_llm.tracking.rank_liveness import signal_ranks
from lightning_llm.tracking.run_state import SETTLED, state_of
from lightning_llm.tracking.sweep_definition import Job, Sweep, define
from lightning_llm.tracking.sweep_file import ENDED_AT, SEARCH, SEARCH_FILE, write_results
from lightning_llm.tracking.sweep_jobs import kind_of

FEWEST_SEEDS = 2


@dataclass
class Halving:
    """`recipes`: {name: its jobs, by seed}; `rungs`: steps at which recipes may be ended; `dropped`: by name."""

    keys: SweepConfig
    whole: Sweep
    recipes: dict[str, list[Job]]
    rungs: tuple[int, ...]
    dropped: dict[str, Dropped] = field(default_factory=dict)

    @property
    def alive(self) -> dict[str, list[Job]]:
        """The recipes that go on."""
        return {name: jobs for name, jobs in self.recipes.items() if name not in self.dropped}

    @property
    def ended(self) -> dict[int, str]:
        """{Job number: why it was ended}, of jobs that had not come to their end by themselves."""
        return {
            job.number: each.words
            for name, each in self.dropped.items()
            for job in self.recipes[name]
            if state_of(job.folder) not in SETTLED
        }

    @property
    def not_judged(self) -> dict[int, str]:
        """{Job number: why}, of jobs that are no evidence: of ended recipes, a seed that came to its end, too.

        One that was left behind by a killed start trains on, and its recipe's other seeds did not. Where no job was
        ended early (all diverged), they are a result.
        """
        ended = self.ended
        numbers = {name: [job.number for job in self.recipes[name]] for name in self.dropped}
        return {
            number: self.dropped[name].words
            for name, own in numbers.items()
            for number in own
            if not ended.keys().isdisjoint(own)
        }


def planned_halving(asked: SearchRequest) -> Halving:
    """Return the halving, nothing of it started.

    Raises:
        ConfigError: there are fewer than two recipes, one lacks seeds, or no validation lies before a rung.
    """
    composed, name, typed = asked.jobs_at([])
    keys, first = asked.keys, composed[0][1]
    check_launcher(first)
    check_metric(keys.metric, [config for _, config in composed])
    kinds = {kind_of(config): config for _, config in composed}
    seeds = sorted({config.seed for _, config in composed})
    problems = []
    if len(kinds) < 2:
        problems.append(Problem("sweep.search", "halves among several recipes, and there is one. Give a=1,2."))
    if len(seeds) < FEWEST_SEEDS or len(composed) < len(kinds) * len(seeds):
        text = f"halving needs {FEWEST_SEEDS} seeds or more of each recipe, to know the noise: seed=0,1,2."
        problems.append(Problem("seed", text))
    last, every = first.trainer.max_steps, first.trainer.validate_every_steps
    for key in ("max_steps", "validate_every_steps"):  # they are compared at equal steps
        if len({getattr(config.trainer, key) for config in kinds.values()}) > 1:
            problems.append(Problem(f"trainer.{key}", "is one for all recipes of a halving, and these differ in it."))
    rungs = tuple(dict.fromkeys(math.ceil(share * last / every) * every for share in keys.rungs)) if every else ()
    if not rungs or rungs[-1] >= last:
        text = f"is {every}, and of {last} steps there has to be a validation between a rung's and the last."
        problems.append(Problem("trainer.validate_every_steps", text))
    if problems:
        raise ConfigError(problems)
    about = {"search": "halving", "rungs": list(rungs), "margin": keys.margin_nats, "confidence": keys.confidence,
             "metric": keys.metric, "tail": keys.tail}  # fmt: skip
    whole = define(composed, name, typed, {SEARCH: about})
    recipes = recipes_of(whole)
    try:
        dropped = dropped_before(whole.folder, recipes)
    except ValueError as error:
        raise ConfigError(Problem(str(whole.folder / SEARCH_FILE), f"cannot be read: {error}. Remove it.")) from error
    return Halving(keys, whole, recipes, rungs, dropped)


def recipes_of(whole: Sweep) -> dict[str, list[Job]]:
    """Return {what tells a recipe from the others: its jobs, by seed}."""
    found: dict[str, list[Job]] = {}
    for job in whole.jobs:
        words = " ".join(word for word in job.words if not word.startswith("seed="))
        found.setdefault(words or "as it is", []).append(job)
    return {name: sorted(jobs, key=lambda job: job.config.seed) for name, jobs in found.items()}


def halve(asked: SearchRequest) -> int:
    """Run the recipes from rung to rung, and those that are left to their end; return the exit code.

    Raises:
        ConfigError: as `planned_halving`.
    """
    halving = planned_halving(asked)
    steps = ", ".join(map(str, halving.rungs))
    print(f"sweep  {len(halving.recipes)} recipes, rungs at steps {steps}; in {halving.whole.folder}", flush=True)
    for each in halving.dropped.values():
        print(f"ended  {each.words}, in an earlier start: not run on", flush=True)
    halving.whole = opened(lambda: halving.whole)
    halving.recipes = recipes_of(halving.whole)
    outcomes: list[Outcome] = []
    with signals_passed_on() as relay:
        ended_before = [job for name in halving.dropped for job in halving.recipes[name]]
        await_elsewhere(stop_elsewhere(ended_before), relay, "it saves and stops")  # a killed start left them behind
        for rung, step in enumerate((*halving.rungs, None)):
            if not _run_to(halving, rung, step, relay, outcomes):
                break
            if step is not None:
                drop_at(halving, rung, step, relay)
                write_results(halving.whole.folder, _rows(halving), halving.not_judged)
    write_results(halving.whole.folder, _rows(halving), halving.not_judged)
    return close(halving.whole, outcomes, relay.received, set(halving.ended))


def _run_to(halving: Halving, rung: int, step: int | None, relay: Relay, outcomes: list[Outcome]) -> bool:
    """Run what is alive to a rung, or (`step` None) to its end; return whether all came there."""

    def is_there(job: Job) -> bool:
        run = run_in(job.folder)
        return (
            run is not None
            and step is not None
            and max(run.validations.get(halving.keys.metric, {}), default=0) >= step
        )

    def paused(job: Job) -> str | None:
        return f"paused at rung {rung + 1} of {len(halving.rungs)}, step {step}," if is_there(job) else None

    def short(job: Job) -> bool:
        return state_of(job.folder) not in SETTLED and not is_there(job)

    phase = SearchPhase(paused, _step_of, lambda: steps_left(halving))
    while jobs := [job for jobs in halving.alive.values() for job in jobs if short(job)]:
        if todo := left_to_do(jobs):
            with watched(todo, is_there, relay):
                ended = start(todo, relay, phase)
            outcomes += [replace(each, code=0) if is_there(each.job) and not relay.received else each for each in ended]
        if relay.received or any(short(job) and not runs_elsewhere(job) for job in todo):
            return False
        await_elsewhere(jobs, relay, "it is held against the others", is_there)
    return not relay.received


def _step_of(job: Job) -> int:
    run = run_in(job.folder)
    return 0 if run is None else run.last_step


def steps_left(halving: Halving) -> int:
    """Return the steps that all recipes that go on have to make yet, if no further one is ended."""
    jobs = [job for jobs in halving.alive.values() for job in jobs if state_of(job.folder) not in SETTLED]
    return sum(max(0, job.config.trainer.max_steps - _step_of(job)) for job in jobs)


def drop_at(halving: Halving, rung: int, step: int, relay: Relay) -> None:
    """End the recipes that are worse than the best at `step` by more than the margin, and print which.

    Those of their jobs that another start runs or has left behind are awaited: until they have stopped, they take the
    cores of the others, and what became of them is not known.
    """
    names = list(halving.alive)
    losses = losses_at([[run_in(job.folder) for job in halving.recipes[name]] for name in names], step, halving.keys)
    told: list[Job] = []
    for place, (best, gap, low, high) in worse_than_best(losses, halving.keys, len(halving.rungs)).items():
        dropped = Dropped(names[place], step, names[best], gap, low, high)
        halving.dropped[names[place]] = dropped
        print(f"ended  {dropped.words}", flush=True)
        told += stop_elsewhere(halving.recipes[names[place]])
    await_elsewhere(told, relay, "it saves and stops")
    print(
        f"sweep  rung {rung + 1} of {len(halving.rungs)}, step {step}: {len(halving.alive)} recipes go on", flush=True
    )


def stop_elsewhere(jobs: Sequence[Job]) -> list[Job]:
    """Have those of `jobs` that another start runs or has left behind save and stop, or say where to do that.

    Returns those that were told to.
    """
    told = []
    for job in jobs:
        if not runs_elsewhere(job):
            continue
        if signal_ranks(job.folder, signal.SIGTERM):
            told.append(job)
            print(f"ended  job {job.number}, which another start runs or has left behind: told to stop", flush=True)
        else:
            mark = str(summary_of(job.folder).get("process", "")) if state_of(job.folder) == "running" else ""
            text = f"note   job {job.number} is ended, and {whose(mark)} trains it on, in {job.folder}: stop it there"
            print(text, file=sys.stderr, flush=True)
    return told


def _rows(halving: Halving) -> list[Mapping[str, Any]]:
    return [
        {"recipe": name, "jobs": [job.number for job in jobs],
         "state": "ended" if name in halving.dropped else _whole_or_open(jobs),
         "why": halving.dropped[name].words if name in halving.dropped else None,
         ENDED_AT: halving.dropped[name].as_data() if name in halving.dropped else None}
        for name, jobs in halving.recipes.items()
    ]  # fmt: skip


def _whole_or_open(jobs: Sequence[Job]) -> str:
    return "whole" if all(state_of(job.folder) in SETTLED for job in jobs) else "open"
