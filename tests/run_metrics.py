"""Readers of a run's files."""

import json
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from lightning_llm.train.checkpoint.failures import without_its_warnings
from lightning_llm.train.checkpoint.tensor_storage import open_tensors
from lightning_llm.train.checkpoint.verification import verified


def read_metrics(folder: Path) -> list[dict]:
    """Return the records of `folder`/metrics.jsonl."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def curve(folder: Path) -> list[tuple]:
    """Return the metrics that must be equal bit for bit between equal runs."""
    keys = ("step", "tokens", "loss", "grad_norm", "lr", "val_loss", "val_loss/jsonl")
    return [tuple(record.get(key) for key in keys) for record in read_metrics(folder)]


def steps_saved(folder: Path) -> list[int]:
    """Return the steps that `folder` has checkpoints of."""
    return sorted(int(path.name.removeprefix("step=")) for path in (folder / "checkpoints").glob("step=*"))


def weights(folder: Path, step: int) -> dict[str, torch.Tensor]:
    """Return the parameters in the checkpoint of `step`."""
    return read_tensors(folder / "checkpoints" / f"step={step}", "model.")


def same_weights(one: Path, other: Path, step: int) -> bool:
    """Whether both runs had the same parameters after `step`, bit for bit."""
    ours, theirs = weights(one, step), weights(other, step)
    return ours.keys() == theirs.keys() and all(torch.equal(value, theirs[name]) for name, value in ours.items())


def read_tensors(folder: Path, prefix: str = "") -> dict[str, torch.Tensor]:
    """Return the verified checkpoint's tensors with the prefix `prefix` ("model.<parameter>"), whole, on the CPU."""
    reader = open_tensors(verified(folder))
    tensors = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in reader.metadata.state_dict_metadata.items()
        if name.startswith(prefix)
    }
    with without_its_warnings():
        dcp.load(tensors, storage_reader=reader, no_dist=True)
    return tensors
