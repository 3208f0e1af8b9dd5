"""Gemma2ForCausalLM."""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from lightning_llm.base.errors import Problem
from lightning_llm.config.schema.model import ModelConfig
from lightning_llm.model.attention.kinds import SoftCappedAttention
from lightning_llm.model.interop.architecture import (
    LLAMA_SIZES,
    PRE_NORM,
    Architecture,
    has_dividing_heads,
    kinds_of,
    read_shape,
    shape_entries,
)
from lightning_llm.model.interop.rope import rope_entries


class Gemma2(Architecture):
    """Blocks normed before and after, scores and logits capped, every second block with a window."""

    class_name: ClassVar[str] = "Gemma2ForCausalLM"
    model_type: ClassVar[str] = "gemma2"
    shape: ClassVar[str] = (
        "Gemma 2 (rmsnorm_zero_centered, rope, geglu, gelu=tanh, post_norms, soft_capped_attention of one cap and "
        "scalar and at most one window, logit_cap, embedding_scale=sqrt_hidden_size, tie_embeddings, no bias, "
        "num_heads divides hidden_size)"
    )

    sizes: ClassVar[tuple[str, ...]] = LLAMA_SIZES
    wanted: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "hidden_activation": ("gelu_pytorch_tanh",),
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "tie_word_embeddings": (True,),
        "use_bidirectional_attention": (None, False),
    }

    aliases: ClassVar[Mapping[str, str]] = {"hidden_act": "hidden_activation"}
    not_null: ClassVar[tuple[str, ...]] = ("rms_norm_eps", "head_dim", "num_key_value_heads")
    heads_divide: ClassVar[bool] = True

    def fits(self, config: ModelConfig) -> bool:
        switches = (config.norm, config.position, config.gelu, config.embedding_scale, config.bias)
        wanted = ("rmsnorm_zero_centered", "rope", "tanh", "sqrt_hidden_size", False)
        kinds = kinds_of(config) == {("soft_capped_attention", "geglu", True)}
        if switches != wanted or not kinds or config.rope_scaling or not config.tie_embeddings:
            return False
        if not has_dividing_heads(config):
            return False
        mixers = [_mixer(config, index) for index in range(config.num_layers)]
        alike = {(mixer.cap, mixer.query_pre_attention_scalar) for mixer in mixers}
        return config.logit_cap is not None and len(alike) == 1 and len({each.window for each in mixers} - {None}) <= 1

    def block_names(self, config: ModelConfig, index: int) -> dict[str, str]:
        return {
            **PRE_NORM,
            "attention_post_norm": "post_attention_layernorm",
            "feed_forward_norm": "pre_feedforward_layernorm",
            "feed_forward_post_norm": "post_feedforward_layernorm",
        }

    def entries(self, config: ModelConfig) -> dict[str, Any]:
        mixers = [_mixer(config, index) for index in range(config.num_layers)]
        window = next((mixer.window for mixer in mixers if mixer.window), None)
        return {
            "architectures": [self.class_name],
            "model_type": self.model_type,
            "hidden_activation": "gelu_pytorch_tanh",
            "pad_token_id": None,  # with its default, 0, transformers would not train the embedding of token 0
            "query_pre_attn_scalar": mixers[0].query_pre_attention_scalar or config.attention_head_dim,
            "attn_logit_softcapping": mixers[0].cap,
            "final_logit_softcapping": config.logit_cap,
            "sliding_window": window or config.max_sequence_length,
            "layer_types": ["sliding_attention" if mixer.window else "full_attention" for mixer in mixers],
            **shape_entries(config),
            **rope_entries(config),
        }

    def problems(self, values: Mapping[str, Any]) -> Iterator[Problem]:
        yield from super().problems(values)
        for key, default in NUMBERS.items():
            value = values.get(key, default)
            if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
                yield Problem(f"config.json {key}", "must be a number above 0.", repr(value))
            elif key != "final_logit_softcapping" and key != "attn_logit_softcapping" and value != int(value):
                yield Problem(f"config.json {key}", "must be a whole number.", repr(value))
        kinds = values.get("layer_types")
        if kinds is not None and (not isinstance(kinds, list) or len(kinds) != values.get("num_hidden_layers")):
            yield Problem("config.json layer_types", "must be a list with one kind per layer (num_hidden_layers).")
        elif odd := sorted({str(each) for each in kinds or ()} - LAYER_TYPES.keys()):
            yield Problem("config.json layer_types", f"has {', '.join(odd)}. Supported: {', '.join(LAYER_TYPES)}.")

    def read(self, values: Mapping[str, Any]) -> dict[str, Any]:
        kinds = values.get("layer_types") or [
            "full_attention" if index % 2 else "sliding_attention" for index in range(values["num_hidden_layers"])
        ]
        numbers = {key: values.get(key, default) for key, default in NUMBERS.items()}
        scalar, cap = int(numbers["query_pre_attn_scalar"]), float(numbers["attn_logit_softcapping"])
        mixer = {"kind": "soft_capped_attention", "cap": cap, "query_pre_attention_scalar": scalar}
        windowed = {**mixer, "window": int(numbers["sliding_window"])}
        blocks = {"sliding_attention": windowed, "full_attention": mixer}
        names = [LAYER_TYPES[each] for each in kinds]
        return {
            **read_shape(values, head_dim=256, num_key_value_heads=4, tie_word_embeddings=True),
            "norm": "rmsnorm_zero_centered",
            "activation": "geglu",
            "init": "gpt2",
            "embedding_scale": "sqrt_hidden_size",
            "logit_cap": float(numbers["final_logit_softcapping"]),
            "blocks": {LAYER_TYPES[each]: {"mixer": blocks[each], "post_norms": True} for each in dict.fromkeys(kinds)},
            "layers": names[:2] if names == (names[:2] * len(names))[: len(names)] else names,
        }


LAYER_TYPES = {"sliding_attention": "attention_local", "full_attention": "attention_global"}
"""Our names of Gemma 2's two kinds of block."""
NUMBERS = {
    "query_pre_attn_scalar": 256,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "sliding_window": 4096,
}
"""Entries of config.json, with transformers' defaults."""


def _mixer(config: ModelConfig, index: int) -> SoftCappedAttention:
    mixer: Any = config.block_at(index).mixer
    made: SoftCappedAttention = mixer
    return made
