"""The end of a start of a sweep: its printed result, the report to MLflow, and the exit code."""

import sys
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lightning_llm.config.schema import Config
from lightning_llm.config.workspace import command, sync_command
from lightning_llm.sweep.progress import STOPPED, Outcome, is_trained, one_at_a_time, runs_elsewhere
from lightning_llm.tracking.mlflow.sweep import parent_job, write_parent
from lightning_llm.tracking.mlflow.sync import catch_up
from lightning_llm.tracking.mlflow.tracker import tracking_uri
from lightning_llm.tracking.mlflow.ui import ui_lines
from lightning_llm.tracking.run_state import SETTLED, detail_of, mlflow_facts, state_of
from lightning_llm.tracking.sweep_definition import Job, Sweep, command_to_go_on, write_sweep
from lightning_llm.tracking.sweep_file import TOLD, read_sweep_file


@dataclass
class _Ending:
    """State of a sweep when this start of it ends: the states of its jobs, and the failed ones."""

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
        """{number: state} of jobs that are not settled and were not stopped by a search."""
        return {n: state for n, state in self.states.items() if state not in SETTLED and n not in self.ended}

    @property
    def failed(self) -> list[Outcome]:
        """Failed jobs of this start. A diverged job is a result, and a job that was stopped has not failed."""
        return [each for each in self.outcomes if each.code and not (self._diverged(each) or self._was_stopped(each))]

    @property
    def failed_elsewhere(self) -> list[Job]:
        """Failed jobs of other starts. The summary of a running job may be from an earlier attempt."""
        known = {each.job.number for each in self.outcomes} | {job.number for job in self.running}
        return [job for job in self.whole.jobs if self.states[job.number] == "failed" and job.number not in known]

    @property
    def code(self) -> int:
        """The exit code."""
        return 128 + self.stopped_by if self.stopped_by else int(bool(self.failed or self.failed_elsewhere))

    def _diverged(self, each: Outcome) -> bool:
        return self.states[each.job.number] == "diverged"

    def _was_stopped(self, each: Outcome) -> bool:
        return bool(self.stopped_by or each.job.number in self.ended) and each.code in STOPPED


def close(
    whole: Sweep, outcomes: list[Outcome], stopped_by: int, ended: Collection[int] = (), further: str = ""
) -> int:
    """Print the result of the sweep, report it to MLflow, and return the exit code.

    Args:
        whole: the sweep.
        outcomes: those of the jobs that this start ran.
        stopped_by: number of the signal that stopped this start; 0 if none did.
        ended: numbers of jobs that a search stopped early, which have not failed.
        further: work that remains besides the existing jobs, such as "another look"; "" if none.
    """
    ending = _Ending(whole, outcomes, stopped_by, ended)
    _report_to_mlflow(ending)
    counts = {"diverged": ending.diverged, "stopped by the search": len(ended)}
    counts["running elsewhere"] = len(ending.running)
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
        _print_stop(whole, ending, further)
    print_where_to_judge(whole)
    return ending.code


def close_again(whole: Sweep) -> None:
    """End a start that found nothing left to do: report to MLflow unless an earlier start did, and name `compare`.

    The start that ran the last job may have been killed before its report.
    """
    reported = read_sweep_file(whole.folder).get(TOLD)
    if not (isinstance(reported, dict) and reported.get("status")):  # null: jobs were running elsewhere
        _report_to_mlflow(_Ending(whole, [], 0, ()))
    elif whole.jobs[0].config.logger.name == "mlflow":
        _upload_missing(whole)
    print_where_to_judge(whole)


def _report_to_mlflow(ending: _Ending) -> None:
    """Log the end of the sweep, and upload missing data of its jobs; does nothing for other loggers."""
    if ending.whole.jobs[0].config.logger.name != "mlflow":
        return
    if _log_end(ending.whole, _end_facts(ending)) and not ending.stopped_by:
        _upload_missing(ending.whole)


def _end_facts(ending: _Ending) -> dict[str, Any]:
    """Return the facts for MLflow: `status`, null while jobs still run, and counts of jobs."""
    failed = len(ending.failed) + len(ending.failed_elsewhere)
    sound = not failed and not ending.left
    status = "KILLED" if ending.stopped_by else "FINISHED" if sound else "FAILED"
    counts = {"finished": ending.finished, "diverged": ending.diverged, "failed": failed, "total": len(ending.states)}
    return {"status": None if ending.running else status, "jobs": counts}


def _upload_missing(whole: Sweep) -> None:
    """Upload to MLflow the missing data of jobs in the sweep's folder, of any start; print a note if that fails.

    A start that was killed leaves its jobs to the next one. Running jobs upload their own data.
    """
    folders = [whole.folder / str(each["number"]) for each in read_sweep_file(whole.folder).get("jobs", [])]
    if problem := catch_up([folder for folder in folders if not is_trained(folder)]):
        text = f"note   MLflow lacks data of this sweep ({problem}). Later: {sync_command(whole.folder)}"
        print(text, file=sys.stderr)


def _print_stop(whole: Sweep, ending: _Ending, further: str) -> None:
    """Print where a signal stopped the sweep and how to resume it, if anything is left.

    `further`: work that follows the existing jobs.
    """
    left, interrupted = ending.left, {each.job.number for each in ending.outcomes if each.code in STOPPED}
    if not left and not further:
        print(f"stopped after the last job: all {len(whole.jobs)} are finished", file=sys.stderr)
        return
    stopped = [str(number) for number, state in left.items() if state == "stopped" or number in interrupted]
    where = f"in job {', '.join(stopped)}" if stopped else "between jobs"
    jobs = f"{len(left)} of {len(whole.jobs)} jobs are left" if left else f"{further} remains"
    print(f"stopped {where}; {jobs}; to resume: {command_to_go_on(whole)}", file=sys.stderr)


def _print_where_and_how(config: Config, outcomes: Sequence[Outcome]) -> None:
    """Print the address of the sweep in MLflow, and a note if jobs shared the machine."""
    if config.logger.name == "mlflow":
        tracked = mlflow_facts(outcomes[0].job.folder)
        for line in ui_lines(tracking_uri(config), tracked.get("experiment_id")):
            print(line)
    if config.launcher.name == "local" and config.launcher.at_once > 1 and len(outcomes) > 1:
        at_once = min(config.launcher.at_once, len(outcomes))
        print(f"note   {at_once} jobs at a time shared this machine: compare speeds within this sweep only")


def print_where_to_judge(whole: Sweep) -> None:
    """Print the `compare` command of the sweep, if its jobs differ in more than the seed and one of them has ended."""
    varied = any(len(values) > 1 for key, values in whole.axes.items() if key != "seed")
    if varied and any(state_of(job.folder) in SETTLED for job in whole.jobs):
        print(f"       the verdict: {command('compare', str(whole.folder))}")


def _log_end(whole: Sweep, facts: Mapping[str, Any]) -> bool:
    """Log the end of the sweep to MLflow; return whether that succeeded, and print a note if not."""
    with one_at_a_time(whole.folder):  # another start may end at the same time
        about = write_sweep(whole)
    job = parent_job(whole.folder, about, tracking_uri(whole.jobs[0].config))
    job["metrics"] = {f"jobs/{key}": count for key, count in facts["jobs"].items()}
    job["status"] = facts["status"]
    parent, problem = write_parent(job)
    if problem:
        later = f"Later: {sync_command(whole.folder)}"
        print(f"note   the end of the sweep was not logged to MLflow ({problem}). {later}", file=sys.stderr)
        return False
    with one_at_a_time(whole.folder):
        write_sweep(replace(whole, parent_run_id=parent), facts)  # which may be new
    return True


def _print_ending(job: Job, how: str) -> None:
    why = detail_of(job.folder) or "no reason recorded; see its output"
    print(f"  {how}: {job.folder} ({' '.join(job.overrides)}): {why}", file=sys.stderr)
