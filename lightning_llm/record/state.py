"""What has become of a sweep's jobs, read from their folders. Imports no torch."""

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from filelock import FileLock, Timeout

from lightning_llm.errors import ConfigError, Problem
from lightning_llm.record.files import ended_not_finite, summary_of
from lightning_llm.record.liveness import await_sign, has_died
from lightning_llm.record.reading import read_run
from lightning_llm.record.sweep_definition import CLAIMS, Job

State = Literal["new", "finished", "diverged", "failed", "stopped", "running"]
SETTLED: tuple[State, State] = ("finished", "diverged")
"""Nothing is left to do: a run that diverged would do so again."""
JOB_VARIABLE = "LIGHTNING_LLM_SWEEP_JOB"
"""Set for a job that speaks on the terminal of its sweep."""
OTHER_FILES = 64
"""What a process has open beside the claims it holds, with room to spare."""


def is_among_jobs() -> bool:
    """Return whether the sweep says on this terminal what holds for all its jobs, so that one says its own alone."""
    return JOB_VARIABLE in os.environ


@dataclass(frozen=True)
class Outcome:
    """How a job came out, `code` as its process left it; `seconds` of this start alone."""

    job: Job
    code: int
    seconds: float


def state_of(folder: Path) -> State:
    """Return what `summary.json` in `folder` says; a run whose process is gone is "stopped", whatever it says.

    So is one whose summary is damaged: it did begin, and nothing says that it came to an end.
    """
    try:
        summary = summary_of(folder)
    except ValueError:
        return "stopped"
    if not summary:
        return "new"
    if summary.get("status") == "running" and not has_died(folder, summary.get("process", "")):
        return "running"
    if _diverged(folder, summary):
        return "diverged"
    return summary["status"] if summary.get("status") in ("finished", "failed") else "stopped"


def _diverged(folder: Path, summary: dict[str, Any]) -> bool:
    """Return whether the run lost its loss, as `compare` sees it: not finite, or ended by spikes.policy over it."""
    if ended_not_finite(summary):
        return True
    if summary.get("status") != "failed" or not str(summary.get("detail", "")).startswith("SpikeStop"):
        return False
    try:
        return read_run(folder).lost_its_loss
    except ConfigError:  # its records are damaged: `compare` says so
        return False


def settled_state(folder: Path) -> State:
    """Return `state_of`, "running" only on a sign of life: one from another machine is waited for, for minutes."""
    state = state_of(folder)
    if state == "running" and not await_sign(folder, summary_of(folder).get("process", "")):
        return state_of(folder)
    return state


def detail_of(folder: Path) -> str:
    """Return the last line of why the run ended, "" where nothing says so; or that its summary is damaged."""
    try:
        lines = str(summary_of(folder).get("detail", "")).splitlines()
    except ValueError as error:
        return str(error)
    return lines[-1] if lines else ""


def mlflow_facts(folder: Path) -> dict[str, Any]:
    """Return what the run's summary says of MLflow, {} where it says nothing or is damaged."""
    try:
        return dict(summary_of(folder).get("mlflow") or {})
    except ValueError:
        return {}


@contextmanager
def one_at_a_time(sweep: Path) -> Iterator[None]:
    """Hold the folder of a sweep while its definition and its parent run are written."""
    with FileLock(_locks(sweep) / "sweep"):
        yield


def _locks(sweep: Path) -> Path:
    folder = sweep / CLAIMS
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def allow_open_files(claims: int) -> None:
    """Let this process hold as many claims, each an open file, as there are jobs: the usual limit is 1,024 files.

    Raises:
        ConfigError: the machine does not allow as many.
    """
    wanted = claims + OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    if hard != resource.RLIM_INFINITY and hard < wanted:
        text = f"{claims} jobs at a time need {wanted} open files, and this machine allows {hard} (ulimit -Hn)."
        raise ConfigError(Problem("launcher", f"{text} Split the sweep, or raise the limit."))
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


@contextmanager
def claimed(job: Job) -> Iterator[bool]:
    """Yield whether this process may run `job`: False while another one does. A claim ends with its process."""
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
