"""Which checkpoints of a run stay, and the disk that they take: rules, bytes, and whether there is room. No torch."""

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
from lightning_llm.optim.state_bytes import state_bytes
from lightning_llm.plan.memory.units import units_of

LONGEST_NAME_BYTES = 255
"""NAME_MAX of Linux's file systems."""
CLOSE = 0.9
"""The share of the room that checkpoints may take before a run says so as it starts."""


def retention_problems(config: Config) -> Iterator[Problem]:
    """Yield why what checkpoint.keep_every or keep_best ask for cannot be kept."""
    checkpoint, validated = config.checkpoint, config.trainer.validate_every_steps
    every = checkpoint.every_steps
    if checkpoint.keep_every is not None and (every is None or checkpoint.keep_every % every):
        saved = "only the last step is saved" if every is None else f"checkpoint.every_steps={every} is no part of it"
        text = f"is {checkpoint.keep_every}, and {saved}. Set it to a multiple of checkpoint.every_steps."
        yield Problem("checkpoint.keep_every", text)
    if checkpoint.keep_best is None:
        return
    if "val_loss" not in metric_names(config):
        text = "goes by val_loss, and data.validation.fraction=0 holds out nothing to validate on. Set it to null."
        yield Problem("checkpoint.keep_best", text)
    elif every is not None and (validated is None or every % validated):
        when = "at the end only" if validated is None else f"every {validated} steps (trainer.validate_every_steps)"
        text = (
            f"goes by the val_loss of the step that is saved, every {every} steps, and validations are {when}. Set "
            "checkpoint.every_steps to a multiple of trainer.validate_every_steps."
        )
        yield Problem("checkpoint.keep_best", text)


def checkpoint_bytes(config: Config) -> int:
    """Return the bytes of one checkpoint, of all ranks: parameters, and the optimizer's and algorithm's state.

    What callbacks keep for each parameter (averages) is not counted.
    """
    shards = units_of(config.model).shards(1)
    return state_bytes(shards, config.optim, config.chosen_algorithm, config.precision).checkpoint


def kept_checkpoints(config: Config) -> int:
    """Return how many checkpoints of a run stay at the most, at its end."""
    checkpoint = config.checkpoint
    kept = checkpoint.keep_last + (checkpoint.keep_best or 0)
    if checkpoint.keep_every is None or checkpoint.every_steps is None:
        return kept
    of_last = checkpoint.keep_last // max(1, checkpoint.keep_every // checkpoint.every_steps)  # are multiples, too
    return kept - of_last + config.trainer.max_steps // checkpoint.keep_every


def disk_facts(config: Config) -> dict[str, int]:
    """Return `checkpoint_bytes` of one, how many `checkpoints` are there at once at the most, and their `bytes`."""
    each, count = checkpoint_bytes(config), kept_checkpoints(config) + 1  # a new one is whole before an old one goes
    return {"checkpoint_bytes": each, "checkpoints": count, "bytes": each * count}


def disk_row(facts: dict[str, Any]) -> tuple[str, str]:
    """Return `disk_facts` as a line."""
    each, count, whole = (facts[key] for key in ("checkpoint_bytes", "checkpoints", "bytes"))
    return "disk", f"{decimal(whole)}: {count:,} checkpoints of {decimal(each)} at the most, one of them being written"


def disk_problems(config: Config, jobs: int = 1) -> list[Problem]:
    """Return why run.dir cannot be written, or has no room for the checkpoints of `jobs` runs like this."""
    folder = nearest_existing(Path(config.run.dir))
    if any(len(part.encode()) > LONGEST_NAME_BYTES for part in Path(config.run.dir).parts):
        return [Problem("run.dir", f"{config.run.dir} has a name of more than {LONGEST_NAME_BYTES} bytes. Shorten it.")]
    if not folder.is_dir():
        return [Problem("run.dir", f"{folder} is a file, not a folder. Choose another run.dir.")]
    if not os.access(folder, os.W_OK):
        text = f"{config.run.dir} cannot be written ({folder} refuses). Choose another run.root."
        return [Problem("run.dir", text)]
    each, kept = checkpoint_bytes(config), kept_checkpoints(config) * jobs + 1
    room = _room(config)
    if each * kept <= room:
        return []
    text = (
        f"{kept} checkpoints of {decimal(each)} each (all that are kept, and one being written) need "
        f"{decimal(each * kept)} and {folder} has {decimal(room)} free. Lower checkpoint.keep_last, or choose another "
        "run.root."
    )
    if config.checkpoint.keep_every or config.checkpoint.keep_best:
        text = text.replace("keep_last,", "keep_last or keep_best, keep fewer by a larger keep_every,")
    return [Problem("checkpoint.keep_last", text)]


def disk_notes(config: Config) -> Iterator[str]:
    """Yield that a run's checkpoints will take nearly all that is free."""
    facts, room = disk_facts(config), _room(config)
    if CLOSE * room < facts["bytes"] <= room:
        count, whole, folder = facts["checkpoints"], decimal(facts["bytes"]), nearest_existing(Path(config.run.dir))
        yield (
            f"note   {count} checkpoints will take {whole} of the {decimal(room)} that are free in {folder}: what "
            "others write there may end this run"
        )


def _room(config: Config) -> int:
    """Return the bytes that a run's checkpoints may take: what is free, and what those there take by now."""
    there = Path(config.run.dir).glob("checkpoints/step=*/**/*")
    return shutil.disk_usage(nearest_existing(Path(config.run.dir))).free + sum(
        file.stat().st_size for file in there if file.is_file()
    )
