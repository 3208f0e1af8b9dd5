"""The lock of a run's folder: one process at a time trains there. Imports no torch."""

from pathlib import Path

from filelock import FileLock, Timeout

from lightning_llm.errors import ConfigError, Problem
from lightning_llm.record.sweep_definition import LOCKS


def lock_run(folder: Path) -> FileLock:
    """Return the lock of a run's folder, beside it and taken: held until its process ends, or it is released.

    `summary.json` says "running" only once the data are ready; until then the lock keeps a second process away.

    Raises:
        ConfigError: another process holds it, or it cannot be made.
    """
    lock = FileLock(folder.parent / LOCKS / f"{folder.name}.run")
    try:
        (folder.parent / LOCKS).mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except Timeout as error:
        text = f"{folder} is being trained right now, by another process. Wait, or stop it."
        raise ConfigError(Problem("run.dir", text)) from error
    except OSError as error:
        text = f"{folder} cannot be written ({error.strerror}). Choose a folder that can."
        raise ConfigError(Problem("run.dir", text)) from error
    return lock
