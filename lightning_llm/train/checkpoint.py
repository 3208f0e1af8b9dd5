"""Write a run's whole state, and read it back under any layout. What lies where is said in `manifest.py`."""

import json
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from lightning_llm.errors import ConfigError, Problem
from lightning_llm.precision.loss_scale import LossScale
from lightning_llm.train.callback_state import FILE as CALLBACKS
from lightning_llm.train.callback_state import CallbackState, collect, restore_callbacks
from lightning_llm.train.manifest import PRECISION, PROGRESS, TENSORS, VERSION, Checkpoint
from lightning_llm.train.module import LanguageModule
from lightning_llm.train.precision_plugin import TrainPrecision
from lightning_llm.train.spikes import SpikeState

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def save(
    folder: Path, module: LanguageModule, optimizer: torch.optim.Optimizer, precision: TrainPrecision, config_hash: str
) -> Checkpoint:
    """Write `folder`/step=N; it appears under that name only when every rank's bytes are on disk. Collective.

    `folder` is the run's `checkpoints` folder, seen by all ranks; `config_hash` is the run's identity.
    """
    step, model = module.completed_steps, module.model
    final, partial = folder / f"step={step}", folder / f".step={step}.partial"
    first = not dist.is_initialized() or dist.get_rank() == 0
    if first:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    _barrier()
    optimizer_state = get_optimizer_state_dict(model, optimizer, options=FLAT)
    tensors = {name: value for name, value in optimizer_state.items() if isinstance(value, Tensor)}
    scalars = {name: value for name, value in optimizer_state.items() if not isinstance(value, Tensor)}
    callbacks = collect(module.trainer)
    with _without_its_warning():
        dcp.save(
            {"model": _parameters(model), "optimizer": tensors, "callbacks": callbacks.tensors},
            storage_writer=dcp.FileSystemWriter(partial / TENSORS, sync_files=True),
            no_dist=not dist.is_initialized(),
        )
    layout = module.trainer.strategy.layout
    scalars = _union(layout.gather_over_stages(scalars))
    delayed = _union(layout.gather_over_stages({k: v.cpu() for k, v in module.quantisation.state(model).items()}))
    if first:
        save_file({name: tensor.contiguous() for name, tensor in delayed.items()}, partial / PRECISION)
        loss_scale = asdict(precision.state) if precision.state else None
        counters = {"step": step, "skipped_steps": module.skipped_steps, "spikes": asdict(module.spikes.state)}
        (partial / CALLBACKS).write_bytes(callbacks.encode())
        _write_json(partial / PROGRESS, {**counters, "loss_scale": loss_scale, "optimizer": scalars})
        _finish(partial, final, {"step": step, "config_hash": config_hash})
    _barrier()
    return Checkpoint(final, step, config_hash)


def _finish(partial: Path, final: Path, facts: dict[str, Any]) -> None:
    """Write the manifest and move the folder to its name."""
    files = sorted(file for file in partial.rglob("*") if file.is_file())
    stored = dcp.FileSystemReader(partial / TENSORS).read_metadata().storage_data or {}
    missing = sorted({part.relative_path for part in stored.values()} - {file.name for file in files})
    if missing:
        text = f"{partial.parent} is not one folder for all ranks ({', '.join(missing)} of others are not seen here)"
        raise OSError(f"the checkpoint is not whole: {text}. Set run.root to storage that all nodes share.")
    sizes = {str(file.relative_to(partial)): file.stat().st_size for file in files}
    _write_json(partial / "manifest.json", {"version": VERSION, **facts, "torch": torch.__version__, "files": sizes})
    for path in [*partial.rglob("*"), partial]:
        _sync(path)
    if final.exists():
        replaced = final.with_name(f".{final.name}.deleted")
        final.rename(replaced)
        partial.rename(final)
        shutil.rmtree(replaced)
    else:
        partial.rename(final)
    _sync(final.parent)


def restore(
    checkpoint: Checkpoint, module: LanguageModule, optimizer: torch.optim.Optimizer, precision: TrainPrecision
) -> int:
    """Load the checkpoint into all that trains, in place; return the number of completed steps. Collective.

    Raises:
        ConfigError: a parameter is missing, unknown or of another shape.
    """
    model = module.model
    reader = dcp.FileSystemReader(checkpoint.folder / TENSORS)
    own = _parameters(model)
    shapes = {name: tensor.shape for name, tensor in own.items()}
    whole = _union(module.trainer.strategy.layout.gather_over_stages(shapes))
    stored = reader.read_metadata().state_dict_metadata
    problems = _differences(stored, whole, checkpoint.folder)
    if problems:
        raise ConfigError(problems)
    progress = json.loads((checkpoint.folder / PROGRESS).read_text())
    # An optimizer that has made no step has no moments yet; this makes them, without a step.
    state = get_optimizer_state_dict(model, optimizer, options=FLAT)
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    kept = [name.removeprefix("callbacks.") for name in stored if name.startswith("callbacks.")]
    callbacks = collect(module.trainer) if kept else CallbackState({}, {})  # whose tensors are those to load into
    averages = {name: tensor for name, tensor in callbacks.tensors.items() if name in kept}
    with torch.no_grad(), _without_its_warning():
        dcp.load(
            {"model": own, "optimizer": tensors, "callbacks": averages},
            storage_reader=reader,
            no_dist=not dist.is_initialized(),
        )
    scalars = {name: value for name, value in progress["optimizer"].items() if name in state}  # this stage's
    set_optimizer_state_dict(model, optimizer, {**tensors, **scalars}, options=FLAT)
    module.quantisation.begin_step(model, int(progress["step"]))
    device = str(module.trainer.strategy.root_device)
    module.quantisation.load_state(model, load_file(checkpoint.folder / PRECISION, device=device))
    module.skipped_steps = int(progress["skipped_steps"])
    module.spikes.state = SpikeState.from_json(progress.get("spikes", {}))
    if precision.state is not None and progress["loss_scale"] is not None:
        precision.state = LossScale(**progress["loss_scale"])
    restore_callbacks(module.trainer, checkpoint.folder / CALLBACKS, callbacks, averages)
    return int(progress["step"])


def read_tensors(folder: Path, prefix: str = "") -> dict[str, Tensor]:
    """Return the checkpoint's tensors whose names begin with `prefix` ("model.<parameter>", ...), whole, on the CPU."""
    reader = dcp.FileSystemReader(folder / TENSORS)
    stored: dict[str, Any] = dict(reader.read_metadata().state_dict_metadata)
    tensors = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in stored.items()
        if name.startswith(prefix)
    }
    with _without_its_warning():
        dcp.load(tensors, storage_reader=reader, no_dist=True)
    return tensors


@contextmanager
def _without_its_warning() -> Iterator[None]:
    """Keep what torch says of a checkpoint made or read by one process, on purpose, out of the user's terminal."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _union(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what all pipeline stages have by name; a tied embedding's entries, which two have, are equal."""
    return {name: value for part in parts for name, value in part.items()}


def _parameters(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def _differences(stored: Mapping[str, Any], own: Mapping[str, torch.Size], folder: Path) -> list[Problem]:
    kept = {name.removeprefix("model."): entry for name, entry in stored.items() if name.startswith("model.")}
    problems = [Problem(name, f"is not in the checkpoint {folder}.") for name in own if name not in kept]
    problems += [
        Problem(name, f"is in the checkpoint {folder} but not in this model.") for name in kept if name not in own
    ]
    problems += [
        Problem(name, f"has shape {tuple(kept[name].size)} in {folder}, and {tuple(own[name])} in this model.")
        for name in own
        if name in kept and kept[name].size != own[name]
    ]
    return problems


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def _write_json(file: Path, value: Any) -> None:
    file.write_text(json.dumps(value, indent=1))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
