"""The keys that each query of softmax attention sees, and the kernel that computes it.

A query sees the keys from the first of its document or window up to itself: two positions per query. A kernel gets a
bool for each pair of a query and a key, or the blocks of keys that a block of queries sees, for kernels that skip the
others (FlexAttention, Dong et al. 2024, arXiv:2412.05496, section 3.2). Letters: B sequences, Q queries, S keys (all of
a sequence); M, N blocks of them.

The kernel is torch's choice, or one by name (`trainer.attention_kernel`). On CUDA, where queries do not see all keys
before them, it is FlexAttention's in compiled blocks: it takes no mask but a list of blocks, and skips those that no
query sees.
"""

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from lightning_llm.model.attention.kinds import SHORT_KERNEL_TOKENS

BLOCK_TOKENS = 128
"""Queries and keys of a block: what FlexAttention's kernels are made for (`_DEFAULT_SPARSE_BLOCK_SIZE`)."""


class SeenKeys(NamedTuple):
    """Range of keys per query: a query at position p with first key f sees the keys at f, ..., p.

    `first`: int64 `[B or 1, Q]`; `queries` int64 `[Q]` and `keys` int64 `[S]` are positions in the sequence, in the
    order in which attention gets them.
    """

    first: Tensor
    queries: Tensor
    keys: Tensor

    @classmethod
    def from_positions(
        cls, positions: Tensor, keys: Tensor, document_ids: Tensor | None, window: int | None
    ) -> "SeenKeys":
        """Return it for queries at `positions` `[Q]` and keys at `keys` `[S]`, any order of all positions.

        `document_ids` `[B, S]`, in the order of the sequence, is any integer that differs between neighbouring
        documents; None: one document. Of a `window` a query sees the last so many tokens, itself included.
        """
        first = torch.zeros_like(positions)[None] if document_ids is None else first_tokens(document_ids)[:, positions]
        if window is not None:
            first = torch.maximum(first, positions - (window - 1))
        return cls(first, positions, keys)

    def dense(self) -> Tensor:
        """Return bool `[B or 1, 1, Q, S]`: whether a query sees a key."""
        upward = self.keys <= self.queries[:, None]  # [Q, S]
        return ((self.keys >= self.first[:, :, None]) & upward)[:, None]  # [B, 1, Q, S]

    def blocks(self) -> BlockMask:
        """Return the blocks of keys that each block of queries sees, whole or in part, found without any pair."""
        newest, oldest = _by_block(self.queries, True), _by_block(self.queries, False)  # 2 x [M]
        least, most = _by_block(self.first, False), _by_block(self.first, True)  # 2 x [B, M]
        last, start = _by_block(self.keys, True), _by_block(self.keys, False)  # 2 x [N]
        seen = (last >= least[..., None]) & (start <= newest[:, None])  # [B, M, N]
        whole = (start >= most[..., None]) & (last <= oldest[:, None])  # [B, M, N]
        whole = whole & _complete(self.queries)[:, None] & _complete(self.keys)
        first, queries, keys = self.first, self.queries, self.keys

        def sees(sequence: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            of = first[0] if first.shape[0] == 1 else first[sequence]  # [Q]
            return (keys[key] >= of[query]) & (keys[key] <= queries[query])

        return BlockMask.from_kv_blocks(
            *_listed(seen & ~whole), *_listed(whole), BLOCK_TOKENS, sees, (queries.shape[0], keys.shape[0])
        )


def first_tokens(document_ids: Tensor) -> Tensor:
    """Return int64 `[B, T]`: the position of the first token of each token's document, for ids `[B, T]`."""
    begins = torch.ones_like(document_ids, dtype=torch.bool)  # [B, T]
    begins[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    positions = torch.arange(document_ids.shape[1], device=document_ids.device)  # [T]
    return torch.where(begins, positions, 0).cummax(dim=1).values


def document_mask(document_ids: Tensor, window: int | None = None) -> Tensor:
    """Return bool `[B, 1, T, T]`: whether a query sees a key (last axis): those of its document up to itself."""
    positions = torch.arange(document_ids.shape[1], device=document_ids.device)  # [T]
    return SeenKeys.from_positions(positions, positions, document_ids, window).dense()


def _by_block(positions: Tensor, largest: bool) -> Tensor:
    """Return the largest or least of each block of `positions` `[..., Q]`: `[..., M]`. The last block may be short."""
    missing = -positions.shape[-1] % BLOCK_TOKENS
    last = positions[..., -1:].expand(*positions.shape[:-1], missing)
    blocks = torch.cat([positions, last], dim=-1).unflatten(-1, (-1, BLOCK_TOKENS))
    return blocks.amax(-1) if largest else blocks.amin(-1)


def _complete(positions: Tensor) -> Tensor:
    """Return bool `[M]`: whether each block of `positions` `[Q]` is full. Kernels must mask partial blocks."""
    ends = torch.arange(0, positions.shape[0], BLOCK_TOKENS, device=positions.device) + BLOCK_TOKENS
    return ends <= positions.shape[0]


def _listed(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Return for bool `[B, M, N]` how many blocks of keys are chosen `[B, 1, M]`, and all of them, these first."""
    order = chosen.to(torch.int8).argsort(dim=-1, descending=True, stable=True)  # [B, M, N]
    return chosen.sum(-1, dtype=torch.int32)[:, None], order.to(torch.int32)[:, None]


Mask = Tensor | BlockMask | None
"""Keys that queries see: bool that broadcasts to `[B, H, T, S]`, or by blocks (`SeenKeys`); None: causal."""

AUTO, SHORT, FLEX = "auto", "short", "flex"
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
LOOKED_AT_TOKENS = 4096
"""Of longer sequences as many are looked at: no kernel is refused for more, and a mask grows with their square."""
TRIED_TOKENS = 256
"""Length of the sequence that FlexAttention is tried on: two blocks of queries, one of them skips keys."""
_chosen = AUTO
_by_blocks = False


class AttentionShape(NamedTuple):
    """Shape of an attention call: heads of one rank, elements per head, tokens of a sequence, with a mask or not.

    `shared`: each rank has a part of the queries and gathers keys (`parallel.cp`). `compiled`: within compiled blocks.
    """

    heads: int
    kv_heads: int
    head_dim: int
    tokens: int
    masked: bool
    dtype: torch.dtype
    shared: bool = False
    compiled: bool = False

    @property
    def is_short(self) -> bool:
        """Whether `cpu_kernel` computes it on a CPU by default."""
        return self.tokens <= SHORT_KERNEL_TOKENS and not self.shared


class NoKernelError(Exception):
    """The requested kernel does not run; the message has the reasons."""


@contextmanager
def attention_by(name: str, by_blocks: bool = False) -> Iterator[None]:
    """Run the block with the attention kernel `name` over whole sequences, also in compiled blocks of this process.

    "auto": torch's choice, or `cpu_kernel` for short sequences on a CPU.

    `by_blocks`: FlexAttention computes masked attention, except in blocks that take no kernels.
    """
    global _chosen, _by_blocks
    before, _chosen, _by_blocks = (_chosen, _by_blocks), name, by_blocks
    try:
        with sdpa_kernel(BACKENDS[name]) if name in BACKENDS else nullcontext():
            yield
    finally:
        _chosen, _by_blocks = before


@contextmanager
def without_blocks() -> Iterator[None]:
    """Run a model with uncompiled blocks without FlexAttention, which would compute the scores of all pairs there."""
    global _by_blocks
    before, _by_blocks = _by_blocks, False
    try:
        yield
    finally:
        _by_blocks = before


def mask_of(seen: SeenKeys | None, takes_kernels: bool) -> Mask:
    """Return the mask for `seen` keys in the form that the kernel takes; None: all keys up to each query."""
    if seen is None:
        return None
    return seen.blocks() if takes_kernels and _by_blocks else seen.dense()


def takes_short_kernel(is_faster: bool) -> bool:
    """Return whether `cpu_kernel.short_attention` runs; `is_faster`: whether it beats torch's kernel here."""
    return is_faster if _chosen == AUTO else _chosen == SHORT


def any_kernel() -> AbstractContextManager[None]:
    """Return a context in which torch chooses the kernel: the run's may not take the masks of a cache's queries."""
    return nullcontext() if _chosen in (AUTO, SHORT) else sdpa_kernel(list(BACKENDS.values()))


def kernel_of(name: str, shape: AttentionShape, device: torch.device) -> str:
    """Return the kernel that attention of `shape` takes on `device` under `trainer.attention_kernel=name`.

    If "auto" would be FlexAttention, but it fails here, the name is followed by the reason.

    Raises:
        NoKernelError: no such kernel on this device; the text has torch's reason.
    """
    if name == SHORT or (name == AUTO and device.type == "cpu" and shape.is_short):
        return SHORT
    if name == FLEX or (name == AUTO and device.type == "cuda" and shape.masked and shape.compiled):
        if (reason := flex_failure(shape, device)) is None:
            return FLEX
        if name == FLEX:
            raise NoKernelError(reason)
        return f"{kernel_of(name, shape._replace(compiled=False), device)} (flex fails here: {reason})"
    tokens = min(shape.tokens, LOOKED_AT_TOKENS)
    batch = (1, shape.heads, tokens, shape.head_dim)
    # As `torch_attention` has them.
    kv_heads = shape.heads if shape.masked and device.type == "cuda" else shape.kv_heads
    q = torch.empty(batch, dtype=shape.dtype, device=device, requires_grad=True)
    k = torch.empty((1, kv_heads, *batch[2:]), dtype=shape.dtype, device=device, requires_grad=True)
    mask = torch.ones((1, 1, tokens, tokens), dtype=torch.bool, device=device) if shape.masked else None
    with attention_by(name), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:  # what scaled_dot_product_attention itself asks
            found = torch._fused_sdp_choice(q, k, k, mask, 0.0, mask is None, enable_gqa=kv_heads != shape.heads)
        except RuntimeError as error:
            reasons = [str(each.message).partition(" (Triggered")[0] for each in said]
            raise NoKernelError(" ".join([*reasons, str(error).partition("\n")[0]])) from error
    return next(each for each, backend in BACKENDS.items() if backend.value == found)


def flex_failure(shape: AttentionShape, device: torch.device) -> str | None:
    """Return why FlexAttention does not run forward and backward for `shape` on `device`, compiled; None if it does.

    It is tried on one short sequence of two documents, so that nothing fails in a run's first step.
    """
    heads, kv_heads, tokens = shape.heads, shape.kv_heads, TRIED_TOKENS
    q, k, v = (
        torch.zeros(1, each, tokens, shape.head_dim, dtype=shape.dtype, device=device, requires_grad=True)
        for each in (heads, kv_heads, kv_heads)
    )
    positions = torch.arange(tokens, device=device)
    mask = SeenKeys.from_positions(positions, positions, (positions // (tokens // 2))[None], None).blocks()
    try:
        mixed = torch.compile(flex_attention)(q, k, v, block_mask=mask, enable_gqa=heads != kv_heads)
        torch.autograd.grad(mixed.sum(), (q, k, v))
    except Exception as error:  # any error of the compiler, its tools or the device
        return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    return None
