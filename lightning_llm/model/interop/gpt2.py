"""GPT2LMHeadModel."""

from collections.abc import Mapping
from typing import Any, ClassVar

from lightning_llm.config.schema.model import ModelConfig
from lightning_llm.model.interop.architecture import Architecture, is_plain, kinds_of, windows_of


class GPT2(Architecture):
    """GPT-2, and GPT-3's shape. Its Conv1D keeps weights as [inputs, outputs], q, k and v side by side."""

    class_name: ClassVar[str] = "GPT2LMHeadModel"
    model_type: ClassVar[str] = "gpt2"
    shape: ClassVar[str] = (
        "GPT2 (layernorm, learned, gelu, bias, as many key/value heads as query heads, head_dim null)"
    )
    block_prefix: ClassVar[str] = "transformer.h"
    ends: ClassVar[Mapping[str, str]] = {
        "embedding": "transformer.wte",
        "position_embedding": "transformer.wpe",
        "norm": "transformer.ln_f",
        "head": "lm_head",
    }
    transposed: ClassVar[bool] = True
    fused: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "attn.c_attn": ("attention.q_proj", "attention.k_proj", "attention.v_proj")
    }

    base_prefix: ClassVar[str] = "transformer."
    buffers: ClassVar[tuple[str, ...]] = (".attn.bias", ".attn.masked_bias")
    sizes: ClassVar[tuple[str, ...]] = ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head")
    wanted: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "activation_function": ("gelu_new", "gelu_pytorch_tanh", "gelu"),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
    }
    aliases: ClassVar[Mapping[str, str]] = {
        "hidden_size": "n_embd",
        "max_position_embeddings": "n_positions",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    }
    rotary: ClassVar[bool] = False

    def fits(self, config: ModelConfig) -> bool:
        square = config.num_kv_heads * config.attention_head_dim == config.hidden_size == _query_size(config)
        switches = (config.norm, config.position, config.bias) == ("layernorm", "learned", True)
        return (
            switches
            and square
            and kinds_of(config) == {("attention", "gelu", False)}
            and (is_plain(config) and windows_of(config) == {None})
        )

    def block_names(self, config: ModelConfig, index: int) -> dict[str, str]:
        return {
            "attention_norm": "ln_1",
            "attention.o_proj": "attn.c_proj",
            "feed_forward_norm": "ln_2",
            "feed_forward.up_proj": "mlp.c_fc",
            "feed_forward.down_proj": "mlp.c_proj",
        }

    def entries(self, config: ModelConfig) -> dict[str, Any]:
        return {
            "architectures": [self.class_name],
            "model_type": self.model_type,
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

    def read(self, values: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "vocab_size": values["vocab_size"],
            "num_layers": values["n_layer"],
            "hidden_size": values["n_embd"],
            "num_heads": values["n_head"],
            "num_kv_heads": values["n_head"],
            "ffn_hidden_size": values.get("n_inner") or 4 * values["n_embd"],
            "max_sequence_length": values["n_positions"],
            "norm": "layernorm",
            "norm_eps": values.get("layer_norm_epsilon", 1e-5),
            "position": "learned",
            "activation": "gelu",
            "gelu": "exact" if values.get("activation_function") == "gelu" else "tanh",
            "bias": True,
            "init": "gpt2",
            "init_std": values.get("initializer_range", 0.02),
            "tie_embeddings": bool(values.get("tie_word_embeddings", True)),
        }


def _query_size(config: ModelConfig) -> int:
    return config.num_heads * config.attention_head_dim
