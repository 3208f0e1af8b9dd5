"""How a sweep came out: its last lines, what MLflow is told, and the exit code."""

import sys
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lightning_llm.config.commands import command, sync_command
from lightning_llm.config.schema import Config
from lightning_llm.sweep.job_locks import Outcome, is_trained, one_at_a_time, runs_elsewhere
from lightning_llm.sweep.progress import STOPPED
from lightning_llm.tracking.mlflow.sweep import parent_job, write_parent
from lightning_llm.tracking.mlflow.sync import catch_up
from lightning_llm.tracking.mlflow.tracker import tracking_uri
from lightning_llm.tracking.mlflow.ui import ui_lines
from lightning_llm.tracking.run_state import SETTLED, detail_of, mlflow_facts, state_of
from lightning_llm.tracking.sweep_definition import Job, Sweep, command_to_go_on, write_sweep
from lightning_llm.tracking.sweep_file import TOLD, read_sweep_file


@dataclass
class _Ending:
    """A sweep as it stands when this start of it ends: its jobs' states, and which of them went wrong, and where."""

    whole: Sweep
    outcomes: list[Outcome]
    stopped_by: int
    ended: Collection[int]

    def __post_init__(self) -> None:
        self.states = {job.number: state_of(job.folder) for job in self.whole.jobs}
        counted = Counter(self.states.values())
        self.finished, self.diverged = (counted[state] for state in SETTLED)
        self.running = [job for job in self.whole.jobs if runs_elsewhere(job)]

    @property
    def left(self) -> dict[int, str]:
        """{Number: state} of jobs that have not come to their end, and that no search has ended."""
        return {n: state for n, state in self.states.items() if state not in SETTLED and n not in self.ended}

    @property
    def failed(self) -> list[Outcome]:
        """Of the jobs that ran here: a diverged one has a result, and one that was told to stop did so."""
        return [each for each in self.outcomes if each.code and not (self._diverged(each) or self._was_told(each))]

    @property
    def failed_elsewhere(self) -> list[Job]:
        """Of another start; the summary of a job that runs may be of an earlier attempt."""
        known = {each.job.number for each in self.outcomes} | {job.number for job in self.running}
        return [job for job in self.whole.jobs if self.states[job.number] == "failed" and job.number not in known]

    @property
    def code(self) -> int:
        """The exit code."""
        return 128 + self.stopped_by if self.stopped_by else int(bool(self.failed or self.failed_elsewhere))

    def _diverged(self, each: Outcome) -> bool:
        return self.states[each.job.number] == "diverged"

    def _was_told(self, each: Outcome) -> bool:
        return bool(self.stopped_by or each.job.number in self.ended) and each.code in STOPPED


def close(
    whole: Sweep, outcomes: list[Outcome], stopped_by: int, ended: Collection[int] = (), further: str = ""
) -> int:
    """Print how the sweep came out, tell MLflow, and return the exit code.

    `ended`: numbers of jobs that a search ended before their end, which are no failures. `further`: what is still to
    come beside the jobs that there are, such as "look 2 of 6".
    """
    ending = _Ending(whole, outcomes, stopped_by, ended)
    _tell_mlflow(ending)
    counts = {"diverged": ending.diverged, "ended by the search": len(ended), "running elsewhere": len(ending.running)}
    lost = "".join(f", {count} {how}" for how, count in counts.items() if count)
    print(f"sweep  {ending.finished} of {len(ending.states)} jobs finished{lost}, in {whole.folder}")
    if outcomes:
        _print_where_and_how(whole.jobs[0].config, outcomes)
    for each in outcomes:
        if ending.states[each.job.number] == "diverged":
            _print_ending(each.job, "diverged")
    for each in ending.failed:
        _print_ending(each.job, f"exit code {each.code}")
    for job in ending.failed_elsewhere:
        _print_ending(job, "failed in another start")
    if stopped_by:
        _print_stop(whole, ending.left, further)
    print_where_to_judge(whole)
    return ending.code


def close_again(whole: Sweep) -> None:
    """Tell MLflow of a sweep that has nothing left to do what the start that ran its last job did not live to tell."""
    told = read_sweep_file(whole.folder).get(TOLD)
    if not (isinstance(told, dict) and told.get("status")):  # null: jobs ran elsewhere
        _tell_mlflow(_Ending(whole, [], 0, ()))
    elif whole.jobs[0].config.logger.name == "mlflow":
        _hand_in_late(whole)
    print_where_to_judge(whole)


def _tell_mlflow(ending: _Ending) -> None:
    """Log how the sweep ended, and hand in what MLflow lacks of its jobs; nothing where the logger is another."""
    if ending.whole.jobs[0].config.logger.name != "mlflow":
        return
    if _log_end(ending.whole, _told(ending)) and not ending.stopped_by:
        _hand_in_late(ending.whole)


def _told(ending: _Ending) -> dict[str, Any]:
    """Return what MLflow is told of the end: its `status`, null where jobs still run, and counts of jobs."""
    failed = len(ending.failed) + len(ending.failed_elsewhere)
    sound = not failed and not ending.left
    status = "KILLED" if ending.stopped_by else "FINISHED" if sound else "FAILED"
    counts = {"finished": ending.finished, "diverged": ending.diverged, "failed": failed, "total": len(ending.states)}
    return {"status": None if ending.running else status, "jobs": counts}


def _hand_in_late(whole: Sweep) -> None:
    """Hand in to MLflow what it lacks of the jobs in the sweep's folder, of whichever start; print where it cannot be.

    A start that was killed left its jobs to the next one. Those that a process trains right now hand in themselves.
    """
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
    """Print the command that gives the verdict, if jobs differ in more than the seed and one of them can be judged."""
    varied = any(len(values) > 1 for key, values in whole.axes.items() if key != "seed")
    if varied and any(state_of(job.folder) in SETTLED for job in whole.jobs):
        print(f"       the verdict: {command('compare', str(whole.folder))}")


def _log_end(whole: Sweep, told: Mapping[str, Any]) -> bool:
    """Log how the sweep ended to MLflow; return whether that was possible, and print where not."""
    with one_at_a_time(whole.folder):  # another start of it may end at the same time
        about = write_sweep(whole)
    job = parent_job(whole.folder, about, tracking_uri(whole.jobs[0].config))
    job["metrics"] = {f"jobs/{key}": count for key, count in told["jobs"].items()}
    job["status"] = told["status"]
    parent, problem = write_parent(job)
    if problem:
        later = f"Later: {sync_command(whole.folder)}"
        print(f"note   MLflow was not told how the sweep ended ({problem}). {later}", file=sys.stderr)
        return False
    with one_at_a_time(whole.folder):
        write_sweep(replace(whole, parent_run_id=parent), told)  # it may have been made just now
    return True


def _print_ending(job: Job, how: str) -> None:
    why = detail_of(job.folder) or "it said nothing; see its output"
    print(f"  {how}: {job.folder} ({' '.join(job.words)}): {why}", file=sys.stderr)
