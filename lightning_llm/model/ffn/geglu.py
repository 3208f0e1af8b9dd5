"""The feed-forward network gated by GELU."""

import torch.nn.functional as F
from torch import Tensor

from lightning_llm.config.schema.model import ModelConfig
from lightning_llm.model.ffn.dense import SwiGLU


class GeGLU(SwiGLU):
    """`down(gelu(gate(x)) * up(x))`. Letters as in `SwiGLU`."""

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        self.approximate = "tanh" if config.gelu == "tanh" else "none"

    def forward(self, x: Tensor) -> Tensor:
        """Return `[B, T, D]` for `x` `[B, T, D]`."""
        gated = F.gelu(self.gate_proj(x), approximate=self.approximate) * self.up_proj(x)  # [B, T, F]
        return self.down_proj(gated)  # [B, T, D]
