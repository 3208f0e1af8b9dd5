"""The lock of a run's folder: one process at a time trains there. Imports no torch."""

import fcntl
import os
from pathlib import Path

from filelock import FileLock, Timeout

from lightning_llm.errors import ConfigError, Problem
from lightning_llm.record.sweep_file import LOCKS

LOOKED_AT_SECONDS = 1.0
"""In which those who look whether the lock is taken have let go again."""


def is_locked(folder: Path) -> bool:
    """Return whether a process holds the lock of a run's folder: it trains there, or is about to.

    Several may look at once: each shares the lock for an instant. False, too, where the lock cannot be opened, which
    `lock_run` says as the run starts.
    """
    file = _lock_file(folder)
    try:
        looked_at = os.open(file, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.flock(looked_at, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # EAGAIN, of some file systems EACCES
        return True
    except OSError:
        return _is_held_without_flock(file)
    finally:
        os.close(looked_at)
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


def lock_run(folder: Path) -> FileLock:
    """Return the lock of a run's folder, beside it and taken: held until its process ends, or it is released.

    `summary.json` says "running" only once the data are ready; until then the lock keeps a second process away.

    Raises:
        ConfigError: another process holds it, or it cannot be made.
    """
    lock = FileLock(_lock_file(folder))
    try:
        (folder.parent / LOCKS).mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=LOOKED_AT_SECONDS)
    except Timeout as error:
        text = f"{folder} is being trained right now, by another process. Wait, or stop it."
        raise ConfigError(Problem("run.dir", text)) from error
    except OSError as error:
        text = f"{folder} cannot be written ({error.strerror}). Choose a folder that can."
        raise ConfigError(Problem("run.dir", text)) from error
    return lock
