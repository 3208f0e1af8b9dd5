"""Tensors to write for weights, under this package's or Hugging Face's names; each is computed when it is written."""

from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_llm.config.schema.model import ModelConfig
from lightning_llm.linalg.tensors import DTYPES
from lightning_llm.model.interop.families import StoredParameter, architecture, stored_as
from lightning_llm.model.weights.folder import Weights
from lightning_llm.model.weights.write import TensorToWrite

KEPT_IN_FP32 = ".e_score_correction_bias"
"""End of the names of tensors that transformers keeps in fp32, whatever the other weights' dtype."""


def as_ours(weights: Weights) -> list[TensorToWrite]:
    """Return the tensors to write under this package's parameter names, bit for bit in the dtype they have now."""
    return [
        TensorToWrite(name, prod(shape) * DTYPES[weights.dtype(name)].itemsize, _Rows(weights, name, shape[0]))
        for name, shape in weights.shapes.items()
    ]


def as_huggingface(weights: Weights, config: ModelConfig, dtype: str) -> list[TensorToWrite]:
    """Return the tensors to write for the transformers architecture that is equivalent to `config`, in `dtype`.

    `dtype`: "fp32", "bf16" or "fp16".

    Raises:
        ConfigError: no architecture of transformers is equivalent.
    """
    parts: dict[str, list[_Part]] = {}
    for ours, stored in stored_as(config, architecture(config)).items():
        rows = stored.shape[0] // stored.count
        for number, name in enumerate(stored.tensors):
            parts.setdefault(name, []).append(_Part(ours, stored, number * rows, (number + 1) * rows))
    made = []
    for name, several in parts.items():
        kind = DTYPES["fp32" if name.endswith(KEPT_IN_FP32) else dtype]
        made.append(TensorToWrite(name, prod(several[0].stored.whole) * kind.itemsize, _Joined(weights, several, kind)))
    return made


class _Part(NamedTuple):
    """Rows `first` to `last` of our parameter `name`, which are a tensor of theirs or a part of one."""

    name: str
    stored: StoredParameter
    first: int
    last: int


class _Rows:
    """A whole parameter."""

    def __init__(self, weights: Weights, name: str, rows: int):
        self.weights, self.name, self.rows = weights, name, rows

    def __call__(self) -> Tensor:
        return self.weights.rows(self.name, 0, self.rows)


class _Joined:
    """A tensor of the architecture, from one parameter of the decoder or several concatenated ones."""

    def __init__(self, weights: Weights, several: list[_Part], dtype: torch.dtype):
        self.weights, self.several, self.dtype = weights, several, dtype

    def __call__(self) -> Tensor:
        parts = [self.weights.rows(each.name, each.first, each.last).to(self.dtype) for each in self.several]
        whole = torch.cat(parts) if len(parts) > 1 else parts[0]
        return whole.t() if self.several[0].stored.transposed else whole
