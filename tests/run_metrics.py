"""Reading back what a run wrote."""

import json
from pathlib import Path

import torch

from lightning_llm.train.checkpoint.restoring import read_tensors


def read_metrics(folder: Path) -> list[dict]:
    """Return the records of `folder`/metrics.jsonl."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def curve(folder: Path) -> list[tuple]:
    """Return what must be equal bit for bit between runs that are the same."""
    keys = ("step", "tokens", "loss", "grad_norm", "lr", "val_loss", "val_loss/jsonl")
    return [tuple(record.get(key) for key in keys) for record in read_metrics(folder)]


def steps_saved(folder: Path) -> list[int]:
    """Return the steps that `folder` has checkpoints of."""
    return sorted(int(path.name.removeprefix("step=")) for path in (folder / "checkpoints").glob("step=*"))


def weights(folder: Path, step: int) -> dict[str, torch.Tensor]:
    """Return the parameters in the checkpoint of `step`."""
    tensors = read_tensors(folder / "checkpoints" / f"step={step}")
    return {name: tensor for name, tensor in tensors.items() if name.startswith("model.")}


def same_weights(one: Path, other: Path, step: int) -> bool:
    """Whether both runs had the same parameters after `step`, bit for bit."""
    ours, theirs = weights(one, step), weights(other, step)
    return ours.keys() == theirs.keys() and all(torch.equal(value, theirs[name]) for name, value in ours.items())
