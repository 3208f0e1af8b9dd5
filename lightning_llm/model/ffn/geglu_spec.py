"""The description of `geglu`, without torch."""

from typing import TYPE_CHECKING, ClassVar, Literal

from lightning_llm.config.schema.block import FEED_FORWARDS
from lightning_llm.config.schema.model import ModelConfig
from lightning_llm.model.ffn.dense_spec import DenseSpec

if TYPE_CHECKING:
    from torch import nn


@FEED_FORWARDS.register
class GeGLU(DenseSpec):
    """Gated by GELU (Shazeer 2020, arXiv:2002.05202), `model.gelu` by the tanh approximation or exactly."""

    kind: Literal["geglu"] = "geglu"
    gated: ClassVar[bool] = True

    def build(self, model: ModelConfig) -> "nn.Module":
        from lightning_llm.model.ffn.geglu import GeGLU as Module

        return Module(model)
