"""Qwen3ForCausalLM."""

from typing import Any, ClassVar

from lightning_llm.config.schema.model import ModelConfig
from lightning_llm.model.interop.architecture import (
    PRE_NORM,
    Architecture,
    is_plain,
    kinds_of,
    rope_entries,
    shape_entries,
)


class Qwen3(Architecture):
    """Llama's blocks with norms of queries and keys within each head."""

    class_name: ClassVar[str] = "Qwen3ForCausalLM"
    shape: ClassVar[str] = "Qwen3 (Llama with qk_norm_attention)"

    def fits(self, config: ModelConfig) -> bool:
        switches = (config.norm, config.position, config.bias) == ("rmsnorm", "rope", False)
        return switches and kinds_of(config) == {("qk_norm_attention", "swiglu", False)} and is_plain(config)

    def block_names(self, config: ModelConfig, index: int) -> dict[str, str]:
        return {**PRE_NORM, "attention.q_norm": "self_attn.q_norm", "attention.k_norm": "self_attn.k_norm"}

    def entries(self, config: ModelConfig) -> dict[str, Any]:
        return {
            "architectures": [self.class_name],
            "model_type": "qwen3",
            "hidden_act": "silu",
            **shape_entries(config),
            **rope_entries(config),
        }


ARCHITECTURE = Qwen3()
