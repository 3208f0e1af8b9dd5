"""The description of `soft_capped_attention`, without torch."""

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from lightning_llm.config.schema.base import PositiveFloat, PositiveInt
from lightning_llm.config.schema.block import MIXERS
from lightning_llm.config.schema.model import ModelConfig
from lightning_llm.model.mixer.attention_spec import AttentionSpec, mask_of
from lightning_llm.model.spec import ForwardPass, SavedTensor

if TYPE_CHECKING:
    from torch import nn


@MIXERS.register
class SoftCappedAttention(AttentionSpec):
    """Attention whose scores are capped before the softmax, as in Gemma 2 (arXiv 2408.00118, section 2).

    No kernel of torch's caps scores, so they are made whole: memory grows with the square of the sequence.
    """

    takes_kernels: ClassVar[bool] = False
    kind: Literal["soft_capped_attention"] = "soft_capped_attention"
    cap: PositiveFloat = Field(50.0, description="scores are cap x tanh(scores / cap)")
    query_pre_attention_scalar: PositiveInt | None = Field(
        None, description="scores are q k over its square root; null: the elements per head"
    )

    def saved_tensors(self, model: ModelConfig, forward: ForwardPass) -> list[SavedTensor]:
        """Return what plain operations keep: of each score the tanh and the probability in fp32, and rounded; a mask.

        Keys and values are kept for all heads, as they are multiplied.
        """
        query, width = model.num_heads * model.attention_head_dim, forward.width
        scores = model.num_heads * forward.sequence_length
        return [
            SavedTensor("input", model.hidden_size, width, "gathered", linears=("q_proj", "k_proj", "v_proj")),
            SavedTensor("queries", query, width),
            SavedTensor("keys and values", 2 * query * forward.context_ranks, width),
            SavedTensor("tanh of scores", scores, 4),
            SavedTensor("probabilities", scores, 4),
            *([SavedTensor("rounded probabilities", scores, width)] if width < 4 else []),
            mask_of(forward, 1),
            SavedTensor("mixed values", query, width, linears=("o_proj",)),
        ]

    def keeps_shared_mask(self, forward: ForwardPass) -> bool:
        return False

    def kernel_outputs(self, model: ModelConfig, width: int, sequence_length: int) -> int:
        """Return those of two matrix products: the scores and the mixed values."""
        return width * model.num_heads * (sequence_length + model.attention_head_dim)

    def build(self, model: ModelConfig) -> "nn.Module":
        from lightning_llm.model.mixer.soft_capped_attention import SoftCappedAttention as Module

        return Module(self, model)
