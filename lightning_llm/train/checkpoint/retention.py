"""Which checkpoints stay. Whatever goes is first moved to a name that nothing takes for a checkpoint."""

import shutil
from collections.abc import Collection
from pathlib import Path

from lightning_llm.errors import ConfigError
from lightning_llm.train.checkpoint.manifest import ASIDE, DamagedError, open_checkpoint, step_folders, step_of

SUPERSEDED, DAMAGED = ASIDE


def supersede(folder: Path, step: int, damaged: Collection[Path] = ()) -> None:
    """Move every checkpoint above `step` aside: a run that goes on from there makes its own.

    `damaged`: those that were found so. They stay until the user removes them; the others until the next good save.
    """
    for path in step_folders(folder):
        if step_of(path) > step:
            _move_aside(path, DAMAGED if path in damaged else SUPERSEDED)


def replace(final: Path, partial: Path) -> None:
    """Give a whole new checkpoint its name; what has it is moved aside first."""
    if final.exists():
        _move_aside(final, SUPERSEDED if _opens(final) else DAMAGED)
    partial.rename(final)


def prune(folder: Path, keep_last: int) -> None:
    """Delete all but the newest `keep_last` whole checkpoints, what was superseded, and what broken-off saves left.

    To be called after a save: the newest is good. Damaged ones do not count, and stay.
    """
    for old in [path for path in step_folders(folder) if _opens(path)][keep_last:]:
        _delete(old)
    if (folder / SUPERSEDED).is_dir():
        _delete(folder / SUPERSEDED)
    for left in [*folder.glob(".*.partial"), *folder.glob(".*.deleted")]:
        shutil.rmtree(left)


def _opens(path: Path) -> bool:
    try:
        open_checkpoint(path)
    except (DamagedError, ConfigError):  # damaged, or another version's: not ours to count or delete
        return False
    return True


def _move_aside(path: Path, name: str) -> None:
    aside = path.parent / name
    aside.mkdir(exist_ok=True)
    target, number = aside / path.name, 1
    while target.exists():
        number += 1
        target = aside / f"{path.name}.{number}"
    path.rename(target)


def _delete(path: Path) -> None:
    doomed = path.with_name(f".{path.name}.deleted")
    if doomed.exists():  # of a process that was killed while it deleted
        shutil.rmtree(doomed)
    path.rename(doomed)  # from here on nothing takes it for a checkpoint
    shutil.rmtree(doomed)
