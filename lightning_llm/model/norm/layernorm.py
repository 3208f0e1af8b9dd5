"""LayerNorm, in the dtype of its input with statistics in fp32."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class LayerNorm(nn.Module):
    """`(x - mean) / sqrt(var + eps) * weight + bias` over the last dimension (Ba et al. 2016, arXiv:1607.06450)."""

    def __init__(self, size: int, eps: float, bias: bool):
        super().__init__()
        self.size, self.eps = size, eps
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Return `[..., D]` in the dtype of `x` `[..., D]`; mean and variance are taken in fp32."""
        return self.normalise(x, self.weight, self.bias)

    def normalise(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return what `forward` does, with this weight and bias."""
        return F.layer_norm(x, (self.size,), weight.to(x.dtype), None if bias is None else bias.to(x.dtype), self.eps)
