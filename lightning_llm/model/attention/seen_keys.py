"""Keys that each query of causal attention sees: from the first of its document or window up to itself.

Two positions per query define them. A kernel gets a bool for each pair of a query and a key, or the blocks of keys that
a block of queries sees, for kernels that skip the others (FlexAttention, Dong et al. 2024, arXiv:2412.05496, section
3.2).

Letters: B sequences, Q queries, S keys (all of a sequence); M, N blocks of them.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

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
