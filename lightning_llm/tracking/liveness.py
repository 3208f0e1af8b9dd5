"""Liveness of the process that trains in a run's folder, visible on any machine that sees the folder.

The process holds the folder open, so that a rename is noticed, and touches `summary.json` every 30 s.
"""

import contextlib
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from lightning_llm.base.errors import StorageError
from lightning_llm.tracking.provenance import has_ended, is_of_this_machine

DELETED = " (deleted)"
"""What Linux adds to the path of an open folder that was deleted."""


class FolderGoneError(StorageError, OSError):
    """The folder of a run was renamed, replaced or deleted while it trained. `now`: its path, None if deleted."""

    def __init__(self, path: Path, now: Path | None):
        self.path, self.now = path, now
        what = "was deleted" if now is None else f"was moved to {now}"
        found = "and another folder lies there" if path.exists() else "and nothing lies there"
        super().__init__(f"{path} {what} during the run, {found}. Leave the folder of a run in place until it ends.")

    def __reduce__(self) -> tuple[type["FolderGoneError"], tuple[Path, Path | None]]:
        return type(self), (self.path, self.now)


class HeldFolder:
    """One folder, known by its inode from `open` to `close`; before and after, by its path."""

    def __init__(self, path: Path):
        self.path = Path(path)
        self._file: int | None = None

    def open(self) -> None:
        """Hold the folder that lies at the path now."""
        if self._file is None:
            self._file = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)

    def close(self) -> None:
        """Let go."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def now(self) -> Path | None:
        """Return where the folder is now, None if it was deleted."""
        if self._file is None:
            return self.path
        try:
            held = os.fstat(self._file)
        except OSError:  # a stale handle of network storage: another machine deleted it
            return None
        try:
            if os.path.samestat(held, os.stat(self.path)):
                return self.path
        except FileNotFoundError:
            pass
        except OSError:  # storage that is away for a while has moved nothing
            return self.path
        return self._found_elsewhere(held)

    def check(self) -> None:
        """Return if the folder still lies at its path.

        Raises:
            FolderGoneError: it does not.
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


HEARTBEAT_SECONDS = 30.0
"""How often a running run touches its `summary.json`."""

SILENT_SECONDS = 180.0
"""How long nothing may be heard of a run on another machine. Network storage shows a change up to 60 s late."""


class Heartbeat:
    """Touches `summary.json` in `folder` every `HEARTBEAT_SECONDS` between `start` and `stop`.

    A thread and not the training loop: a validation, a checkpoint or a compilation may take longer than the limit.
    """

    def __init__(self, folder: HeldFolder):
        self.folder = folder
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
                if (now := self.folder.now()) is not None:  # what lies at its old path may be another run's
                    os.utime(now / "summary.json")


def last_sign(folder: Path) -> float:
    """Return when the run in `folder` was last heard of, in seconds since the epoch: a heartbeat, or a record."""
    return max(_signs(folder), default=0.0)


def _signs(folder: Path) -> Sequence[float]:
    """Return when each file was written that a running run writes to; any change is a sign, whatever clock it is of."""
    files = [folder / name for name in ("summary.json", "metrics.jsonl")]
    return [file.stat().st_mtime for file in files if file.exists()]


def has_died(folder: Path, fingerprint: str) -> bool:
    """Return whether the process of `fingerprint`, which trains in `folder`, is gone.

    On this machine its process number tells. On another, or without a fingerprint, silence does: no sign for
    `SILENT_SECONDS` by the clock, or while this process has watched the folder. Clocks of two machines may differ by
    any amount, so a sign from the future proves nothing, and is waited for no longer than any other.
    """
    if has_ended(fingerprint) or is_of_this_machine(fingerprint):
        return has_ended(fingerprint)
    return time.time() - last_sign(folder) > SILENT_SECONDS or _watched_seconds(folder) > SILENT_SECONDS


_SEEN: dict[Path, tuple[Sequence[float], float]] = {}
"""{folder: (its signs, when this process first saw these, by its own monotonic clock)}."""


def _watched_seconds(folder: Path) -> float:
    """Return for how long this process has seen no new sign of the run in `folder`."""
    signs, now = _signs(folder), time.monotonic()
    seen, since = _SEEN.setdefault(folder, (signs, now))
    if signs != seen:
        _SEEN[folder] = signs, now
        return 0.0
    return now - since


def await_sign(folder: Path, fingerprint: str) -> bool:
    """Return whether the process of `fingerprint` lives; on another machine wait for its next sign, or its silence."""
    if has_died(folder, fingerprint):
        return False
    if is_of_this_machine(fingerprint):
        return True
    heard = _signs(folder)
    left = min(max(heard, default=0.0) + SILENT_SECONDS - time.time(), SILENT_SECONDS - _watched_seconds(folder))
    print(
        f"note   {folder} was being trained by {whose(fingerprint)}: waiting for a sign of it, {left:.0f} s at most",
        flush=True,
    )
    while not has_died(folder, fingerprint):
        if _signs(folder) != heard:
            return True
        time.sleep(0.5)
    return False


def whose(fingerprint: str) -> str:
    """Return the process of `fingerprint` in words."""
    host, _, rest = fingerprint.partition(" ")
    number = rest.partition(" ")[0]
    where = "this machine" if is_of_this_machine(fingerprint) else f"the machine {host}"
    return f"process {number} of {where}" if number else "an unnamed process"
