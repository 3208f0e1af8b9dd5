"""The description of `rmsnorm`, without torch."""

from typing import TYPE_CHECKING, Literal

from lightning_llm.config.schema.block import NORMS
from lightning_llm.config.schema.model import ModelConfig
from lightning_llm.model.spec import ForwardPass, Norm, SavedTensor

if TYPE_CHECKING:
    from torch import nn


@NORMS.register
class RMSNorm(Norm):
    """RMSNorm (arXiv:1910.07467): a weight, which begins as 1, and no bias."""

    kind: Literal["rmsnorm"] = "rmsnorm"

    def vectors(self, model: ModelConfig) -> dict[str, float]:
        return {"weight": 1.0}

    def saved_for(self, size: int, forward: ForwardPass) -> list[SavedTensor]:
        return saved_by_rms_norm(size, forward, forward.width)

    def build_for(self, model: ModelConfig, size: int) -> "nn.Module":
        from lightning_llm.model.norm.rmsnorm import RMSNorm as Module

        return Module(size, model.norm_eps)


def saved_by_rms_norm(size: int, forward: ForwardPass, width: int) -> list[SavedTensor]:
    """Return what is kept of a vector of `size` elements of `width` bytes: it, and its inverse root mean square."""
    root = SavedTensor("inverse root mean square", 1, max(width, 4), "outside")
    return [SavedTensor("input", size, width, "outside"), root]
