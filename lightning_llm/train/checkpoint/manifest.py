"""Checkpoint format: `checkpoints/step=N/`, complete or absent, and rejected if a byte has changed.

    manifest.json           version, step, run id, config hash, torch's version, every file's size and digest, its own;
                            seed, digest and values of the config that may not change on resume, and the head of the
                            hash chain over the records up to its step (earlier releases wrote none of these)
    tensors/                `tensor_storage.py`: "model.<parameter>" in the recipe's master dtype, and
                            "optimizer.state.<parameter>.<moment>"; each rank wrote its shards, any layout reads them.
                            "algorithm.<state>.<parameter>": a training algorithm's, if it has state
                            "callbacks.<path>.<parameter>": a callback's state per parameter, e.g. averages
    precision.safetensors   delayed scaling's state as "<layer>.scale", "<layer>.amax_history"; empty for other recipes
    callbacks.pt            remaining state of callbacks; torch reads it without running code
    progress.json           everything except tensors: counters, optimizer scalars, loss scale, the spike detector's
                            state, the training algorithm's numbers, if it has any

Names are the model's parameter names, independent of the layout. There is no data-loader or generator state, because
batch n and every random bit are functions of (config, seed, n). Nothing read here can run code. Version 2, of earlier
releases, has no digests; `tensor_storage.py` checks it as far as possible. `verification.py` compares files with their
digests. Imports no torch.

A run id in summary.json and in each manifest identifies the run of a checkpoint (`RunIdentity`). The config does not
suffice: two runs of one config may have different learning rates at the same step (another trainer.max_steps) or ran on
different kernels. A folder that is moved or copied as a whole keeps its id.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

from lightning_llm.base.errors import ConfigError, Problem
from lightning_llm.base.integrity import (
    RECORDS,
    SEAL,
    ChainHead,
    FileContent,
    digest_of_file,
    parse_object,
    seal,
    size_problem,
    unseal,
)

VERSION = 3
UNSEALED = 2
"""Version without digests, which can still be read."""
MANIFEST = "manifest.json"
FROZEN_CONFIG = "frozen_config"
"""Key of manifest.json: the values of the config that may not change on resume."""
TENSORS = "tensors"
PRECISION = "precision.safetensors"
PROGRESS = "progress.json"
STEP_FOLDER = re.compile(r"step=(0|[1-9][0-9]*)")
ASIDE = ("superseded", "damaged")
"""Folders next to the checkpoints. The first has checkpoints that a run resumed from an earlier step will write again,
until its first save. The second has damaged ones, which only the user removes."""
SHOWN_DIGITS = 8


@dataclass(frozen=True)
class Damage:
    """The reason why one file makes a checkpoint unusable."""

    folder: Path
    """Folder of the checkpoint."""
    file: str
    """Name of the file within the folder."""
    what: str
    """The reason; completes the sentence "FILE ..."."""
    foreign: bool = False
    """The file is intact, but the checkpoint is from another run."""
    outdated: bool = False
    """The file is intact, but the checkpoint was trained on samples that the run now skips."""

    def __str__(self) -> str:
        return f"{self.folder.name}: {self.file} {self.what}"


class DamagedError(Exception):
    """A checkpoint's folder is damaged; `damage` lists the reasons."""

    def __init__(self, *damage: Damage):
        super().__init__("; ".join(map(str, damage)))
        self.damage = damage


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint: manifest and progress are verified, other files have the right sizes.

    `run_id`, `frozen_config` and `records` are None if an earlier release saved it.
    """

    folder: Path
    step: int
    config_hash: str
    files: Mapping[str, FileContent]
    """Size and digest of each file by name."""
    progress: Mapping[str, Any] = field(repr=False)
    """Content of progress.json: the state other than tensors."""
    version: int = VERSION
    run_id: str | None = None
    """Id of the run that saved it."""
    written_in: str = ""
    """Path of the `checkpoints` folder when it was saved."""
    frozen_config: Mapping[str, Any] | None = field(default=None, repr=False)
    """Values of the config that may not change on resume, by dotted key."""
    records: ChainHead | None = None
    """Head of the hash chain over the run's records up to `step`."""

    @property
    def run_folder(self) -> Path:
        """Folder of the run that contains the checkpoint."""
        above = self.folder.parent
        return above.parent.parent if above.name in ASIDE else above.parent

    @property
    def digest(self) -> str:
        """Digest (32 hex digits) of the whole state: that of the manifest, which has the digests of all files.

        For version 2, without digests, it is computed over all files.
        """
        manifest = digest_of_file(self.folder / MANIFEST)
        if self.version != UNSEALED:
            return manifest
        files = "".join(digest_of_file(self.folder / name) for name in sorted(self.files))
        return str(FileContent.of(f"{manifest}{files}".encode()).digest)

    @property
    def events(self) -> int:
        """Number of anomalous steps so far, on which spikes.policy acted."""
        return int(self.progress.get("spikes", {}).get("events", 0))


def sealed_manifest(step: int, origin: Mapping[str, Any], files: Mapping[str, FileContent]) -> bytes:
    """Return the content of manifest.json. `origin`: run_id, written_in, config_hash, torch version and other
    entries."""
    about = {name: {"bytes": each.size_bytes, "digest": each.digest} for name, each in sorted(files.items())}
    return seal({"version": VERSION, "step": step, **origin, "files": about})


def open_checkpoint(folder: Path) -> Checkpoint:
    """Return the checkpoint in `folder`; reads its manifest and progress, and only sizes of other files.

    Raises:
        DamagedError: a file is missing, truncated or changed, or folder, manifest and progress contradict each other.
        ConfigError: it has another version.
    """
    version, values = _read_manifest(folder)
    try:
        files = dict(_files(values["files"], version))
        step, config_hash = int(values["step"]), str(values["config_hash"])
        frozen = None if values.get(FROZEN_CONFIG) is None else dict(values[FROZEN_CONFIG])
        records = None if values.get(RECORDS) is None else ChainHead.from_data(values[RECORDS])
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
        raise DamagedError(Damage(folder, MANIFEST, f"is not a manifest ({type(error).__name__}: {error})")) from error
    if folder.name != f"step={step}":
        raise DamagedError(Damage(folder, MANIFEST, f"is of step {step}, which contradicts the folder's name"))
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
    """Return the folders step=N in `folder`, highest N first."""
    found = [path for path in folder.glob("step=*") if STEP_FOLDER.fullmatch(path.name)]
    return sorted(found, key=step_of, reverse=True)


def step_of(folder: Path) -> int:
    """Return N, the step, of a checkpoint's folder named step=N."""
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
            text = f"has version {version}: this release reads {VERSION}. Use the release that wrote it."
            raise ConfigError(Problem(str(folder / MANIFEST), text))
        if sealed != (version == VERSION):
            raise ValueError("was changed after it was written (its digest contradicts its version)")
    except ValueError as error:
        raise DamagedError(Damage(folder, MANIFEST, str(error))) from error
    return int(version), values


def _read_progress(folder: Path, step: int, files: Mapping[str, FileContent]) -> dict[str, Any]:
    content = _read(folder, PROGRESS)
    try:
        if files[PROGRESS].digest not in (None, FileContent.of(content).digest):
            raise ValueError("was changed after it was written (digest)")
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
            raise ValueError(f"has no valid {key}")
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
            raise ValueError(f"{name!r} is outside of the folder")
        if version == UNSEALED:
            yield name, FileContent(int(about), None)
        else:
            yield name, FileContent(int(about["bytes"]), str(about["digest"]))


@dataclass(frozen=True)
class RunIdentity:
    """Identity of a run, by which its checkpoints are told from those of other runs."""

    id: str
    """32 hex digits."""
    begun_at_step: int | None = 0
    """The folder's own records start after this step: 0 unless the run started from another run's checkpoint. None: an
    earlier release created the folder, where checkpoints have no id."""

    @classmethod
    def new(cls, begun_at_step: int | None = 0) -> "RunIdentity":
        """Return the identity of a new run."""
        return cls(uuid4().hex, begun_at_step)

    @classmethod
    def from_summary(cls, summary: Mapping[str, Any]) -> "RunIdentity | None":
        """Return the identity in `summary.json`, None if it has none."""
        run_id, begun = summary.get("run_id"), summary.get("begun_at_step")
        return cls(run_id, begun if isinstance(begun, int) else None) if isinstance(run_id, str) else None

    def facts(self) -> dict[str, Any]:
        """Return the entries for `summary.json`."""
        begun = {} if self.begun_at_step is None else {"begun_at_step": self.begun_at_step}
        return {"run_id": self.id, **begun}

    def foreign(self, checkpoint: Checkpoint) -> Damage | None:
        """Return a `Damage` if `checkpoint` is from another run, else None."""
        if checkpoint.run_id == self.id or (checkpoint.run_id is None and self.begun_at_step is None):
            return None
        here = f"here it is {self.id[:SHOWN_DIGITS]}"
        if checkpoint.run_id is None:
            text = f"names no run, as those of earlier releases do (run id: {here})"
        else:
            written = f", written in {Path(checkpoint.written_in).parent}" if checkpoint.written_in else ""
            text = f"is of another run (run id {checkpoint.run_id[:SHOWN_DIGITS]}{written}; {here})"
        return Damage(checkpoint.folder, MANIFEST, text, foreign=True)
