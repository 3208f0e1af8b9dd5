"""Jobs of a sweep: they are composed and checked, recorded in its folder, and started by their launcher."""

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from lightning_llm.base.errors import ConfigError, Problem
from lightning_llm.base.signals import Relay
from lightning_llm.base.terminal import Waiting
from lightning_llm.config.overrides import typed_value
from lightning_llm.config.schema import Config
from lightning_llm.config.schema.sweep import SweepConfig
from lightning_llm.config.schema.validation import gather
from lightning_llm.config.sweep_space import read_sweep
from lightning_llm.config.workspace import sync_command
from lightning_llm.plan.report import notes
from lightning_llm.plan.resolve import DerivedConfig, plan_of
from lightning_llm.run.checked_plan import problems_beyond
from lightning_llm.run.launch.ray_cluster import in_sweep, ray_problems
from lightning_llm.run.resume.branch import with_branch_resolved
from lightning_llm.sweep.launchers import run_here, run_on_slurm, slurm_problems
from lightning_llm.sweep.progress import Outcome, Progress, SearchPhase, one_at_a_time, runs_elsewhere
from lightning_llm.tracking.mlflow.sweep import parent_job, write_parent
from lightning_llm.tracking.mlflow.tracker import tracking_uri
from lightning_llm.tracking.run_state import SETTLED, settled_state
from lightning_llm.tracking.sweep_definition import Job, Sweep, SweepSource, tracked, write_sweep

NOT_CHECKED = {"seed", "resume", "run"}
"""Jobs that only differ in these keys are checked once: each gets a separate folder in the sweep's, and no rule reads
the other keys."""

PLACES = {"run.name", "run.root", "run.dir"}


def left_to_do(jobs: Iterable[Job]) -> list[Job]:
    """Return the jobs that this start should run, and print the state of each other one.

    Others are settled (finished or diverged), or run in another process.
    """
    todo = []
    for job in jobs:
        state = settled_state(job.folder)
        state = "running" if runs_elsewhere(job) else state
        if state in (*SETTLED, "running"):
            again = f", a result (to rerun it, remove {job.folder})" if state == "diverged" else ""
            print(f"job    {job.name}: {state}, skipped{again}")
        else:
            todo.append(job)
    return todo


def opened(definition: Callable[[], Sweep]) -> Sweep:
    """Record a sweep before its jobs start: write its `sweep.json`, and its parent run to MLflow; return the sweep.

    `definition` returns the sweep. It is called again under the lock of the sweep's folder, since another start may
    have changed the folder.
    """
    with one_at_a_time(definition().folder):
        return _open(definition())


def start(jobs: Sequence[Job], relay: Relay, phase: SearchPhase | None = None) -> list[Outcome]:
    """Run `jobs` (at least one) with their launcher until they end, and return their outcomes.

    `relay` passes signals on to them. `phase`: the phase of a search, which may stop jobs on purpose.
    """
    launcher = jobs[0].config.launcher
    here = launcher.name == "local"  # the machines of Slurm and Ray are not known here
    plans = [DerivedConfig(job.config, to_train=here).plan() for job in jobs]
    lines = [line for plan in plans for line in notes(plan, to_train=True)]
    for line in dict.fromkeys(lines):
        print(line, flush=True)
    progress = Progress(len(jobs), queued=launcher.name == "slurm", phase=phase)
    with in_sweep(launcher):
        if launcher.name == "slurm":
            run_on_slurm(jobs, relay, progress)
        else:
            run_here(jobs, launcher.at_once, relay, progress)
    return progress.outcomes


def checked_jobs(
    arguments: argparse.Namespace, *, to_train: bool = True
) -> tuple[list[tuple[list[str], Config]], str | None, SweepSource]:
    """Return the arguments of `define`: the composed jobs, the name of the sweep (None if not given), and its source.

    Every job is checked; with `to_train` also whether this machine can run it.

    Raises:
        ConfigError: with the problems of all jobs, each once.
    """
    if arguments.config:
        raise ConfigError(Problem("--config", "is one resolved run, but a sweep (-m) is composed. Use overrides."))
    composed = read_sweep(arguments.overrides, arguments.config_dir)
    read = [(own, with_branch_resolved(reading)) for own, reading in composed]
    problems = dict.fromkeys(problem for _, reading in read for problem in reading.problems)
    configs = [reading.config for _, reading in read if reading.config]
    for config in _one_of_each_kind(configs):
        found = DerivedConfig(config, to_train=to_train)
        problems.update(dict.fromkeys(problems_beyond(found, jobs=len(read))))
    problems.update(dict.fromkeys(gather([lambda: _launcher_problems(configs, to_train)])))
    varied = {each.partition("=")[0] for own, _ in read for each in own}
    for key in sorted(varied & PLACES):
        problems[Problem(key, "must be the same for all jobs, which get numbered folders. Give one value.")] = None
    if problems:
        raise ConfigError(problems)
    jobs = [(arguments, plan_of(reading.checked()).config) for arguments, reading in read]
    typed = SweepSource(tuple(arguments.overrides), arguments.config_dir)
    return jobs, typed_value(arguments.overrides, "run.name"), typed


def _one_of_each_kind(configs: Sequence[Config]) -> Iterator[Config]:
    """Yield one config of each kind that the rules can distinguish."""
    known = set()
    with Waiting("checking the sweep's jobs") as waiting:
        for number, config in enumerate(configs):
            waiting.tell(number)
            kind = config.model_dump_json(exclude=NOT_CHECKED, warnings=False)  # parts may be invalid
            if kind not in known:
                known.add(kind)
                yield config


def _launcher_problems(configs: list[Config], to_train: bool) -> Iterator[Problem]:
    if any(config.launcher != configs[0].launcher for config in configs):
        yield Problem("launcher", "must be the same for all jobs of a sweep. Give one value.")
    elif to_train and configs:
        yield from slurm_problems(configs[0].launcher)
        for config in configs:
            yield from ray_problems(config)


def _open(whole: Sweep) -> Sweep:
    """Write the sweep's file, and the MLflow parent run of its jobs, before any of them starts."""
    whole.folder.mkdir(parents=True, exist_ok=True)
    parent = whole.parent_run_id
    about = write_sweep(whole)
    if whole.jobs[0].config.logger.name == "mlflow":
        found, problem = write_parent(parent_job(whole.folder, about, tracking_uri(whole.jobs[0].config)))
        parent = found or parent
        if problem:
            print(
                f"note   MLflow has no parent run of this sweep ({problem}). The jobs still run. Later: "
                f"{sync_command(whole.folder)}",
                file=sys.stderr,
            )
    whole = tracked(whole, parent)
    write_sweep(whole)
    return whole


ComposedJob = tuple[list[str], Config]


@dataclass(frozen=True)
class SearchRequest:
    """A requested search: the command's arguments, its `sweep` keys, and whether jobs are checked for training here."""

    arguments: argparse.Namespace
    keys: SweepConfig
    to_train: bool = True

    def jobs_at(self, overrides: Sequence[str]) -> tuple[list[ComposedJob], str | None, SweepSource]:
        """Return the arguments of `define` for the jobs, one per seed, of the command with further `overrides`.

        As `checked_jobs`; the further overrides come first in each job's own.
        """
        every = [*self.arguments.overrides, *overrides]
        whole = argparse.Namespace(overrides=every, config=None, config_dir=self.arguments.config_dir)
        jobs, name, _ = checked_jobs(whole, to_train=self.to_train)
        named = [([*overrides, *(each for each in own if each not in overrides)], config) for own, config in jobs]
        return named, name, SweepSource(tuple(self.arguments.overrides), self.arguments.config_dir)


def check_launcher(config: Config) -> None:
    """Raise ConfigError unless the jobs run on this machine (launcher=local), where a search can watch them."""
    if config.launcher.name != "local":
        text = f"is {config.launcher.name}, but a search must watch its jobs while they run. Use launcher=local."
        raise ConfigError(Problem("launcher", text))
