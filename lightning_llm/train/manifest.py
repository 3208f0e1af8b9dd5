"""A run's whole state on disk: `checkpoints/step=N/`, there whole or not at all.

    manifest.json           version, step, config hash, torch's version, every file with its size
    tensors/                torch.distributed.checkpoint: "model.<parameter>" in the recipe's master dtype, and
                            "optimizer.state.<parameter>.<moment>"; each rank wrote its shards, any layout reads them.
                            "callbacks.<path>.<parameter>": what a callback keeps for each parameter, averages say
    precision.safetensors   delayed scaling's state as "<layer>.scale", "<layer>.amax_history"; empty for other recipes
    callbacks.pt            what callbacks keep beside that; torch reads it without running code
    progress.json           what is not a tensor: counters, optimizer scalars, loss scale, the spike detector's state

Names carry no layout: they are the model's own parameter names. There is no data-loader or generator state, because
batch n and every random bit are functions of (config, seed, n).
"""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from lightning_llm.errors import ConfigError, Problem

VERSION = 2
TENSORS = "tensors"
PRECISION = "precision.safetensors"
PROGRESS = "progress.json"


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    folder: Path
    step: int
    config_hash: str


def find_checkpoint(path: Path) -> Checkpoint | None:
    """Return the checkpoint at `path`, or None where it is not complete (no manifest, a file short or missing).

    Raises:
        ConfigError: it is of another version.
    """
    try:
        manifest = json.loads((path / "manifest.json").read_text())
    except (OSError, json.JSONDecodeError):
        return None
    if manifest.get("version") != VERSION:
        text = f"has version {manifest.get('version')}, this program reads {VERSION}. Use the program that wrote it."
        raise ConfigError(Problem(str(path / "manifest.json"), text))
    for name, size in manifest["files"].items():
        file = path / name
        if not file.is_file() or file.stat().st_size != size:
            return None
    return Checkpoint(path, int(manifest["step"]), manifest["config_hash"])


def last_checkpoint(folder: Path) -> Checkpoint | None:
    """Return the complete checkpoint with the highest step under `folder`, or None."""
    found = [checkpoint for path in folder.glob("step=*") if (checkpoint := find_checkpoint(path))]
    return max(found, key=lambda each: each.step, default=None)


def events_before(checkpoint: Checkpoint) -> int:
    """Return how many steps before `checkpoint` were out of the ordinary, and so were treated by spikes.policy."""
    spikes = json.loads((checkpoint.folder / PROGRESS).read_text()).get("spikes", {})
    return int(spikes.get("events", 0))


def drop_after(folder: Path, step: int) -> None:
    """Delete every checkpoint above `step`: a run that goes on from there makes its own."""
    for path in folder.glob("step=*"):
        if path.name.removeprefix("step=").isdigit() and int(path.name.removeprefix("step=")) > step:
            _delete(path)


def prune(folder: Path, keep_last: int) -> None:
    """Delete all but the newest `keep_last` complete checkpoints, and what broken-off saves left."""
    found = sorted(
        (each for path in folder.glob("step=*") if (each := find_checkpoint(path))), key=lambda each: each.step
    )
    for old in found[:-keep_last]:
        _delete(old.folder)
    for left in [*folder.glob(".step=*.partial"), *folder.glob(".step=*.deleted")]:
        shutil.rmtree(left)


def _delete(checkpoint: Path) -> None:
    doomed = checkpoint.with_name(f".{checkpoint.name}.deleted")
    checkpoint.rename(doomed)  # from here on nothing takes it for a checkpoint
    shutil.rmtree(doomed)
