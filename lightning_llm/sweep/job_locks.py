"""Locks, so that one process at a time runs a job, and waiting for jobs that another start of the sweep runs.

A start is one `train -m` command. A start that was killed may leave jobs that are still training.
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
from lightning_llm.base.signals import Relay
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
