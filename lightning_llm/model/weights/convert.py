"""Conversion of weights to our names or Hugging Face's: each tensor is computed when its file is written."""

from math import prod

import torch
from torch import Tensor

from lightning_llm.config.schema.model import ModelConfig
from lightning_llm.model.dtypes import DTYPES
from lightning_llm.model.interop.families import StoredParameter, architecture, stored_as
from lightning_llm.model.weights.folder import Weights
from lightning_llm.model.weights.write import TensorToWrite


def as_ours(weights: Weights) -> list[TensorToWrite]:
    """Return every parameter under our names, bit for bit in the dtype it is kept in."""
    return [
        TensorToWrite(name, prod(shape) * DTYPES[weights.dtype(name)].itemsize, _Rows(weights, name, shape[0]))
        for name, shape in weights.shapes.items()
    ]


def as_huggingface(weights: Weights, config: ModelConfig, dtype: str) -> list[TensorToWrite]:
    """Return every tensor of the transformers architecture that is equivalent to `config`, in `dtype`.

    Raises:
        ConfigError: there is none.
    """
    parts: dict[str, list[tuple[str, StoredParameter]]] = {}
    for ours, stored in stored_as(config, architecture(config)).items():
        parts.setdefault(stored.name, []).append((ours, stored))
    kind = DTYPES[dtype]
    return [
        TensorToWrite(name, prod(several[0][1].whole) * kind.itemsize, _Joined(weights, several, kind))
        for name, several in parts.items()
    ]


class _Rows:
    """A whole parameter."""

    def __init__(self, weights: Weights, name: str, rows: int):
        self.weights, self.name, self.rows = weights, name, rows

    def __call__(self) -> Tensor:
        return self.weights.rows(self.name, 0, self.rows)


class _Joined:
    """A tensor of the architecture, from one parameter of the decoder or several concatenated ones."""

    def __init__(self, weights: Weights, several: list[tuple[str, StoredParameter]], dtype: torch.dtype):
        self.weights, self.several, self.dtype = weights, several, dtype

    def __call__(self) -> Tensor:
        parts = [self.weights.rows(ours, 0, stored.shape[0]).to(self.dtype) for ours, stored in self.several]
        whole = torch.cat(parts) if len(parts) > 1 else parts[0]
        return whole.t() if self.several[0][1].transposed else whole
