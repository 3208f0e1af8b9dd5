"""Gated linear attention: a matrix-valued state instead of keys; each token's gates decide its decay.

The layer is that of fla-org/flash-linear-attention (`fla/layers/gla.py`, without its short convolutions), as in the
paper (Yang et al. 2024, arXiv:2312.06635, section 4.4) but for the norm. Whole sequences are computed chunk by chunk
(their section 4). Of a head, with log decays g_t <= 0 of each key element, from S_0 = 0 `[K, V]`:

    S_t = diag(exp g_t) S_(t-1) + k_t^T v_t,    o_t = q_t S_t / sqrt(K)

Within a chunk of `CHUNK` tokens let b_t be the sum of g up to t. Then q_t exp(b_t) meets the state at the start of the
chunk, and k_j exp(b_C - b_j) enters that at its end. Within the chunk a query meets keys through exp(b_t - b_j), which
is taken apart into a product of two matrices only at a point between t and j (the end of a secondary chunk of
`SUBCHUNK` tokens), so that neither factor exceeds 1: exp(-b_j) alone overflows. Within a secondary chunk the difference
is taken first. Sums, decays, states and the backward pass are in fp32, or in fp64 for fp64 inputs. Of the gradients,
that of b_t is q_t dq_t - k_t dk_t (their appendix C), so g_t's is its sum from t to the chunk's end, and the rows' sums
of the state there times its gradient, which stand for all chunks after it.

A document's first token meets a state of zeros: decays across bounds of documents are zeros, not small.

A compiler sees one operator each way, not the loops. Kept for the backward pass are the inputs alone.

Letters: B sequences, T tokens, D hidden_size, H heads, K and V elements of a head's keys and values, N chunks of C
tokens.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_llm.config.schema.model import ModelConfig
from lightning_llm.model import kinds
from lightning_llm.model.linear import Linear
from lightning_llm.model.structure import norm_of

CHUNK, SUBCHUNK = 64, 16


def gated_linear_attention(q: Tensor, k: Tensor, v: Tensor, g: Tensor, document_ids: Tensor | None) -> Tensor:
    """Return the outputs `[B, T, H, V]` in the dtype of `v`, for `q`, `k`, `g` `[B, T, H, K]` and `v` `[B, T, H, V]`.

    `g` are finite logarithms of decays, at most 0; `document_ids` `[B, T]` are equal within a document and differ
    between neighbours, None for one document.
    """
    return _forward(q, k, v, g, document_ids)


def continue_from(state: Tensor | None, q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Return (outputs of tokens that follow `state`, the state `[B, H, K, V]` after them); `state=None`: zeros.

    Operands are those of `gated_linear_attention`; a single token is one step of the recurrence. Autograd derives the
    backward pass from its operations.
    """
    if state is None:
        state = g.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3])  # [B, H, K, V]
    if q.shape[1] > 1:
        chunks = _chunks(q, k, v, g, None)
        starts, last = _states(chunks, state)
        return chunks.unfold(chunks.scores() @ chunks.v + (chunks.q * chunks.entering) @ starts, v), last
    query, key, value, decay = (each.transpose(1, 2).to(g.dtype) for each in (q, k, v, g.exp()))  # [B, H, 1, K or V]
    state = state * decay.mT + key.mT @ value  # [B, H, K, V]
    return (query @ state / math.sqrt(q.shape[-1])).transpose(1, 2).to(v.dtype), state


class _Chunks(NamedTuple):
    """The operands by chunks, `[B, H, N, C, K or V]`, wide; `q` is over sqrt(K). Padding has no keys and decays by 1.

    `entering`, `leaving` `[B, H, N, C, K]`: the decay of the state from the chunk's start to a token, and of a token to
    its end; `through` `[B, H, N, K]`: of a state from start to end. `seen` `[B, 1, N, C, C]`: which keys (last) of its
    chunk a query sees; `starts` `[B, T]`: the first tokens of documents but each sequence's first, or None.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    b: Tensor
    entering: Tensor
    leaving: Tensor
    through: Tensor
    seen: Tensor
    starts: Tensor | None

    def scores(self) -> Tensor:
        """Return `[B, H, N, C, C]`: weight of each key's value for each query."""
        q, k, b = self.q, self.k, self.b
        found = q.new_zeros(*q.shape[:-1], q.shape[-2])  # [B, H, N, C, C]
        for first in range(SUBCHUNK, q.shape[-2], SUBCHUNK):
            queries, keys = self.across(first)
            found[..., first : first + SUBCHUNK, :first] = queries @ keys.mT
        within, (qs, ks, bs) = _diagonal_blocks(found), map(_subchunks, (q, k, b))
        for j in range(SUBCHUNK):
            key = ks[..., j : j + 1, :] * torch.exp(bs[..., j:, :] - bs[..., j : j + 1, :])  # [B, H, N, C/S, S-j, K]
            within[..., j:, j, :] = (qs[..., j:, :] * key).sum(-1).transpose(-1, -2)
        return found * self.seen

    def across(self, first: int) -> tuple[Tensor, Tensor]:
        """Return the queries of the secondary chunk from `first` on, and all keys before it, both as decayed there."""
        last, at = first + SUBCHUNK, self.b[..., first - 1 : first, :]
        return (
            self.q[..., first:last, :] * torch.exp(self.b[..., first:last, :] - at),
            self.k[..., :first, :] * torch.exp(at - self.b[..., :first, :]),
        )

    def unfold(self, x: Tensor, like: Tensor) -> Tensor:
        """Return `x` `[B, H, N, C, V]` as `[B, T, H, V]`, in the shape and dtype of `like`."""
        return x.flatten(2, 3)[:, :, : like.shape[1]].transpose(1, 2).to(like.dtype).contiguous()


def _chunks(q: Tensor, k: Tensor, v: Tensor, g: Tensor, document_ids: Tensor | None) -> _Chunks:
    length = q.shape[1]
    size = min(CHUNK, -(-length // SUBCHUNK) * SUBCHUNK)
    padding = -length % size

    def fold(x: Tensor) -> Tensor:
        wide = x.to(g.dtype).transpose(1, 2)  # [B, H, T, K]
        return F.pad(wide, (0, 0, 0, padding)).unflatten(2, (-1, size))  # [B, H, N, C, K]

    b = fold(g).cumsum(-2)  # [B, H, N, C, K]
    seen = torch.ones(size, size, dtype=torch.bool, device=q.device).tril()[None, None, None]  # [1, 1, 1, C, C]
    entering, leaving, through = b.exp(), torch.exp(b[..., -1:, :] - b), b[..., -1, :].exp()
    starts = None
    if document_ids is not None:
        starts = F.pad(document_ids[:, 1:] != document_ids[:, :-1], (1, 0))  # [B, T]
        number = F.pad(starts.cumsum(1)[:, None], (0, padding), mode="replicate").unflatten(2, (-1, size))  # [B,1,N,C]
        last = number[..., -1:]  # [B, 1, N, 1]
        before = torch.cat([number[:, :, :1, :1], last[:, :, :-1]], dim=2)  # of the token before the chunk
        seen = seen & (number[..., :, None] == number[..., None, :])  # [B, 1, N, C, C]
        entering, leaving = entering * (number == before)[..., None], leaving * (number == last)[..., None]
        through = through * (before == last)
    return _Chunks(
        fold(q) / math.sqrt(q.shape[-1]), fold(k), fold(v), b, entering, leaving, through, seen, starts
    )  # fmt: skip


def _states(chunks: _Chunks, first: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the states `[B, H, N, K, V]` at the chunks' starts, from `first` or zeros, and that after the last."""
    added = (chunks.k * chunks.leaving).mT @ chunks.v  # [B, H, N, K, V]
    state = torch.zeros_like(added[:, :, 0]) if first is None else first.to(added.dtype)  # [B, H, K, V]
    states = []
    for decay, new in zip(chunks.through.unbind(2), added.unbind(2), strict=True):
        states.append(state)
        state = torch.addcmul(new, decay[..., None], state)
    return torch.stack(states, dim=2), state


def _state_gradients(chunks: _Chunks, grad: Tensor) -> Tensor:
    """Return the gradients `[B, H, N, K, V]` of the states after each chunk, for that of the outputs."""
    added = (chunks.q * chunks.entering).mT @ grad  # [B, H, N, K, V]
    gradient = torch.zeros_like(added[:, :, 0])
    gradients = []
    for decay, new in zip(reversed(chunks.through.unbind(2)), reversed(added.unbind(2)), strict=True):
        gradients.append(gradient)
        gradient = torch.addcmul(new, decay[..., None], gradient)
    return torch.stack(gradients[::-1], dim=2)


def _subchunks(x: Tensor) -> Tensor:
    """`[..., C, K]` -> `[..., C / S, S, K]`, a view."""
    return x.unflatten(-2, (-1, SUBCHUNK))


def _diagonal_blocks(x: Tensor) -> Tensor:
    """Return a view `[..., S, S, C / S]` of the blocks on the diagonal of `x` `[..., C, C]`: query, key, block."""
    return x.unflatten(-1, (-1, SUBCHUNK)).unflatten(-3, (-1, SUBCHUNK)).diagonal(dim1=-4, dim2=-2)


@torch.library.custom_op("lightning_llm::gated_linear_attention", mutates_args=())
def _forward(q: Tensor, k: Tensor, v: Tensor, g: Tensor, document_ids: Tensor | None) -> Tensor:
    chunks = _chunks(q, k, v, g, document_ids)
    states, _ = _states(chunks)
    return chunks.unfold(chunks.scores() @ chunks.v + (chunks.q * chunks.entering) @ states, v)


@torch.library.custom_op("lightning_llm::gated_linear_attention_backward", mutates_args=())
def _backward(
    grad_output: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, document_ids: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    chunks = _chunks(q, k, v, g, document_ids)
    grad = F.pad(grad_output.to(g.dtype).transpose(1, 2), (0, 0, 0, chunks.q.shape[2:4].numel() - q.shape[1]))
    grad = grad.unflatten(2, (-1, chunks.q.shape[3]))  # [B, H, N, C, V]
    (states, last), after = _states(chunks), _state_gradients(chunks, grad)  # [B, H, N, K, V]
    grad_v = chunks.scores().mT @ grad + (chunks.k * chunks.leaving) @ after
    grad_q, grad_k = _within(chunks, (grad @ chunks.v.mT) * chunks.seen)  # [B, H, N, C, K]
    grad_q += chunks.entering * (grad @ states.mT)
    grad_k += chunks.leaving * (chunks.v @ after.mT)
    at_end = (torch.cat([states[:, :, 1:], last[:, :, None]], dim=2) * after).sum(-1)  # [B, H, N, K]
    grad_b = chunks.q * grad_q - chunks.k * grad_k  # [B, H, N, C, K]
    grad_g = chunks.unfold(grad_b.flip(-2).cumsum(-2).flip(-2) + at_end[..., None, :], g)
    if chunks.starts is not None:
        grad_g.masked_fill_(chunks.starts[..., None, None], 0.0)  # earlier tokens have no effect
    grad_q = grad_q / math.sqrt(q.shape[-1])
    return chunks.unfold(grad_q, q), chunks.unfold(grad_k, k), chunks.unfold(grad_v, v), grad_g


def _within(chunks: _Chunks, grad_scores: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of queries and keys `[B, H, N, C, K]` by the scores within chunks `[B, H, N, C, C]`."""
    grad_q, grad_k = torch.zeros_like(chunks.q), torch.zeros_like(chunks.k)
    for first in range(SUBCHUNK, chunks.q.shape[-2], SUBCHUNK):
        last, at = first + SUBCHUNK, chunks.b[..., first - 1 : first, :]
        queries, keys = chunks.across(first)
        block = grad_scores[..., first:last, :first]
        grad_q[..., first:last, :] += block @ keys * torch.exp(chunks.b[..., first:last, :] - at)
        grad_k[..., :first, :] += block.mT @ queries * torch.exp(at - chunks.b[..., :first, :])
    qs, ks, bs, grad_qs, grad_ks = map(_subchunks, (chunks.q, chunks.k, chunks.b, grad_q, grad_k))
    blocks = _diagonal_blocks(grad_scores)
    for j in range(SUBCHUNK):
        column = blocks[..., j:, j, :].transpose(-1, -2)[..., None]  # [B, H, N, C/S, S-j, 1]
        decayed = column * torch.exp(bs[..., j:, :] - bs[..., j : j + 1, :])  # [B, H, N, C/S, S-j, K]
        grad_qs[..., j:, :] += decayed * ks[..., j : j + 1, :]
        grad_ks[..., j, :] += (decayed * qs[..., j:, :]).sum(-2)
    return grad_q, grad_k


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, g: Tensor, document_ids: Tensor | None) -> Tensor:
    return v.new_empty(v.shape)


@_backward.register_fake
def _(
    grad_output: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, document_ids: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), g.new_empty(g.shape)


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.save_for_backward(*inputs)


def _differentiate(ctx, grad_output: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, None]:  # type: ignore[no-untyped-def]
    return (*_backward(grad_output, *ctx.saved_tensors), None)


_forward.register_autograd(_differentiate, setup_context=_save)
KERNEL = torch.ops.lightning_llm.gated_linear_attention.default


@dataclass
class GLACache:
    """Cache for generation, of constant size: the state `[B, H, K, V]`, fp32; None before the first token."""

    state: Tensor | None = None


class GLA(nn.Module):
    """Token mixer with gated linear attention: `o_proj(norm(o) * silu(g_proj(x)))` with o of `gated_linear_attention`.

    The number of heads follows from the tensors' shapes, so that it works on a shard, too.

    The decays' logarithms are `logsigmoid(gk) / gate_logit_normalizer` in fp32, gk of rank gate_low_rank_dim.
    """

    kernel_ops = (KERNEL,)

    def __init__(self, spec: kinds.GLA, config: ModelConfig):
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
        """Return an empty cache. Its size does not depend on `length`."""
        return GLACache()

    def step(self, x: Tensor, rope: tuple[Tensor, Tensor] | None, cache: GLACache) -> Tensor:
        """Return outputs `[B, T, D]` for the next tokens `x` `[B, T, D]` of the cached sequences; updates `cache`."""
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
        """Return `[B, T, D]`: the heads' outputs `mixed` `[B, T, H, V]` normed, gated by `x` `[B, T, D]`, projected."""
        gate = F.silu(self.g_proj(x))  # [B, T, H V]
        return self.o_proj(self.g_norm(mixed).flatten(2) * gate)  # [B, T, D]
