"""How a sweep came out: its last lines, what MLflow is told, and the exit code."""

import sys
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from lightning_llm.config.commands import command, sync_command
from lightning_llm.config.schema import Config
from lightning_llm.record.mlflow.sweep import parent_job, write_parent
from lightning_llm.record.mlflow.sync import catch_up
from lightning_llm.record.mlflow.tracker import tracking_uri
from lightning_llm.record.mlflow.ui import ui_lines
from lightning_llm.record.state import SETTLED, detail_of, mlflow_facts, state_of
from lightning_llm.record.sweep_commands import command_to_go_on
from lightning_llm.record.sweep_definition import Job, Sweep, write
from lightning_llm.record.sweep_file import read_sweep_file
from lightning_llm.sweep.elsewhere import is_trained, runs_elsewhere
from lightning_llm.sweep.job_locks import Outcome, one_at_a_time
from lightning_llm.sweep.progress import STOPPED


def close(
    whole: Sweep, outcomes: list[Outcome], stopped_by: int, ended: Collection[int] = (), further: str = ""
) -> int:
    """Print how the sweep came out, tell MLflow, and return the exit code.

    `ended`: numbers of jobs that a search ended before their end, which are no failures. `further`: what is still to
    come beside the jobs that there are, such as "look 2 of 6".
    """
    states = {job.number: state_of(job.folder) for job in whole.jobs}
    counted = Counter(states.values())
    finished, diverged = (counted[state] for state in SETTLED)
    left = [number for number, state in states.items() if state not in SETTLED and number not in ended]
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
        sound = not failed and not elsewhere and not left
        status = "KILLED" if stopped_by else "FINISHED" if sound else "FAILED"
        counts = {"finished": finished, "diverged": diverged, "failed": len(failed) + len(elsewhere)}
        counts["total"] = len(states)
        logged = _log_end(whole, None if running else status, counts)
        if logged and not stopped_by:
            hand_in_late(whole)
    lost = f", {diverged} diverged" if diverged else ""
    lost += f", {len(ended)} ended by the search" if ended else ""
    lost += f", {len(elsewhere_now)} running elsewhere" if elsewhere_now else ""
    print(f"sweep  {finished} of {len(states)} jobs finished{lost}, in {whole.folder}")
    if outcomes:
        _print_where_and_how(whole.jobs[0].config, outcomes)
    for each in outcomes:
        if states[each.job.number] == "diverged":
            _print_ending(each.job, "diverged")
    for each in failed:
        _print_ending(each.job, f"exit code {each.code}")
    for job in elsewhere:
        _print_ending(job, "failed in another start")
    if stopped_by:
        _print_stop(whole, {number: states[number] for number in left}, further)
        return 128 + stopped_by
    return 1 if failed or elsewhere else 0


def hand_in_late(whole: Sweep) -> None:
    """Hand in to MLflow what it lacks of the jobs in the sweep's folder, of whichever start; print where it cannot be.

    A start that was killed left its jobs to the next one. Those that a process trains right now hand in themselves.
    """
    if whole.jobs[0].config.logger.name != "mlflow":
        return
    folders = [whole.folder / str(each["number"]) for each in read_sweep_file(whole.folder).get("jobs", [])]
    if problem := catch_up([folder for folder in folders if not is_trained(folder)]):
        text = f"note   MLflow lacks something of this sweep ({problem}). Later: {sync_command(whole.folder)}"
        print(text, file=sys.stderr)


def _print_stop(whole: Sweep, left: Mapping[int, str], further: str) -> None:
    """Print where a signal stopped the sweep, and how to go on, if there is anything to go on with.

    `left`: {number: state} of jobs not at their end; `further`: what comes behind those that there are.
    """
    if not left and not further:
        print(f"stopped after the last job: all {len(whole.jobs)} have come to their end", file=sys.stderr)
        return
    stopped = [str(number) for number, state in left.items() if state == "stopped"]
    where = f"in job {', '.join(stopped)}" if stopped else "between jobs"
    jobs = f"{len(left)} of {len(whole.jobs)} jobs are left" if left else f"{further} is still to come"
    print(f"stopped {where}; {jobs}; go on: {command_to_go_on(whole)}", file=sys.stderr)


def _print_where_and_how(config: Config, outcomes: Sequence[Outcome]) -> None:
    """Print where MLflow shows the sweep, and that its jobs shared a machine."""
    if config.logger.name == "mlflow":
        tracked = mlflow_facts(outcomes[0].job.folder)
        for line in ui_lines(tracking_uri(config), tracked.get("experiment_id")):
            print(line)
    if config.launcher.name == "local" and config.launcher.at_once > 1 and len(outcomes) > 1:
        at_once = min(config.launcher.at_once, len(outcomes))
        print(f"note   {at_once} jobs at a time shared this machine: their speeds compare within this sweep alone")


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
        later = f"Later: {sync_command(whole.folder)}"
        print(f"note   MLflow was not told how the sweep ended ({problem}). {later}", file=sys.stderr)
        return False
    with one_at_a_time(whole.folder):
        write(replace(whole, parent_run_id=parent))  # it may have been made just now
    return True


def _print_ending(job: Job, how: str) -> None:
    why = detail_of(job.folder) or "it said nothing; see its output"
    print(f"  {how}: {job.folder} ({' '.join(job.words)}): {why}", file=sys.stderr)
