"""The description of `soft_capped_attention`, without torch."""

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from lightning_llm.config.schema.base import PositiveFloat, PositiveInt
from lightning_llm.config.schema.block import MIXERS
from lightning_llm.config.schema.model import ModelConfig
from lightning_llm.model.mixer.attention_spec import AttentionSpec
from lightning_llm.model.spec import SavedActivations

if TYPE_CHECKING:
    from torch import nn


@MIXERS.register
class SoftCappedAttention(AttentionSpec):
    """Attention whose scores are capped before the softmax, as in Gemma 2 (arXiv 2408.00118, section 2).

    No kernel of torch's caps scores, so they are made whole: memory grows with the square of the sequence.
    """

    kind: Literal["soft_capped_attention"] = "soft_capped_attention"
    cap: PositiveFloat = Field(50.0, description="scores are cap x tanh(scores / cap)")
    query_pre_attention_scalar: PositiveInt | None = Field(
        None, description="scores are q k over its square root; null: the elements per head"
    )

    def saved_activations(self, model: ModelConfig, width: int, sequence_length: int) -> SavedActivations:
        """Return attention's, and of each score the capped one and its probability in fp32, and rounded."""
        whole = super().saved_activations(model, width, sequence_length)
        scores = model.num_heads * sequence_length * (8 + (width if width < 4 else 0))
        return whole._replace(within=whole.within + scores)

    def kernel_outputs(self, model: ModelConfig, width: int, sequence_length: int) -> int:
        """Return those of two matrix products: the scores and the mixed values."""
        return width * model.num_heads * (sequence_length + model.attention_head_dim)

    def build(self, model: ModelConfig) -> "nn.Module":
        from lightning_llm.model.mixer.soft_capped_attention import SoftCappedAttention as Module

        return Module(self, model)
