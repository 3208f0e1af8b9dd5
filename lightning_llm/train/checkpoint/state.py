"""Write a run's whole state, and read it back under any layout. The layout of its files: `manifest.py`."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from safetensors.torch import save as safetensors_bytes
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict

from lightning_llm.errors import AgreedError, ConfigError, Problem, StorageError
from lightning_llm.integrity import FileContent, sync_to_disk
from lightning_llm.precision.loss_scale import LossScale
from lightning_llm.train.checkpoint.callback_state import FILE as CALLBACKS
from lightning_llm.train.checkpoint.callback_state import CallbackState, collect, read_callbacks, restore_callbacks
from lightning_llm.train.checkpoint.failures import UNREADABLE, on_all_ranks, torchs_failures, without_its_warnings
from lightning_llm.train.checkpoint.manifest import (
    MANIFEST,
    PRECISION,
    PROGRESS,
    TENSORS,
    Checkpoint,
    DamagedError,
    sealed_manifest,
    verified,
)
from lightning_llm.train.checkpoint.ownership import RunIdentity
from lightning_llm.train.checkpoint.retention import replace
from lightning_llm.train.checkpoint.tensor_storage import TensorWriter, open_tensors
from lightning_llm.train.health.spikes import SpikeState
from lightning_llm.train.module import LanguageModule

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
OPTIONS = "param_groups."
"""Before the names of an optimizer's options in its flat state: one for each parameter and option."""


def save(
    folder: Path, module: LanguageModule, optimizer: torch.optim.Optimizer, run: RunIdentity, config_hash: str
) -> None:
    """Write `folder`/step=N; it appears under that name only when every rank's bytes are on disk. Collective.

    `folder` is the `checkpoints` folder of `run`, seen by all ranks.

    Raises:
        StorageError: on every rank, where one could not write; nothing of the checkpoint is left.
        ConfigError: a callback's state is of a kind that no checkpoint holds.
    """
    step, model = module.completed_steps, module.model
    partial = folder / f".step={step}.partial"
    first = not dist.is_initialized() or dist.get_rank() == 0
    failed = f"the state of step {step} was not saved"
    try:
        with on_all_ranks(failed, OSError):
            if first:
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir(parents=True)
        state = _optimizer_state(model, optimizer)
        tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
        scalars = {name: value for name, value in state.items() if not isinstance(value, Tensor)}
        callbacks = collect(module.trainer)
        encoded_callbacks = callbacks.encode()
        writer = TensorWriter(partial / TENSORS)
        with torchs_failures(failed, OSError), without_its_warnings():
            dcp.save(
                {
                    "model": _parameters(model),
                    "optimizer": tensors,
                    **_algorithm_state(module),
                    "callbacks": callbacks.tensors,
                },
                storage_writer=writer,
                no_dist=not dist.is_initialized(),
            )
        layout = module.trainer.strategy.layout
        scalars = _union(layout.gather_over_stages(scalars))
        delayed = _union(layout.gather_over_stages({k: v.cpu() for k, v in module.quantisation.state(model).items()}))
        with on_all_ranks(failed, OSError):
            if first:
                content = {
                    PRECISION: safetensors_bytes({name: tensor.contiguous() for name, tensor in delayed.items()}),
                    CALLBACKS: encoded_callbacks,
                    PROGRESS: json.dumps(_progress(module, scalars), indent=1).encode(),
                }
                _write_rest(partial, step, content, writer.files, run, config_hash)
                replace(folder / f"step={step}", partial, run)
                sync_to_disk(folder)
    except StorageError:
        if first:
            shutil.rmtree(partial, ignore_errors=True)  # what it took of a full disk is given back
        raise


def _not_shared(partial: Path, missing: list[str]) -> str:
    text = f"{partial.parent} is not one folder for all ranks ({', '.join(missing)} of others are not seen here)"
    return f"the checkpoint is not whole: {text}. Set run.root to storage that all nodes share."


def _progress(module: LanguageModule, optimizer: dict[str, Any]) -> dict[str, Any]:
    """Return what `PROGRESS` says; `optimizer` holds its state's numbers, by name."""
    loss_scale = module.scaler.state
    algorithm = module.train_step.algorithm.numbers()
    return {
        "step": module.state.completed_steps,
        "skipped_steps": module.state.skipped_steps,
        "spikes": asdict(module.spikes.state),
        "loss_scale": asdict(loss_scale) if loss_scale else None,
        "optimizer": optimizer,
        **({"algorithm": algorithm} if algorithm else {}),
    }


def _write_rest(
    partial: Path,
    step: int,
    content: Mapping[str, bytes],
    tensors: Mapping[str, FileContent],
    run: RunIdentity,
    config_hash: str,
) -> None:
    """Write the files that one rank writes for all, the manifest last; what is in `partial` is on the disk then."""
    if missing := sorted(name for name in tensors if not (partial / TENSORS / name).is_file()):
        raise OSError(_not_shared(partial, missing))
    files = {f"{TENSORS}/{name}": each for name, each in tensors.items()}
    files |= {name: FileContent.of(each) for name, each in content.items()}
    origin = {"run_id": run.id, "written_in": str(partial.parent), "config_hash": config_hash}
    manifest = sealed_manifest(step, {**origin, "torch": torch.__version__}, files)
    for name, each in {**content, MANIFEST: manifest}.items():
        (partial / name).write_bytes(each)
        sync_to_disk(partial / name)
    for path in (partial / TENSORS, partial):
        sync_to_disk(path)


def restore(
    checkpoint: Checkpoint, module: LanguageModule, optimizer: torch.optim.Optimizer, own_options: bool = False
) -> None:
    """Load the checkpoint into all that trains, in place. Collective.

    `own_options`: the optimizer's parameter groups keep their options (weight decay, betas, ...), as they were made.

    Raises:
        ConfigError: on every rank, where it could not be loaded on one; or a parameter is missing, unknown or of
            another shape.
    """
    try:
        _restore(checkpoint, module, optimizer, own_options)
    except StorageError as error:
        text = f"{error}. Nothing was changed: resume from another of the run's checkpoints by its path."
        raise AgreedError(Problem("resume", text)) from error


def _restore(
    checkpoint: Checkpoint, module: LanguageModule, optimizer: torch.optim.Optimizer, own_options: bool
) -> None:
    model, progress = module.model, checkpoint.progress
    step, failed = checkpoint.step, f"{checkpoint.folder} could not be loaded"
    with on_all_ranks(failed, *UNREADABLE):
        reader = open_tensors(checkpoint)
        saved_callbacks = read_callbacks(checkpoint.folder / CALLBACKS)
    stored = reader.metadata.state_dict_metadata
    own = _parameters(model)
    shapes = {name: tensor.shape for name, tensor in own.items()}
    whole = _union(module.trainer.strategy.layout.gather_over_stages(shapes))
    problems = _differences(stored, whole, checkpoint.folder)
    if problems:
        raise AgreedError(problems)
    # An optimizer that has made no step has no moments yet; this makes them, without a step.
    state = _optimizer_state(model, optimizer)
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    kept = [name.removeprefix("callbacks.") for name in stored if name.startswith("callbacks.")]
    callbacks = collect(module.trainer) if kept else CallbackState({}, {})  # whose tensors are those to load into
    averages = {name: tensor for name, tensor in callbacks.tensors.items() if name in kept}
    with torch.no_grad(), torchs_failures(failed, Exception), without_its_warnings():
        dcp.load(
            {"model": own, "optimizer": tensors, **_algorithm_state(module), "callbacks": averages},
            storage_reader=reader,
            no_dist=not dist.is_initialized(),
        )
    scalars = {name: value for name, value in progress["optimizer"].items() if name in state}  # this stage's
    if own_options:
        scalars |= {name: value for name, value in state.items() if name.startswith(OPTIONS)}
    loaded: dict[str, Any] = {**tensors, **scalars}
    set_optimizer_state_dict(model, optimizer, loaded, options=FLAT)
    module.quantisation.begin_step(model, step)
    with on_all_ranks(failed, *UNREADABLE):
        device = str(module.trainer.strategy.root_device)
        module.quantisation.load_state(model, load_file(checkpoint.folder / PRECISION, device=device))
        module.state.completed_steps, module.state.skipped_steps = step, progress["skipped_steps"]
        module.train_step.algorithm.load_numbers(progress.get("algorithm", {}))
        module.spikes.state = SpikeState.from_json(progress.get("spikes", {}))
        if module.scaler.state is not None and progress.get("loss_scale") is not None:
            module.scaler.state = LossScale(**progress["loss_scale"])
    restore_callbacks(module.trainer, saved_callbacks, callbacks, averages)


def read_tensors(where: Checkpoint | Path, prefix: str = "") -> dict[str, Tensor]:
    """Return the checkpoint's tensors whose names begin with `prefix` ("model.<parameter>", ...), whole, on the CPU.

    A `Checkpoint` was verified by whoever chose it; at a path it is done here.

    Raises:
        ConfigError: it is damaged.
    """
    checkpoint = where if isinstance(where, Checkpoint) else verified(where)
    failed = f"{checkpoint.folder} could not be loaded"
    try:
        with torchs_failures(failed, Exception), without_its_warnings():
            reader = open_tensors(checkpoint)
            stored: dict[str, Any] = dict(reader.metadata.state_dict_metadata)
            tensors = {
                name: torch.empty(entry.size, dtype=entry.properties.dtype)
                for name, entry in stored.items()
                if name.startswith(prefix)
            }
            dcp.load(tensors, storage_reader=reader, no_dist=True)
    except (StorageError, DamagedError) as error:
        raise ConfigError(Problem(str(checkpoint.folder), f"could not be loaded: {error}.")) from error
    return tensors


def _union(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what all pipeline stages have by name; a tied embedding's entries, which two have, are equal."""
    return {name: value for part in parts for name, value in part.items()}


def _algorithm_state(module: LanguageModule) -> dict[str, dict[str, Tensor]]:
    """Return the training algorithm's tensors, for an algorithm that has any."""
    tensors = module.train_step.algorithm.tensors()
    return {"algorithm": tensors} if tensors else {}


def _optimizer_state(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return get_optimizer_state_dict(model, optimizer, options=FLAT)


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
