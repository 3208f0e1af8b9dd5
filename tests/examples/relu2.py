from functools import cache
from typing import ClassVar, Literal

from lightning_llm.config.schema.model import FEED_FORWARDS
from lightning_llm.model.kinds import DenseSpec


@FEED_FORWARDS.register
class Relu2(DenseSpec):
    """Squared ReLU (So et al. 2021, arXiv 2109.08668)."""

    kind: Literal["relu2"] = "relu2"
    gated: ClassVar[bool] = False

    def build(self, model):
        return relu2_class()(model)


@cache
def relu2_class():
    from torch import nn

    from lightning_llm.model.linear import Linear

    class Relu2(nn.Module):
        def __init__(self, model):
            super().__init__()
            self.up_proj = Linear(model.hidden_size, model.ffn_hidden_size, bias=model.bias)
            self.down_proj = Linear(model.ffn_hidden_size, model.hidden_size, bias=model.bias)

        def forward(self, x):  # [B, T, D]
            return self.down_proj(self.up_proj(x).relu().square())

    return Relu2
