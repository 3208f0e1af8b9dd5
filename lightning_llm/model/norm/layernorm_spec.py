"""The description of `layernorm`, without torch."""

from typing import TYPE_CHECKING, Literal

from lightning_llm.config.schema.block import NORMS
from lightning_llm.config.schema.model import ModelConfig
from lightning_llm.model.spec import ForwardPass, Norm, SavedTensor

if TYPE_CHECKING:
    from torch import nn


@NORMS.register
class LayerNorm(Norm):
    """LayerNorm (arXiv:1607.06450): a weight, which begins as 1, and with model.bias a bias."""

    kind: Literal["layernorm"] = "layernorm"

    def vectors(self, model: ModelConfig) -> dict[str, float]:
        return {"weight": 1.0} | ({"bias": 0.0} if model.bias else {})

    def saved_for(self, size: int, forward: ForwardPass) -> list[SavedTensor]:
        """Return the input, its mean and the inverse of its deviation: fp32 on a GPU, else in the input's dtype."""
        width = max(forward.width, 4) if forward.on_gpu else forward.width
        return [
            SavedTensor("input", size, forward.width, "outside"),
            SavedTensor("mean and inverse deviation", 2, width, "outside"),
        ]

    def build_for(self, model: ModelConfig, size: int) -> "nn.Module":
        from lightning_llm.model.norm.layernorm import LayerNorm as Module

        return Module(size, model.norm_eps, model.bias)
