"""Write a run's whole state, and read it back. What lies where is said in `manifest.py`."""

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from lightning_llm.errors import ConfigError, Problem
from lightning_llm.precision.loss_scale import LossScale
from lightning_llm.train.manifest import SLOTS, VERSION, Checkpoint
from lightning_llm.train.module import LanguageModule
from lightning_llm.train.precision_plugin import TrainPrecision

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def save(
    folder: Path, module: LanguageModule, optimizer: torch.optim.Optimizer, precision: TrainPrecision, config_hash: str
) -> Checkpoint:
    """Write `folder`/step=N; it appears under that name only when every byte is on disk.

    `folder` is the run's `checkpoints` folder; `config_hash` is the run's identity.
    """
    step, model = module.completed_steps, module.model
    final = folder / f"step={step}"
    partial = folder / f".step={step}.partial"
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    state: dict[str, Any] = get_optimizer_state_dict(model, optimizer, options=FLAT)
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    scalars = {name: value for name, value in state.items() if not isinstance(value, Tensor)}
    save_file(_contiguous(dict(model.named_parameters())), partial / SLOTS["model"])
    save_file(_contiguous(tensors), partial / SLOTS["optimizer"])
    save_file(_contiguous(module.quantisation.state(model)), partial / SLOTS["precision"])
    loss_scale = asdict(precision.state) if precision.state else None
    counters = {"step": step, "skipped_steps": module.skipped_steps}
    _write_json(partial / SLOTS["progress"], {**counters, "loss_scale": loss_scale, "optimizer": scalars})
    files = {slot: {"file": name, "bytes": (partial / name).stat().st_size} for slot, name in SLOTS.items()}
    manifest = {
        "version": VERSION,
        "step": step,
        "config_hash": config_hash,
        "torch": torch.__version__,
        "slots": files,
    }
    _write_json(partial / "manifest.json", manifest)
    for file in partial.iterdir():
        _sync(file)
    if final.exists():
        replaced = folder / f".step={step}.deleted"
        final.rename(replaced)
        partial.rename(final)
        shutil.rmtree(replaced)
    else:
        partial.rename(final)
    _sync(folder)
    return Checkpoint(final, step, config_hash)


def restore(
    checkpoint: Checkpoint, module: LanguageModule, optimizer: torch.optim.Optimizer, precision: TrainPrecision
) -> int:
    """Load the checkpoint into all that trains, in place; return the number of completed steps.

    Raises:
        ConfigError: a parameter is missing, unknown or of another shape.
    """
    model = module.model
    device = next(model.parameters()).device
    stored = load_file(checkpoint.folder / SLOTS["model"], device=str(device))
    own = dict(model.named_parameters())
    problems = _differences(stored, own, checkpoint.folder)
    if problems:
        raise ConfigError(problems)
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(stored[name])
    progress = json.loads((checkpoint.folder / SLOTS["progress"]).read_text())
    state = {**load_file(checkpoint.folder / SLOTS["optimizer"], device=str(device)), **progress["optimizer"]}
    set_optimizer_state_dict(model, optimizer, state, options=FLAT)
    module.quantisation.begin_step(model, int(progress["step"]))
    module.quantisation.load_state(model, load_file(checkpoint.folder / SLOTS["precision"], device=str(device)))
    module.skipped_steps = int(progress["skipped_steps"])
    if precision.state is not None and progress["loss_scale"] is not None:
        precision.state = LossScale(**progress["loss_scale"])
    return int(progress["step"])


def _differences(stored: Mapping[str, Tensor], own: Mapping[str, Tensor], folder: Path) -> list[Problem]:
    problems = [Problem(name, f"is not in the checkpoint {folder}.") for name in own if name not in stored]
    problems += [
        Problem(name, f"is in the checkpoint {folder} but not in this model.") for name in stored if name not in own
    ]
    problems += [
        Problem(name, f"has shape {tuple(stored[name].shape)} in {folder}, and {tuple(own[name].shape)} in this model.")
        for name in own
        if name in stored and stored[name].shape != own[name].shape
    ]
    return problems


def _contiguous(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().contiguous() for name, tensor in tensors.items()}


def _write_json(file: Path, value: Any) -> None:
    file.write_text(json.dumps(value, indent=1))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
