"""Weights under our names, or under Hugging Face's: what is to be written of each tensor, made when its file is."""

from collections.abc import Callable, Mapping
from math import prod

import torch
from torch import Tensor

from lightning_llm.config.schema.model import ModelConfig
from lightning_llm.model.dtypes import DTYPES
from lightning_llm.model.interop.families import (
    VOCABULARY,
    Stored,
    architecture,
    huggingface_config,
    model_config_of,
    parameter_shapes,
    stored_as,
)
from lightning_llm.model.weights.folder import Weights
from lightning_llm.model.weights.load import InitialWeights
from lightning_llm.model.weights.write import ToWrite


def as_ours(weights: Weights) -> list[ToWrite]:
    """Return every parameter under our names, bit for bit in the dtype it is kept in."""
    return [
        ToWrite(name, prod(shape) * DTYPES[weights.dtype(name)].itemsize, _Rows(weights, name, shape[0]))
        for name, shape in weights.shapes.items()
    ]


def as_huggingface(weights: Weights, config: ModelConfig, dtype: str) -> list[ToWrite]:
    """Return every tensor of the architecture that computes what `config` does, in `dtype`.

    Raises:
        ConfigError: there is none.
    """
    parts: dict[str, list[tuple[str, Stored]]] = {}
    for ours, stored in stored_as(config, architecture(config)).items():
        parts.setdefault(stored.name, []).append((ours, stored))
    kind = DTYPES[dtype]
    return [
        ToWrite(name, prod(several[0][1].whole) * kind.itemsize, _Joined(weights, several, kind))
        for name, several in parts.items()
    ]


class _Rows:
    """A whole parameter."""

    def __init__(self, weights: Weights, name: str, rows: int):
        self.weights, self.name, self.rows = weights, name, rows

    def __call__(self) -> Tensor:
        return self.weights.rows(self.name, 0, self.rows)


class _Joined:
    """A tensor of theirs, of one of our parameters or several that lie side by side."""

    def __init__(self, weights: Weights, several: list[tuple[str, Stored]], dtype: torch.dtype):
        self.weights, self.several, self.dtype = weights, several, dtype

    def __call__(self) -> Tensor:
        parts = [self.weights.rows(ours, 0, stored.shape[0]).to(self.dtype) for ours, stored in self.several]
        whole = torch.cat(parts) if len(parts) > 1 else parts[0]
        return whole.t() if self.several[0][1].transposed else whole


def state_dict_of(weights: Weights, config: ModelConfig | None = None) -> Mapping[str, Tensor]:
    """Return all parameters as a `Decoder` of `config` loads them: fp32, with zeros as rows of padding, on the CPU."""
    config = config or weights.config
    return whole_state(InitialWeights(weights, config), config)


def whole_state(initial: Callable[[str, int, int], Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Return all parameters of a `Decoder` of `config` from slices of them, see `InitialWeights`: fp32, on the CPU."""
    state = {}
    for name, shape in parameter_shapes(config).items():
        rows = config.padded_vocab_size if name in VOCABULARY else shape[0]
        state[name] = initial(name, 0, rows * prod(shape[1:])).view(rows, *shape[1:])
    return state


__all__ = ["from_huggingface", "huggingface_config", "model_config_of", "to_huggingface"]


def to_huggingface(state: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Return a whole `Decoder`'s state dict under Hugging Face's names and shapes, without padding rows.

    A tied head is no entry of its own, as in the safetensors files of tied models.
    """
    parts: dict[str, list[Tensor]] = {}
    turned = set()
    for ours, stored in stored_as(config, architecture(config)).items():
        tensor = state[ours][: config.vocab_size] if ours in VOCABULARY else state[ours]
        parts.setdefault(stored.name, []).append(tensor)
        turned |= {stored.name} if stored.transposed else set()
    whole = {name: torch.cat(several) if len(several) > 1 else several[0] for name, several in parts.items()}
    return {name: (tensor.t() if name in turned else tensor).contiguous() for name, tensor in whole.items()}


def from_huggingface(state: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Return the state dict a `Decoder` of `config` loads, from that of a Hugging Face model. Raises KeyError."""
    result: dict[str, Tensor] = {}
    for ours, stored in stored_as(config, architecture(config)).items():
        theirs = state[stored.name].t() if stored.transposed else state[stored.name]
        tensor = theirs[stored.first : stored.first + stored.shape[0]]
        if ours in VOCABULARY:
            padding = config.padded_vocab_size - tensor.shape[0]
            tensor = torch.nn.functional.pad(tensor, (0, 0, 0, padding))  # [V, D]
        result[ours] = tensor
    return result
