"""Lock of a run's folder, so that only one process trains there. Imports no torch.

The lock has two parts. A lock file next to the folder, found by the resolved path, exists before the folder does. The
folder's inode is locked too, so that a second path to it (a bind mount) shares the lock.
"""

import fcntl
import os
import time
from pathlib import Path

from filelock import FileLock, Timeout

from lightning_llm.base.errors import ConfigError, Problem
from lightning_llm.tracking.sweep_file import LOCKS

LOOKED_AT_SECONDS = 1.0
"""Timeout to acquire the lock; processes that only check it release it within this time."""
LOOKED_EVERY_SECONDS = 0.05


class RunLock:
    """Lock of one run's folder, held from `acquire` until `release` or the end of this process."""

    def __init__(self, folder: Path):
        self.folder = Path(os.path.realpath(folder))
        self._file = FileLock(_lock_file(self.folder))
        self._inode: int | None = None

    @property
    def is_locked(self) -> bool:
        """Whether this process holds the lock."""
        return self._file.is_locked

    def acquire(self) -> None:
        """Acquire the lock. If the folder does not exist yet, `lock_inode` locks it later.

        Raises:
            Timeout: another process holds it.
            OSError: the lock cannot be created.
        """
        self._file.acquire(timeout=LOOKED_AT_SECONDS)
        _HELD[self.folder] = self
        try:
            self.lock_inode()
        except BaseException:
            self.release()
            raise

    def lock_inode(self) -> None:
        """Lock the folder's inode if it exists and its file system supports it. Raises Timeout if it is taken."""
        if self._inode is not None or not self.folder.is_dir():
            return
        self._inode = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
        until = time.monotonic() + LOOKED_AT_SECONDS
        while (taken := _flocked(self._inode, fcntl.LOCK_EX)) and time.monotonic() < until:
            time.sleep(LOOKED_EVERY_SECONDS)
        if taken:
            raise Timeout(str(self.folder))

    def release(self) -> None:
        """Release both parts."""
        _HELD.pop(self.folder, None)
        if self._inode is not None:
            os.close(self._inode)
            self._inode = None
        self._file.release()


_HELD: dict[Path, RunLock] = {}
"""Locks of this process by resolved folder."""


def lock_made_folder(folder: Path) -> Problem | None:
    """Lock the inode of a folder created under a lock of this process; return the problem, or None."""
    held = _HELD.get(Path(os.path.realpath(folder)))
    try:
        if held is not None:
            held.lock_inode()
    except Timeout:
        return _is_taken(folder)
    return None


def is_locked(folder: Path) -> bool:
    """Return whether a process holds the lock of a run's folder, because it trains there or is about to.

    Several processes may check at once; each takes a shared lock for an instant. Also False if the lock cannot be
    opened, which `lock_run` reports when the run starts.
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
    """Lock an open file; return whether another process holds it, None if the file system has no locks."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # EAGAIN, or EACCES on some file systems
        return True
    except OSError:
        return None
    return False


def _is_held_without_flock(file: Path) -> bool:
    """Return whether the lock is held on a file system without flock, where FileLock uses another method."""
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
    return Problem("run.dir", f"another process is training in {folder}. Wait, or stop it.")


def lock_run(folder: Path) -> RunLock:
    """Acquire and return the lock of a run's folder. It is held until it is released or this process ends.

    The status in `summary.json` becomes "running" only once the data are ready; the lock protects the time before.

    Raises:
        ConfigError: another process holds it, or it cannot be created.
    """
    lock = RunLock(folder)
    try:
        (lock.folder.parent / LOCKS).mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout as error:
        raise ConfigError(_is_taken(folder)) from error
    except OSError as error:
        text = f"{folder} cannot be written ({error.strerror}). Choose another folder."
        raise ConfigError(Problem("run.dir", text)) from error
    return lock
