"""Qwen3ForCausalLM."""

from typing import ClassVar

from lightning_llm.config.schema.model import ModelConfig
from lightning_llm.model.interop.architecture import PRE_NORM
from lightning_llm.model.interop.llama import Llama


class Qwen3(Llama):
    """Llama's blocks with norms of queries and keys within each head."""

    class_name: ClassVar[str] = "Qwen3ForCausalLM"
    model_type: ClassVar[str] = "qwen3"
    shape: ClassVar[str] = "Qwen3 (Llama with qk_norm_attention)"
    mixer: ClassVar[str] = "qk_norm_attention"
    switches: ClassVar[dict[str, bool]] = {}

    def block_names(self, config: ModelConfig, index: int) -> dict[str, str]:
        return {**PRE_NORM, "attention.q_norm": "self_attn.q_norm", "attention.k_norm": "self_attn.k_norm"}


ARCHITECTURE = Qwen3()
