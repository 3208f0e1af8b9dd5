"""Gated linear attention: a matrix-valued state instead of keys, which each token lets decay by gates of its own.

The layer is that of fla-org/flash-linear-attention (`fla/layers/gla.py`, without its short convolutions), as in the
paper (Yang et al. 2024, arXiv:2312.06635, section 4.4) but for the norm. Letters: B sequences, T tokens, D hidden_size,
H heads, K and V elements of a head's keys and values.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_llm.config.schema.model import ModelConfig
from lightning_llm.model.block_spec import norm_of
from lightning_llm.model.linear import Linear
from lightning_llm.model.mixer.gla_chunked import KERNEL, continue_from, gated_linear_attention
from lightning_llm.model.mixer.gla_spec import GLA as Spec


@dataclass
class GLACache:
    """What generation keeps of the tokens so far, however many: the state `[B, H, K, V]`, fp32; None of no token."""

    state: Tensor | None = None


class GLA(nn.Module):
    """`o_proj(norm(o) * silu(g_proj(x)))`, o as in `mixer.gla_chunked`. Heads are read off tensors: a shard works.

    The decays' logarithms are `logsigmoid(gk) / gate_logit_normalizer` in fp32, gk of rank gate_low_rank_dim.
    """

    kernel_ops = (KERNEL,)

    def __init__(self, spec: Spec, config: ModelConfig):
        super().__init__()
        hidden, keys, values = config.hidden_size, spec.key_dim(config), spec.value_dim(config)
        self.head_key_dim, self.head_value_dim = keys // spec.num_heads, values // spec.num_heads
        self.gate_logit_normalizer = spec.gate_logit_normalizer
        self.q_proj = Linear(hidden, keys, bias=config.bias)
        self.k_proj = Linear(hidden, keys, bias=config.bias)
        self.v_proj = Linear(hidden, values, bias=config.bias)
        self.gk_down_proj = Linear(hidden, spec.gate_low_rank_dim, bias=False)
        self.gk_up_proj = Linear(spec.gate_low_rank_dim, keys, bias=True)
        self.g_proj = Linear(hidden, values, bias=config.bias)
        self.g_norm = norm_of(config).build_for(config, self.head_value_dim)
        self.o_proj = Linear(values, hidden, bias=config.bias)

    def forward(self, x: Tensor, rope: None, document_ids: Tensor | None) -> Tensor:
        """Return `[B, T, D]` for `x` `[B, T, D]`; `document_ids` `[B, T]`, see `model.spec.Mixer.recurrent`."""
        return self._gated(x, gated_linear_attention(*self._operands(x), document_ids))  # [B, T, D]

    def new_cache(self, batch_size: int, length: int) -> GLACache:
        """Return the cache of no token yet. It takes no more for a longer `length`."""
        return GLACache()

    def step(self, x: Tensor, rope: tuple[Tensor, Tensor] | None, cache: GLACache) -> Tensor:
        """Return `[B, T, D]` for the next tokens `x` `[B, T, D]` of the sequences in `cache`, which takes them in."""
        mixed, cache.state = continue_from(cache.state, *self._operands(x))  # [B, T, H, V], [B, H, K, V]
        return self._gated(x, mixed)

    def _operands(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return queries, keys `[B, T, H, K]`, values `[B, T, H, V]` and fp32 logarithms of decays `[B, T, H, K]`."""
        q, k, gk = self.q_proj(x), self.k_proj(x), self.gk_up_proj(self.gk_down_proj(x))  # [B, T, H K]
        wide = gk.to(torch.promote_types(gk.dtype, torch.float32))
        g = F.logsigmoid(wide) / self.gate_logit_normalizer  # [B, T, H K]
        q, k, g = (each.unflatten(-1, (-1, self.head_key_dim)) for each in (q, k, g))  # [B, T, H, K]
        return q, k, self.v_proj(x).unflatten(-1, (-1, self.head_value_dim)), g

    def _gated(self, x: Tensor, mixed: Tensor) -> Tensor:
        """Return `[B, T, D]` of what each head mixed `[B, T, H, V]`: normed, gated by `x` `[B, T, D]`, projected."""
        gate = F.silu(self.g_proj(x))  # [B, T, H V]
        return self.o_proj(self.g_norm(mixed).flatten(2) * gate)  # [B, T, D]
