"""The description of a Hugging Face architecture: names and config entries, to convert weights there and back."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from lightning_llm.config.schema.model import ModelConfig


class Architecture(ABC):
    """One of transformers' causal language models. Each file here has one, as `ARCHITECTURE`."""

    class_name: ClassVar[str]
    shape: ClassVar[str]
    """What a config must be to have this counterpart, in words."""
    block_prefix: ClassVar[str] = "model.layers"
    ends: ClassVar[Mapping[str, str]] = {"embedding": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
    """Their names of what stands outside the blocks, by ours."""
    transposed: ClassVar[bool] = False
    """Whether weights of linears are kept as [inputs, outputs]."""
    fused: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Our linears whose outputs lie side by side in one of theirs, by its name within a block."""

    @abstractmethod
    def fits(self, config: ModelConfig) -> bool:
        """Return whether it computes what `config` does."""

    @abstractmethod
    def block_names(self, config: ModelConfig, index: int) -> dict[str, str]:
        """Return their names of the modules of block `index` that hold parameters, by ours; fused ones left out."""

    @abstractmethod
    def entries(self, config: ModelConfig) -> dict[str, Any]:
        """Return the content of `config.json`."""


PRE_NORM = {
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
"""Names in a block of Llama's, which most later architectures took."""


def kinds_of(config: ModelConfig) -> set[tuple[str, str, bool]]:
    """Return which (mixer, feed-forward, post_norms) the blocks of `config` have."""
    blocks: list[Any] = [config.block_at(index) for index in range(config.num_layers)]
    return {(block.mixer.kind, block.feed_forward.kind, block.post_norms) for block in blocks}


def is_plain(config: ModelConfig) -> bool:
    """Return whether no token's sight is limited, and neither embeddings nor logits are scaled or capped."""
    windows = {getattr(config.block_at(index).mixer, "window", None) for index in range(config.num_layers)}
    return windows == {None} and config.embedding_scale is None and config.logit_cap is None


def rope_entries(config: ModelConfig) -> dict[str, Any]:
    """Return what config.json says of positions: transformers 5 reads theta inside the rope entry, 4 beside it."""
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
        "rope_theta": config.rope_theta,
        "rope_scaling": None if config.rope_scaling is None else rope,
        "rope_parameters": {**rope, "rope_theta": config.rope_theta},
    }


def shape_entries(config: ModelConfig) -> dict[str, Any]:
    """Return the sizes as Llama's config.json has them."""
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.ffn_hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.attention_head_dim,
        "max_position_embeddings": config.max_sequence_length,
        "rms_norm_eps": config.norm_eps,
        "initializer_range": config.init_std,
        "attention_bias": config.bias,
        "tie_word_embeddings": config.tie_embeddings,
    }
