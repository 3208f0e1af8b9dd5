"""What has become of a sweep's jobs, read from their folders. Imports no torch."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from filelock import FileLock, Timeout

from lightning_llm.callbacks.provenance import has_ended
from lightning_llm.callbacks.records import summary_of
from lightning_llm.sweep.definition import Job

State = Literal["new", "finished", "failed", "stopped", "running"]


@dataclass(frozen=True)
class Outcome:
    """How a job came out, `code` as its process left it; `seconds` of this start alone."""

    job: Job
    code: int
    seconds: float


def state_of(folder: Path) -> State:
    """Return what `summary.json` in `folder` says; a run whose process is gone is "stopped", whatever it says."""
    summary = summary_of(folder)
    if not summary:
        return "new"
    if summary["status"] == "running" and has_ended(summary.get("process", "")):
        return "stopped"
    return summary["status"]


def detail_of(folder: Path) -> str:
    """Return the last line of why the run ended, "" where nothing says so."""
    lines = str(summary_of(folder).get("detail", "")).splitlines()
    return lines[-1] if lines else ""


@contextmanager
def claimed(job: Job) -> Iterator[bool]:
    """Yield whether this process may run `job`: False while another one does. A claim ends with its process."""
    locks = job.folder.parent / ".claims"
    locks.mkdir(parents=True, exist_ok=True)
    lock = FileLock(locks / str(job.number))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        yield False
        return
    try:
        yield True
    finally:
        lock.release()
