"""Causal attention for short sequences on CPU, where the backward pass of torch's own kernel is slow.

`scaled_dot_product_attention` on CPU takes three times its forward in the backward pass at short lengths (torch 2.13,
bf16, 8 x 8 heads of 32 over 256 tokens: 20.8 ms both ways against 14.1 ms here; from 1,024 tokens on it wins). This is
the same exact attention by rows of queries: scores and probabilities of `ROWS` queries at a time, recomputed in the
backward pass as in FlashAttention (Dao et al. 2022, arXiv:2205.14135), so memory is linear in T. Scores, softmax and
its derivative are in fp32; the products with v, q and k take probabilities rounded to the input's dtype.

Letters: B sequences, T tokens, H query heads, G key/value heads, R = H / G queries per key, K elements of a head's
keys, V of its values.
"""

import math

import torch
from torch import Tensor

from lightning_llm.linalg.gemm import operand, product
from lightning_llm.model.attention.kinds import SHORT_KERNEL_TOKENS

ROWS = 64
SCORES = 1 << 19
"""Scores that are there at once, 2 MB in fp32. A quarter of it costs calls, and on two threads more than it saves."""


def is_faster_here(q: Tensor) -> bool:
    """Return whether `short_attention` beats torch's kernel for queries `q` `[B, T, H, K]`."""
    return q.device.type == "cpu" and q.shape[1] <= SHORT_KERNEL_TOKENS


def short_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Return `softmax(q k^T / sqrt(K)) v` `[B, T, H, V]` for `q` `[B, T, H, K]` and `k`, `v` `[B, T, G, K or V]`.

    `mask` is bool `[B, 1, T, T]`, True where a query (row) sees a key: a part of the causal triangle in which each
    query sees at least itself. None is the whole triangle. A compiler sees one operator, not the loop.
    """
    return _forward(q, k, v, mask)


def row_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Return `short_attention` `[B, b, H, V]` of b queries `[B, b, H, K]` on t keys `[B, t, G, K]`, by the same sums.

    `mask` is bool and broadcasts to `[B, H, b, t]`; None is causal attention of the last b of t tokens. No gradients.
    """
    groups = k.shape[2]
    queries, scaled_t = _wide(_by_head(q, groups)).flatten(0, 1), _scaled_keys(_by_key(k))  # [BG, R, b, K], [BG, K, t]
    scores = queries.new_empty(len(queries) * queries.shape[1] * q.shape[1] * k.shape[1])
    p = _probabilities(queries, scaled_t, mask, scores)  # [BG, R b, t]
    mixed = product(p.to(v.dtype), _by_key(v).flatten(0, 1))  # [BG, R b, V]
    out = _mixed_like(q, v)
    _by_head(out, groups).copy_(mixed.view(len(q), groups, -1, q.shape[1], v.shape[3]))
    return out


@torch.library.custom_op("lightning_llm::short_attention", mutates_args=())
def _forward(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    out, groups = _mixed_like(q, v), k.shape[2]  # [B, T, H, V]
    scores = q.new_empty(0, dtype=_wide_dtype(q))
    for part in _parts(q, groups):
        query, mixed = _by_head(q, groups)[part], _by_head(out, groups)[part]  # 2 x [c, g, R, T, K]
        queries, scaled_t = _wide(query).flatten(0, 1), _scaled_keys(_by_key(k)[part])  # [cg, R, T, K], [cg, K, T]
        values = operand(_by_key(v)[part]).flatten(0, 1)  # [cg, T, V]
        scores = _room(scores, queries)
        for start, stop in _row_blocks(q):
            seen = _rows(mask, part[0], start, stop)
            p = _probabilities(queries[:, :, start:stop], scaled_t[:, :, :stop], seen, scores)  # [cg, R b, t]
            block = torch.bmm(operand(p.to(v.dtype)), values[:, :stop])  # [cg, R b, V]
            mixed[..., start:stop, :].copy_(block.view(mixed[..., start:stop, :].shape))
    return out


@torch.library.custom_op("lightning_llm::short_attention_backward", mutates_args=())
def _backward(
    grad_output: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (torch.empty_like(each, memory_format=torch.contiguous_format) for each in (q, k, v))
    groups, scale = k.shape[2], 1 / math.sqrt(q.shape[-1])
    scores = grads = q.new_empty(0, dtype=_wide_dtype(q))
    for part in _parts(q, groups):
        queries, grad = (_wide(_by_head(each, groups)[part]).flatten(0, 1) for each in (q, grad_output))
        keys, values = (_wide(_by_key(each)[part]).flatten(0, 1) for each in (k, v))  # [cg, T, K or V]
        scaled_t, values_t = (keys / math.sqrt(k.shape[-1])).transpose(1, 2), values.transpose(1, 2)  # [cg, .., T]
        q_operand, grad_operand, k_operand = (_multiplied(each, q) for each in (queries, grad, keys))
        grad_q, grad_k, grad_v = torch.empty_like(queries), torch.zeros_like(keys), torch.zeros_like(values)
        scores, grads = _room(scores, queries), _room(grads, queries)
        for start, stop in _row_blocks(q):
            rows = slice(start, stop)
            seen = _rows(mask, part[0], start, stop)
            p = _probabilities(queries[:, :, rows], scaled_t[:, :, :stop], seen, scores)  # [cg, R b, t]
            grad_p = torch.bmm(grad[:, :, rows].flatten(1, 2), values_t[:, :, :stop], out=_shaped(grads, p))
            torch._softmax_backward_data(grad_p, p, -1, p.dtype, grad_input=grad_p)  # [cg, R b, t]
            grad_s, own = operand(grad_p.to(q.dtype)), operand(p.to(q.dtype))  # 2 x [cg, R b, t]
            block = torch.bmm(grad_s, k_operand[:, :stop]).to(q.dtype)  # [cg, R b, K]
            grad_q[:, :, rows].copy_(block.unflatten(1, (-1, stop - start)))
            grad_k[:, :stop].add_(torch.bmm(grad_s.transpose(1, 2), q_operand[:, :, rows].flatten(1, 2)).to(q.dtype))
            grad_v[:, :stop].add_(torch.bmm(own.transpose(1, 2), grad_operand[:, :, rows].flatten(1, 2)).to(q.dtype))
        _by_head(dq, groups)[part].copy_(grad_q.mul_(scale).view_as(_by_head(dq, groups)[part]))
        _by_key(dk)[part].copy_(grad_k.mul_(scale).view_as(_by_key(dk)[part]))
        _by_key(dv)[part].copy_(grad_v.view_as(_by_key(dv)[part]))
    return dq, dk, dv


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    return _mixed_like(q, v)


@_backward.register_fake
def _(grad_output: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.save_for_backward(*inputs)


def _differentiate(ctx, grad_output: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:  # type: ignore[no-untyped-def]
    return (*_backward(grad_output, *ctx.saved_tensors), None)


_forward.register_autograd(_differentiate, setup_context=_save)


def _mixed_like(q: Tensor, v: Tensor) -> Tensor:
    """Return an uninitialized `[B, T, H, V]`: a result for queries `[B, T, H, K]` and values `[B, .., V]`."""
    return q.new_empty((*q.shape[:3], v.shape[3]))


def _row_blocks(q: Tensor) -> list[tuple[int, int]]:
    length = q.shape[1]
    return [(start, min(start + ROWS, length)) for start in range(0, length, ROWS)]


def _parts(q: Tensor, groups: int) -> list[tuple[slice, slice]]:
    """Return ranges of sequences and key heads with at most `SCORES` scores, at `ROWS` queries each."""
    batch, length, heads, _ = q.shape
    each = heads // groups * ROWS * length
    if groups * each > SCORES:
        step = max(1, SCORES // each)
        return [(slice(b, b + 1), slice(g, g + step)) for b in range(batch) for g in range(0, groups, step)]
    step = SCORES // (groups * each)
    return [(slice(b, b + step), slice(None)) for b in range(0, batch, step)]


def _rows(mask: Tensor | None, sequences: slice, start: int, stop: int) -> Tensor | None:
    if mask is None:
        return None
    return mask[sequences if len(mask) > 1 else slice(None), :, start:stop, :stop]


def _room(flat: Tensor, queries: Tensor) -> Tensor:
    """Return `flat`, or a longer buffer if the scores of `queries` `[BG, R, T, K]`, `ROWS` at a time, need it."""
    elements = len(queries) * queries.shape[1] * min(ROWS, queries.shape[2]) * queries.shape[2]
    return flat if flat.numel() >= elements else flat.new_empty(elements)


def _shaped(flat: Tensor, like: Tensor) -> Tensor:
    return flat[: like.numel()].view_as(like)


def _probabilities(query: Tensor, scaled_t: Tensor, mask: Tensor | None, room: Tensor) -> Tensor:
    """Return the attention weights, fp32 `[BG, R b, t]`, of b queries `[BG, R, b, K]` on t keys `[BG, K, t]`.

    `mask` is bool and broadcasts to `[B, H, b, t]`; None is causal attention of the last b of t tokens. They are
    written to the flat `room`: fresh memory for each block costs more than the products.
    """
    rows, keys = query.shape[2], scaled_t.shape[-1]
    of_heads = query.flatten(1, 2)  # [BG, R b, K]
    scores = room[: of_heads.shape[0] * of_heads.shape[1] * keys].view(*of_heads.shape[:2], keys)  # [BG, R b, t]
    torch.bmm(of_heads, scaled_t, out=scores)
    by_row = scores.view(-1, query.shape[1], rows, keys)  # [BG, R, b, t]
    if mask is None:
        by_row[..., keys - rows :].add_(scores.new_full((rows, rows), -math.inf).triu_(1))
    else:
        by_row.view(mask.shape[0], -1, rows, keys).masked_fill_(~mask, -math.inf)
    return torch.softmax(scores, dim=-1, out=scores)


def _wide_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _wide(x: Tensor) -> Tensor:
    """Return a contiguous copy in fp32, or fp64."""
    return torch.empty(x.shape, dtype=_wide_dtype(x), device=x.device).copy_(x)


def _multiplied(wide: Tensor, like: Tensor) -> Tensor:
    """Return `wide`, the widened `like`, as an operand of products in the dtype of `like`."""
    return wide if operand(like.new_empty(0)).dtype == wide.dtype else wide.to(like.dtype)


def _scaled_keys(keys: Tensor) -> Tensor:
    """Return keys `[B, G, T, K]` as fp32 `[BG, K, T]`, over sqrt(K)."""
    return _wide(keys).div_(math.sqrt(keys.shape[-1])).flatten(0, 1).transpose(1, 2)


def _by_key(x: Tensor) -> Tensor:
    """`[B, T, G, K]` -> `[B, G, T, K]`."""
    return x.transpose(1, 2)


def _by_head(x: Tensor, groups: int) -> Tensor:
    """`[B, T, H, K]` -> `[B, G, R, T, K]`: the query heads that share a key head lie together."""
    return x.unflatten(2, (groups, -1)).permute(0, 2, 3, 1, 4)
