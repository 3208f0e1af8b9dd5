"""The description of `qk_norm_attention`, without torch."""

from typing import TYPE_CHECKING, Literal

from lightning_llm.config.schema.block import MIXERS
from lightning_llm.config.schema.model import ModelConfig
from lightning_llm.model.block_spec import norm_of
from lightning_llm.model.mixer.attention_spec import AttentionSpec
from lightning_llm.model.spec import ForwardPass, MemoryPass, ParameterSpec, SavedTensor

if TYPE_CHECKING:
    from torch import nn


@MIXERS.register
class QKNormAttention(AttentionSpec):
    """Attention whose queries and keys are normed within each head, as in Qwen3 (arXiv 2505.09388, section 2)."""

    kind: Literal["qk_norm_attention"] = "qk_norm_attention"

    def own_parameters(self, model: ModelConfig) -> list[ParameterSpec]:
        each = norm_of(model).parameters_for(model, model.attention_head_dim, "per_head")
        return [made._replace(name=f"{norm}.{made.name}") for norm in ("q_norm", "k_norm") for made in each]

    def saved_tensors(self, model: ModelConfig, forward: ForwardPass) -> list[SavedTensor]:
        """Return attention's, and those of both norms, one vector per head."""
        heads, each = model.num_heads + model.num_kv_heads, norm_of(model).saved_for(model.attention_head_dim, forward)
        normed = [
            saved._replace(name=f"heads' {saved.name}", elements=heads * saved.elements, split="within")
            for saved in each
        ]
        return super().saved_tensors(model, forward) + normed

    def memory_passes(self, model: ModelConfig, width: int, compiled: bool) -> list[MemoryPass]:
        """Return attention's, and both norms'."""
        normed = width * (model.num_heads + model.num_kv_heads) * model.attention_head_dim
        return [MemoryPass(2 * normed, 3 * normed, 2), *super().memory_passes(model, width, compiled)]

    def build(self, model: ModelConfig) -> "nn.Module":
        from lightning_llm.model.mixer.qk_norm_attention import QKNormAttention as Module

        return Module(self, model)
