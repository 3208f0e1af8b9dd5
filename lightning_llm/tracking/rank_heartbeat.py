"""A sign of life of every rank, so that a run which waits in vain can name the rank that it waits for.

`ranks/RANK.json` in the run's folder: process, last step, the lines that its main thread is at, and the collective that
it is in, or was in last. A thread writes it: it goes on while the rank waits in a collective, and ends when the process
is stopped, killed or its machine gone. A rank that has begun no collective for half of the time that others would wait
also writes `ranks/gloo_RANK`: its last collectives, and what all of its threads are at.
"""

import contextlib
import json
import linecache
import os
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

from lightning_llm.tracking.liveness import HEARTBEAT_SECONDS
from lightning_llm.tracking.provenance import process_mark
from lightning_llm.tracking.rank_liveness import FOLDER, Collective, last_collective

STACK_LINES = 40


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
        _replace(self.file, json.dumps(about))
        if kept and kept[-1]["age_seconds"] > self.timeout_seconds / 2:
            threads = {each.name: _stack(sys._current_frames().get(each.ident or 0)) for each in threading.enumerate()}
            _replace(self.dump, json.dumps({**about, "threads": threads, "collectives": kept}, indent=1))


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


def _replace(file: Path, text: str) -> None:
    partial = file.with_name(f"{file.name}.partial")
    partial.write_text(text)
    os.replace(partial, file)
