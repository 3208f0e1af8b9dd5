"""Weights and configs to and from Hugging Face's layout: LlamaForCausalLM and GPT2LMHeadModel.

Which of the two a config is follows from its switches; other mixtures (say RoPE with LayerNorm) have no counterpart
and raise ConfigError. Tensors are views where the layouts agree. Padding rows of the vocabulary are cut on export and
come back as zeros on import (their logits are masked, so their values never matter).
"""

from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_llm.config.schema.model import ModelConfig, RopeScaling
from lightning_llm.errors import ConfigError, Problem

_LLAMA_BLOCK = {
    "attention_norm": "input_layernorm",
    "attention.q_proj": "self_attn.q_proj",
    "attention.k_proj": "self_attn.k_proj",
    "attention.v_proj": "self_attn.v_proj",
    "attention.o_proj": "self_attn.o_proj",
    "feed_forward_norm": "post_attention_layernorm",
    "feed_forward.gate_proj": "mlp.gate_proj",
    "feed_forward.up_proj": "mlp.up_proj",
    "feed_forward.down_proj": "mlp.down_proj",
}
_LLAMA_ENDS = {"embedding": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
_GPT2_BLOCK = {
    "attention_norm": "ln_1",
    "attention.o_proj": "attn.c_proj",
    "feed_forward_norm": "ln_2",
    "feed_forward.up_proj": "mlp.c_fc",
    "feed_forward.down_proj": "mlp.c_proj",
}
_GPT2_ENDS = {
    "embedding": "transformer.wte",
    "position_embedding": "transformer.wpe",
    "norm": "transformer.ln_f",
    "head": "lm_head",
}
_GPT2_FUSED = "attn.c_attn"  # q, k and v side by side; GPT2's Conv1D keeps weights as [inputs, outputs]
_QUERY_KEY_VALUE = ("attention.q_proj", "attention.k_proj", "attention.v_proj")


def architecture(config: ModelConfig) -> Literal["llama", "gpt2"]:
    """Return which Hugging Face architecture computes what `config` does. Raises ConfigError where none does."""
    switches = (config.norm, config.position, config.activation)
    square = (
        config.num_kv_heads == config.num_heads and config.attention_head_dim * config.num_heads == config.hidden_size
    )
    if switches == ("rmsnorm", "rope", "swiglu") and not config.bias:
        return "llama"
    if switches == ("layernorm", "learned", "gelu") and config.bias and square:
        return "gpt2"
    raise ConfigError(
        Problem(
            "model",
            f"{config.name} has no Hugging Face counterpart: norm={config.norm}, position={config.position}, "
            f"activation={config.activation}, bias={config.bias}. Known are Llama (rmsnorm, rope, swiglu, no bias) and "
            "GPT2 (layernorm, learned, gelu, bias, as many key/value heads as query heads, head_dim null).",
        )
    )


def huggingface_config(config: ModelConfig) -> dict[str, Any]:
    """Return the content of `config.json` for the exported model."""
    return _llama_config(config) if architecture(config) == "llama" else _gpt2_config(config)


def _llama_config(config: ModelConfig) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default"}
    if config.rope_scaling is not None:
        rope = {
            "rope_type": "llama3",
            "factor": config.rope_scaling.factor,
            "low_freq_factor": config.rope_scaling.low_frequency_factor,
            "high_freq_factor": config.rope_scaling.high_frequency_factor,
            "original_max_position_embeddings": config.rope_scaling.original_sequence_length,
        }
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.ffn_hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.attention_head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_sequence_length,
        "rms_norm_eps": config.norm_eps,
        "initializer_range": config.init_std,
        # transformers 5 reads theta inside the rope entry, 4 beside it.
        "rope_theta": config.rope_theta,
        "rope_scaling": None if config.rope_scaling is None else rope,
        "rope_parameters": {**rope, "rope_theta": config.rope_theta},
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": config.tie_embeddings,
    }


def _gpt2_config(config: ModelConfig) -> dict[str, Any]:
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": config.vocab_size,
        "n_positions": config.max_sequence_length,
        "n_embd": config.hidden_size,
        "n_layer": config.num_layers,
        "n_head": config.num_heads,
        "n_inner": config.ffn_hidden_size,
        "activation_function": "gelu_new" if config.gelu == "tanh" else "gelu",
        "layer_norm_epsilon": config.norm_eps,
        "initializer_range": config.init_std,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "tie_word_embeddings": config.tie_embeddings,
    }


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
    llama = architecture(config) == "llama"
    result: dict[str, Tensor] = {}
    for ours, theirs, transposed in _pairs(config):
        tensor = state[ours]
        if ours in {"embedding.weight", "head.weight"}:
            tensor = tensor[: config.vocab_size]
        result[theirs] = tensor.t() if transposed else tensor
    if not llama:
        for index in range(config.num_layers):
            for kind in ("weight", "bias"):
                parts = [state[f"layers.{index}.{name}.{kind}"] for name in _QUERY_KEY_VALUE]
                fused = torch.cat(parts)  # [3 D, D] or [3 D]
                result[f"transformer.h.{index}.{_GPT2_FUSED}.{kind}"] = fused.t() if kind == "weight" else fused
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
    if architecture(config) == "gpt2":
        for index in range(config.num_layers):
            for kind in ("weight", "bias"):
                fused = state[f"transformer.h.{index}.{_GPT2_FUSED}.{kind}"]  # [D, 3 D] or [3 D]
                parts = (fused.t() if kind == "weight" else fused).chunk(3)  # 3 x [D, D] or [D]
                result |= {f"layers.{index}.{n}.{kind}": part for n, part in zip(_QUERY_KEY_VALUE, parts, strict=True)}
    return result


def _pairs(config: ModelConfig) -> list[tuple[str, str, bool]]:
    """Return (our name, their name, whether theirs is transposed) for every parameter but GPT2's fused projections."""
    llama = architecture(config) == "llama"
    ends, block, prefix = (
        (_LLAMA_ENDS, _LLAMA_BLOCK, "model.layers") if llama else (_GPT2_ENDS, _GPT2_BLOCK, "transformer.h")
    )
    modules = {ours: theirs for ours, theirs in ends.items() if not (ours == "head" and config.tie_embeddings)}
    for index in range(config.num_layers):
        modules |= {f"layers.{index}.{ours}": f"{prefix}.{index}.{theirs}" for ours, theirs in block.items()}
    pairs = []
    for ours, theirs in modules.items():
        transposed = not llama and ours.endswith("_proj")
        pairs.append((f"{ours}.weight", f"{theirs}.weight", transposed))
        if not llama and ours.endswith(("norm", "_proj")):
            pairs.append((f"{ours}.bias", f"{theirs}.bias", False))
    return pairs
