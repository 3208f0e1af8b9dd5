"""Causal self-attention with grouped key/value heads (GQA, Ainslie et al. 2023, arXiv:2305.13245).

Letters: B sequences, T tokens, D hidden_size, H query heads, G key/value heads, K elements per head.
"""

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from lightning_llm.config.schema.model import ModelConfig
from lightning_llm.model.attention import kinds
from lightning_llm.model.attention.cpu_kernel import ROWS, is_faster_here, row_attention, short_attention
from lightning_llm.model.attention.kernel_choice import Mask, any_kernel, takes_short_kernel
from lightning_llm.model.linear import Linear
from lightning_llm.model.rope import apply_rope
from lightning_llm.model.stepping import KeyValueCache, blocks_of, in_block, rows_of
from lightning_llm.model.structure import norm_of
from lightning_llm.model.unit_scaling import attention_factor, scaled, scaled_linear

Kernel = Callable[[Tensor, Tensor, Tensor, Any], Tensor]
"""Of q `[B, T, H, K]`, k `[B, S, G, K]`, v `[B, S, G, V]` and a `Mask` that the kernel takes: `[B, T, H, V]`.

V <= K; both are `head_dim` but for latent attention.
"""


def dot_product_attention(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    """Return `softmax(q k^T / sqrt(K)) v` `[B, T, H, V]` for `q` `[B, T, H, K]`, `k` and `v` `[B, T, G, K or V]`."""
    if isinstance(mask, BlockMask) or not takes_short_kernel(is_faster_here(q)):
        return torch_attention(q, k, v, mask)
    return short_attention(q, k, v, mask)


def torch_attention(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    """Return `dot_product_attention` by torch's kernels: `q` `[B, T, H, K]`, and `k`, `v` `[B, S, G, K or V]`, any S.

    Where `mask` is None, S = T. Values narrower than keys are filled up with zeros: torch's fast kernels take one
    width, and otherwise it falls back to the one that keeps all scores.
    """
    if (width := v.shape[-1]) < k.shape[-1]:
        return _by_torch(q, k, filled_up(v, k.shape[-1]), mask)[..., :width]
    return _by_torch(q, k, v, mask)


def _by_torch(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    if isinstance(mask, BlockMask):
        return _flex_attention(q, k, v, mask)
    if mask is not None and q.is_cuda:
        k, v = for_all_heads(k, q.shape[2]), for_all_heads(v, q.shape[2])  # [B, S, H, K]
    mixed = F.scaled_dot_product_attention(
        q.transpose(1, 2),  # [B, H, T, K]
        k.transpose(1, 2),  # [B, G, S, K]
        v.transpose(1, 2),  # [B, G, S, K]
        attn_mask=mask,
        is_causal=mask is None,
        enable_gqa=q.shape[2] != k.shape[2],
    )  # [B, H, T, K]
    return mixed.transpose(1, 2)  # [B, T, H, K]


def filled_up(values: Tensor, width: int) -> Tensor:
    """Return `[B, S, G, width]`: `values` `[B, S, G, V]`, and zeros."""
    return F.pad(values, (0, width - values.shape[-1]))


def _flex_attention(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> Tensor:
    grouped = q.shape[2] != k.shape[2]
    mixed = flex_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), block_mask=mask, enable_gqa=grouped)
    return mixed.transpose(1, 2)  # [B, T, H, K]


def block_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Return `torch_attention` for a block of `ROWS` queries; on a CPU with the sums of `short_attention`."""
    if q.device.type == "cpu":
        return row_attention(q, k, v, mask)
    with any_kernel():
        return torch_attention(q, k, v, mask)


def for_all_heads(keys: Tensor, heads: int) -> Tensor:
    """Return `[B, S, heads, K]` from `[B, S, G, K]`: each key/value head as often as query heads share it.

    On CUDA, only two of torch's kernels accept fewer key/value heads: flash, without a mask, and math, which stores all
    scores. With a mask torch would silently choose math (`scaled_dot_product_attention`, enable_gqa).
    """
    return keys if keys.shape[2] == heads else keys.repeat_interleave(heads // keys.shape[2], dim=2)


KERNEL_OPS = (
    torch.ops.lightning_llm.short_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.higher_order.flex_attention,
)
"""Operators that `dot_product_attention` may run as."""


class SoftmaxAttention(nn.Module):
    """Base class of causal `o_proj(softmax(q k^T / sqrt(K)) v)`.

    A subclass makes queries, and per token two tensors that the cache keeps (`project`), keys and values from these
    (`expand`), and `o_proj`. Head counts are read off the tensors, so a shard of heads works.
    """

    kernel_ops = KERNEL_OPS
    """Operators with outputs that selective checkpointing keeps, see `parallel.blocks`."""
    steps_in_blocks = True
    o_proj: Linear

    def __init__(self, window: int | None):
        super().__init__()
        self.window = window
        self.attend: Kernel = dot_product_attention  # parallel.cp replaces it:
        self.kernel: Kernel = torch_attention  # gathers keys, then calls `kernel` (any number of keys)
        self.block_kernel: Kernel = block_attention  # and for a block of queries behind a cache of keys

    def project(self, x: Tensor, rope: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries `[B, T, H, K]`, and the two tensors `[B, T, G, ..]` of `x` `[B, T, D]` for `expand`."""
        raise NotImplementedError

    def project_rows(
        self, x: Tensor, rope: tuple[Tensor, Tensor] | None, cache: KeyValueCache, rows: slice
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return `project` of a block `x` `[B, STEP_ROWS, D]`, of which `rows` are the next tokens after `cache`."""
        return self.project(x, rope)

    def expand(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys `[B, S, G, K]` and values `[B, S, G, V]` from what `project` made for S tokens."""
        return k, v

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor] | None, mask: Mask) -> Tensor:
        """Return `[B, T, D]` for `x` `[B, T, D]`; `rope` are the tables of `rope_tables`."""
        q, *context = self.project(x, rope)  # [B, T, H, K], 2 x [B, T, G, ..]
        return self.output(self.attend(q, *self.expand(*context), mask).flatten(2))  # [B, T, D]

    def output(self, mixed: Tensor) -> Tensor:
        """Return the output `[B, T, D]` of the mixed values of all heads `[B, T, H V]`."""
        return self.o_proj(mixed)

    def new_cache(self, batch_size: int, length: int) -> KeyValueCache:
        """Return room for the context of `batch_size` sequences of at most `length` tokens."""
        return KeyValueCache(batch_size, length, self.window)

    def step(self, x: Tensor, rope: tuple[Tensor, Tensor] | None, cache: KeyValueCache) -> Tensor:
        """Return `[B, n, D]` for the next n tokens `x` `[B, n, D]`; `rope` are the tables of their positions.

        See `model.stepping`. Raises ValueError where the cache is full.
        """
        mixed, first = [], cache.length
        for start, stop in blocks_of(first, x.shape[1]):
            part = slice(start - first, stop - first)
            tables = None if rope is None else (rope[0][..., part, :, :], rope[1][..., part, :, :])
            mixed.append(self._step_in_block(x[:, part], tables, cache))
        return torch.cat(mixed, dim=1)  # [B, n, D]

    def _step_in_block(self, x: Tensor, rope: tuple[Tensor, Tensor] | None, cache: KeyValueCache) -> Tensor:
        start = cache.length
        rows = rows_of(start, start + x.shape[1])
        if rope is not None:
            rope = in_block(rope[0], start, -3), in_block(rope[1], start, -3)  # 2 x [.., STEP_ROWS, 1, K/2]
        q, k, v = self.project_rows(in_block(x, start), rope, cache, rows)
        cache.append(k[:, rows], v[:, rows])
        first_row = start - start % q.shape[1]
        block = first_row - first_row % ROWS
        *context, mask = cache.seen_from(block)  # 2 x [B, S, G, ..], [1, 1, ROWS, S]
        keys, values = self.expand(*context)  # [B, S, G, K], [B, S, G, V]
        mixed = self.block_kernel(in_block(q, first_row, rows=ROWS), keys, values, mask)  # [B, ROWS, H, V]
        own = mixed[:, rows_of(first_row, first_row + q.shape[1], ROWS)]  # [B, STEP_ROWS, H, V]
        return self.output(own.flatten(2))[:, rows]  # [B, n, D]


class Attention(SoftmaxAttention):
    """Attention of Llama and GPT: queries, keys and values are each a linear of the input."""

    def __init__(self, spec: kinds.AttentionSpec, config: ModelConfig):
        super().__init__(spec.window)
        self.head_dim = config.attention_head_dim
        query_size, key_size = config.num_heads * self.head_dim, config.num_kv_heads * self.head_dim
        self.q_proj = Linear(config.hidden_size, query_size, bias=config.bias)
        self.k_proj = Linear(config.hidden_size, key_size, bias=config.bias)
        self.v_proj = Linear(config.hidden_size, key_size, bias=config.bias)
        self.o_proj = Linear(query_size, config.hidden_size, bias=config.bias)
        self.input_factor, self.output_inputs = config.hidden_size**-0.5, query_size
        self.factor = attention_factor(config) if config.unit_scaling else None  # None: no unit scaling

    def project(self, x: Tensor, rope: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries `[B, T, H, K]`, keys and values `[B, T, G, K]` of `x` `[B, T, D]`."""
        if self.factor is not None:
            x = scaled(x, backward=self.input_factor)  # [B, T, D]
        q, k, v = (linear(x) for linear in (self.q_proj, self.k_proj, self.v_proj))  # [B, T, H K], 2 x [B, T, G K]
        if self.factor is not None:
            q, k, v = (scaled(each, self.input_factor, self.factor) for each in (q, k, v))
        q, k, v = (each.unflatten(-1, (-1, self.head_dim)) for each in (q, k, v))  # [B, T, H, K], 2 x [B, T, G, K]
        q, k = self.prepare(q, k)  # [B, T, H, K], [B, T, G, K]
        if rope is not None:
            q, k = apply_rope(q, *rope), apply_rope(k, *rope)  # [B, T, H, K], [B, T, G, K]
        return q, k, v

    def output(self, mixed: Tensor) -> Tensor:
        if self.factor is None:
            return super().output(mixed)
        return scaled_linear(self.o_proj, scaled(mixed, forward=self.factor), self.output_inputs)

    def prepare(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Return queries `[B, T, H, K]` and keys `[B, T, G, K]` as other kinds change them, before positions do.

        With unit scaling scores are q k^T / K: the kernel divides by sqrt(K).
        """
        return q if self.factor is None else q * self.head_dim**-0.5, k


class QKNormAttention(Attention):
    """`Attention` with `q_norm` and `k_norm` over K elements, shared by all heads: Qwen3's."""

    def __init__(self, spec: kinds.AttentionSpec, config: ModelConfig):
        super().__init__(spec, config)
        self.q_norm = norm_of(config).build_for(config, self.head_dim)
        self.k_norm = norm_of(config).build_for(config, self.head_dim)

    def prepare(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return self.q_norm(q), self.k_norm(k)  # [B, T, H, K], [B, T, G, K]


class SoftCappedAttention(Attention):
    """Gemma 2's `Attention`: `cap x tanh(scores / cap)` and a separate scale of the scores."""

    def __init__(self, spec: kinds.SoftCappedAttention, config: ModelConfig):
        super().__init__(spec, config)
        self.kernel = self.attend = self.block_kernel = capped_attention(spec.cap)
        scalar = spec.query_pre_attention_scalar or self.head_dim
        self.scale = math.sqrt(self.head_dim / scalar)  # multiplies the queries; the kernel divides by sqrt(K)

    def prepare(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return q if self.scale == 1.0 else q * self.scale, k  # [B, T, H, K], [B, T, G, K]


@cache
def capped_attention(cap: float) -> Kernel:
    """Return attention with capped scores: q `[B, T, H, K]`, k, v `[B, S, G, K]`, mask -> `[B, T, H, K]`; cached.

    The mask is as in `torch_attention`. Capped scores and softmax are in fp32.
    """

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        keys = for_all_heads(k, q.shape[2]).permute(0, 2, 3, 1)  # [B, H, K, S]
        values = for_all_heads(v, q.shape[2]).transpose(1, 2)  # [B, H, S, K]
        wide = torch.promote_types(q.dtype, torch.float32)
        scores = torch.matmul(q.transpose(1, 2) / math.sqrt(q.shape[-1]), keys).to(wide)  # [B, H, T, S]
        if mask is None:
            mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()  # [T, S]
        seen = (torch.tanh(scores / cap) * cap).masked_fill(~mask, -math.inf)  # [B, H, T, S]
        mixed = torch.matmul(torch.softmax(seen, dim=-1).to(v.dtype), values)  # [B, H, T, K]
        return mixed.transpose(1, 2)  # [B, T, H, K]

    return attend
