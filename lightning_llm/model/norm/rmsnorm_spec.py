"""The description of `rmsnorm`, without torch."""

from typing import TYPE_CHECKING, Literal

from lightning_llm.config.schema.block import NORMS
from lightning_llm.config.schema.model import ModelConfig
from lightning_llm.model.spec import Norm

if TYPE_CHECKING:
    from torch import nn


@NORMS.register
class RMSNorm(Norm):
    """RMSNorm (arXiv:1910.07467): a weight, which begins as 1, and no bias."""

    kind: Literal["rmsnorm"] = "rmsnorm"

    def vectors(self, model: ModelConfig) -> dict[str, float]:
        return {"weight": 1.0}

    def build_for(self, model: ModelConfig, size: int) -> "nn.Module":
        from lightning_llm.model.norm.rmsnorm import RMSNorm as Module

        return Module(size, model.norm_eps)
