"""RMSNorm, in the dtype of its input with statistics in fp32."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dimension (Zhang & Sennrich 2019, arXiv:1910.07467)."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.size, self.eps = size, eps
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        """Return `[..., D]` in the dtype of `x` `[..., D]`; the mean of squares is taken in fp32."""
        return self.normalise(x, self.weight)

    def normalise(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return what `forward` does, with this weight; there is no bias."""
        return F.rms_norm(x, (self.size,), weight.to(x.dtype), self.eps)
