"""Causal self-attention with grouped key/value heads (GQA, Ainslie et al. 2023, arXiv:2305.13245).

Letters: B sequences, T tokens, D hidden_size, H query heads, G key/value heads, K elements per head.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_llm.config.schema.model import ModelConfig
from lightning_llm.model.linear import Linear
from lightning_llm.model.mixer.attention_cpu import is_faster_here, short_attention
from lightning_llm.model.mixer.attention_spec import AttentionSpec
from lightning_llm.model.rope import apply_rope

Kernel = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
"""Of q `[B, T, H, K]`, k and v `[B, S, G, K]` and a mask that broadcasts to `[B, H, T, S]`: `[B, T, H, K]`."""


def document_mask(document_ids: Tensor, window: int | None = None) -> Tensor:
    """Return bool `[B, 1, T, T]`: which key (last) a query sees, namely those of its own document up to itself.

    `document_ids` is `[B, T]`, any integer that is equal within a document and differs between neighbours. Of a
    `window` a query sees the last so many tokens, itself included.
    """
    same = document_ids[:, :, None] == document_ids[:, None, :]  # [B, T, T]
    return (same & _causal(document_ids.shape[1], window, document_ids.device))[:, None]  # [B, 1, T, T]


def window_mask(length: int, window: int | None, device: torch.device) -> Tensor | None:
    """Return bool `[1, 1, T, T]` as `document_mask` of one document; None, plain causal, if no token is hidden."""
    return None if window is None or window >= length else _causal(length, window, device)[None, None]


def _causal(length: int, window: int | None, device: torch.device) -> Tensor:
    causal = torch.ones(length, length, dtype=torch.bool, device=device).tril()  # [T, T]
    return causal if window is None else causal.triu(1 - window)


def dot_product_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Return `softmax(q k^T / sqrt(K)) v` `[B, T, H, K]` for `q` `[B, T, H, K]` and `k`, `v` `[B, T, G, K]`.

    `mask` is that of `document_mask`; None is plain causal attention.
    """
    return short_attention(q, k, v, mask) if is_faster_here(q) else torch_attention(q, k, v, mask)


def torch_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Return the same by torch's kernels, for `q` `[B, T, H, K]` and any number S of keys: `k`, `v` `[B, S, G, K]`.

    `mask` is bool and broadcasts to `[B, H, T, S]`; None is plain causal attention, of S = T.
    """
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


def for_all_heads(keys: Tensor, heads: int) -> Tensor:
    """Return `[B, S, heads, K]` from `[B, S, G, K]`: each key/value head as often as query heads share it.

    On CUDA torch groups heads in two kernels: flash, which takes no mask, and the one that keeps all scores. With a
    mask it would take the latter without a word (`scaled_dot_product_attention`, enable_gqa).
    """
    return keys if keys.shape[2] == heads else keys.repeat_interleave(heads // keys.shape[2], dim=2)


KERNEL_OPS = (
    torch.ops.lightning_llm.short_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
)
"""What `dot_product_attention` may run as."""


class Attention(nn.Module):
    """`o_proj(softmax(q k^T / sqrt(K)) v)`, causal. Head counts are read off the tensors, so a shard of heads works."""

    kernel_ops = KERNEL_OPS
    """What selective checkpointing keeps the outputs of, see `parallel.activation`."""

    def __init__(self, spec: AttentionSpec, config: ModelConfig):
        super().__init__()
        self.head_dim = config.attention_head_dim
        self.attend: Kernel = dot_product_attention  # replaced where other ranks hold a part of the keys,
        self.kernel: Kernel = torch_attention  # by what gathers them for this one, which takes any number of keys
        query_size, key_size = config.num_heads * self.head_dim, config.num_kv_heads * self.head_dim
        self.q_proj = Linear(config.hidden_size, query_size, bias=config.bias)
        self.k_proj = Linear(config.hidden_size, key_size, bias=config.bias)
        self.v_proj = Linear(config.hidden_size, key_size, bias=config.bias)
        self.o_proj = Linear(query_size, config.hidden_size, bias=config.bias)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor] | None, mask: Tensor | None) -> Tensor:
        """Return `[B, T, D]` for `x` `[B, T, D]`.

        `rope` are the tables of `rope_tables`; `mask` is that of `document_mask`, None for plain causal attention.
        """
        q = self.q_proj(x).unflatten(-1, (-1, self.head_dim))  # [B, T, H, K]
        k = self.k_proj(x).unflatten(-1, (-1, self.head_dim))  # [B, T, G, K]
        v = self.v_proj(x).unflatten(-1, (-1, self.head_dim))  # [B, T, G, K]
        q, k = self.prepare(q, k)  # [B, T, H, K], [B, T, G, K]
        if rope is not None:
            q, k = apply_rope(q, *rope), apply_rope(k, *rope)  # [B, T, H, K], [B, T, G, K]
        return self.o_proj(self.attend(q, k, v, mask).flatten(2))  # [B, T, D]

    def prepare(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Return queries `[B, T, H, K]` and keys `[B, T, G, K]` as other kinds change them, before positions do."""
        return q, k
