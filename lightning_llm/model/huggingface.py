"""Weights and configs to and from Hugging Face's layout, by the architectures of `model.interop`.

Which of them a config is follows from its blocks and switches; other mixtures (say RoPE with LayerNorm) have no
counterpart and raise ConfigError. Tensors are views where the layouts agree. Padding rows of the vocabulary are cut on
export and come back as zeros on import (their logits are masked, so their values never matter).
"""

import importlib
import pkgutil
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lightning_llm.config.schema.model import DEFAULT_LAYERS, ModelConfig, RopeScaling
from lightning_llm.errors import ConfigError, Problem
from lightning_llm.model import interop
from lightning_llm.model.interop.architecture import Architecture
from lightning_llm.model.linear_names import linears_of
from lightning_llm.model.spec import block_parameters, norm_of


@cache
def _architectures() -> list[Architecture]:
    modules = [importlib.import_module(f"{interop.__name__}.{m.name}") for m in pkgutil.iter_modules(interop.__path__)]
    return [module.ARCHITECTURE for module in modules if hasattr(module, "ARCHITECTURE")]


def architecture(config: ModelConfig) -> Architecture:
    """Return which Hugging Face architecture computes what `config` does. Raises ConfigError where none does."""
    for each in _architectures():
        if each.fits(config):
            return each
    raise ConfigError(
        Problem(
            "model",
            f"{config.name} has no Hugging Face counterpart: norm={config.norm}, position={config.position}, "
            f"activation={config.activation}, bias={config.bias}, layers={list(config.layers or DEFAULT_LAYERS)}. "
            f"Known are {'; '.join(each.shape for each in _architectures())}.",
        )
    )


def huggingface_config(config: ModelConfig) -> dict[str, Any]:
    """Return the content of `config.json` for the exported model."""
    return architecture(config).entries(config)


def model_config_of(values: Mapping[str, Any], name: str) -> ModelConfig:
    """Return the shape that a LlamaForCausalLM's `config.json` describes, under the name `name`.

    Raises:
        ConfigError: with everything in it that this decoder does not compute.
    """
    problems = list(_unsupported(values))
    missing = [key for key in _LLAMA_KEYS if not isinstance(values.get(key), int)]
    problems += [Problem(f"config.json {key}", "a whole number must be given.") for key in missing]
    if problems:
        raise ConfigError(problems)
    rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
    scaling = None
    if _rope_type(values) == "llama3":
        scaling = RopeScaling(
            factor=rope["factor"],
            low_frequency_factor=rope["low_freq_factor"],
            high_frequency_factor=rope["high_freq_factor"],
            original_sequence_length=rope["original_max_position_embeddings"],
        )
    return ModelConfig(
        name=name,
        vocab_size=values["vocab_size"],
        num_layers=values["num_hidden_layers"],
        hidden_size=values["hidden_size"],
        num_heads=values["num_attention_heads"],
        num_kv_heads=values.get("num_key_value_heads") or values["num_attention_heads"],
        head_dim=values.get("head_dim"),
        ffn_hidden_size=values["intermediate_size"],
        max_sequence_length=values["max_position_embeddings"],
        norm_eps=values.get("rms_norm_eps", 1e-6),  # transformers' default
        rope_theta=rope.get("rope_theta") or values.get("rope_theta") or 10_000.0,
        rope_scaling=scaling,
        tie_embeddings=bool(values.get("tie_word_embeddings", False)),
    )


_LLAMA_KEYS = (
    "vocab_size",
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "intermediate_size",
    "max_position_embeddings",
)


def _rope_type(values: Mapping[str, Any]) -> str:
    rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
    return str(rope.get("rope_type") or rope.get("type") or "default")


def _unsupported(values: Mapping[str, Any]) -> Iterator[Problem]:
    architectures = values.get("architectures") or [f"model_type {values.get('model_type')}"]
    if architectures != ["LlamaForCausalLM"]:
        text = f"is {', '.join(map(str, architectures))}; read here is LlamaForCausalLM alone."
        yield Problem("config.json architectures", text)
        return
    wanted = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "quantization_config": None}
    for key, value in wanted.items():
        if (found := values.get(key, value)) != value:
            yield Problem(f"config.json {key}", f"is {found!r}, and this decoder has {value!r}.")
    if _rope_type(values) not in ("default", "llama3"):
        yield Problem("config.json rope_scaling", f"is of type {_rope_type(values)!r}; known are default and llama3.")


def to_huggingface(state: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Return a whole `Decoder`'s state dict under Hugging Face's names and shapes, without padding rows.

    A tied head is no entry of its own, as in the safetensors files of tied models.
    """
    result: dict[str, Tensor] = {}
    for ours, theirs, transposed in _pairs(config):
        tensor = state[ours]
        if ours in {"embedding.weight", "head.weight"}:
            tensor = tensor[: config.vocab_size]
        result[theirs] = tensor.t() if transposed else tensor
    for several, theirs, transposed in _fused(config):
        fused = torch.cat([state[ours] for ours in several])  # [3 D, D] or [3 D]
        result[theirs] = fused.t() if transposed else fused
    return {name: tensor.contiguous() for name, tensor in result.items()}


def from_huggingface(state: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Return the state dict a `Decoder` of `config` loads, from that of a Hugging Face model. Raises KeyError."""
    result: dict[str, Tensor] = {}
    for ours, theirs, transposed in _pairs(config):
        tensor = state[theirs].t() if transposed else state[theirs]
        if ours in {"embedding.weight", "head.weight"}:
            padding = config.padded_vocab_size - tensor.shape[0]
            tensor = torch.nn.functional.pad(tensor, (0, 0, 0, padding))  # [V, D]
        result[ours] = tensor
    for several, theirs, transposed in _fused(config):
        fused = state[theirs].t() if transposed else state[theirs]  # [3 D, D] or [3 D]
        result |= dict(zip(several, fused.chunk(len(several)), strict=True))
    return result


def _pairs(config: ModelConfig) -> Iterator[tuple[str, str, bool]]:
    """Yield (our name, their name, whether theirs is transposed) for every parameter that is one of theirs."""
    theirs = architecture(config)
    for ours, name in theirs.ends.items():
        if ours == "head" and config.tie_embeddings:
            continue
        for kind in norm_of(config).vectors(config) if ours == "norm" else ("weight",):
            yield f"{ours}.{kind}", f"{name}.{kind}", False
    linears = linears_of(config)
    for index in range(config.num_layers):
        names = theirs.block_names(config, index)
        for parameter in block_parameters(config, index):
            module, _, kind = parameter.name.rpartition(".")
            if module in names:
                ours, name = f"layers.{index}.{module}", f"{theirs.block_prefix}.{index}.{names[module]}"
                yield f"{ours}.{kind}", f"{name}.{kind}", theirs.transposed and ours in linears and kind == "weight"


def _fused(config: ModelConfig) -> Iterator[tuple[list[str], str, bool]]:
    """Yield (our names, their one, whether theirs is transposed) for parameters that lie side by side in theirs."""
    theirs = architecture(config)
    for index in range(config.num_layers):
        for name, several in theirs.fused.items():
            for kind in ("weight", "bias"):
                ours = [f"layers.{index}.{each}.{kind}" for each in several]
                yield ours, f"{theirs.block_prefix}.{index}.{name}.{kind}", theirs.transposed and kind == "weight"
