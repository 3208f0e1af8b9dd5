"""Gemma2ForCausalLM."""

from typing import Any, ClassVar

from lightning_llm.config.schema.model import ModelConfig
from lightning_llm.model.interop.architecture import PRE_NORM, Architecture, kinds_of, rope_entries, shape_entries
from lightning_llm.model.mixer.soft_capped_attention_spec import SoftCappedAttention


class Gemma2(Architecture):
    """Blocks normed before and behind, scores and logits capped, every second block with a window."""

    class_name: ClassVar[str] = "Gemma2ForCausalLM"
    shape: ClassVar[str] = (
        "Gemma 2 (rmsnorm_zero_centered, rope, geglu, gelu=tanh, post_norms, soft_capped_attention of one cap and "
        "scalar and at most one window, logit_cap, embedding_scale=sqrt_hidden_size, tie_embeddings, no bias)"
    )

    def fits(self, config: ModelConfig) -> bool:
        switches = (config.norm, config.position, config.gelu, config.embedding_scale, config.bias)
        wanted = ("rmsnorm_zero_centered", "rope", "tanh", "sqrt_hidden_size", False)
        kinds = kinds_of(config) == {("soft_capped_attention", "geglu", True)}
        if switches != wanted or not kinds or config.rope_scaling or not config.tie_embeddings:
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
            "model_type": "gemma2",
            "hidden_activation": "gelu_pytorch_tanh",
            "pad_token_id": None,  # transformers' default is 0, whose embedding it would not train
            "query_pre_attn_scalar": mixers[0].query_pre_attention_scalar or config.attention_head_dim,
            "attn_logit_softcapping": mixers[0].cap,
            "final_logit_softcapping": config.logit_cap,
            "sliding_window": window or config.max_sequence_length,
            "layer_types": ["sliding_attention" if mixer.window else "full_attention" for mixer in mixers],
            **shape_entries(config),
            **rope_entries(config),
        }


def _mixer(config: ModelConfig, index: int) -> SoftCappedAttention:
    mixer: Any = config.block_at(index).mixer
    made: SoftCappedAttention = mixer
    return made


ARCHITECTURE = Gemma2()
