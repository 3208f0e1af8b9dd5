"""`sweep.search=halving`: recipes over a few seeds; clearly worse recipes are stopped early, at rungs.

Successive halving (K. Jamieson and A. Talwalkar, AISTATS 2016) keeps the better half at each rung, by rank. Here a
recipe is stopped only if the interval of its gap to the current best is above the margin (`worse_than_best`). Stopped
recipes are recorded in `search.json`, so that no later start resumes them.
"""

import math
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lightning_llm.base.errors import ConfigError, Problem
from lightning_llm.base.signals import Relay, signals_passed_on
from lightning_llm.config.schema.sweep import SweepConfig
from lightning_llm.sweep.decide import check_metric
from lightning_llm.sweep.ending import close
from lightning_llm.sweep.jobs import SearchRequest, check_launcher, left_to_do, opened, start
from lightning_llm.sweep.progress import Outcome, SearchPhase, await_elsewhere, runs_elsewhere
from lightning_llm.sweep.running_jobs import losses_at, run_in, watched, worse_than_best
from lightning_llm.tracking.files import summary_of
from lightning_llm.tracking.rank_liveness import signal_ranks
from lightning_llm.tracking.run_state import SETTLED, state_of, whose
from lightning_llm.tracking.sweep_definition import Job, Sweep, define
from lightning_llm.tracking.sweep_file import ENDED_AT, SEARCH, SEARCH_FILE, kind_of, read_trials, write_results

FEWEST_SEEDS = 2


@dataclass(frozen=True)
class Dropped:
    """A recipe that was stopped at `step`: its gap to the recipe `best` there, with the ends of its interval."""

    name: str
    step: int
    best: str
    gap: float
    low: float
    high: float

    @property
    def reason(self) -> str:
        """Why it was stopped, in one line."""
        if not math.isfinite(self.gap):
            return f"{self.name}: all its runs diverged by step {self.step}"
        interval = f"[{self.low:+.4f}, {self.high:+.4f}]"
        return f"{self.name}: {self.gap:+.4f} {interval} above {self.best} at step {self.step}"

    def as_data(self) -> dict[str, Any]:
        """Return its entry in `search.json`, with None for numbers that are not finite."""
        numbers = {"gap": self.gap, "low": self.low, "high": self.high}
        finite = {key: value if math.isfinite(value) else None for key, value in numbers.items()}
        return {"step": self.step, "best": self.best, **finite}


@dataclass
class Halving:
    """State of a halving.

    `recipes`: {name: its jobs by seed}. `rungs`: steps at which recipes may be stopped. `dropped`: {name: why it was
    stopped}.
    """

    keys: SweepConfig
    whole: Sweep
    recipes: dict[str, list[Job]]
    rungs: tuple[int, ...]
    dropped: dict[str, Dropped] = field(default_factory=dict)

    @property
    def alive(self) -> dict[str, list[Job]]:
        """{name: jobs} of the recipes that continue."""
        return {name: jobs for name, jobs in self.recipes.items() if name not in self.dropped}

    @property
    def ended(self) -> dict[int, str]:
        """{job number: reason} of jobs that were stopped before their end."""
        return {
            job.number: each.reason
            for name, each in self.dropped.items()
            for job in self.recipes[name]
            if state_of(job.folder) not in SETTLED
        }

    @property
    def not_judged(self) -> dict[int, str]:
        """{job number: reason} of jobs that must not be judged: all jobs of a stopped recipe, also finished ones.

        A job left by a killed start may train to its end although its recipe's other seeds did not. If no job was
        stopped early (all diverged), they are results.
        """
        ended = self.ended
        numbers = {name: [job.number for job in self.recipes[name]] for name in self.dropped}
        return {
            number: self.dropped[name].reason
            for name, own in numbers.items()
            for number in own
            if not ended.keys().isdisjoint(own)
        }


def planned_halving(asked: SearchRequest) -> Halving:
    """Return the halving without starting anything.

    Raises:
        ConfigError: there are fewer than two recipes, one lacks seeds, or there is no validation between a rung and the
            end.
    """
    composed, name, typed = asked.jobs_at([])
    keys, first = asked.keys, composed[0][1]
    check_launcher(first)
    check_metric(keys.metric, [config for _, config in composed])
    kinds = {kind_of(config): config for _, config in composed}
    seeds = sorted({config.seed for _, config in composed})
    problems = []
    if len(kinds) < 2:
        text = "requires several recipes, but there is one. Give several values of a key, e.g. precision=mxfp8,mxfp4."
        problems.append(Problem("sweep.search", text))
    if len(seeds) < FEWEST_SEEDS or len(composed) < len(kinds) * len(seeds):
        text = f"halving requires at least {FEWEST_SEEDS} seeds of each recipe to measure the noise. Use seed=0,1,2."
        problems.append(Problem("seed", text))
    last, every = first.trainer.max_steps, first.trainer.validate_every_steps
    for key in ("max_steps", "validate_every_steps"):  # recipes are compared at equal steps
        if len({getattr(config.trainer, key) for config in kinds.values()}) > 1:
            problems.append(Problem(f"trainer.{key}", "must be the same for all recipes of a halving. Give one value."))
    rungs = tuple(dict.fromkeys(math.ceil(share * last / every) * every for share in keys.rungs)) if every else ()
    if not rungs or rungs[-1] >= last:
        text = f"is {every}: a validation between a rung and the last of {last} steps is required. Use a smaller value."
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
    """Return {recipe: its jobs by seed}. A recipe is named by the overrides of its jobs, without the seed."""
    found: dict[str, list[Job]] = {}
    for job in whole.jobs:
        name = " ".join(each for each in job.overrides if not each.startswith("seed="))
        found.setdefault(name or "as it is", []).append(job)
    return {name: sorted(jobs, key=lambda job: job.config.seed) for name, jobs in found.items()}


def dropped_before(folder: Path, recipes: Mapping[str, Sequence[Job]]) -> dict[str, Dropped]:
    """Return {name: reason} of those of `recipes` that an earlier start of the halving in `folder` has stopped.

    They are identified by their jobs, because names may grow with the sweep. Empty without an earlier start, or if its
    version did not record them.

    Raises:
        ValueError: its record cannot be read.
    """
    named = {job.number: name for name, jobs in recipes.items() for job in jobs}
    found: dict[str, Dropped] = {}
    for row in read_trials(folder):
        about = row.get(ENDED_AT)
        name = next((named[number] for number in row.get("jobs", ()) if number in named), None)
        if about is None or name is None:
            continue
        try:
            gap, low, high = (math.inf if about[key] is None else float(about[key]) for key in ("gap", "low", "high"))
            found[name] = Dropped(name, int(about["step"]), str(about["best"]), gap, low, high)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{folder / SEARCH_FILE} is damaged: {error}") from error
    return found


def halve(asked: SearchRequest) -> int:
    """Run the recipes from rung to rung, and the remaining ones to their end; return the exit code.

    Raises:
        ConfigError: as `planned_halving`.
    """
    halving = planned_halving(asked)
    steps = ", ".join(map(str, halving.rungs))
    print(f"sweep  {len(halving.recipes)} recipes, rungs at steps {steps}; in {halving.whole.folder}", flush=True)
    for each in halving.dropped.values():
        print(f"ended  {each.reason}, in an earlier start: not resumed", flush=True)
    halving.whole = opened(lambda: halving.whole)
    halving.recipes = recipes_of(halving.whole)
    outcomes: list[Outcome] = []
    with signals_passed_on() as relay:
        ended_before = [job for name in halving.dropped for job in halving.recipes[name]]
        await_elsewhere(stop_elsewhere(ended_before), relay, "it saves and stops")  # left by a killed start
        for rung, step in enumerate((*halving.rungs, None)):
            if not _run_to(halving, rung, step, relay, outcomes):
                break
            if step is not None:
                drop_at(halving, rung, step, relay)
                write_results(halving.whole.folder, _rows(halving), halving.not_judged)
    write_results(halving.whole.folder, _rows(halving), halving.not_judged)
    return close(halving.whole, outcomes, relay.received, set(halving.ended))


def _run_to(halving: Halving, rung: int, step: int | None, relay: Relay, outcomes: list[Outcome]) -> bool:
    """Run the remaining recipes to a rung, or (`step` None) to their end; return whether all got there."""

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
        await_elsewhere(jobs, relay, "it is compared with the others", is_there)
    return not relay.received


def _step_of(job: Job) -> int:
    run = run_in(job.folder)
    return 0 if run is None else run.last_step


def steps_left(halving: Halving) -> int:
    """Return the number of remaining optimizer steps of all jobs if no further recipe is stopped."""
    jobs = [job for jobs in halving.alive.values() for job in jobs if state_of(job.folder) not in SETTLED]
    return sum(max(0, job.config.trainer.max_steps - _step_of(job)) for job in jobs)


def drop_at(halving: Halving, rung: int, step: int, relay: Relay) -> None:
    """Stop the recipes that are worse than the best at `step` by more than the margin, and print them.

    Waits for their jobs that another start runs: until these have stopped, they use cores and their results are not
    final.
    """
    names = list(halving.alive)
    losses = losses_at([[run_in(job.folder) for job in halving.recipes[name]] for name in names], step, halving.keys)
    stopping: list[Job] = []
    for place, (best, gap, low, high) in worse_than_best(losses, halving.keys, len(halving.rungs)).items():
        dropped = Dropped(names[place], step, names[best], gap, low, high)
        halving.dropped[names[place]] = dropped
        print(f"ended  {dropped.reason}", flush=True)
        stopping += stop_elsewhere(halving.recipes[names[place]])
    await_elsewhere(stopping, relay, "it saves and stops")
    at = f"rung {rung + 1} of {len(halving.rungs)}, step {step}"
    print(f"sweep  {at}: {len(halving.alive)} recipes continue", flush=True)


def stop_elsewhere(jobs: Sequence[Job]) -> list[Job]:
    """Ask those of `jobs` that another start runs or left behind to save and stop; return the jobs that were asked.

    Prints a note for a job that cannot be reached, because it runs on another machine.
    """
    stopping = []
    for job in jobs:
        if not runs_elsewhere(job):
            continue
        if signal_ranks(job.folder, signal.SIGTERM):
            stopping.append(job)
            print(f"ended  job {job.number}, which another start runs or left behind: asked to stop", flush=True)
        else:
            mark = str(summary_of(job.folder).get("process", "")) if state_of(job.folder) == "running" else ""
            text = f"note   job {job.number} is ended, but {whose(mark)} trains it in {job.folder}. Stop it there"
            print(text, file=sys.stderr, flush=True)
    return stopping


def _rows(halving: Halving) -> list[Mapping[str, Any]]:
    return [
        {"recipe": name, "jobs": [job.number for job in jobs],
         "state": "ended" if name in halving.dropped else _whole_or_open(jobs),
         "why": halving.dropped[name].reason if name in halving.dropped else None,
         ENDED_AT: halving.dropped[name].as_data() if name in halving.dropped else None}
        for name, jobs in halving.recipes.items()
    ]  # fmt: skip


def _whole_or_open(jobs: Sequence[Job]) -> str:
    return "whole" if all(state_of(job.folder) in SETTLED for job in jobs) else "open"
