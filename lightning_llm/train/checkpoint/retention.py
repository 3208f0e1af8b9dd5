"""Retention of checkpoints. A checkpoint is renamed before it is deleted, so that no half-deleted one is read.

Checkpoints of other runs are never removed. Of a symbolic link, only the link is removed, not its target.
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
    """Move every checkpoint after `step` in `folder` aside, because the run resumes at `step` and writes its own.

    They are removed after the next successful save, except for those in `damaged` (damaged or from another run), which
    stay until the user removes them.
    """
    for path in step_folders(folder):
        if step_of(path) > step:
            _move_aside(path, DAMAGED if path in damaged else SUPERSEDED)


def put_in_place(final: Path, partial: Path, run: RunIdentity) -> None:
    """Rename the complete new checkpoint `partial` of `run` to `final`; an existing `final` is moved aside first."""
    if os.path.lexists(final):
        _move_aside(final, SUPERSEDED if _is_whole(final, run) else DAMAGED)
    partial.rename(final)


def prune(folder: Path, keep: CheckpointConfig, run: RunIdentity, val_losses: Mapping[int, float] = NONE) -> None:
    """Delete superseded checkpoints, remains of interrupted saves, and old checkpoints of `run` by the rules of `keep`.

    Call it after a successful save. Damaged checkpoints and those of other runs do not count, and are kept.
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
    """Return the `steps` to keep: the newest `keep_last`, multiples of `keep_every`, the best `keep_best`.

    The best by `val_losses` (by step), the earlier one on ties. Steps without a finite validation loss are not among
    the best. The newest step, from which resume=auto resumes, is always kept.
    """
    steps = sorted(steps, reverse=True)
    every = [step for step in steps if keep.keep_every is not None and step % keep.keep_every == 0]
    best = sorted((val_losses[step], step) for step in steps if isfinite(val_losses.get(step, nan)))
    return {*steps[: keep.keep_last], *every, *(step for _, step in best[: keep.keep_best or 0])}


def _is_whole(path: Path, run: RunIdentity) -> bool:
    try:
        return run.foreign(open_checkpoint(path)) is None
    except (DamagedError, ConfigError):  # damaged or of another version: not counted and not deleted
        return False


def _move_aside(path: Path, name: str) -> None:
    aside = path.parent / name
    aside.mkdir(exist_ok=True)
    target, number = aside / path.name, 1
    while os.path.lexists(target):
        number += 1
        target = aside / f"{path.name}.{number}"
    if path.is_symlink():  # moving a relative link would change its target
        target.symlink_to(path.resolve())
        path.unlink()
    else:
        path.rename(target)


def _delete(path: Path) -> None:
    doomed = path.with_name(f".{path.name}.deleted")
    if os.path.lexists(doomed):  # left by a process that was killed while it deleted
        _remove(doomed)
    path.rename(doomed)  # no longer recognized as a checkpoint
    _remove(doomed)


def _remove(path: Path) -> None:
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path)
