"""Compressed convolutional attention (CCA, Figliolia et al. 2025, arXiv 2510.04476), in the form of ZAYA1.

Queries q and keys k of all heads are C channels of a token. Two causal convolutions run over them, one within each
channel, then one over the channels of each head. To their result come means of the unconvolved q and k of the heads
that share keys; then each head is normed to the length sqrt(K), and keys are multiplied by a factor per head. The first
half of the values is of the token, the second of the one before it.

Tokens before a document are absent for all of this: zeros before the convolutions, as before a sequence.

Letters: B sequences, T tokens, D hidden_size, H query heads, G key/value heads, K elements per head, C = (H + G) K
channels, P tokens before one that it depends on.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lightning_llm.config.schema.model import ModelConfig
from lightning_llm.model.attention import convolved_kind
from lightning_llm.model.attention.attention import SoftmaxAttention, for_all_heads
from lightning_llm.model.attention.kernel_choice import Mask
from lightning_llm.model.linear import Linear
from lightning_llm.model.norm import rms_norm
from lightning_llm.model.rope import apply_rope
from lightning_llm.model.stepping import KeyValueCache

EPSILON = 1e-14
"""Added to the mean square of a head, so that a head of zeros stays zeros."""
Tables = tuple[Tensor, Tensor]


class Convolution(nn.Module):
    """Weights of a causal convolution over tokens: a row per output channel, of elements (input channel, token).

    The last token is the output's own.
    """

    def __init__(self, channels: int, columns: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, columns))
        self.bias = nn.Parameter(torch.empty(channels))


class KeyScale(nn.Module):
    """One factor per key head."""

    def __init__(self, heads: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(heads))

    def forward(self, keys: Tensor) -> Tensor:
        """Return `keys` `[B, T, G, K]` times the factors."""
        return keys * self.weight.to(keys.dtype)[:, None]


class _Convolve(torch.autograd.Function):
    """Both convolutions of `x` `[B, T, C]` behind `before` `[B, P, C]`, None for zeros: `[B, T, C]`.

    Of all tensors only the inputs are saved. Elementwise operations are in fp32, or in fp64 for fp64 inputs.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, depthwise: Tensor, depthwise_bias: Tensor, grouped: Tensor, grouped_bias: Tensor,
        width: int, before: Tensor | None, document_ids: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """`depthwise` `[C, k]`, `grouped` `[C, K l]`, and their biases `[C]`, in the dtype of `x`; `width`: K."""
        ctx.save_for_backward(x, depthwise, depthwise_bias, grouped, document_ids)
        ctx.width = width
        heads = grouped.view(-1, width, width, grouped.shape[1] // width)  # [n, K, K, l]: output, input, token
        taps = _Taps(x, before, document_ids, depthwise.shape[1] + heads.shape[3] - 2)
        total = grouped_bias.view(len(heads), 1, width).expand(-1, x[..., 0].numel(), -1)  # [n, B T, K]
        for tap in range(heads.shape[3]):
            y = taps.depthwise(depthwise, depthwise_bias, tap)
            total = torch.baddbmm(total, _by_head(y, width), heads[..., -1 - tap].mT)
        return total.transpose(0, 1).reshape(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, depthwise, depthwise_bias, grouped, document_ids = ctx.saved_tensors
        width, dtype = ctx.width, depthwise.dtype
        heads = grouped.view(-1, width, width, grouped.shape[1] // width)
        taps = _Taps(x, None, document_ids, depthwise.shape[1] + heads.shape[3] - 2)
        rows = _by_head(gradient, width)  # [n, B T, K]
        of_heads, of_depthwise = torch.empty_like(heads), torch.zeros_like(depthwise, dtype=taps.wide)
        of_x, of_bias = torch.zeros_like(x, dtype=taps.wide), torch.zeros_like(depthwise_bias, dtype=taps.wide)
        for tap in range(heads.shape[3]):
            y = taps.depthwise(depthwise, depthwise_bias, tap)
            of_heads[..., -1 - tap] = torch.bmm(rows.mT, _by_head(y, width))
            of_y = torch.bmm(rows, heads[..., -1 - tap]).transpose(0, 1).reshape(x.shape).to(taps.wide)
            of_bias += of_y.sum((0, 1))
            for inner in range(depthwise.shape[1]):
                of_depthwise[:, -1 - inner] += (of_y * taps.shifted(tap + inner)).sum((0, 1))
                taps.add_back(of_x, of_y * depthwise[:, -1 - inner].to(taps.wide), tap + inner)
        biases = of_bias.to(dtype), gradient.sum((0, 1), dtype=taps.wide).to(dtype)
        own = of_x.to(x.dtype), of_depthwise.to(dtype), biases[0], of_heads.view_as(grouped), biases[1]
        return *own, None, None, None


class _Taps:
    """The channels `[B, T, C]` of tokens and of those up to P before them."""

    def __init__(self, x: Tensor, before: Tensor | None, document_ids: Tensor | None, most: int):
        self.wide = torch.promote_types(x.dtype, torch.float32)
        self.dtype, self.ids, self.most, self.tokens = x.dtype, document_ids, most, x.shape[1]
        whole = F.pad(x, (0, 0, most, 0)) if before is None else torch.cat([before, x], dim=1)
        self.whole = whole.to(self.wide)  # [B, P + T, C]

    def shifted(self, tokens: int) -> Tensor:
        """Return the channels of the token so many `tokens` before each one; zeros where it is in another document."""
        found = self.whole[:, self.most - tokens : self.most - tokens + self.tokens]
        return found if (seen := self._seen(tokens)) is None else found * seen

    def add_back(self, total: Tensor, gradient: Tensor, tokens: int) -> None:
        """Add the gradient of `shifted` to that of the tokens, `total`."""
        seen = self._seen(tokens)
        gradient = gradient if seen is None else gradient * seen
        total[:, : max(0, self.tokens - tokens)] += gradient[:, tokens:]

    def depthwise(self, weight: Tensor, bias: Tensor, tap: int) -> Tensor:
        """Return the convolution within channels, of the token `tap` tokens before each one, rounded once."""
        total = bias.to(self.wide)
        for inner in range(weight.shape[1]):
            total = torch.addcmul(total, self.shifted(tap + inner), weight[:, -1 - inner].to(self.wide))
        return total.to(self.dtype)

    def _seen(self, tokens: int) -> Tensor | None:
        if self.ids is None or not tokens:
            return None
        return F.pad(self.ids[:, tokens:] == self.ids[:, :-tokens], (min(tokens, self.tokens), 0))[..., None]


def _by_head(x: Tensor, width: int) -> Tensor:
    """Return `[n, B T, K]` of `x` `[B, T, C]`, a view."""
    return x.reshape(-1, x.shape[-1] // width, width).transpose(0, 1)


class ConvolvedCache(KeyValueCache):
    """Keys and values of all tokens, and of the last ones the channels and delayed values that the next token needs."""

    channels: Tensor | None = None
    """`[B, P, C]`, before the convolutions; None: no token yet."""
    delayed: Tensor | None = None
    """`[B, 1, G K / 2]`, of the last token."""


class ConvolvedAttention(SoftmaxAttention):
    """`o_proj` of attention over convolved queries and keys; see the module."""

    breaks_graph = True  # compiled blocks run this module as it is: its own backward pass is checked eagerly only

    def __init__(self, spec: convolved_kind.ConvolvedAttention, config: ModelConfig):
        super().__init__(spec.window)
        self.spec, self.head_dim = spec, config.attention_head_dim
        hidden, queries = config.hidden_size, config.num_heads * self.head_dim
        keys, channels = config.num_kv_heads * self.head_dim, spec.channels(config)
        self.q_proj = Linear(hidden, queries, bias=config.bias)
        self.k_proj = Linear(hidden, keys, bias=config.bias)
        self.v_proj = Linear(hidden, keys // 2, bias=config.bias)
        self.v_delayed_proj = Linear(hidden, keys // 2, bias=config.bias)
        self.o_proj = Linear(queries, hidden, bias=config.bias)
        self.depthwise = Convolution(channels, spec.depthwise_tokens)
        self.grouped = Convolution(channels, self.head_dim * spec.grouped_tokens)
        self.key_scale = KeyScale(config.num_kv_heads)

    def forward(self, x: Tensor, rope: Tables | None, mask: Mask, document_ids: Tensor | None = None) -> Tensor:
        """Return `[B, T, D]` for `x` `[B, T, D]`; `document_ids` `[B, T]` are equal within a document, None for one."""
        q, k, delayed = self.q_proj(x), self.k_proj(x), self.v_delayed_proj(x)
        first = self._delayed_of_none(delayed)  # [B, 1, G K / 2]
        late = torch.cat([first, delayed[:, :-1]], dim=1)  # [B, T, G K / 2]
        if document_ids is not None:
            starts = F.pad(document_ids[:, 1:] != document_ids[:, :-1], (1, 0))[..., None]  # [B, T, 1]
            late = torch.where(starts, first, late)
        q, k, v = self._heads(x, q, k, late, None, document_ids, rope)
        return self.o_proj(self.attend(q, k, v, mask).flatten(2))  # [B, T, D]

    def new_cache(self, batch_size: int, length: int) -> ConvolvedCache:
        """Return room for the context of `batch_size` sequences of at most `length` tokens."""
        return ConvolvedCache(batch_size, length, self.window)

    def project_rows(
        self, x: Tensor, rope: Tables | None, cache: KeyValueCache, rows: slice
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values of a block `x` `[B, STEP_ROWS, D]`, of which `rows` are the next tokens."""
        if not isinstance(cache, ConvolvedCache):
            raise TypeError("a cache of new_cache is needed")
        q, k, delayed = self.q_proj(x), self.k_proj(x), self.v_delayed_proj(x)
        both, most = torch.cat([q, k], dim=-1), self.spec.tokens_before
        whole = F.pad(both, (0, 0, most, 0))  # [B, P + STEP_ROWS, C]
        late = torch.cat([self._delayed_of_none(delayed), delayed[:, :-1]], dim=1)
        whole[:, rows.start : rows.start + most] = 0 if cache.channels is None else cache.channels
        late[:, rows.start : rows.start + 1] = (
            self._delayed_of_none(delayed) if cache.delayed is None else cache.delayed
        )
        cache.channels = whole[:, rows.stop : rows.stop + most].clone()
        cache.delayed = delayed[:, rows.stop - 1 : rows.stop].clone()
        before = whole[:, :most]
        q, k = whole[:, most:].split((q.shape[-1], k.shape[-1]), dim=-1)
        return self._heads(x, q, k, late, before, None, rope)

    def _delayed_of_none(self, delayed: Tensor) -> Tensor:
        """Return the delayed values `[B, 1, G K / 2]` of a token of zeros, which stands before the first one."""
        bias = self.v_delayed_proj.bias
        first = torch.zeros_like(delayed[:, :1])
        return first if bias is None else first + bias.to(first.dtype)

    def _heads(
        self, x: Tensor, q: Tensor, k: Tensor, late: Tensor, before: Tensor | None, document_ids: Tensor | None,
        rope: Tables | None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Return queries `[B, T, H, K]`, keys and values `[B, T, G, K]` from `q` and `k` before the convolutions."""
        q_conv, k_conv = self._convolved(torch.cat([q, k], dim=-1), before, document_ids).split(
            (q.shape[-1], k.shape[-1]), dim=-1
        )
        q, k = q.unflatten(-1, (-1, self.head_dim)), k.unflatten(-1, (-1, self.head_dim))
        mean = (q + for_all_heads(k, q.shape[2])) * 0.5  # [B, T, H, K]
        key_mean = mean.unflatten(2, (k.shape[2], -1)).mean(3)  # [B, T, G, K]
        q, k = q_conv.view_as(q) + mean, k_conv.view_as(k) + key_mean
        ones = torch.ones(self.head_dim, dtype=q.dtype, device=q.device)
        q, k = rms_norm(q, ones, EPSILON), self.key_scale(rms_norm(k, ones, EPSILON))
        values = torch.cat([self.v_proj(x), late], dim=-1).unflatten(-1, (-1, self.head_dim))  # [B, T, G, K]
        return self._rotated(q, rope), self._rotated(k, rope), values

    def _convolved(self, both: Tensor, before: Tensor | None, document_ids: Tensor | None) -> Tensor:
        parts = (self.depthwise.weight, self.depthwise.bias, self.grouped.weight, self.grouped.bias)
        weights = (part.to(both.dtype) for part in parts)
        mixed: Tensor = _Convolve.apply(both, *weights, self.head_dim, before, document_ids)
        return mixed

    @staticmethod
    def _rotated(heads: Tensor, rope: Tables | None) -> Tensor:
        """Return `heads` `[B, T, .., K]` with their first elements turned by the tables, of half as many columns."""
        if rope is None:
            return heads
        width = 2 * rope[0].shape[-1]
        turned = apply_rope(heads[..., :width], *rope)
        return turned if width == heads.shape[-1] else torch.cat([turned, heads[..., width:]], dim=-1)
