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
    turned, shapes = set(), {}
    for ours, stored in stored_as(config, architecture(config)).items():
        tensor = state[ours][: config.vocab_size] if ours in VOCABULARY else state[ours]
        if stored.slices > 1:
            tensor = tensor.view(stored.slices, -1, tensor.shape[-1]).transpose(0, 1)  # rows of a slice first
        shapes |= dict.fromkeys(stored.tensors, (stored.whole, stored.slices > 1))
        for name, part in zip(stored.tensors, tensor.chunk(stored.count), strict=True):
            parts.setdefault(name, []).append(part)
        turned |= {stored.name} if stored.transposed else set()
    whole = {name: torch.cat(several) if len(several) > 1 else several[0] for name, several in parts.items()}
    for name, (shape, in_slices) in shapes.items():
        tensor = whole[name].transpose(0, 1) if in_slices else whole[name]
        whole[name] = (tensor.t() if name in turned else tensor.reshape(shape)).contiguous()
    return whole


def from_huggingface(state: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Return the state dict a `Decoder` of `config` loads, from that of a Hugging Face model. Raises KeyError."""
    result: dict[str, Tensor] = {}
    for ours, stored in stored_as(config, architecture(config)).items():
        theirs = torch.cat([state[name] for name in stored.tensors]) if stored.count > 1 else state[stored.name]
        theirs = theirs.t() if stored.transposed else theirs
        if stored.slices > 1:
            theirs = theirs[:, stored.first : stored.first + stored.shape[0] // stored.slices].flatten(0, 1)
        first = 0 if stored.slices > 1 else stored.first
        tensor = theirs[first : first + stored.shape[0]].reshape(-1, *stored.shape[1:])
        if ours in VOCABULARY:
            padding = config.padded_vocab_size - tensor.shape[0]
            tensor = torch.nn.functional.pad(tensor, (0, 0, 0, padding))  # [V, D]
        result[ours] = tensor
    return result
