"""State of a run (finished, diverged, failed, stopped, running, new) from its folder, and its heartbeat. No torch.

A running run touches `summary.json` every `HEARTBEAT_SECONDS`, so that any machine that shares the folder can see
whether its training process is alive.
"""

import contextlib
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from lightning_llm.base.errors import ConfigError, StorageError
from lightning_llm.tracking.files import ended_not_finite, summary_of
from lightning_llm.tracking.provenance import has_ended, is_of_this_machine
from lightning_llm.tracking.reading import read_run

DELETED = " (deleted)"
"""Suffix that Linux adds to the path of an open folder that was deleted."""
HEARTBEAT_SECONDS = 30.0
"""Interval at which a running run touches its `summary.json`."""
SILENT_SECONDS = 180.0
"""Time without heartbeats after which a run on another machine counts as dead. Network storage may lag by 60 s."""
_SEEN: dict[Path, tuple[Sequence[float], float]] = {}
"""{folder: (modification times, time when this process first saw them, by its monotonic clock)}."""
State = Literal["new", "finished", "diverged", "failed", "stopped", "running"]
SETTLED: tuple[State, State] = ("finished", "diverged")
"""States in which nothing is left to do. A run that diverged would do so again."""
JOB_VARIABLE = "LIGHTNING_LLM_SWEEP_JOB"
"""Environment variable of a job that prints to the terminal of its sweep."""


def is_among_jobs() -> bool:
    """Return whether this process is a job of a sweep that prints to the sweep's terminal.

    Such a job does not repeat the lines that are common to all jobs.
    """
    return JOB_VARIABLE in os.environ


def state_of(folder: Path) -> State:
    """Return the state of the run in `folder`, from `summary.json` and the liveness of its process.

    A run is "stopped" if its process has ended without writing a status, or if its summary is damaged.
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
    """Return whether the run diverged, as in `compare`: not finite, or ended by spikes.policy because of it."""
    if ended_not_finite(summary):
        return True
    if summary.get("status") != "failed" or not str(summary.get("detail", "")).startswith("SpikeStop"):
        return False
    try:
        return read_run(folder).diverged
    except ConfigError:  # its records are damaged, which `compare` reports
        return False


def settled_state(folder: Path) -> State:
    """Return the state of the run in `folder` as `state_of`, but return "running" only after a heartbeat was seen.

    For a run on another machine this may take minutes.
    """
    state = state_of(folder)
    if state == "running" and not await_sign(folder, summary_of(folder).get("process", "")):
        return state_of(folder)
    return state


def detail_of(folder: Path) -> str:
    """Return why the run in `folder` ended, as one line; "" if unknown. It may be that its summary is damaged."""
    try:
        lines = str(summary_of(folder).get("detail", "")).splitlines()
    except ValueError as error:
        return str(error)
    return lines[-1] if lines else ""


def mlflow_facts(folder: Path) -> dict[str, Any]:
    """Return the entry "mlflow" of the run's summary (its run, experiment, problems); {} if missing or damaged."""
    try:
        return dict(summary_of(folder).get("mlflow") or {})
    except ValueError:
        return {}


class FolderGoneError(StorageError, OSError):
    """The run's folder was moved, replaced or deleted during training. `now`: its new path; None if deleted."""

    def __init__(self, path: Path, now: Path | None):
        self.path, self.now = path, now
        what = "was deleted" if now is None else f"was moved to {now}"
        found = " and another folder took its place" if path.exists() else ""
        super().__init__(f"{path} {what} during the run{found}. Do not move a run's folder before the run ends.")

    def __reduce__(self) -> tuple[type["FolderGoneError"], tuple[Path, Path | None]]:
        return type(self), (self.path, self.now)


class HeldFolder:
    """A folder that is kept open, so that it is found again after it was moved.

    Between `open` and `close` it is identified by its inode, otherwise by its path.
    """

    def __init__(self, path: Path):
        self.path = Path(path)
        self._file: int | None = None

    def open(self) -> None:
        """Open the folder at the path."""
        if self._file is None:
            self._file = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)

    def close(self) -> None:
        """Close the folder."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def now(self) -> Path | None:
        """Return the current path of the folder; None if it was deleted."""
        if self._file is None:
            return self.path
        try:
            held = os.fstat(self._file)
        except OSError:  # stale handle on network storage: deleted by another machine
            return None
        try:
            if os.path.samestat(held, os.stat(self.path)):
                return self.path
        except FileNotFoundError:
            pass
        except OSError:  # storage is unreachable for a while; nothing was moved
            return self.path
        return self._found_elsewhere(held)

    def check(self) -> None:
        """Check that the folder is still at its path.

        Raises:
            FolderGoneError: it was moved or deleted.
        """
        now = self.now()
        if now != self.path:
            raise FolderGoneError(self.path, now)

    def _found_elsewhere(self, held: os.stat_result) -> Path | None:
        try:
            path = os.readlink(f"/proc/self/fd/{self._file}")
            return Path(path) if os.path.samestat(held, os.stat(path)) else None
        except OSError:
            return None


class Heartbeat:
    """Thread that touches `summary.json` in `folder` every `HEARTBEAT_SECONDS` between `start` and `stop`.

    The training loop could not do it: a validation, a checkpoint or a compilation may take longer than the limit.
    """

    def __init__(self, folder: HeldFolder):
        self.folder = folder
        self._stopped = threading.Event()

    def start(self) -> None:
        """Start the thread. It ends with the process."""
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def stop(self) -> None:
        """Ask the thread to stop; one touch may still follow."""
        self._stopped.set()

    def _beat(self) -> None:
        while not self._stopped.wait(HEARTBEAT_SECONDS):
            with contextlib.suppress(OSError):  # unreachable storage does not end the run
                if (now := self.folder.now()) is not None:  # the old path may contain another run by now
                    os.utime(now / "summary.json")


def last_sign(folder: Path) -> float:
    """Return the time of the last heartbeat or record of the run in `folder`, in seconds since the epoch."""
    return max(_signs(folder), default=0.0)


def _signs(folder: Path) -> Sequence[float]:
    """Return the modification times of the files that a running run writes; any change is a sign of life."""
    files = [folder / name for name in ("summary.json", "metrics.jsonl")]
    return [file.stat().st_mtime for file in files if file.exists()]


def has_died(folder: Path, fingerprint: str) -> bool:
    """Return whether the process that trains in `folder` has ended.

    `fingerprint`: the process as its summary names it (`provenance.process_mark`), "" if unknown. On this machine the
    process id decides. On another machine, or if unknown, it counts as ended after `SILENT_SECONDS` without a
    heartbeat, by the clock or while this process has watched the folder. Clocks of machines may differ by any amount,
    so a time in the future does not extend the wait.
    """
    if has_ended(fingerprint) or is_of_this_machine(fingerprint):
        return has_ended(fingerprint)
    return time.time() - last_sign(folder) > SILENT_SECONDS or _watched_seconds(folder) > SILENT_SECONDS


def _watched_seconds(folder: Path) -> float:
    """Return the time in seconds for which this process has seen no heartbeat of the run in `folder`."""
    signs, now = _signs(folder), time.monotonic()
    seen, since = _SEEN.setdefault(folder, (signs, now))
    if signs != seen:
        _SEEN[folder] = signs, now
        return 0.0
    return now - since


def await_sign(folder: Path, fingerprint: str) -> bool:
    """Return whether the process of `fingerprint` is alive; for another machine, wait for a heartbeat or the limit."""
    if has_died(folder, fingerprint):
        return False
    if is_of_this_machine(fingerprint):
        return True
    heard = _signs(folder)
    left = min(max(heard, default=0.0) + SILENT_SECONDS - time.time(), SILENT_SECONDS - _watched_seconds(folder))
    print(
        f"note   {whose(fingerprint)} was training in {folder}: waiting up to {left:.0f} s for its heartbeat",
        flush=True,
    )
    while not has_died(folder, fingerprint):
        if _signs(folder) != heard:
            return True
        time.sleep(0.5)
    return False


def whose(fingerprint: str) -> str:
    """Return the process named by `fingerprint` as text: "process 12 of this machine"."""
    host, _, rest = fingerprint.partition(" ")
    number = rest.partition(" ")[0]
    where = "this machine" if is_of_this_machine(fingerprint) else f"the machine {host}"
    return f"process {number} of {where}" if number else "an unnamed process"
