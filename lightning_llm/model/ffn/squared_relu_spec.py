"""The description of `squared_relu`, without torch."""

from typing import TYPE_CHECKING, ClassVar, Literal

from lightning_llm.config.schema.block import FEED_FORWARDS
from lightning_llm.config.schema.model import ModelConfig
from lightning_llm.model.ffn.dense_spec import DenseSpec

if TYPE_CHECKING:
    from torch import nn


@FEED_FORWARDS.register
class SquaredReLU(DenseSpec):
    """The square of ReLU, without a gate (So et al. 2021, arXiv:2109.08668), as in Nemotron-4."""

    kind: Literal["squared_relu"] = "squared_relu"
    gated: ClassVar[bool] = False

    def build(self, model: ModelConfig) -> "nn.Module":
        from lightning_llm.model.ffn.squared_relu import SquaredReLU as Module

        return Module(model)
