"""RMSNorm by 1 + weight ("zero-centered gamma" in Megatron-LM and Transformer Engine)."""

import torch
from torch import Tensor, nn

from lightning_llm.model.norm.rmsnorm import RMSNorm, rms_norm


class RMSNormZeroCentered(RMSNorm):
    """`x / sqrt(mean(x^2) + eps) * (1 + weight)` over the last dimension."""

    def __init__(self, size: int, eps: float):
        super().__init__(size, eps)
        self.weight = nn.Parameter(torch.zeros(size))

    def normalise(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return what `forward` does, with this weight; there is no bias.

        In fp32, rounded once, as in Gemma: in bf16 1 + weight would step by 2^-7, and small weights be none.
        """
        wide = torch.promote_types(x.dtype, torch.float32)
        return rms_norm(x.to(wide), 1 + weight.to(x.dtype).to(wide), self.eps).to(x.dtype)
