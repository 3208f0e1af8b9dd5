"""Heartbeats of every rank, so that a run that waits in vain can name the rank it waits for.

`ranks/RANK.json` in the run's folder contains the process, its last step, the stack of its main thread, and its current
or last collective. A thread writes the file while the rank waits in a collective; it stops when the process is stopped
or killed or the machine fails. A rank that has started no collective for half of the timeout also writes
`ranks/gloo_RANK`: its last collectives and the stacks of all threads.
"""

import contextlib
import json
import linecache
import re
import shutil
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from lightning_llm.tracking.files import replace_file, summary_of
from lightning_llm.tracking.provenance import has_ended, is_of_this_machine, process_mark, send_signal
from lightning_llm.tracking.run_state import HEARTBEAT_SECONDS, whose

FOLDER = "ranks"
NAMED_RANKS = 8
"""Maximum number of ranks named in an error."""
STACK_LINES = 40
Collective = Mapping[str, Any]
"""Facts about one collective, from `parallel.process_group`."""


class RankSilentError(Exception):
    """A collective failed because a rank wrote no heartbeat, or did not join the collective."""


def last_collective(kept: Sequence[Collective]) -> Collective | None:
    """Return the oldest collective that the rank waits in, else the last one that it completed; None without any."""
    return next((each for each in kept if not each["ended"]), kept[-1] if kept else None)


def collective_line(collective: Collective) -> str:
    """Return the name and number of a collective as text; numbers are the same on all ranks of a group."""
    name, number, group = (collective[key] for key in ("profiling_name", "collective_seq_id", "group"))
    return f"{name} {number} of group {group}"


class RankHeartbeat:
    """Thread that writes this rank's file every `interval_seconds` between `start` and `stop`.

    `collectives` returns the last collectives of this rank, the oldest first; by default none.
    """

    def __init__(
        self,
        run_dir: Path,
        rank: int,
        timeout_seconds: float,
        step: Callable[[], int],
        collectives: Callable[[], Sequence[Collective]] = tuple,
    ):
        self.file = run_dir / FOLDER / f"{rank}.json"
        self.dump = run_dir / FOLDER / f"gloo_{rank}"
        self.timeout_seconds = timeout_seconds
        self._collectives = collectives
        self.interval_seconds = min(HEARTBEAT_SECONDS, timeout_seconds / 5)
        self._about = {"rank": rank, "process": process_mark()}
        self._step = step
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="rank heartbeat", daemon=True)

    def start(self) -> None:
        """Write the first file and start the thread."""
        self._write()
        self._thread.start()

    def stop(self) -> None:
        """Stop and delete the file, since no rank will wait for this one."""
        self._stopped.set()
        self._thread.join()  # it may be about to write once more
        self.file.unlink(missing_ok=True)
        self.dump.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # not empty: files of other ranks
            self.file.parent.rmdir()

    def _beat(self) -> None:
        while not self._stopped.wait(self.interval_seconds):
            with contextlib.suppress(OSError):  # unreachable storage does not end the run
                self._write()

    def _write(self) -> None:
        self.file.parent.mkdir(exist_ok=True)
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        kept = self._collectives()
        last = last_collective(kept)
        about = {
            **self._about,
            "step": self._step(),
            "at": _own_line(frame),
            "stack": _stack(frame),
            "waits": _is_waiting(frame) or (last is not None and not last["ended"]),
            "collective": last,
        }
        replace_file(self.file, json.dumps(about).encode())
        if kept and kept[-1]["age_seconds"] > self.timeout_seconds / 2:
            threads = {each.name: _stack(sys._current_frames().get(each.ident or 0)) for each in threading.enumerate()}
            replace_file(self.dump, json.dumps({**about, "threads": threads, "collectives": kept}, indent=1).encode())


def _own_line(frame: FrameType | None) -> str:
    """Return the innermost line outside of torch and Lightning, as "file.py:12 function"."""
    skipped = ("/torch/", "/lightning/", __file__)
    while frame is not None and any(part in frame.f_code.co_filename for part in skipped):
        frame = frame.f_back
    return "?" if frame is None else _line(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)


def _stack(frame: FrameType | None) -> list[str]:
    """Return the stack of a thread as lines, the innermost first."""
    lines = [(each.f_code, number) for each, number in traceback.walk_stack(frame)] if frame is not None else []
    return [_line(code.co_filename, number, code.co_name) for code, number in lines[:STACK_LINES]]


def _line(file: str, number: int, function: str) -> str:
    return f"{Path(file).name}:{number} {function}"


def _is_waiting(frame: FrameType | None) -> bool:
    """Return whether a thread is in torch.distributed or calls wait(), since messages of pipelines are not recorded."""
    if frame is None:
        return False
    file = frame.f_code.co_filename
    return "/torch/distributed/" in file or ".wait(" in linecache.getline(file, frame.f_lineno)


@dataclass(frozen=True)
class Beat:
    """Last heartbeat of a rank, `age_seconds` older than the newest of all ranks.

    `step`: number of its completed optimizer steps. `stack`: stack of its main thread, the innermost line first.
    `waits`: whether it was waiting for other ranks.
    """

    rank: int
    process: str
    step: int
    at: str
    age_seconds: float
    stack: Sequence[str] = ()
    waits: bool = False
    collective: Collective | None = None

    @property
    def is_stopped(self) -> bool:
        """True if the rank is a process of this machine that was stopped by SIGSTOP."""
        if not is_of_this_machine(self.process) or has_ended(self.process):
            return False
        try:
            return bool(psutil.Process(self.number).status() == psutil.STATUS_STOPPED)
        except psutil.NoSuchProcess:
            return False

    @property
    def number(self) -> int:
        """Process id of the rank on its machine."""
        return int(self.process.split()[1])

    def end_if_stopped(self) -> None:
        """Kill the process if it is stopped, since a launcher's SIGTERM does not reach it and its run has ended."""
        if self.is_stopped:
            with contextlib.suppress(psutil.Error):
                psutil.Process(self.number).kill()

    def __str__(self) -> str:
        state = ", which is stopped" if self.is_stopped else ""
        return (
            f"rank {self.rank} ({whose(self.process)}{state}) has given no sign of life for {self.age_seconds:.0f} s; "
            f"its last heartbeat is from step {self.step + 1}, at {self.at}{self._last_collective()}"
        )

    @property
    def idle_seconds(self) -> float:
        """Seconds in which the rank has neither started a collective nor waited in one; 0 if unknown."""
        if self.waits or self.collective is None or not self.collective["ended"]:
            return 0.0
        return float(self.collective["age_seconds"]) + self.age_seconds

    def absence(self) -> str:
        """Return a text about this rank, which lives but did not join the collective of the others."""
        return (
            f"rank {self.rank} ({whose(self.process)}) has not joined the collective of the other ranks: it has "
            f"started no collective for {self.idle_seconds:.0f} s and is in step {self.step + 1}, at {self.at}"
            f"{self._last_collective()}"
        )

    def _last_collective(self) -> str:
        if self.collective is None:
            return ""
        state = "last in" if self.collective["ended"] else "waiting in"
        return f", {state} {collective_line(self.collective)}"


def clear_beats(run_dir: Path) -> None:
    """Delete the heartbeats that a previous session left in the run's folder."""
    shutil.rmtree(run_dir / FOLDER, ignore_errors=True)


def beats(run_dir: Path) -> list[Beat]:
    """Return the last heartbeats of all ranks, oldest first. Ages are by the storage's clock only."""
    found = []
    for file in (run_dir / FOLDER).glob("*.json"):
        with contextlib.suppress(OSError, ValueError):
            found.append((file.stat().st_mtime, json.loads(file.read_text())))
    last = max((seen for seen, _ in found), default=0.0)
    made = [Beat(**about, age_seconds=last - seen) for seen, about in found]
    return sorted(made, key=lambda each: -each.age_seconds)


def signal_ranks(run_dir: Path, number: int) -> bool:
    """Send the signal `number` to the processes here that train in `run_dir`; return whether there are any."""
    sent = [send_signal(each.process, number) for each in beats(run_dir)]  # those of a previous session have ended
    return any(sent) or send_signal(str(summary_of(run_dir).get("process", "")), number)


def silent_ranks(run_dir: Path, timeout_seconds: float) -> list[Beat]:
    """Return the ranks without a heartbeat for more than half of the timeout."""
    return [each for each in beats(run_dir) if each.age_seconds > timeout_seconds / 2]


def absent_ranks(run_dir: Path, timeout_seconds: float) -> list[Beat]:
    """Return the live ranks that have started no collective for more than half of the timeout.

    Ranks of a pipeline that wait for a message do not count: their main thread is in torch.distributed.
    """
    return [each for each in beats(run_dir) if each.idle_seconds > timeout_seconds / 2]


def silent_text(silent: list[Beat], timeout_seconds: float, waited_in: Collective | None = None) -> str:
    """Return the error text about `silent` ranks; `waited_in`: collective in which the others waited, if known."""
    return _error_text(list(map(str, silent)), timeout_seconds, waited_in)


def absent_text(absent: list[Beat], timeout_seconds: float, waited_in: Collective | None = None) -> str:
    """Return the error text about live ranks that have not joined the collective `waited_in`."""
    return _error_text([each.absence() for each in absent], timeout_seconds, waited_in)


def _error_text(named: list[str], timeout_seconds: float, waited_in: Collective | None) -> str:
    more = f"; and {len(named) - NAMED_RANKS} more" if len(named) > NAMED_RANKS else ""
    where = "" if waited_in is None else f" in {collective_line(waited_in)}"
    listed = "; ".join(named[:NAMED_RANKS])
    return f"{listed}{more}. The other ranks waited{where} (parallel.timeout_seconds={timeout_seconds:g})"


def is_silent_text(detail: str) -> bool:
    """Return whether `detail`, why a run ended, was written by `silent_text` or `absent_text`."""
    pattern = r"rank \d+ \(.* has (given no sign of life for|not joined the collective of the other ranks:) "
    return re.match(pattern, detail) is not None
