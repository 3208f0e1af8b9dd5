"""Liveness of the process that trains in a run's folder, for any machine that sees the folder."""

import contextlib
import os
import threading
import time
from pathlib import Path

from lightning_llm.record.provenance import has_ended, is_of_this_machine

HEARTBEAT_SECONDS = 30.0
"""How often a running run touches its `summary.json`."""

SILENT_SECONDS = 180.0
"""How long nothing may be heard of a run on another machine. Network storage shows a change up to 60 s late."""


class Heartbeat:
    """Touches `summary.json` in `folder` every `HEARTBEAT_SECONDS` between `start` and `stop`.

    A thread and not the training loop: a validation, a checkpoint or a compilation may take longer than the limit.
    """

    def __init__(self, folder: Path):
        self.file = folder / "summary.json"
        self._stopped = threading.Event()

    def start(self) -> None:
        """Begin. The thread ends with its process, however that ends."""
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def stop(self) -> None:
        """End; one touch may still be under way."""
        self._stopped.set()

    def _beat(self) -> None:
        while not self._stopped.wait(HEARTBEAT_SECONDS):
            with contextlib.suppress(OSError):  # storage that is away for a while does not end the run
                os.utime(self.file)


def last_sign(folder: Path) -> float:
    """Return when the run in `folder` was last heard of, in seconds since the epoch: a heartbeat, or a record."""
    files = [folder / name for name in ("summary.json", "metrics.jsonl")]
    return max((file.stat().st_mtime for file in files if file.exists()), default=0.0)


def has_died(folder: Path, fingerprint: str) -> bool:
    """Return whether the process of `fingerprint`, which trains in `folder`, is gone.

    On this machine its number says so. On another its silence does, as it does where there is no fingerprint.
    """
    return has_ended(fingerprint) or (
        not is_of_this_machine(fingerprint) and time.time() - last_sign(folder) > SILENT_SECONDS
    )


def await_sign(folder: Path, fingerprint: str) -> bool:
    """Return whether the process of `fingerprint` lives; for one of another machine wait for its next sign, or its silence."""
    if has_died(folder, fingerprint):
        return False
    if is_of_this_machine(fingerprint):
        return True
    heard = last_sign(folder)
    left = heard + SILENT_SECONDS - time.time()
    print(
        f"note   {folder} was being trained by {whose(fingerprint)}: waiting for a sign of it, {left:.0f} s at most",
        flush=True,
    )
    while not has_died(folder, fingerprint):
        if last_sign(folder) > heard:
            return True
        time.sleep(0.5)
    return False


def whose(fingerprint: str) -> str:
    """Return the process of `fingerprint` in words."""
    host, _, rest = fingerprint.partition(" ")
    number = rest.partition(" ")[0]
    where = "this machine" if is_of_this_machine(fingerprint) else f"the machine {host}"
    return f"process {number} of {where}" if number else "an unnamed process"
