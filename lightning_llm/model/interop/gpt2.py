"""GPT2LMHeadModel."""

from collections.abc import Mapping
from typing import Any, ClassVar

from lightning_llm.config.schema.model import ModelConfig
from lightning_llm.model.interop.architecture import Architecture, is_plain, kinds_of


class GPT2(Architecture):
    """GPT-2, and GPT-3's shape. Its Conv1D keeps weights as [inputs, outputs], q, k and v side by side."""

    class_name: ClassVar[str] = "GPT2LMHeadModel"
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

    def fits(self, config: ModelConfig) -> bool:
        square = config.num_kv_heads * config.attention_head_dim == config.hidden_size == _query_size(config)
        switches = (config.norm, config.position, config.bias) == ("layernorm", "learned", True)
        return switches and square and kinds_of(config) == {("attention", "gelu", False)} and is_plain(config)

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


def _query_size(config: ModelConfig) -> int:
    return config.num_heads * config.attention_head_dim


ARCHITECTURE = GPT2()
