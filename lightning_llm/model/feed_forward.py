"""Dense feed-forward networks, applied to each token independently."""

from collections.abc import Callable, Mapping

import torch.nn.functional as F
from torch import Tensor, nn

from lightning_llm.config.schema.model import ModelConfig
from lightning_llm.model.kinds import DenseSpec
from lightning_llm.model.linear import Linear
from lightning_llm.model.unit_scaling import scaled, scaled_linear, scaled_swiglu


def gelu_tanh(x: Tensor) -> Tensor:
    """Return GELU by its tanh approximation (arXiv:1606.08415)."""
    return F.gelu(x, approximate="tanh")


def squared_relu(x: Tensor) -> Tensor:
    """Return `relu(x)^2` (So et al. 2021, arXiv:2109.08668)."""
    return F.relu(x).square()


ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "gelu": F.gelu, "squared_relu": squared_relu}
"""By `DenseSpec.activation`; "gelu" is exact, and `gelu_tanh` where `model.gelu` is tanh."""


class DenseFeedForward(nn.Module):
    """`down(activation(up(x)))`, or gated, `down(activation(gate(x)) * up(x))`. D: hidden_size, F: ffn_hidden_size."""

    def __init__(self, kind: DenseSpec, model: ModelConfig):
        super().__init__()
        self.unit_scaling = model.unit_scaling
        self.sizes = model.hidden_size, model.ffn_hidden_size
        tanh = kind.activation == "gelu" and model.gelu == "tanh"
        self.activation = gelu_tanh if tanh else ACTIVATIONS[kind.activation]
        self.gate_proj = Linear(model.hidden_size, model.ffn_hidden_size, bias=model.bias) if kind.gated else None
        self.up_proj = Linear(model.hidden_size, model.ffn_hidden_size, bias=model.bias)
        self.down_proj = Linear(model.ffn_hidden_size, model.hidden_size, bias=model.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return `[B, T, D]` for `x` `[B, T, D]`."""
        if self.unit_scaling:
            return self._scaled(x)
        if self.gate_proj is None:
            inner = self.activation(self.up_proj(x))  # [B, T, F]
        else:
            inner = self.activation(self.gate_proj(x)) * self.up_proj(x)  # [B, T, F]
        return self.down_proj(inner)  # [B, T, D]

    def _scaled(self, x: Tensor) -> Tensor:
        """Return the gated network of `x` with unit scaling; `structure.shape_problems` admits no other."""
        if self.gate_proj is None:
            raise ValueError("unit scaling needs a gated feed-forward network")
        width, inner_width = self.sizes
        factor = width**-0.5
        x = scaled(x, backward=factor)  # once for both linears, which then share its cast
        gate, up = (scaled(linear(x), forward=factor) for linear in (self.gate_proj, self.up_proj))  # 2 x [B, T, F]
        return scaled_linear(self.down_proj, scaled_swiglu(gate, up), inner_width)  # [B, T, D]
