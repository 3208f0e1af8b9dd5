"""The description of `layernorm`, without torch."""

from typing import TYPE_CHECKING, Literal

from lightning_llm.config.schema.block import NORMS
from lightning_llm.config.schema.model import ModelConfig
from lightning_llm.model.spec import Norm

if TYPE_CHECKING:
    from torch import nn


@NORMS.register
class LayerNorm(Norm):
    """LayerNorm (arXiv:1607.06450): a weight, which begins as 1, and with model.bias a bias."""

    kind: Literal["layernorm"] = "layernorm"

    def vectors(self, model: ModelConfig) -> dict[str, float]:
        return {"weight": 1.0} | ({"bias": 0.0} if model.bias else {})

    def build_for(self, model: ModelConfig, size: int) -> "nn.Module":
        from lightning_llm.model.norm.layernorm import LayerNorm as Module

        return Module(size, model.norm_eps, model.bias)
