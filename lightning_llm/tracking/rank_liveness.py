"""Signs of life of every rank, so that a run which waits in vain can name the rank it waits for.

`ranks/RANK.json` in the run's folder: process, last step, the stack of its main thread, and its current or last
collective. A thread writes the file: it continues while the rank waits in a collective, and ends when the process is
stopped, killed or its machine gone. A rank that has begun no collective for half of the timeout also writes
`ranks/gloo_RANK`: its last collectives, and the stacks of all its threads.
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
from lightning_llm.tracking.liveness import HEARTBEAT_SECONDS, whose
from lightning_llm.tracking.provenance import has_ended, is_of_this_machine, process_mark, send_signal

FOLDER = "ranks"
NAMED_RANKS = 8
"""How many ranks an error names, of thousands."""
STACK_LINES = 40
Collective = Mapping[str, Any]
"""What `parallel.process_group` tells of one."""


class RankSilentError(Exception):
    """A collective failed, and a rank that it needed has given no sign of life for long."""


def last_collective(kept: Sequence[Collective]) -> Collective | None:
    """Return the one that a rank waits in, the oldest of several, or else the last that it has ended."""
    return next((each for each in kept if not each["ended"]), kept[-1] if kept else None)


def collective_line(collective: Collective) -> str:
    """Return which one it is, for a reader: ranks of a group number theirs alike."""
    name, number, group = (collective[key] for key in ("profiling_name", "collective_seq_id", "group"))
    return f"{name} {number} of group {group}"


class RankHeartbeat:
    """Writes this rank's file every `interval_seconds`, between `start` and `stop`.

    `collectives` gives the last ones of this rank, the oldest first; none where nobody keeps them.
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
        """Begin; the first file is there on return."""
        self._write()
        self._thread.start()

    def stop(self) -> None:
        """End, and leave no file: nobody is going to wait for this rank."""
        self._stopped.set()
        self._thread.join()  # which may be about to write one more
        self.file.unlink(missing_ok=True)
        self.dump.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # others have theirs
            self.file.parent.rmdir()

    def _beat(self) -> None:
        while not self._stopped.wait(self.interval_seconds):
            with contextlib.suppress(OSError):  # storage that is away for a while does not end the run
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
    """Return the innermost line that is not torch's or Lightning's, as "file.py:12 function"."""
    passed_over = ("/torch/", "/lightning/", __file__)
    while frame is not None and any(part in frame.f_code.co_filename for part in passed_over):
        frame = frame.f_back
    return "?" if frame is None else _line(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)


def _stack(frame: FrameType | None) -> list[str]:
    """Return the lines of a thread, the innermost first."""
    lines = [(each.f_code, number) for each, number in traceback.walk_stack(frame)] if frame is not None else []
    return [_line(code.co_filename, number, code.co_name) for code, number in lines[:STACK_LINES]]


def _line(file: str, number: int, function: str) -> str:
    return f"{Path(file).name}:{number} {function}"


def _is_waiting(frame: FrameType | None) -> bool:
    """Return whether a thread is in torch.distributed, or at a line that waits: a pipeline's messages are not kept."""
    if frame is None:
        return False
    file = frame.f_code.co_filename
    return "/torch/distributed/" in file or ".wait(" in linecache.getline(file, frame.f_lineno)


@dataclass(frozen=True)
class Beat:
    """What a rank last said, `age_seconds` before the last that any rank did. `step`: optimizer steps it had made.

    `stack`: what its main thread was at, the innermost line first; `waits`: it was waiting for others there.
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
            f"it was last heard of in step {self.step + 1}, at {self.at}{self._last_collective()}"
        )

    @property
    def idle_seconds(self) -> float:
        """How long it has begun no collective, and waited in none; 0 where that is not known."""
        if self.waits or self.collective is None or not self.collective["ended"]:
            return 0.0
        return float(self.collective["age_seconds"]) + self.age_seconds

    def absence(self) -> str:
        """Return what is known of a rank that lives, and has not come to what others wait in."""
        return (
            f"rank {self.rank} ({whose(self.process)}) has not come to what the others wait in: it has begun no "
            f"collective for {self.idle_seconds:.0f} s, and is in step {self.step + 1}, at {self.at}"
            f"{self._last_collective()}"
        )

    def _last_collective(self) -> str:
        if self.collective is None:
            return ""
        state = "last in" if self.collective["ended"] else "waiting in"
        return f", {state} {collective_line(self.collective)}"


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


def signal_ranks(run_dir: Path, number: int) -> bool:
    """Send a signal to those processes of this machine that train in `run_dir`; return whether there are any."""
    sent = [send_signal(each.process, number) for each in beats(run_dir)]  # an earlier start's have ended
    return any(sent) or send_signal(str(summary_of(run_dir).get("process", "")), number)


def silent_ranks(run_dir: Path, timeout_seconds: float) -> list[Beat]:
    """Return the ranks that have been silent for more than half of what the others wait."""
    return [each for each in beats(run_dir) if each.age_seconds > timeout_seconds / 2]


def absent_ranks(run_dir: Path, timeout_seconds: float) -> list[Beat]:
    """Return the ranks that live, and for more than half of what the others wait have come to no collective.

    Those of a pipeline that wait for a message of another's are none: their main thread is in torch.distributed.
    """
    return [each for each in beats(run_dir) if each.idle_seconds > timeout_seconds / 2]


def silent_text(silent: list[Beat], timeout_seconds: float, waited_in: Collective | None = None) -> str:
    """Return the error that names `silent`; the others waited for them in `waited_in`, if that is known."""
    return _say(list(map(str, silent)), timeout_seconds, waited_in)


def absent_text(absent: list[Beat], timeout_seconds: float, waited_in: Collective | None = None) -> str:
    """Return the error that names ranks that live, and have not come to `waited_in`."""
    return _say([each.absence() for each in absent], timeout_seconds, waited_in)


def _say(named: list[str], timeout_seconds: float, waited_in: Collective | None) -> str:
    more = f"; and {len(named) - NAMED_RANKS} more" if len(named) > NAMED_RANKS else ""
    where = "" if waited_in is None else f" in {collective_line(waited_in)}"
    listed = "; ".join(named[:NAMED_RANKS])
    return f"{listed}{more}. The others waited for it{where} (parallel.timeout_seconds={timeout_seconds:g})"


def is_silent_text(detail: str) -> bool:
    """Return whether `detail`, of a run's summary, is what `silent_text` or `absent_text` returned."""
    said = r"rank \d+ \(.* has (given no sign of life for|not come to what the others wait in:) "
    return re.match(said, detail) is not None
