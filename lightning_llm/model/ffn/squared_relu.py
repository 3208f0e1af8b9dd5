"""The feed-forward network of a squared ReLU."""

import torch.nn.functional as F
from torch import Tensor

from lightning_llm.model.ffn.dense import GELU


class SquaredReLU(GELU):
    """`down(relu(up(x))^2)`. Letters as in `SwiGLU`."""

    def forward(self, x: Tensor) -> Tensor:
        """Return `[B, T, D]` for `x` `[B, T, D]`."""
        hidden = F.relu(self.up_proj(x)).square()  # [B, T, F]
        return self.down_proj(hidden)  # [B, T, D]
