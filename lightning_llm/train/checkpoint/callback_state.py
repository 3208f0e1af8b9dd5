"""State of callbacks in a checkpoint: their `state_dict`, and what `on_save_checkpoint` adds.

`on_save_checkpoint` gets Lightning's dictionary. A tensor that stands there under a parameter's name and has its shape
(the averaged weights of WeightAveraging) is stored as parameters are, sharded, so that any layout reads it. Everything
else is rank 0's and goes into one file, which torch reads back without running code (`weights_only`): numbers, strings,
tensors, lists and dictionaries of them.
"""

import io
import pickle
import warnings
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import EarlyStopping
from torch import Tensor

from lightning_llm.base.errors import ConfigError, Problem
from lightning_llm.base.integrity import unpickling_problem
from lightning_llm.train.checkpoint.manifest import Damage, DamagedError

FILE = "callbacks.pt"
MODEL_KEYS = "model_state_keys"
"""Keys of the dictionary that hold the model's own state, which is stored but once."""


@dataclass(frozen=True)
class CallbackState:
    """`sharded`: tensors like parameters, by their path in Lightning's dictionary; `rest`: that dictionary's others."""

    sharded: dict[tuple[str, ...], Tensor]
    rest: dict[str, Any]

    @classmethod
    def of_dicts(cls, trainer: pl.Trainer) -> "CallbackState":
        """Return what the callbacks' `state_dict` say now, by their keys."""
        states = {each.state_key: each.state_dict() for each in trainer.callbacks}
        return cls({}, {"callbacks": {key: state for key, state in states.items() if state}})

    @property
    def tensors(self) -> dict[str, Tensor]:
        """`sharded` by dotted names, as in the checkpoint below "callbacks."."""
        return {".".join(path): tensor for path, tensor in self.sharded.items()}

    def encode(self) -> bytes:
        """Return the bytes of `FILE`.

        Raises:
            ConfigError: naming the callback whose state could not be read back.
        """
        for name, state in self.rest["callbacks"].items():
            _encoded(state, f"the state of {name}")
        return _encoded(self.rest, "what a callback's on_save_checkpoint adds")


def collect(trainer: pl.Trainer) -> CallbackState:
    """Return what the callbacks would have saved now. Tensors are theirs, not copies."""
    module = trainer.lightning_module
    model = module.state_dict()
    checkpoint: dict[str, Any] = {"state_dict": model, "global_step": trainer.global_step}
    checkpoint |= CallbackState.of_dicts(trainer).rest
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
    """Return what `CallbackState.encode` wrote to `file`; what says that there is nothing, where an older run has none.

    Raises whatever torch does of a file that is not as it was written, and DamagedError of one that holds no mere data.
    """
    if not file.exists():
        return {MODEL_KEYS: ["state_dict"], "callbacks": {}}
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Detected pickle protocol")  # and then it is read, or refused
            saved: Any = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise DamagedError(Damage(file.parent, FILE, unpickling_problem(error))) from error
    if not (isinstance(saved, dict) and isinstance(saved.get("callbacks"), dict) and MODEL_KEYS in saved):
        raise ValueError(f"{FILE} holds something else than callbacks' state")
    return saved


def restore_callbacks(
    trainer: pl.Trainer, saved: Mapping[str, Any], fresh: CallbackState, loaded: Collection[str]
) -> None:
    """Hand each callback what it `saved`; `fresh` is `collect` from before, and of its tensors `loaded` are so.

    A callback that the checkpoint knows nothing of begins here, with the model as it is.
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
                callback.patience = patience  # its state holds this argument, and the config's is newer


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
