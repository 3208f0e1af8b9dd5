"""Locks on the jobs of a sweep, which one process at a time runs, and how a job ended."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
from filelock import FileLock, Timeout

from lightning_llm.base.errors import ConfigError, Problem
from lightning_llm.tracking.sweep_definition import Job
from lightning_llm.tracking.sweep_file import LOCKS

OTHER_FILES = 64
"""What a process may still open beside the locks that it is to hold."""


@dataclass(frozen=True)
class Outcome:
    """How a job came out, `code` as its process left it; `seconds` of this start alone."""

    job: Job
    code: int
    seconds: float


@contextmanager
def one_at_a_time(sweep: Path) -> Iterator[None]:
    """Hold the folder of a sweep while its definition and its parent run are written."""
    with FileLock(_locks(sweep) / "sweep"):
        yield


def _locks(sweep: Path) -> Path:
    folder = sweep / LOCKS
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def allow_open_files(locks: int) -> None:
    """Let this process hold as many locks, each an open file, as there are jobs: the usual limit is 1,024 files.

    Raises:
        ConfigError: the machine does not allow as many.
    """
    wanted = locks + psutil.Process().num_fds() + OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    if hard != resource.RLIM_INFINITY and hard < wanted:
        text = f"{locks} jobs at a time need {wanted} open files, and this machine allows {hard} (ulimit -Hn)."
        raise ConfigError(Problem("launcher", f"{text} Split the sweep, or raise the limit."))
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


@contextmanager
def locked(job: Job) -> Iterator[bool]:
    """Yield whether this process may run `job`: False while another one does. A lock ends with its process."""
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
