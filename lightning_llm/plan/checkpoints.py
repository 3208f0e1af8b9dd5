"""Retention and disk use of a run's checkpoints: rules, bytes, and free space. Imports no torch."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.filesize import decimal

from lightning_llm.base.errors import Problem
from lightning_llm.base.folders import nearest_existing
from lightning_llm.config.schema import Config
from lightning_llm.config.schema.callbacks import metric_names
from lightning_llm.optim.kinds import state_bytes
from lightning_llm.plan.memory.units import units_of

LONGEST_NAME_BYTES = 255
"""NAME_MAX of Linux's file systems."""
CLOSE = 0.9
"""Share of the available space above which a starting run prints a note."""


def retention_problems(config: Config) -> Iterator[Problem]:
    """Yield why checkpoint.keep_every or keep_best cannot be honored."""
    checkpoint, validated = config.checkpoint, config.trainer.validate_every_steps
    every = checkpoint.every_steps
    if checkpoint.keep_every is not None and (every is None or checkpoint.keep_every % every):
        saved = "only the last step is saved" if every is None else f"checkpoint.every_steps={every} does not divide it"
        text = f"is {checkpoint.keep_every}, and {saved}. Set it to a multiple of checkpoint.every_steps."
        yield Problem("checkpoint.keep_every", text)
    if checkpoint.keep_best is None:
        return
    if "val_loss" not in metric_names(config):
        text = "needs val_loss, and data.validation.fraction=0 holds out nothing to validate on. Set it to null."
        yield Problem("checkpoint.keep_best", text)
    elif every is not None and (validated is None or every % validated):
        when = "at the end only" if validated is None else f"every {validated} steps (trainer.validate_every_steps)"
        text = (
            f"needs the val_loss of each saved step (every {every} steps), and validations are {when}. Set "
            "checkpoint.every_steps to a multiple of trainer.validate_every_steps."
        )
        yield Problem("checkpoint.keep_best", text)


def checkpoint_bytes(config: Config) -> int:
    """Return the bytes of one checkpoint over all ranks: parameters, and the state of optimizer and algorithm.

    State of callbacks (weight averages) is not counted.
    """
    shards = units_of(config.model).shards(1)
    return state_bytes(shards, config.optim, config.chosen_algorithm, config.precision).checkpoint


def kept_checkpoints(config: Config) -> int:
    """Return the largest number of checkpoints that the retention rules keep when a run has ended."""
    checkpoint = config.checkpoint
    kept = checkpoint.keep_last + (checkpoint.keep_best or 0)
    if checkpoint.keep_every is None or checkpoint.every_steps is None:
        return kept
    of_last = checkpoint.keep_last // max(1, checkpoint.keep_every // checkpoint.every_steps)  # are multiples, too
    return kept - of_last + config.trainer.max_steps // checkpoint.keep_every


def disk_facts(config: Config) -> dict[str, int]:
    """Return {"checkpoint_bytes": of one, "checkpoints": most on disk at once, "bytes": of all of these}."""
    each, count = (
        checkpoint_bytes(config),
        kept_checkpoints(config) + 1,
    )  # the new one is complete before an old one goes
    return {"checkpoint_bytes": each, "checkpoints": count, "bytes": each * count}


def disk_row(facts: dict[str, Any]) -> tuple[str, str]:
    """Return `disk_facts` as a line."""
    each, count, whole = (facts[key] for key in ("checkpoint_bytes", "checkpoints", "bytes"))
    return "disk", f"{decimal(whole)}: at most {count:,} checkpoints of {decimal(each)}, one of them being written"


def disk_problems(config: Config, jobs: int = 1) -> list[Problem]:
    """Return problems if run.dir cannot be written, or its disk lacks space for the checkpoints of `jobs` such runs."""
    folder = nearest_existing(Path(config.run.dir))
    if any(len(part.encode()) > LONGEST_NAME_BYTES for part in Path(config.run.dir).parts):
        return [Problem("run.dir", f"is {config.run.dir}: a name is over {LONGEST_NAME_BYTES} bytes. Shorten it.")]
    if not folder.is_dir():
        text = f"is {config.run.dir}, and {folder} is a file, not a folder. Choose another run.dir."
        return [Problem("run.dir", text)]
    if not os.access(folder, os.W_OK):
        text = f"is {config.run.dir}, and {folder} is not writable. Choose another run.root."
        return [Problem("run.dir", text)]
    each, kept = checkpoint_bytes(config), kept_checkpoints(config) * jobs + 1
    room = _room(config)
    if each * kept <= room:
        return []
    text = (
        f"{kept} checkpoints of {decimal(each)} each (those kept and one being written) need "
        f"{decimal(each * kept)} and {folder} has {decimal(room)} free. Lower checkpoint.keep_last, or choose another "
        "run.root."
    )
    if config.checkpoint.keep_every or config.checkpoint.keep_best:
        text = text.replace("keep_last,", "keep_last or keep_best, keep fewer by a larger keep_every,")
    return [Problem("checkpoint.keep_last", text)]


def disk_notes(config: Config) -> Iterator[str]:
    """Yield a note if a run's checkpoints will take nearly all free space."""
    facts, room = disk_facts(config), _room(config)
    if CLOSE * room < facts["bytes"] <= room:
        count, whole, folder = facts["checkpoints"], decimal(facts["bytes"]), nearest_existing(Path(config.run.dir))
        yield (
            f"note   {count} checkpoints will take {whole} of the {decimal(room)} free in {folder}; other "
            "writers may fill the disk and end this run"
        )


def _room(config: Config) -> int:
    """Return the bytes that a run's checkpoints may take: free space plus the run's existing checkpoints."""
    there = Path(config.run.dir).glob("checkpoints/step=*/**/*")
    return shutil.disk_usage(nearest_existing(Path(config.run.dir))).free + sum(
        file.stat().st_size for file in there if file.is_file()
    )
