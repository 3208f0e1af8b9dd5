"""Restore a run's whole state from a checkpoint, under any layout."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

from lightning_llm.base.errors import AgreedError, Problem, StorageError
from lightning_llm.precision.loss_scale import LossScale
from lightning_llm.train.checkpoint.failures import UNREADABLE, on_all_ranks, torchs_failures, without_its_warnings
from lightning_llm.train.checkpoint.manifest import PRECISION, Checkpoint
from lightning_llm.train.checkpoint.snapshot import (
    CALLBACKS_FILE,
    FLAT,
    CallbackState,
    algorithm_state,
    collect,
    optimizer_state,
    parameters,
    read_callbacks,
    restore_callbacks,
    union,
)
from lightning_llm.train.checkpoint.tensor_storage import open_tensors
from lightning_llm.train.module import LanguageModule
from lightning_llm.train.spikes import SpikeState
from lightning_llm.train.weight_rounding import COMPENSATION

SAME_MODEL = "Resume with the model that it was saved from."
OPTIONS = "param_groups."
"""Prefix of an optimizer's options in its flat state, one entry per parameter and option."""


def restore(
    checkpoint: Checkpoint, module: LanguageModule, optimizer: torch.optim.Optimizer, own_options: bool = False
) -> None:
    """Load a checkpoint into the run: model, optimizer, counters, callbacks and all other state, in place. Collective.

    `own_options`: the optimizer's parameter groups keep their current options (weight decay, betas, ...).

    Raises:
        ConfigError: on every rank, if it could not be loaded on one, or a parameter is missing, unknown or has another
            shape.
    """
    try:
        _restore(checkpoint, module, optimizer, own_options)
    except StorageError as error:
        text = f"{error}. Nothing was changed. Resume from another checkpoint of the run by its path."
        raise AgreedError(Problem("resume", text)) from error


def _restore(
    checkpoint: Checkpoint, module: LanguageModule, optimizer: torch.optim.Optimizer, own_options: bool
) -> None:
    model, progress = module.model, checkpoint.progress
    step, failed = checkpoint.step, f"{checkpoint.folder} could not be loaded"
    with on_all_ranks(failed, *UNREADABLE):
        reader = open_tensors(checkpoint)
        saved_callbacks = read_callbacks(checkpoint.folder / CALLBACKS_FILE)
    stored = reader.metadata.state_dict_metadata
    own = parameters(model)
    shapes = {name: tensor.shape for name, tensor in own.items()}
    whole = union(module.trainer.strategy.layout.gather_over_stages(shapes))
    problems = _differences(stored, whole, checkpoint.folder)
    if problems:
        raise AgreedError(problems)
    # An optimizer without a step has no moments yet; this creates them without a step.
    state = optimizer_state(model, optimizer)
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    begun = [name for name in tensors if name.endswith(f".{COMPENSATION}") and f"optimizer.{name}" not in stored]
    saved = {name: tensor for name, tensor in tensors.items() if name not in begun}  # others begin at 0 in a branch
    kept = [name.removeprefix("callbacks.") for name in stored if name.startswith("callbacks.")]
    callbacks = collect(module.trainer) if kept else CallbackState({}, {})  # its tensors are loaded into
    averages = {name: tensor for name, tensor in callbacks.tensors.items() if name in kept}
    with torch.no_grad(), torchs_failures(failed, Exception), without_its_warnings():
        dcp.load(
            {"model": own, "optimizer": saved, **algorithm_state(module), "callbacks": averages},
            storage_reader=reader,
            no_dist=not dist.is_initialized(),
        )
    scalars = {name: value for name, value in progress["optimizer"].items() if name in state}  # this stage's
    if own_options:
        scalars |= {name: value for name, value in state.items() if name.startswith(OPTIONS)}
    loaded: dict[str, Any] = {**tensors, **scalars}
    set_optimizer_state_dict(model, optimizer, loaded, options=FLAT)
    module.quantization.begin_step(model, step)
    with on_all_ranks(failed, *UNREADABLE):
        device = str(module.trainer.strategy.root_device)
        module.quantization.load_state(model, load_file(checkpoint.folder / PRECISION, device=device))
        module.state.completed_steps, module.state.skipped_steps = step, progress["skipped_steps"]
        module.state.skipped_in_a_row = progress.get("skipped_in_a_row", 0)  # absent in earlier releases
        module.train_step.algorithm.load_numbers(progress.get("algorithm", {}))
        module.spikes.state = SpikeState.from_json(progress.get("spikes", {}))
        if module.scaler.state is not None and progress.get("loss_scale") is not None:
            module.scaler.state = LossScale(**progress["loss_scale"])
    restore_callbacks(module.trainer, saved_callbacks, callbacks, averages)


def _differences(stored: Mapping[str, Any], own: Mapping[str, torch.Size], folder: Path) -> list[Problem]:
    kept = {name.removeprefix("model."): entry for name, entry in stored.items() if name.startswith("model.")}
    problems = [Problem(name, f"is not in the checkpoint {folder}. {SAME_MODEL}") for name in own if name not in kept]
    problems += [
        Problem(name, f"is in the checkpoint {folder} but not in this model. {SAME_MODEL}")
        for name in kept
        if name not in own
    ]
    problems += [
        Problem(
            name, f"has shape {tuple(kept[name].size)} in {folder}, and {tuple(own[name])} in this model. {SAME_MODEL}"
        )
        for name in own
        if name in kept and kept[name].size != own[name]
    ]
    return problems
