"""Whole state dicts to and from Hugging Face's layout: the reference for the slices of `import` and `export`."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_llm.config.schema.model import ModelConfig
from lightning_llm.model.interop.families import architecture, stored_as
from lightning_llm.model.structure import VOCABULARY


def huggingface_config(config: ModelConfig) -> dict[str, Any]:
    """Return the content of `config.json` for the exported model."""
    return architecture(config).entries(config)


def to_huggingface(state: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Return a whole `Decoder`'s state dict under Hugging Face's names and shapes, without padding rows.

    A tied head has no entry, as in the safetensors files of tied models.
    """
    parts: dict[str, list[Tensor]] = {}
    turned = set()
    for ours, stored in stored_as(config, architecture(config)).items():
        tensor = state[ours][: config.vocab_size] if ours in VOCABULARY else state[ours]
        for name, part in zip(stored.tensors, tensor.chunk(stored.count), strict=True):
            parts.setdefault(name, []).append(part)
        turned |= {stored.name} if stored.transposed else set()
    whole = {name: torch.cat(several) if len(several) > 1 else several[0] for name, several in parts.items()}
    return {name: (tensor.t() if name in turned else tensor).contiguous() for name, tensor in whole.items()}


def from_huggingface(state: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Return the state dict a `Decoder` of `config` loads, from that of a Hugging Face model. Raises KeyError."""
    result: dict[str, Tensor] = {}
    for ours, stored in stored_as(config, architecture(config)).items():
        theirs = torch.cat([state[name] for name in stored.tensors]) if stored.count > 1 else state[stored.name]
        theirs = theirs.t() if stored.transposed else theirs
        tensor = theirs[stored.first : stored.first + stored.shape[0]]
        if ours in VOCABULARY:
            padding = config.padded_vocab_size - tensor.shape[0]
            tensor = torch.nn.functional.pad(tensor, (0, 0, 0, padding))  # [V, D]
        result[ours] = tensor
    return result
