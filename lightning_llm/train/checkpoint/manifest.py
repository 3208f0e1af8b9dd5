"""A run's whole state on disk: `checkpoints/step=N/`, there whole or not at all, and refused where a byte has changed.

    manifest.json           version, step, run id, config hash, torch's version, every file's size and digest, its own;
                            seed, digest and values of the config that may not change on resume, and the head of the
                            hash chain over the records up to its step (earlier releases wrote none of these)
    tensors/                `tensor_storage.py`: "model.<parameter>" in the recipe's master dtype, and
                            "optimizer.state.<parameter>.<moment>"; each rank wrote its shards, any layout reads them.
                            "algorithm.<state>.<parameter>": a training algorithm's, if it has state
                            "callbacks.<path>.<parameter>": what a callback keeps for each parameter, averages say
    precision.safetensors   delayed scaling's state as "<layer>.scale", "<layer>.amax_history"; empty for other recipes
    callbacks.pt            what callbacks keep beside that; torch reads it without running code
    progress.json           what is not a tensor: counters, optimizer scalars, loss scale, the spike detector's state,
                            the training algorithm's numbers, if it has any

Names carry no layout: they are the model's own parameter names. There is no data-loader or generator state, because
batch n and every random bit are functions of (config, seed, n). Nothing read here can run code. Version 2, of earlier
releases, has no digests; `tensor_storage.py` checks it as far as possible. `verification.py` compares files with their
digests. Imports no torch.

A run id in summary.json and in each manifest says which run a checkpoint belongs to (`RunIdentity`). It names the run,
not the config: two runs of one config may have other learning rates at the same step (another trainer.max_steps) or
another machine's kernels. A folder that is moved or copied whole keeps its id.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

from lightning_llm.base.errors import ConfigError, Problem
from lightning_llm.base.integrity import (
    SEAL,
    FileContent,
    digest_of_file,
    parse_object,
    seal,
    size_problem,
    unseal,
)
from lightning_llm.tracking.chain import RECORDS, ChainHead

VERSION = 3
UNSEALED = 2
"""The version without digests, which is still read."""
MANIFEST = "manifest.json"
FROZEN_CONFIG = "frozen_config"
"""The key of manifest.json with the values of the config that may not change on resume."""
TENSORS = "tensors"
PRECISION = "precision.safetensors"
PROGRESS = "progress.json"
STEP_FOLDER = re.compile(r"step=(0|[1-9][0-9]*)")
ASIDE = ("superseded", "damaged")
"""Folders beside the checkpoints. The first holds what a run that went on from an earlier step will make anew, until
it has saved; the second what was found damaged, which nobody but the user removes."""
SHOWN_DIGITS = 8


@dataclass(frozen=True)
class Damage:
    """What is wrong with one file of a checkpoint: `what` is the rest of a sentence.

    `foreign`: nothing, but the checkpoint is another run's; `outdated`: nothing, but the run leaves samples out that it
    was trained on.
    """

    folder: Path
    file: str
    what: str
    foreign: bool = False
    outdated: bool = False

    def __str__(self) -> str:
        return f"{self.folder.name}: {self.file} {self.what}"


class DamagedError(Exception):
    """A folder holds no checkpoint that can be loaded."""

    def __init__(self, *damage: Damage):
        super().__init__("; ".join(map(str, damage)))
        self.damage = damage


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose manifest and progress are whole, and whose other files have their sizes.

    `run_id` is of the run that saved it, None where an earlier release did; `written_in` the `checkpoints` folder then.
    `frozen_config`: the values of the config that may not change on resume, by dotted key; `records`: the head of the
    hash chain over the run's records up to `step`. Both are None where an earlier release saved it.
    """

    folder: Path
    step: int
    config_hash: str
    files: Mapping[str, FileContent]
    progress: Mapping[str, Any] = field(repr=False)
    version: int = VERSION
    run_id: str | None = None
    written_in: str = ""
    frozen_config: Mapping[str, Any] | None = field(default=None, repr=False)
    records: ChainHead | None = None

    @property
    def run_folder(self) -> Path:
        """The folder of the run that it lies in."""
        above = self.folder.parent
        return above.parent.parent if above.name in ASIDE else above.parent

    @property
    def digest(self) -> str:
        """32 hex digits over the whole state: its manifest's, which has every file's; of older ones, over the files."""
        manifest = digest_of_file(self.folder / MANIFEST)
        if self.version != UNSEALED:
            return manifest
        files = "".join(digest_of_file(self.folder / name) for name in sorted(self.files))
        return str(FileContent.of(f"{manifest}{files}".encode()).digest)

    @property
    def events(self) -> int:
        """How many steps up to here were out of the ordinary, and so were treated by spikes.policy."""
        return int(self.progress.get("spikes", {}).get("events", 0))


def sealed_manifest(step: int, origin: Mapping[str, Any], files: Mapping[str, FileContent]) -> bytes:
    """Return the content of manifest.json. `origin`: run_id, written_in, config_hash, torch (its version), and more."""
    about = {name: {"bytes": each.size_bytes, "digest": each.digest} for name, each in sorted(files.items())}
    return seal({"version": VERSION, "step": step, **origin, "files": about})


def open_checkpoint(folder: Path) -> Checkpoint:
    """Return the checkpoint in `folder`; reads its manifest and progress, and nothing of the rest but the sizes.

    Raises:
        DamagedError: a file is missing, short or not what was written, or folder, manifest and progress disagree.
        ConfigError: it is of another version.
    """
    version, values = _read_manifest(folder)
    try:
        files = dict(_files(values["files"], version))
        step, config_hash = int(values["step"]), str(values["config_hash"])
        frozen = None if values.get(FROZEN_CONFIG) is None else dict(values[FROZEN_CONFIG])
        records = None if values.get(RECORDS) is None else ChainHead.from_data(values[RECORDS])
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
        raise DamagedError(Damage(folder, MANIFEST, f"is no manifest ({type(error).__name__}: {error})")) from error
    if folder.name != f"step={step}":
        raise DamagedError(Damage(folder, MANIFEST, f"is of step {step}: the folder's name is another"))
    damage = [Damage(folder, name, what) for name, each in files.items() if (what := size_problem(folder / name, each))]
    if damage:
        raise DamagedError(*damage)
    run_id = None if values.get("run_id") is None else str(values["run_id"])
    written_in = str(values.get("written_in", ""))
    progress = _read_progress(folder, step, files)
    return Checkpoint(
        folder, step, config_hash, files, progress, version, run_id, written_in, frozen_config=frozen, records=records
    )


def step_folders(folder: Path) -> list[Path]:
    """Return what is named step=N in `folder`, the highest N first."""
    found = [path for path in folder.glob("step=*") if STEP_FOLDER.fullmatch(path.name)]
    return sorted(found, key=step_of, reverse=True)


def step_of(folder: Path) -> int:
    """Return N of a folder named step=N."""
    return int(folder.name.removeprefix("step="))


def _read_manifest(folder: Path) -> tuple[int, dict[str, Any]]:
    content = _read(folder, MANIFEST)
    try:
        values = parse_object(content)
        sealed = SEAL in values
        if sealed:
            values = unseal(content)
        version = values.get("version")
        if version not in (VERSION, UNSEALED):
            text = f"has version {version}, this program reads {VERSION}. Use the program that wrote it."
            raise ConfigError(Problem(str(folder / MANIFEST), text))
        if sealed != (version == VERSION):
            raise ValueError("does not hold what was written (its digest and its version contradict each other)")
    except ValueError as error:
        raise DamagedError(Damage(folder, MANIFEST, str(error))) from error
    return int(version), values


def _read_progress(folder: Path, step: int, files: Mapping[str, FileContent]) -> dict[str, Any]:
    content = _read(folder, PROGRESS)
    try:
        if files[PROGRESS].digest not in (None, FileContent.of(content).digest):
            raise ValueError("does not hold what was written (digest)")
        progress = parse_object(content)
        _check_progress(progress, step)
    except (KeyError, ValueError) as error:
        raise DamagedError(Damage(folder, PROGRESS, str(error))) from error
    return progress


def _check_progress(progress: Mapping[str, Any], step: int) -> None:
    kinds = {"step": int, "skipped_steps": int, "optimizer": dict, "spikes": dict, "loss_scale": dict | None}
    kinds["skipped_in_a_row"] = int
    defaults: dict[str, Any] = {"spikes": {}, "loss_scale": None, "skipped_in_a_row": 0}
    for key, kind in kinds.items():
        if not isinstance(progress.get(key, defaults.get(key, "")), kind):
            raise ValueError(f"lacks {key}, or holds something else there")
    if progress["step"] != step:
        raise ValueError(f"is of step {progress['step']}, the manifest of step {step}")


def _read(folder: Path, name: str) -> bytes:
    try:
        return (folder / name).read_bytes()
    except FileNotFoundError as error:
        raise DamagedError(Damage(folder, name, "is missing")) from error
    except OSError as error:
        raise DamagedError(Damage(folder, name, f"cannot be read ({error.strerror})")) from error


def _files(listed: Mapping[str, Any], version: int) -> Iterator[tuple[str, FileContent]]:
    if missing := {PROGRESS, PRECISION} - set(listed):
        raise ValueError(f"it lists no {', '.join(sorted(missing))}")
    for name, about in listed.items():
        if Path(name).is_absolute() or ".." in Path(name).parts or "\0" in name:
            raise ValueError(f"{name!r} leads out of the folder")
        if version == UNSEALED:
            yield name, FileContent(int(about), None)
        else:
            yield name, FileContent(int(about["bytes"]), str(about["digest"]))


@dataclass(frozen=True)
class RunIdentity:
    """`id`: 32 hex digits. `begun_at_step`: the folder's own records follow this step.

    It is 0 unless the folder was begun from another run's checkpoint, and None where an earlier release began the
    folder, whose checkpoints carry no id.
    """

    id: str
    begun_at_step: int | None = 0

    @classmethod
    def new(cls, begun_at_step: int | None = 0) -> "RunIdentity":
        """Return the identity of a run that begins now."""
        return cls(uuid4().hex, begun_at_step)

    @classmethod
    def of_summary(cls, summary: Mapping[str, Any]) -> "RunIdentity | None":
        """Return what `summary.json` says, None where it says nothing."""
        run_id, begun = summary.get("run_id"), summary.get("begun_at_step")
        return cls(run_id, begun if isinstance(begun, int) else None) if isinstance(run_id, str) else None

    def facts(self) -> dict[str, Any]:
        """Return what `summary.json` is to say."""
        begun = {} if self.begun_at_step is None else {"begun_at_step": self.begun_at_step}
        return {"run_id": self.id, **begun}

    def foreign(self, checkpoint: Checkpoint) -> Damage | None:
        """Return that `checkpoint` is another run's, None if it is this one's."""
        if checkpoint.run_id == self.id or (checkpoint.run_id is None and self.begun_at_step is None):
            return None
        here = f"here it is {self.id[:SHOWN_DIGITS]}"
        if checkpoint.run_id is None:
            text = f"names no run, as those of earlier releases do (run id: {here})"
        else:
            written = f", written in {Path(checkpoint.written_in).parent}" if checkpoint.written_in else ""
            text = f"is of another run (run id {checkpoint.run_id[:SHOWN_DIGITS]}{written}; {here})"
        return Damage(checkpoint.folder, MANIFEST, text, foreign=True)
