"""Qwen3ForCausalLM."""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from lightning_llm.config.schema.model import ModelConfig
from lightning_llm.errors import Problem
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
        "use_sliding_window": (False,),
    }
    defaults: ClassVar[Mapping[str, Any]] = {"head_dim": 128, "num_key_value_heads": 32}

    def fits(self, config: ModelConfig) -> bool:
        return self._fits_but_for_windows(config) and windows_of(config) == {None}

    def block_names(self, config: ModelConfig, index: int) -> dict[str, str]:
        return {**PRE_NORM, "attention.q_norm": "self_attn.q_norm", "attention.k_norm": "self_attn.k_norm"}

    def problems(self, values: Mapping[str, Any]) -> Iterator[Problem]:
        yield from super().problems(values)
        kinds = values.get("layer_types") or ()
        if odd := sorted({str(each) for each in kinds} - {"full_attention"}):
            yield Problem("config.json layer_types", f"has {', '.join(odd)}; read here is full_attention alone.")


ARCHITECTURE = Qwen3()
