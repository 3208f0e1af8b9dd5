"""The description of `qk_norm_attention`, without torch."""

from typing import TYPE_CHECKING, Literal

from lightning_llm.config.schema.block import MIXERS
from lightning_llm.config.schema.model import ModelConfig
from lightning_llm.model.mixer.attention_spec import AttentionSpec
from lightning_llm.model.spec import ParameterSpec, SavedActivations, norm_of

if TYPE_CHECKING:
    from torch import nn


@MIXERS.register
class QKNormAttention(AttentionSpec):
    """Attention whose queries and keys are normed within each head, as in Qwen3 (arXiv 2505.09388, section 2)."""

    kind: Literal["qk_norm_attention"] = "qk_norm_attention"

    def own_parameters(self, model: ModelConfig) -> list[ParameterSpec]:
        each = norm_of(model).parameters_for(model, model.attention_head_dim, "per_head")
        return [made._replace(name=f"{norm}.{made.name}") for norm in ("q_norm", "k_norm") for made in each]

    def saved_activations(self, model: ModelConfig, width: int, sequence_length: int) -> SavedActivations:
        """Return attention's, and the inputs of both norms."""
        whole = super().saved_activations(model, width, sequence_length)
        normed = width * (model.num_heads + model.num_kv_heads) * model.attention_head_dim
        return whole._replace(within=whole.within + normed)

    def build(self, model: ModelConfig) -> "nn.Module":
        from lightning_llm.model.mixer.qk_norm_attention import QKNormAttention as Module

        return Module(self, model)
