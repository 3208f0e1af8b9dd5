"""The description of `rmsnorm_zero_centered`, without torch."""

from typing import TYPE_CHECKING, Literal

from lightning_llm.config.schema.block import NORMS
from lightning_llm.config.schema.model import ModelConfig
from lightning_llm.model.spec import Norm, SavedActivations

if TYPE_CHECKING:
    from torch import nn


@NORMS.register
class RMSNormZeroCentered(Norm):
    """RMSNorm by 1 + weight, as in Gemma: the weight begins as 0, and weight decay pulls towards the plain norm."""

    kind: Literal["rmsnorm_zero_centered"] = "rmsnorm_zero_centered"

    def vectors(self, model: ModelConfig) -> dict[str, float]:
        return {"weight": 0.0}

    def saved_activations(self, model: ModelConfig, width: int, sequence_length: int) -> SavedActivations:
        """Return its input, which is made fp32."""
        return SavedActivations(outside=max(width, 4) * model.hidden_size)

    def build_for(self, model: ModelConfig, size: int) -> "nn.Module":
        from lightning_llm.model.norm.rmsnorm_zero_centered import RMSNormZeroCentered as Module

        return Module(size, model.norm_eps)
