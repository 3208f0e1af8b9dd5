"""The description of `rmsnorm_zero_centered`, without torch."""

from typing import TYPE_CHECKING, Literal

from lightning_llm.config.schema.block import NORMS
from lightning_llm.config.schema.model import ModelConfig
from lightning_llm.model.norm.rmsnorm_spec import saved_by_rms_norm
from lightning_llm.model.spec import ForwardPass, Norm, SavedTensor

if TYPE_CHECKING:
    from torch import nn


@NORMS.register
class RMSNormZeroCentered(Norm):
    """RMSNorm by 1 + weight, as in Gemma: the weight begins as 0, and weight decay pulls towards the plain norm."""

    kind: Literal["rmsnorm_zero_centered"] = "rmsnorm_zero_centered"

    def vectors(self, model: ModelConfig) -> dict[str, float]:
        return {"weight": 0.0}

    def saved_for(self, size: int, forward: ForwardPass) -> list[SavedTensor]:
        """Return RMSNorm's of an input that is made fp32."""
        return saved_by_rms_norm(size, forward, max(forward.width, 4))

    def build_for(self, model: ModelConfig, size: int) -> "nn.Module":
        from lightning_llm.model.norm.rmsnorm_zero_centered import RMSNormZeroCentered as Module

        return Module(size, model.norm_eps)
