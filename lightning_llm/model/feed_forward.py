"""Position-wise feed-forward networks: SwiGLU (Shazeer 2020, arXiv:2002.05202) and GELU (arXiv:1606.08415)."""

import torch.nn.functional as F
from torch import Tensor, nn

from lightning_llm.config.schema.model import ModelConfig
from lightning_llm.model.linear import Linear


class SwiGLU(nn.Module):
    """`down(silu(gate(x)) * up(x))`. Letters: D hidden_size, F ffn_hidden_size."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, config.ffn_hidden_size, bias=config.bias)
        self.up_proj = Linear(config.hidden_size, config.ffn_hidden_size, bias=config.bias)
        self.down_proj = Linear(config.ffn_hidden_size, config.hidden_size, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return `[B, T, D]` for `x` `[B, T, D]`."""
        gated = F.silu(self.gate_proj(x)) * self.up_proj(x)  # [B, T, F]
        return self.down_proj(gated)  # [B, T, D]


class GELU(nn.Module):
    """`down(gelu(up(x)))`, by the tanh approximation or exactly. Letters as in `SwiGLU`."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.approximate = "tanh" if config.gelu == "tanh" else "none"
        self.up_proj = Linear(config.hidden_size, config.ffn_hidden_size, bias=config.bias)
        self.down_proj = Linear(config.ffn_hidden_size, config.hidden_size, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return `[B, T, D]` for `x` `[B, T, D]`."""
        hidden = F.gelu(self.up_proj(x), approximate=self.approximate)  # [B, T, F]
        return self.down_proj(hidden)  # [B, T, D]


class GeGLU(SwiGLU):
    """`down(gelu(gate(x)) * up(x))`. Letters as in `SwiGLU`."""

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        self.approximate = "tanh" if config.gelu == "tanh" else "none"

    def forward(self, x: Tensor) -> Tensor:
        """Return `[B, T, D]` for `x` `[B, T, D]`."""
        gated = F.gelu(self.gate_proj(x), approximate=self.approximate) * self.up_proj(x)  # [B, T, F]
        return self.down_proj(gated)  # [B, T, D]


class SquaredReLU(GELU):
    """`down(relu(up(x))^2)`. Letters as in `SwiGLU`."""

    def forward(self, x: Tensor) -> Tensor:
        """Return `[B, T, D]` for `x` `[B, T, D]`."""
        hidden = F.relu(self.up_proj(x)).square()  # [B, T, F]
        return self.down_proj(hidden)  # [B, T, D]
