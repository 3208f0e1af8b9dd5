"""Retention of checkpoints. Whatever goes is first moved to a name that nothing takes for a checkpoint.

A checkpoint of another run is never removed, nor what lies behind a symbolic link: the link alone goes.
"""

import os
import shutil
from collections.abc import Collection, Iterable, Mapping
from math import isfinite, nan
from pathlib import Path
from types import MappingProxyType

from lightning_llm.base.errors import ConfigError
from lightning_llm.config.schema import CheckpointConfig
from lightning_llm.train.checkpoint.manifest import (
    ASIDE,
    DamagedError,
    RunIdentity,
    open_checkpoint,
    step_folders,
    step_of,
)

SUPERSEDED, DAMAGED = ASIDE
NONE: Mapping[int, float] = MappingProxyType({})


def supersede(folder: Path, step: int, damaged: Collection[Path] = ()) -> None:
    """Move every checkpoint above `step` aside: a run that goes on from there makes its own.

    `damaged`: those that were found so, or another run's. They stay until the user removes them; the others until the
    next good save.
    """
    for path in step_folders(folder):
        if step_of(path) > step:
            _move_aside(path, DAMAGED if path in damaged else SUPERSEDED)


def put_in_place(final: Path, partial: Path, run: RunIdentity) -> None:
    """Give a whole new checkpoint of `run` its name; what has it is moved aside first."""
    if os.path.lexists(final):
        _move_aside(final, SUPERSEDED if _is_whole(final, run) else DAMAGED)
    partial.rename(final)


def prune(folder: Path, keep: CheckpointConfig, run: RunIdentity, val_losses: Mapping[int, float] = NONE) -> None:
    """Delete the whole checkpoints of `run` that `kept_steps` leaves out, what was superseded, and what broken-off
    saves left.

    To be called after a save: the newest is good. Damaged ones and those of other runs do not count, and stay.
    """
    whole = {step_of(path): path for path in step_folders(folder) if _is_whole(path, run)}
    kept = kept_steps(whole, keep, val_losses)
    for step, old in whole.items():
        if step not in kept:
            _delete(old)
    if (folder / SUPERSEDED).is_dir():
        _delete(folder / SUPERSEDED)
    for left in [*folder.glob(".*.partial"), *folder.glob(".*.deleted")]:
        _remove(left)


def kept_steps(steps: Iterable[int], keep: CheckpointConfig, val_losses: Mapping[int, float]) -> set[int]:
    """Return which of `steps` stay: the newest `keep_last`, multiples of `keep_every`, the best `keep_best`.

    The best by `val_losses`, by step: of equal ones the earlier. A step that was not validated, or to a loss that is
    not finite, is none of them. The newest, which resume=auto goes on from, always stays.
    """
    steps = sorted(steps, reverse=True)
    every = [step for step in steps if keep.keep_every is not None and step % keep.keep_every == 0]
    best = sorted((val_losses[step], step) for step in steps if isfinite(val_losses.get(step, nan)))
    return {*steps[: keep.keep_last], *every, *(step for _, step in best[: keep.keep_best or 0])}


def _is_whole(path: Path, run: RunIdentity) -> bool:
    try:
        return run.foreign(open_checkpoint(path)) is None
    except (DamagedError, ConfigError):  # damaged, or another version's: not ours to count or delete
        return False


def _move_aside(path: Path, name: str) -> None:
    aside = path.parent / name
    aside.mkdir(exist_ok=True)
    target, number = aside / path.name, 1
    while os.path.lexists(target):
        number += 1
        target = aside / f"{path.name}.{number}"
    if path.is_symlink():  # a relative one would point elsewhere from there
        target.symlink_to(path.resolve())
        path.unlink()
    else:
        path.rename(target)


def _delete(path: Path) -> None:
    doomed = path.with_name(f".{path.name}.deleted")
    if os.path.lexists(doomed):  # of a process that was killed while it deleted
        _remove(doomed)
    path.rename(doomed)  # from here on nothing takes it for a checkpoint
    _remove(doomed)


def _remove(path: Path) -> None:
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path)
