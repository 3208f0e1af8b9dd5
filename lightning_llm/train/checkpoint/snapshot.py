"""Snapshots of a run's whole state between two steps, and CPU copies of them that training does not modify.

The state of callbacks is their `state_dict` and the entries that `on_save_checkpoint` adds to Lightning's dictionary. A
tensor there with a parameter's name and shape (e.g. averaged weights of WeightAveraging) is stored like parameters,
sharded, so that any layout can read it. Everything else is taken from rank 0 and stored in one file that torch reads
without running code (`weights_only`): numbers, strings, tensors, and lists and dictionaries of them.
"""

import io
import json
import pickle
import warnings
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import EarlyStopping
from safetensors.torch import save as safetensors_bytes
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

from lightning_llm.base.errors import ConfigError, Problem
from lightning_llm.base.integrity import unpickling_problem
from lightning_llm.data.mixing.addressing import SKIPPED_SAMPLES
from lightning_llm.linalg import local
from lightning_llm.train.checkpoint.manifest import PRECISION, PROGRESS, Damage, DamagedError
from lightning_llm.train.module import LanguageModule

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
CALLBACKS_FILE = "callbacks.pt"
MODEL_KEYS = "model_state_keys"
"""Keys of the dictionary with the model's own state, which is stored only once."""


@dataclass(frozen=True)
class Snapshot:
    """A run's whole state after a step, to be written as a checkpoint."""

    step: int
    tensors: Mapping[str, dict[str, Tensor]]
    """This rank's tensors by kind ("model", "optimizer", "algorithm", "callbacks") and name."""
    content: Mapping[str, bytes]
    """Content of the files that the first rank writes, by name."""
    copies: "CpuCopies | None" = None
    """CPU copies of this rank's part of each tensor, by "<kind>.<name>"; None: the tensors themselves are written, and
    must not change until then."""
    about: Mapping[str, Any] = field(default_factory=dict)
    """Further entries of the manifest."""

    @property
    def planner(self) -> DefaultSavePlanner:
        """Save planner for torch.distributed.checkpoint that provides the tensors' content, from `copies` if any."""
        return DefaultSavePlanner() if self.copies is None else _CopiesPlanner(self.copies)


def take(module: LanguageModule, optimizer: torch.optim.Optimizer) -> Snapshot:
    """Return a snapshot of the current state. Collective over the stages of a pipeline.

    Raises:
        ConfigError: a callback's state has a type that checkpoints cannot store.
    """
    model, layout = module.model, module.trainer.strategy.layout
    state = optimizer_state(model, optimizer)
    callbacks = collect(module.trainer)
    encoded_callbacks = callbacks.encode()
    numbers = union(
        layout.gather_over_stages({name: value for name, value in state.items() if not isinstance(value, Tensor)})
    )
    delayed = union(layout.gather_over_stages({k: v.cpu() for k, v in module.quantization.state(model).items()}))
    content = {
        PRECISION: safetensors_bytes({name: tensor.contiguous() for name, tensor in delayed.items()}),
        CALLBACKS_FILE: encoded_callbacks,
        PROGRESS: json.dumps(_progress(module, numbers), indent=1).encode(),
    }
    tensors = {
        "model": parameters(model),
        "optimizer": {name: value for name, value in state.items() if isinstance(value, Tensor)},
        **algorithm_state(module),
        "callbacks": callbacks.tensors,
    }
    return Snapshot(module.completed_steps, tensors, content)


class CpuCopies:
    """CPU buffers for copies of a rank's tensors, reused from save to save; pinned memory for a GPU."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._copied: torch.cuda.Event | None = None

    @torch.no_grad()
    def copy(self, snapshot: Snapshot) -> Snapshot:
        """Return `snapshot` with its tensors copied here, overwriting earlier copies.

        On a GPU the copies are only enqueued, on the stream of the steps, before later steps change the tensors.
        """
        named = {f"{kind}.{name}": each for kind, part in snapshot.tensors.items() for name, each in part.items()}
        own = {name: local(each).detach() for name, each in named.items()}
        self._buffers = {name: self._buffer(name, tensor) for name, tensor in own.items()}
        for name, tensor in own.items():
            self._buffers[name].copy_(tensor, non_blocking=tensor.is_cuda)
        if any(tensor.is_cuda for tensor in own.values()):
            self._copied = torch.cuda.Event()
            self._copied.record()
        return replace(snapshot, copies=self)

    def wait(self) -> None:
        """Wait until the copies are complete."""
        if self._copied is not None:
            self._copied.synchronize()

    def __getitem__(self, name: str) -> Tensor:
        return self._buffers[name]

    def _buffer(self, name: str, tensor: Tensor) -> Tensor:
        kept = self._buffers.get(name)
        if kept is not None and (kept.shape, kept.dtype) == (tensor.shape, tensor.dtype):
            return kept
        # With the strides that torch would write for the tensor itself.
        return torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)


class _CopiesPlanner(DefaultSavePlanner):
    """Plans with the shapes of the training tensors, and reads the content from their copies."""

    def __init__(self, copies: CpuCopies):
        super().__init__()
        self.copies = copies

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self.copies[index.fqn]


def parameters(model: torch.nn.Module) -> dict[str, Tensor]:
    """Return the model's parameters by name, detached."""
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def optimizer_state(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the optimizer's state by flat names such as "state.PARAMETER.exp_avg" and "param_groups.PARAMETER.lr"."""
    return get_optimizer_state_dict(model, optimizer, options=FLAT)


def algorithm_state(module: LanguageModule) -> dict[str, dict[str, Tensor]]:
    """Return {"algorithm": the training algorithm's tensors by name}, {} if it has none."""
    tensors = module.train_step.algorithm.tensors()
    return {"algorithm": tensors} if tensors else {}


def union(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Merge the entries of all pipeline stages by name; the two copies of a tied embedding's entries are equal."""
    return {name: value for part in parts for name, value in part.items()}


def _progress(module: LanguageModule, optimizer: dict[str, Any]) -> dict[str, Any]:
    """Return the content of `PROGRESS`; `optimizer`: the numbers of its state, by name."""
    loss_scale = module.scaler.state
    algorithm = module.train_step.algorithm.numbers()
    skipped = module.trainer.datamodule.corpus.skipped
    return {
        "step": module.state.completed_steps,
        "skipped_steps": module.state.skipped_steps,
        "skipped_in_a_row": module.state.skipped_in_a_row,
        "spikes": asdict(module.spikes.state),
        "loss_scale": asdict(loss_scale) if loss_scale else None,
        "optimizer": optimizer,
        **({"algorithm": algorithm} if algorithm else {}),
        **({SKIPPED_SAMPLES: skipped} if skipped else {}),
    }


@dataclass(frozen=True)
class CallbackState:
    """State of all callbacks, divided by how a checkpoint stores it."""

    sharded: dict[tuple[str, ...], Tensor]
    """Tensors with a parameter's name and shape, by their path in Lightning's dictionary."""
    rest: dict[str, Any]
    """Everything else in Lightning's dictionary."""

    @classmethod
    def from_trainer(cls, trainer: pl.Trainer) -> "CallbackState":
        """Return the `state_dict` of each callback by its state key, all in `rest`."""
        states = {each.state_key: each.state_dict() for each in trainer.callbacks}
        return cls({}, {"callbacks": {key: state for key, state in states.items() if state}})

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors of `sharded` by dotted names, as a checkpoint stores them under "callbacks."."""
        return {".".join(path): tensor for path, tensor in self.sharded.items()}

    def encode(self) -> bytes:
        """Return the bytes of `CALLBACKS_FILE`.

        Raises:
            ConfigError: a callback's state could not be read back; names the callback.
        """
        for name, state in self.rest["callbacks"].items():
            _encoded(state, f"the state of {name}")
        return _encoded(self.rest, "what a callback's on_save_checkpoint adds")


def collect(trainer: pl.Trainer) -> CallbackState:
    """Return the current state of the trainer's callbacks, including `on_save_checkpoint`. Tensors are not copied."""
    module = trainer.lightning_module
    model = module.state_dict()
    checkpoint: dict[str, Any] = {"state_dict": model, "global_step": trainer.global_step}
    checkpoint |= CallbackState.from_trainer(trainer).rest
    for callback in trainer.callbacks:
        callback.on_save_checkpoint(trainer, module, checkpoint)
    rest: dict[str, Any] = {MODEL_KEYS: [key for key, value in checkpoint.items() if value is model]}
    sharded: dict[tuple[str, ...], Tensor] = {}
    for key, value in checkpoint.items():
        if value is not model:
            found = dict(_parameter_like(value, model, (key,)))
            sharded |= found
            rest[key] = _without(value, found, (key,))
    return CallbackState(sharded, rest)


def read_callbacks(file: Path) -> dict[str, Any]:
    """Return the data that `CallbackState.encode` wrote to `file`, empty if an older run has no such file.

    Raises torch's exceptions for a damaged file, and DamagedError for one with more than plain data.
    """
    if not file.exists():
        return {MODEL_KEYS: ["state_dict"], "callbacks": {}}
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Detected pickle protocol")  # it is then read or rejected
            saved: Any = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise DamagedError(Damage(file.parent, CALLBACKS_FILE, unpickling_problem(error))) from error
    if not (isinstance(saved, dict) and isinstance(saved.get("callbacks"), dict) and MODEL_KEYS in saved):
        raise ValueError(f"{CALLBACKS_FILE} contains data that is not callback state")
    return saved


def restore_callbacks(
    trainer: pl.Trainer, saved: Mapping[str, Any], fresh: CallbackState, loaded: Collection[str]
) -> None:
    """Restore the state of each callback.

    `saved`: result of `read_callbacks`. `fresh`: result of `collect` before loading; its tensors named in `loaded` have
    been loaded from the checkpoint. A callback that is not in the checkpoint starts with the model as it is.
    """
    module, checkpoint = trainer.lightning_module, dict(saved)
    for key in checkpoint.pop(MODEL_KEYS):
        checkpoint[key] = module.state_dict()
    for path, tensor in fresh.sharded.items():
        if ".".join(path) in loaded:
            node = checkpoint
            for key in path[:-1]:
                node = node.setdefault(key, {})
            node[path[-1]] = tensor
    checkpoint.setdefault("state_dict", module.state_dict())
    for callback in trainer.callbacks:
        callback.on_load_checkpoint(trainer, module, checkpoint)
    for callback in trainer.callbacks:
        if state := checkpoint["callbacks"].get(callback.state_key):
            patience = callback.patience if isinstance(callback, EarlyStopping) else None
            callback.load_state_dict(state)
            if patience is not None:
                callback.patience = patience  # its state contains this argument, but the config's value is newer


def _parameter_like(value: Any, model: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[tuple[Any, Tensor]]:
    if not isinstance(value, dict):
        return
    for key, each in value.items():
        if isinstance(each, Tensor) and key in model and each.shape == model[key].shape:
            yield (*path, key), each
        else:
            yield from _parameter_like(each, model, (*path, key))


def _without(value: Any, paths: Collection[Any], path: tuple[str, ...]) -> Any:
    if not isinstance(value, dict):
        return value
    return {key: _without(each, paths, (*path, key)) for key, each in value.items() if (*path, key) not in paths}


def _encoded(value: Any, what: str) -> bytes:
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        buffer.seek(0)
        torch.load(buffer, map_location="cpu", weights_only=True)
    except (pickle.PickleError, AttributeError, TypeError) as error:
        why = str(error).strip().splitlines()[0]
        text = f"{what} cannot be kept in a checkpoint, which holds numbers, strings, tensors, lists and dictionaries"
        raise ConfigError(Problem("callbacks", f"{text} alone: {why}")) from error
    return buffer.getvalue()
