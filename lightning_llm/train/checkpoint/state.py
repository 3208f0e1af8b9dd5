"""Write a run's whole state, and read it back under any layout. The layout of its files: `manifest.py`."""

import json
import os
import pickle
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
from safetensors import SafetensorError
from safetensors.torch import load_file
from safetensors.torch import save as safetensors_bytes
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict

from lightning_llm.errors import AgreedError, ConfigError, Problem, StorageError
from lightning_llm.integrity import FileContent
from lightning_llm.precision.loss_scale import LossScale
from lightning_llm.train.checkpoint.callback_state import FILE as CALLBACKS
from lightning_llm.train.checkpoint.callback_state import CallbackState, collect, read_callbacks, restore_callbacks
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
from lightning_llm.train.checkpoint.tensor_storage import TensorWriter, open_tensors, unpickling_problem
from lightning_llm.train.health.spikes import SpikeState
from lightning_llm.train.module import LanguageModule

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
UNREADABLE = (
    OSError,
    ValueError,
    KeyError,
    TypeError,
    RuntimeError,
    SafetensorError,
    DamagedError,
    pickle.UnpicklingError,
)
"""What comes of reading what is not as it was written, where nothing was there to verify it by."""


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
        with _on_all_ranks(failed, OSError):
            if first:
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir(parents=True)
        state = _optimizer_state(model, optimizer)
        tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
        scalars = {name: value for name, value in state.items() if not isinstance(value, Tensor)}
        callbacks = collect(module.trainer)
        encoded_callbacks = callbacks.encode()
        writer = TensorWriter(partial / TENSORS)
        with _torchs_failures(failed, OSError), _without_its_warnings():
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
        with _on_all_ranks(failed, OSError):
            if first:
                content = {
                    PRECISION: safetensors_bytes({name: tensor.contiguous() for name, tensor in delayed.items()}),
                    CALLBACKS: encoded_callbacks,
                    PROGRESS: json.dumps(_progress(module, scalars), indent=1).encode(),
                }
                _write_rest(partial, step, content, writer.files, run, config_hash)
                replace(folder / f"step={step}", partial, run)
                _sync(folder)
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
        _sync(partial / name)
    for path in (partial / TENSORS, partial):
        _sync(path)


def restore(checkpoint: Checkpoint, module: LanguageModule, optimizer: torch.optim.Optimizer) -> None:
    """Load the checkpoint into all that trains, in place. Collective.

    Raises:
        ConfigError: on every rank, where it could not be loaded on one; or a parameter is missing, unknown or of
            another shape.
    """
    try:
        _restore(checkpoint, module, optimizer)
    except StorageError as error:
        text = f"{error}. Nothing was changed: resume from another of the run's checkpoints by its path."
        raise AgreedError(Problem("resume", text)) from error


def _restore(checkpoint: Checkpoint, module: LanguageModule, optimizer: torch.optim.Optimizer) -> None:
    model, progress = module.model, checkpoint.progress
    step, failed = checkpoint.step, f"{checkpoint.folder} could not be loaded"
    with _on_all_ranks(failed, *UNREADABLE):
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
    with torch.no_grad(), _torchs_failures(failed, Exception), _without_its_warnings():
        dcp.load(
            {"model": own, "optimizer": tensors, **_algorithm_state(module), "callbacks": averages},
            storage_reader=reader,
            no_dist=not dist.is_initialized(),
        )
    scalars = {name: value for name, value in progress["optimizer"].items() if name in state}  # this stage's
    loaded: dict[str, Any] = {**tensors, **scalars}
    set_optimizer_state_dict(model, optimizer, loaded, options=FLAT)
    module.quantisation.begin_step(model, step)
    with _on_all_ranks(failed, *UNREADABLE):
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
        with _torchs_failures(failed, Exception), _without_its_warnings():
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


@contextmanager
def _on_all_ranks(failed: str, *kinds: type[Exception]) -> Iterator[None]:
    """Run a block without a collective; where it fails with one of `kinds` on one rank, raise StorageError on all.

    Collective.
    """
    problem, cause = None, None
    try:
        yield
    except kinds as error:
        problem, cause = _in_words(error), error
    found = [problem]
    if dist.is_initialized():
        found = [None] * dist.get_world_size()
        dist.all_gather_object(found, problem)
    if any(found):
        raise StorageError(_of_ranks(failed, {rank: text for rank, text in enumerate(found) if text})) from cause


@contextmanager
def _torchs_failures(failed: str, *kinds: type[Exception]) -> Iterator[None]:
    """Turn what torch raises on every rank, where `kinds` are all its causes, into a StorageError."""
    try:
        yield
    except CheckpointException as error:
        causes = [cause for cause, _ in error.failures.values()]
        if signals := [cause for cause in causes if not isinstance(cause, Exception)]:
            raise signals[0] from error
        if not all(isinstance(cause, kinds) for cause in causes):
            raise
        problems = {rank: _in_words(cause) for rank, (cause, _) in error.failures.items()}
        raise StorageError(_of_ranks(failed, problems)) from error


def _of_ranks(failed: str, problems: Mapping[int, str]) -> str:
    """Return one line: what failed, and why; which rank only where there are several."""
    (rank, text), *others = problems.items()
    several = dist.is_initialized() and dist.get_world_size() > 1
    more = f", and {len(others)} other rank(s)" if others else ""
    return f"{failed}: {f'rank {rank}{more}: ' if several else ''}{text}"


def _in_words(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror + (f" ({error.filename})" if error.filename else "")
    if isinstance(error, pickle.UnpicklingError):
        return f"a tensor {unpickling_problem(error)}"
    text = (str(error).splitlines() or [""])[0]
    return text if isinstance(error, OSError | DamagedError) else f"{type(error).__name__}: {text}"[:300]


@contextmanager
def _without_its_warnings() -> Iterator[None]:
    """Keep what torch says of a checkpoint made or read by one process, on purpose, out of the user's terminal.

    And what it says of a pickle that it then refuses.
    """
    with warnings.catch_warnings():
        for message in ("torch.distributed is disabled", "Detected pickle protocol"):
            warnings.filterwarnings("ignore", message=message)
        yield


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


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
