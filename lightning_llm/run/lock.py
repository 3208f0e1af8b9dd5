"""The lock of a run's folder: one process at a time trains there. Imports no torch."""

from pathlib import Path

from filelock import FileLock, Timeout

from lightning_llm.errors import ConfigError, Problem
from lightning_llm.record.sweep_file import LOCKS

LOOKED_AT_SECONDS = 1.0
"""In which whoever looks whether the lock is taken, by taking it, has let go again."""


def is_locked(folder: Path) -> bool:
    """Return whether a process holds the lock of a run's folder: it trains there, or is about to."""
    file = _lock_file(folder)
    if not file.exists():
        return False
    lock = FileLock(file)
    try:
        lock.acquire(timeout=0)
    except (Timeout, OSError):
        return True
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
