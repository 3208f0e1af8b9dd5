"""The lock of a run's folder: one process at a time trains there. Imports no torch.

It is a lock of two parts. A file beside the folder, found by the resolved path, is there before the folder is. The
folder's own inode is locked, too, so that a second name of it (a bind mount) leads to the same lock.
"""

import fcntl
import os
import time
from pathlib import Path

from filelock import FileLock, Timeout

from lightning_llm.base.errors import ConfigError, Problem
from lightning_llm.tracking.sweep_file import LOCKS

LOOKED_AT_SECONDS = 1.0
"""In which those who look whether the lock is taken have let go again."""
LOOKED_EVERY_SECONDS = 0.05


class RunLock:
    """The lock of one run's folder, held from `acquire` until `release` or the end of this process."""

    def __init__(self, folder: Path):
        self.folder = Path(os.path.realpath(folder))
        self._file = FileLock(_lock_file(self.folder))
        self._inode: int | None = None

    @property
    def is_locked(self) -> bool:
        """Whether this process holds it."""
        return self._file.is_locked

    def acquire(self) -> None:
        """Take the lock; of a folder that is not there yet, `lock_inode` takes the second part.

        Raises:
            Timeout: another process holds it.
            OSError: it cannot be made.
        """
        self._file.acquire(timeout=LOOKED_AT_SECONDS)
        _HELD[self.folder] = self
        try:
            self.lock_inode()
        except BaseException:
            self.release()
            raise

    def lock_inode(self) -> None:
        """Lock the folder itself, where it exists and its file system can. Raises Timeout: another process did."""
        if self._inode is not None or not self.folder.is_dir():
            return
        self._inode = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
        until = time.monotonic() + LOOKED_AT_SECONDS
        while (taken := _flocked(self._inode, fcntl.LOCK_EX)) and time.monotonic() < until:
            time.sleep(LOOKED_EVERY_SECONDS)
        if taken:
            raise Timeout(str(self.folder))

    def release(self) -> None:
        """Let go of both parts."""
        _HELD.pop(self.folder, None)
        if self._inode is not None:
            os.close(self._inode)
            self._inode = None
        self._file.release()


_HELD: dict[Path, RunLock] = {}
"""The locks that this process holds, by resolved folder."""


def lock_made_folder(folder: Path) -> Problem | None:
    """Lock the inode of a folder that was made under a lock of this process; return what is wrong, None if nothing."""
    held = _HELD.get(Path(os.path.realpath(folder)))
    try:
        if held is not None:
            held.lock_inode()
    except Timeout:
        return _is_taken(folder)
    return None


def is_locked(folder: Path) -> bool:
    """Return whether a process holds the lock of a run's folder: it trains there, or is about to.

    Several may look at once: each shares the lock for an instant. False, too, where the lock cannot be opened, which
    `lock_run` says as the run starts.
    """
    folder = Path(os.path.realpath(folder))
    file = _lock_file(folder)
    return _is_held(file, file) or _is_held(folder, None)


def _is_held(path: Path, lock_file: Path | None) -> bool:
    try:
        looked_at = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        taken = _flocked(looked_at, fcntl.LOCK_SH)
    finally:
        os.close(looked_at)
    return _is_held_without_flock(lock_file) if taken is None and lock_file is not None else bool(taken)


def _flocked(file: int, kind: int) -> bool | None:
    """Lock an open file; return whether another process holds it, None where the file system cannot lock it."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # EAGAIN, of some file systems EACCES
        return True
    except OSError:
        return None
    return False


def _is_held_without_flock(file: Path) -> bool:
    """Return whether the lock is held on a file system that has no flock, where FileLock does otherwise."""
    lock = FileLock(file)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        return True
    except OSError:
        return False
    lock.release()
    return False


def _lock_file(folder: Path) -> Path:
    return folder.parent / LOCKS / f"{folder.name}.run"


def _is_taken(folder: Path) -> Problem:
    return Problem("run.dir", f"{folder} is being trained right now, by another process. Wait, or stop it.")


def lock_run(folder: Path) -> RunLock:
    """Return the lock of a run's folder, taken: held until its process ends, or it is released.

    `summary.json` says "running" only once the data are ready; until then the lock keeps a second process away.

    Raises:
        ConfigError: another process holds it, or it cannot be made.
    """
    lock = RunLock(folder)
    try:
        (lock.folder.parent / LOCKS).mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout as error:
        raise ConfigError(_is_taken(folder)) from error
    except OSError as error:
        text = f"{folder} cannot be written ({error.strerror}). Choose a folder that can."
        raise ConfigError(Problem("run.dir", text)) from error
    return lock
