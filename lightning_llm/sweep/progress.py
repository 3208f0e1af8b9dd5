"""Jobs of a sweep while it runs: locks, waiting for jobs of another start, and printed lines with the remaining time.

A start is one `train -m` command. A lock lets one process at a time run a job. A start that was killed may leave jobs
that are still training.
"""

import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
from filelock import FileLock, Timeout

from lightning_llm.base.errors import ConfigError, Problem
from lightning_llm.base.signals import STOPPING, Relay, exit_code
from lightning_llm.run.launch.lock import is_locked
from lightning_llm.tracking.files import summary_of
from lightning_llm.tracking.provenance import is_of_this_machine
from lightning_llm.tracking.run_state import SETTLED, state_of, whose
from lightning_llm.tracking.sweep_definition import Job
from lightning_llm.tracking.sweep_file import LOCKS

OTHER_FILES = 64
"""Number of files that a process may open besides its locks."""


@dataclass(frozen=True)
class Outcome:
    """Result of a job in this start: exit `code` of its process, and its duration in seconds."""

    job: Job
    code: int
    seconds: float


@contextmanager
def one_at_a_time(sweep: Path) -> Iterator[None]:
    """Context that locks the folder of a sweep while its `sweep.json` and its parent run are written."""
    with FileLock(_locks(sweep) / "sweep"):
        yield


def _locks(sweep: Path) -> Path:
    folder = sweep / LOCKS
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def allow_open_files(locks: int) -> None:
    """Raise this process's limit of open files (usually 1,024) if `locks` locks need it.

    Raises:
        ConfigError: the machine does not allow as many.
    """
    wanted = locks + psutil.Process().num_fds() + OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    if hard != resource.RLIM_INFINITY and hard < wanted:
        needs = f"waiting for {locks} jobs needs {wanted} open files, and this machine allows {hard} (ulimit -Hn)."
        raise ConfigError(Problem("launcher", f"{needs} Split the sweep, or raise the limit."))
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


@contextmanager
def locked(job: Job) -> Iterator[bool]:
    """Context that locks `job`; yields True, or False if another process holds the lock.

    A lock is released when its process ends.
    """
    lock = FileLock(_locks(job.folder.parent) / str(job.number))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        yield False
        return
    try:
        yield True
    finally:
        lock.release()


AWAITED_EVERY_SECONDS = 2.0
NAMED_AFTER_SECONDS = 60.0
"""Waiting time after which the awaited processes are listed: one may hang or ignore SIGTERM."""


def runs_elsewhere(job: Job) -> bool:
    """Return whether another process trains the job, or is about to. Call it only while this start does not run it."""
    return is_trained(job.folder)


def is_trained(folder: Path) -> bool:
    """Return whether a process trains the run in `folder`, or is about to.

    Its summary has status "running" once the data are ready; before that the process holds the lock of the run's
    folder.
    """
    state = state_of(folder)
    return state == "running" or (state not in SETTLED and is_locked(folder))


def await_elsewhere(
    jobs: Iterable[Job], relay: Relay, why: str, is_over: Callable[[Job], bool] = lambda job: False
) -> bool:
    """Wait until no other process runs any of `jobs`; return True if there was something to wait for.

    Returns False if none runs elsewhere, or if a signal arrives meanwhile. The wait is unlimited; after
    `NAMED_AFTER_SECONDS` a note names the processes to end if they hang.

    Args:
        jobs: the jobs.
        relay: receives signals.
        why: the reason of the wait, printed.
        is_over: returns True for a job that need not be awaited any longer.
    """

    def waited_for(job: Job) -> bool:
        return runs_elsewhere(job) and not is_over(job)

    elsewhere = [job for job in jobs if waited_for(job)]
    if not elsewhere:
        return False
    numbers = ", ".join(dict.fromkeys(str(job.number) for job in elsewhere))  # trials may share one
    print(f"sweep  waits for job {numbers}, which another start runs or left behind: {why}", flush=True)
    seconds, are_named = 0.0, False
    while not relay.received and (left := [job for job in elsewhere if waited_for(job)]):
        if seconds >= NAMED_AFTER_SECONDS and not are_named:
            print("\n".join(dict.fromkeys(map(_what_to_end, left))), file=sys.stderr, flush=True)
            are_named = True
        time.sleep(AWAITED_EVERY_SECONDS)
        seconds += AWAITED_EVERY_SECONDS
    return not relay.received


def _what_to_end(job: Job) -> str:
    """Return a note on the process that trains the job, and how to end it if it hangs."""
    mark = str(summary_of(job.folder).get("process", "")) if state_of(job.folder) == "running" else ""
    number = mark.partition(" ")[2].partition(" ")[0]
    how = "" if not number else f": kill -9 {number}" if is_of_this_machine(mark) else " there"
    return (
        f"note   job {job.number} is still trained by {whose(mark)}, in {job.folder}; this start keeps waiting. "
        f"If that process hangs or does not stop, end it{how}"
    )


STOPPED = {exit_code(number) for number in STOPPING}
"""Exit codes of a job that was asked to save and stop."""


@dataclass(frozen=True)
class SearchPhase:
    """A phase of a search, which may stop jobs on purpose: at a rung, to resume later, or for good.

    Functions: `stopped` returns the reason if the search has stopped a job, else None. If the length of the search is
    known, `step_of` returns the steps that a job has made, and `steps_left` the remaining steps of all jobs.
    """

    stopped: Callable[[Job], str | None]
    step_of: Callable[[Job], int] | None = None
    steps_left: Callable[[], int] | None = None


class Progress:
    """Printer of a line as each job starts and ends; `outcomes`: those of ended jobs, in the order of their ends.

    A line names a job by its number (from 0, as its folder), followed by the count of started or ended jobs.
    """

    def __init__(self, jobs: int, *, queued: bool = False, phase: SearchPhase | None = None):
        """`jobs`: their number. `queued`: jobs are submitted to a queue. `phase`: the phase of a search, if any."""
        self.jobs = jobs
        self.queued = queued
        self.phase = phase
        self._from: dict[int, int] = {}  # job number -> steps made before this start
        self._steps = 0  # made by the jobs that have ended
        self._began = time.monotonic()
        self.outcomes: list[Outcome] = []
        self._started = 0
        self._running: dict[int, float] = {}  # job number -> when it started
        self._side_by_side = 1

    def starting(self, job: Job) -> None:
        """Report that `job` starts."""
        self._started += 1
        self._running[job.number] = time.monotonic()
        self._side_by_side = max(self._side_by_side, len(self._running))
        if self.phase and self.phase.step_of:
            self._from[job.number] = self.phase.step_of(job)
        how = "queued" if self.queued else "starts"
        print(f"job    {job.name}: {how}, {self._started} of {self.jobs} so far", flush=True)

    def left_alone(self, job: Job) -> None:
        """Report that `job` is skipped, because it runs in a process of another start, and do not count it."""
        if self._running.pop(job.number, None) is not None:
            self._started -= 1
            self._from.pop(job.number, None)
        self.jobs -= 1
        print(f"job    {job.name}: runs in a process that another start left behind, skipped", flush=True)

    def ended(self, outcome: Outcome, *, stopping: bool = False) -> None:
        """Record the outcome of a job; print it with the estimated remaining time.

        `stopping`: a signal has stopped the sweep, so that no time remains.
        """
        self.outcomes.append(outcome)
        self._running.pop(outcome.job.number, None)
        if self.phase and self.phase.step_of:
            self._steps += self.phase.step_of(outcome.job) - self._from[outcome.job.number]
        how = "finished" if outcome.code == 0 else f"exit code {outcome.code}"
        if outcome.code and state_of(outcome.job.folder) == "diverged":
            how = "diverged"
        elif outcome.code in STOPPED and self.phase and (stopped := self.phase.stopped(outcome.job)):
            how = stopped
        elif stopping and outcome.code in STOPPED:
            how = "stopped"
        rest = "" if stopping else self._rest(len(self.outcomes))
        print(f"job    {outcome.job.name}: {how} after {duration(outcome.seconds)}{rest}", flush=True)

    def _rest(self, done: int) -> str:
        """Return the remaining work as text."""
        if self.phase and self.phase.steps_left:
            steps = self.phase.steps_left()
            if not steps or self._steps <= 0:
                return ""
            seconds = sum(outcome.seconds for outcome in self.outcomes) / self._steps * steps / self._side_by_side
            return f" | {done} of {self.jobs} ended, at most about {duration(seconds)} left of the search"
        return (
            f" | {done} of {self.jobs} ended, about {duration(self._seconds_left())} left" if done < self.jobs else ""
        )

    def _seconds_left(self) -> float:
        """Return the remaining time, from the mean time of a job and the number of parallel jobs so far."""
        if self.queued:
            return (time.monotonic() - self._began) / len(self.outcomes) * (self.jobs - len(self.outcomes))
        each = sum(outcome.seconds for outcome in self.outcomes) / len(self.outcomes)
        now = time.monotonic()
        under_way = sum(min(each, now - began) for began in self._running.values())
        return (each * (self.jobs - len(self.outcomes)) - under_way) / self._side_by_side


def duration(seconds: float) -> str:
    """Return a duration as text: "12s", "3m05s" or "2h40m"."""
    minutes, rest = divmod(round(seconds), 60)
    if minutes >= 60:
        return f"{minutes // 60}h{minutes % 60:02d}m"
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"
