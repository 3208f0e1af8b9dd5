from functools import cache
from typing import Literal

from lightning_llm.config.schema.model import NORMS
from lightning_llm.model.spec import Norm, SavedTensor


@NORMS.register
class LayerNormNoBias(Norm):
    """LayerNorm with a weight and no bias, independent of `model.bias`."""

    kind: Literal["layernorm_no_bias"] = "layernorm_no_bias"

    def vectors(self, model):  # parameters of the last dimension's size, and their first values
        return {"weight": 1.0}

    def saved_for(self, size, forward):  # kept for the backward pass: elements per token, bytes of each
        width = max(forward.width, 4) if forward.on_gpu else forward.width
        return [
            SavedTensor("input", size, forward.width, "outside"),
            SavedTensor("mean and inverse deviation", 2, width, "outside"),
        ]

    def build_for(self, model, size):
        return norm_class()(size, model.norm_eps)


@cache
def norm_class():
    import torch

    class LayerNormNoBias(torch.nn.Module):
        def __init__(self, size, eps):
            super().__init__()
            self.size, self.eps = (size,), eps
            self.weight = torch.nn.Parameter(torch.ones(size))

        def forward(self, x):
            return torch.nn.functional.layer_norm(x, self.size, self.weight.to(x.dtype), eps=self.eps)

    return LayerNormNoBias
