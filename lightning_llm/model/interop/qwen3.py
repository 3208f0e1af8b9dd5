"""Qwen3ForCausalLM."""

from collections.abc import Mapping
from typing import Any, ClassVar

from lightning_llm.config.schema.model import ModelConfig
from lightning_llm.model.interop.architecture import PRE_NORM, windows_of
from lightning_llm.model.interop.llama import Llama


class Qwen3(Llama):
    """Llama's blocks with norms of queries and keys within each head."""

    class_name: ClassVar[str] = "Qwen3ForCausalLM"
    model_type: ClassVar[str] = "qwen3"
    shape: ClassVar[str] = "Qwen3 (Llama with qk_norm_attention)"
    mixer: ClassVar[str] = "qk_norm_attention"
    switches: ClassVar[dict[str, bool]] = {}
    wanted: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "hidden_act": ("silu",),
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "use_sliding_window": (False,),
    }
    not_null: ClassVar[tuple[str, ...]] = ("rms_norm_eps", "head_dim")
    heads_divide: ClassVar[bool] = False
    defaults: ClassVar[Mapping[str, Any]] = {"head_dim": 128, "num_key_value_heads": 32}

    def fits(self, config: ModelConfig) -> bool:
        return self._fits_but_for_windows(config) and windows_of(config) == {None}

    def block_names(self, config: ModelConfig, index: int) -> dict[str, str]:
        return {**PRE_NORM, "attention.q_norm": "self_attn.q_norm", "attention.k_norm": "self_attn.k_norm"}


ARCHITECTURE = Qwen3()
