"""A sign of life of every rank, so that a run which waits in vain can name the rank that it waits for.

`ranks/RANK.json` in the run's folder: process, last step, and the line that its main thread is at. A thread writes it:
it goes on while the rank waits in a collective, and ends when the process is stopped, killed or its machine gone.
"""

import contextlib
import json
import os
import re
import shutil
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from lightning_llm.record.liveness import HEARTBEAT_SECONDS, whose
from lightning_llm.record.provenance import has_ended, is_of_this_machine, process_mark

FOLDER = "ranks"
NAMED_RANKS = 8
"""How many ranks an error names, of thousands."""


class RankSilentError(Exception):
    """A collective failed, and a rank that it needed has given no sign of life for long."""


@dataclass(frozen=True)
class Beat:
    """What a rank last said, `age_seconds` before the last that any rank did. `step`: optimizer steps it had made."""

    rank: int
    process: str
    step: int
    at: str
    age_seconds: float

    @property
    def is_stopped(self) -> bool:
        """Whether it is a process of this machine that SIGSTOP holds."""
        if not is_of_this_machine(self.process) or has_ended(self.process):
            return False
        try:
            return bool(psutil.Process(self.number).status() == psutil.STATUS_STOPPED)
        except psutil.NoSuchProcess:
            return False

    @property
    def number(self) -> int:
        """The process' number on its machine."""
        return int(self.process.split()[1])

    def end_if_stopped(self) -> None:
        """Kill the process if it is stopped: a launcher's SIGTERM does not reach it, and its run is over."""
        if self.is_stopped:
            with contextlib.suppress(psutil.Error):
                psutil.Process(self.number).kill()

    def __str__(self) -> str:
        state = ", which is stopped" if self.is_stopped else ""
        return (
            f"rank {self.rank} ({whose(self.process)}{state}) has given no sign of life for {self.age_seconds:.0f} s; "
            f"it was last heard of in step {self.step + 1}, at {self.at}"
        )


class RankHeartbeat:
    """Writes this rank's file every `interval_seconds`, between `start` and `stop`."""

    def __init__(self, run_dir: Path, rank: int, timeout_seconds: float, step: Callable[[], int]):
        self.file = run_dir / FOLDER / f"{rank}.json"
        self.interval_seconds = min(HEARTBEAT_SECONDS, timeout_seconds / 5)
        self._about = {"rank": rank, "process": process_mark()}
        self._step = step
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="rank heartbeat", daemon=True)

    def start(self) -> None:
        """Begin; the first file is there on return."""
        self._write()
        self._thread.start()

    def stop(self) -> None:
        """End, and leave no file: nobody is going to wait for this rank."""
        self._stopped.set()
        self._thread.join()  # which may be about to write one more
        self.file.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # others have theirs
            self.file.parent.rmdir()

    def _beat(self) -> None:
        while not self._stopped.wait(self.interval_seconds):
            with contextlib.suppress(OSError):  # storage that is away for a while does not end the run
                self._write()

    def _write(self) -> None:
        self.file.parent.mkdir(exist_ok=True)
        partial = self.file.with_suffix(".partial")
        partial.write_text(json.dumps({**self._about, "step": self._step(), "at": _line_of_main_thread()}))
        os.replace(partial, self.file)


def clear_beats(run_dir: Path) -> None:
    """Remove what ranks of an earlier start have left."""
    shutil.rmtree(run_dir / FOLDER, ignore_errors=True)


def beats(run_dir: Path) -> list[Beat]:
    """Return the last signs of all ranks, oldest first. Ages are by the storage's clock, so that no two clocks meet."""
    found = []
    for file in (run_dir / FOLDER).glob("*.json"):
        with contextlib.suppress(OSError, ValueError):
            found.append((file.stat().st_mtime, json.loads(file.read_text())))
    last = max((seen for seen, _ in found), default=0.0)
    made = [Beat(**about, age_seconds=last - seen) for seen, about in found]
    return sorted(made, key=lambda each: -each.age_seconds)


def silent_ranks(run_dir: Path, timeout_seconds: float) -> list[Beat]:
    """Return the ranks that have been silent for more than half of what the others wait."""
    return [each for each in beats(run_dir) if each.age_seconds > timeout_seconds / 2]


def say_silent(silent: list[Beat], timeout_seconds: float) -> str:
    """Return the error that names `silent`."""
    more = f"; and {len(silent) - NAMED_RANKS} more" if len(silent) > NAMED_RANKS else ""
    named = "; ".join(map(str, silent[:NAMED_RANKS]))
    return f"{named}{more}. The others waited for it (parallel.timeout_seconds={timeout_seconds:g})"


def says_silent(detail: str) -> bool:
    """Return whether `detail`, of a run's summary, is what `say_silent` returned."""
    return re.match(r"rank \d+ \(.* has given no sign of life for ", detail) is not None


def _line_of_main_thread() -> str:
    """Return the innermost line that is not torch's or Lightning's, as "file.py:12 function"."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    passed_over = ("/torch/", "/lightning/", __file__)
    while frame is not None and any(part in frame.f_code.co_filename for part in passed_over):
        frame = frame.f_back
    if frame is None:
        return "?"
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}"
