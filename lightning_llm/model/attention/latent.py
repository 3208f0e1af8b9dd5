"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): keys and values from a narrow latent.

A token's latent c `[R]` and one rotated key k_r `[K_r]` for all heads are all that generation keeps and that ranks of a
sequence gather. Keys `[k_n, k_r]` and values come from c by one linear. Queries may pass a latent, too.

Letters: B sequences, T tokens, S tokens of all ranks, D hidden_size, H heads, R kv_rank, K_n nope_dim, K_r rope_dim,
K = K_n + K_r, V value_dim.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from lightning_llm.config.schema.model import ModelConfig
from lightning_llm.model.attention import latent_kind
from lightning_llm.model.attention.attention import SoftmaxAttention
from lightning_llm.model.attention.kernel_choice import Mask
from lightning_llm.model.linear import Linear
from lightning_llm.model.rope import apply_rope, score_factor
from lightning_llm.model.structure import norm_of

Tables = tuple[Tensor, Tensor]


class LatentAttention(SoftmaxAttention):
    """`o_proj` of attention over keys and values expanded from latents; names of linears are DeepSeek's."""

    def __init__(self, spec: latent_kind.LatentAttention, config: ModelConfig):
        super().__init__(spec.window)
        self.spec, self.scale = spec, score_factor(config.rope_scaling)
        self.gather: Callable[[Tensor], Tensor] | None = None
        """Gathers `[B, T, ..]` over context-parallel ranks; `parallel.cp` sets it."""
        hidden, heads, normed = config.hidden_size, config.num_heads, spec.normed(config)
        queries = heads * spec.key_width
        if spec.q_rank is None:
            self.q_proj = Linear(hidden, queries, bias=False)
        else:
            self.q_a_proj = Linear(hidden, spec.q_rank, bias=config.bias)
            self.q_b_proj = Linear(spec.q_rank, queries, bias=False)
        self.kv_a_proj = Linear(hidden, spec.kv_rank + spec.rope_dim, bias=config.bias)
        self.kv_b_proj = Linear(spec.kv_rank, heads * (spec.nope_dim + spec.value_dim), bias=False)
        self.o_proj = Linear(heads * spec.value_dim, hidden, bias=config.bias)
        if spec.q_rank is not None:
            self.q_a_norm = norm_of(config).build_for(normed, spec.q_rank)
        self.kv_a_norm = norm_of(config).build_for(normed, spec.kv_rank)

    def forward(self, x: Tensor, rope: Tables | None, mask: Mask) -> Tensor:
        """Return `[B, T, D]` for `x` `[B, T, D]`; `rope` are the tables of `rope_tables` for rope_dim elements."""
        q, latent, key = self.project(x, rope)  # [B, T, H, K], [B, T, 1, R], [B, T, 1, K_r]
        if self.gather is not None:
            both = self.gather(torch.cat([latent, key], dim=-1))  # [B, S, 1, R + K_r]
            latent, key = both.split((latent.shape[-1], key.shape[-1]), dim=-1)
        mixed = self.attend(q, *self.expand(latent, key), mask)  # [B, T, H, V]
        return self.o_proj(mixed.flatten(2))  # [B, T, D]

    def project(self, x: Tensor, rope: Tables | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries `[B, T, H, K]`, normed latents `[B, T, 1, R]` and rotated keys `[B, T, 1, K_r]` of `x`."""
        spec = self.spec
        q = self.q_proj(x) if spec.q_rank is None else self.q_b_proj(self.q_a_norm(self.q_a_proj(x)))  # [B, T, H K]
        still, turned = q.unflatten(-1, (-1, spec.key_width)).split((spec.nope_dim, spec.rope_dim), dim=-1)
        latent, key = self.kv_a_proj(x).split((spec.kv_rank, spec.rope_dim), dim=-1)  # [B, T, R], [B, T, K_r]
        latent, key = self.kv_a_norm(latent)[:, :, None], self._rotated(key[:, :, None], rope)
        q = torch.cat([still, self._rotated(turned, rope)], dim=-1)  # [B, T, H, K]
        return q if self.scale == 1.0 else q * self.scale, latent, key

    def expand(self, latent: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys `[B, S, H, K]` and values `[B, S, H, V]` of latents `[B, S, 1, R]` and keys `[B, S, 1, K_r]`."""
        spec = self.spec
        both = self.kv_b_proj(latent.squeeze(2)).unflatten(-1, (-1, spec.nope_dim + spec.value_dim))
        still, values = both.split((spec.nope_dim, spec.value_dim), dim=-1)  # [B, S, H, K_n], [B, S, H, V]
        return torch.cat([still, key.expand(-1, -1, still.shape[2], -1)], dim=-1), values

    def _rotated(self, x: Tensor, rope: Tables | None) -> Tensor:
        """Return `x` `[B, T, .., K_r]` turned; pairs of neighbors come apart into halves, of keys as of queries."""
        if self.spec.interleaved:
            x = torch.cat([x[..., 0::2], x[..., 1::2]], dim=-1)
        return x if rope is None else apply_rope(x, *rope)
