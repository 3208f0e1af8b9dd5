"""`train -m`: every combination of a sweep, checked before the first starts, each run in a process of its own."""

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace

from lightning_llm.config.commands import command, sync_command
from lightning_llm.config.compose import read_sweep, read_sweep_keys, typed_value
from lightning_llm.config.schema import Config
from lightning_llm.config.schema.partial import gather
from lightning_llm.errors import ConfigError, Problem
from lightning_llm.plan.report import notes
from lightning_llm.plan.resolve import Resolution, plan_of
from lightning_llm.record.mlflow.sweep import parent_job, write_parent
from lightning_llm.record.mlflow.sync import catch_up
from lightning_llm.record.mlflow.tracker import tracking_uri
from lightning_llm.record.mlflow.ui import ui_lines
from lightning_llm.record.state import SETTLED, detail_of, mlflow_facts, settled_state, state_of
from lightning_llm.record.sweep_commands import command_to_go_on
from lightning_llm.record.sweep_definition import Job, Sweep, Typed, define, tracked, write
from lightning_llm.run.checked_plan import problems_beyond
from lightning_llm.run.ray_cluster import in_sweep, ray_problems
from lightning_llm.run.relay import Relay, signals_passed_on
from lightning_llm.run.trunk import settled
from lightning_llm.sweep.elsewhere import runs_elsewhere
from lightning_llm.sweep.job_locks import Outcome, one_at_a_time
from lightning_llm.sweep.local import run_here
from lightning_llm.sweep.progress import STOPPED, Leg, Progress
from lightning_llm.sweep.slurm import run_on_slurm, slurm_problems
from lightning_llm.terminal.waiting import Waiting

NOT_CHECKED = {"seed", "resume", "run"}
"""Jobs that differ in these alone are checked once: each gets a folder of its own in the sweep's, and no rule reads the
others."""

PLACES = {"run.name", "run.root", "run.dir"}


def sweep(arguments: argparse.Namespace) -> int:
    """Run what is left to do of a sweep in `run.root/experiment/<sweep>/<n>`.

    Finished and diverged runs are skipped, those that failed or were stopped go on, those that run elsewhere are left
    alone. Returns 0, 1 where a job failed, or 128 + a signal, which is passed on to the jobs under way: they save and
    stop. A diverged job is a result and no failure.
    """
    keys = read_sweep_keys(arguments.overrides, arguments.config_dir)
    if keys.search is not None:
        from lightning_llm.sweep.search.run import search

        return search(arguments, keys)
    composed = checked_jobs(arguments)
    if keys.until is not None:
        from lightning_llm.sweep.decide import run_until_decided

        return run_until_decided(composed, keys)
    whole = define(*composed)
    todo = left_to_do(whole.jobs)
    if not todo:
        print(f"sweep  nothing left to do, in {whole.folder}")
        return 0
    keys_left = {job.key for job in todo}
    whole = opened(lambda: define(*composed))
    with signals_passed_on() as relay:
        outcomes = start([job for job in whole.jobs if job.key in keys_left], relay)  # they know their parent now
    return close(whole, outcomes, relay.received)


def left_to_do(jobs: Iterable[Job]) -> list[Job]:
    """Return the jobs that are neither settled nor running elsewhere, and print what the others are."""
    todo = []
    for job in jobs:
        state = settled_state(job.folder)
        state = "running" if runs_elsewhere(job) else state
        if state in (*SETTLED, "running"):
            again = f", a result (to run it again, remove {job.folder})" if state == "diverged" else ""
            print(f"job    {job.name}: {state}, left as it is{again}")
        else:
            todo.append(job)
    return todo


def opened(definition: Callable[[], Sweep]) -> Sweep:
    """Return the sweep, its file and its parent run written before any of its jobs starts."""
    with one_at_a_time(definition().folder):  # another start of it may have given numbers, or made the parent, by now
        return _open(definition())


def start(jobs: Sequence[Job], relay: Relay, leg: Leg | None = None) -> list[Outcome]:
    """Run `jobs`, one at least, where their launcher has them run; return how they came out. `leg`: of a search."""
    launcher = jobs[0].config.launcher
    here = launcher.name == "local"  # what Slurm's and Ray's machines are is not known on this one
    plans = [Resolution(job.config, to_train=here).plan() for job in jobs]
    for line in dict.fromkeys(line for plan in plans for line in notes(plan, to_train=True)):
        print(line, flush=True)
    progress = Progress(len(jobs), queued=launcher.name == "slurm", leg=leg)
    with in_sweep(launcher):
        if launcher.name == "slurm":
            run_on_slurm(jobs, relay, progress)
        else:
            run_here(jobs, launcher.at_once, relay, progress)
    return progress.outcomes


def checked_jobs(
    arguments: argparse.Namespace, *, to_train: bool = True
) -> tuple[list[tuple[list[str], Config]], str | None, Typed]:
    """Return the composed jobs that the arguments name, the name given to their sweep, and the arguments, for `define`.

    Every job is checked: against this machine, too, where it is `to_train`.

    Raises:
        ConfigError: with the problems of all jobs, each said once.
    """
    if arguments.config:
        raise ConfigError(Problem("--config", "is one resolved run; a sweep (-m) is composed. Give overrides instead."))
    composed = read_sweep(arguments.overrides, arguments.config_dir)
    read = [(words, settled(reading)) for words, reading in composed]
    problems = dict.fromkeys(problem for _, reading in read for problem in reading.problems)
    configs = [reading.config for _, reading in read if reading.config]
    for config in _one_of_each_kind(configs):
        found = Resolution(config, to_train=to_train)
        problems.update(dict.fromkeys(problems_beyond(found, jobs=len(read))))
    problems.update(dict.fromkeys(gather([lambda: _launcher_problems(configs, to_train)])))
    varied = {word.partition("=")[0] for words, _ in read for word in words}
    for key in sorted(varied & PLACES):
        problems[Problem(key, "is one for all jobs of a sweep: its folder, in which each job has its own.")] = None
    if problems:
        raise ConfigError(problems)
    jobs = [(arguments, plan_of(reading.checked()).config) for arguments, reading in read]
    typed = Typed(tuple(arguments.overrides), arguments.config_dir)
    return jobs, typed_value(arguments.overrides, "run.name"), typed


def _one_of_each_kind(configs: Sequence[Config]) -> Iterator[Config]:
    """Yield the configs that the rules can tell apart, the first of each."""
    known, waiting = set(), Waiting("checking the sweep's jobs")
    for number, config in enumerate(configs):
        waiting.tell(number)
        kind = config.model_dump_json(exclude=NOT_CHECKED, warnings=False)  # a sound part lacks fields
        if kind not in known:
            known.add(kind)
            yield config


def _launcher_problems(configs: list[Config], to_train: bool) -> Iterator[Problem]:
    if any(config.launcher != configs[0].launcher for config in configs):
        yield Problem("launcher", "is one for all jobs of a sweep, and these differ in it.")
    elif to_train and configs:
        yield from slurm_problems(configs[0].launcher)
        for config in configs:
            yield from ray_problems(config)


def _open(whole: Sweep) -> Sweep:
    """Write the sweep's file, and the MLflow run that its jobs are children of, before any of them starts."""
    whole.folder.mkdir(parents=True, exist_ok=True)
    parent = whole.parent_run_id
    about = write(whole)
    if whole.jobs[0].config.logger.name == "mlflow":
        found, problem = write_parent(parent_job(whole.folder, about, tracking_uri(whole.jobs[0].config)))
        parent = found or parent
        if problem:
            print(
                f"note   MLflow has no parent run of this sweep ({problem}). The jobs run all the same; later: "
                f"{sync_command(whole.folder)}",
                file=sys.stderr,
            )
    whole = tracked(whole, parent)
    write(whole)
    return whole


def close(whole: Sweep, outcomes: list[Outcome], stopped_by: int, ended: Collection[int] = ()) -> int:
    """Print how the sweep came out, tell MLflow, and return the exit code.

    `ended`: numbers of jobs that a search ended before their end, which are no failures.
    """
    states = {job.number: state_of(job.folder) for job in whole.jobs}
    counted = Counter(states.values())
    finished, diverged = (counted[state] for state in SETTLED)
    failed = [
        each
        for each in outcomes
        if each.code
        and states[each.job.number] != "diverged"
        and not ((stopped_by or each.job.number in ended) and each.code in STOPPED)
    ]
    here = {each.job.number for each in outcomes}
    elsewhere_now = [job for job in whole.jobs if runs_elsewhere(job)]
    not_lost = here | {job.number for job in elsewhere_now}  # its summary may be of an earlier attempt
    elsewhere = [job for job in whole.jobs if states[job.number] == "failed" and job.number not in not_lost]
    running = bool(elsewhere_now)
    if whole.jobs[0].config.logger.name == "mlflow":
        sound = (
            not failed
            and not elsewhere
            and finished + diverged + sum(number in ended for number in states) == len(states)
        )
        status = "KILLED" if stopped_by else "FINISHED" if sound else "FAILED"
        counts = {"finished": finished, "diverged": diverged, "failed": len(failed) + len(elsewhere)}
        counts["total"] = len(states)
        logged = _log_end(whole, None if running else status, counts)
        if logged and not stopped_by and (problem := catch_up([each.job.folder for each in outcomes])):
            text = f"note   MLflow lacks something of this sweep ({problem}). Later: {sync_command(whole.folder)}"
            print(text, file=sys.stderr)
    lost = f", {diverged} diverged" if diverged else ""
    lost += f", {len(ended)} ended by the search" if ended else ""
    lost += f", {len(elsewhere_now)} running elsewhere" if elsewhere_now else ""
    print(f"sweep  {finished} of {len(states)} jobs finished{lost}, in {whole.folder}")
    if whole.jobs[0].config.logger.name == "mlflow" and outcomes:
        tracked = mlflow_facts(outcomes[0].job.folder)
        for line in ui_lines(tracking_uri(whole.jobs[0].config), tracked.get("experiment_id")):
            print(line)
    launcher = whole.jobs[0].config.launcher
    if launcher.name == "local" and launcher.at_once > 1 and len(outcomes) > 1:
        at_once = min(launcher.at_once, len(outcomes))
        print(f"note   {at_once} jobs at a time shared this machine: their speeds compare within this sweep alone")
    for each in outcomes:
        if states[each.job.number] == "diverged":
            _print_ending(each.job, "diverged")
    for each in failed:
        _print_ending(each.job, f"exit code {each.code}")
    for job in elsewhere:
        _print_ending(job, "failed in another start")
    if stopped_by:
        stopped = [str(number) for number, state in states.items() if state == "stopped"]
        where = f"in job {', '.join(stopped)}" if stopped else "between jobs"
        left = f"{len(states) - finished - diverged} of {len(states)} jobs are left"
        print(f"stopped {where}; {left}; go on: {command_to_go_on(whole)}", file=sys.stderr)
        return 128 + stopped_by
    return 1 if failed or elsewhere else 0


def print_where_to_judge(whole: Sweep) -> None:
    """Print the command that gives the verdict, where any job came to an end that can be judged."""
    if any(state_of(job.folder) in SETTLED for job in whole.jobs):
        print(f"       the verdict: {command('compare', str(whole.folder))}")


def _log_end(whole: Sweep, status: str | None, counts: dict[str, int]) -> bool:
    """Log how the sweep ended to MLflow; return whether that was possible, and print where not."""
    with one_at_a_time(whole.folder):  # another start of it may end at the same time
        about = write(whole)
    job = parent_job(whole.folder, about, tracking_uri(whole.jobs[0].config))
    job["metrics"] = {f"jobs/{key}": count for key, count in counts.items()}
    job["status"] = status
    parent, problem = write_parent(job)
    if problem:
        print(f"note   MLflow was not told how the sweep ended: {problem}", file=sys.stderr)
        return False
    with one_at_a_time(whole.folder):
        write(replace(whole, parent_run_id=parent))  # it may have been made just now
    return True


def _print_ending(job: Job, how: str) -> None:
    why = detail_of(job.folder) or "it said nothing; see its output"
    print(f"  {how}: {job.folder} ({' '.join(job.words)}): {why}", file=sys.stderr)
