"""Cached decoding in fixed blocks of rows, so that the bits do not depend on how tokens are split into calls.

A matrix product of another shape may use another kernel with another order of sums: of fp32 `[M, K] x [K, N]` on a CPU
with AVX-512 (torch 2.13, MKL), M = 1 to 15 differ from M >= 16 in the last bits. So a step computes a whole block of
`STEP_ROWS` positions, with the new tokens in the rows of their positions and zeros elsewhere. Each position is computed
with one shape in one row, for a prompt in one call or token by token. Bits are equal by construction.
"""

from collections.abc import Iterator, Mapping
from copy import copy
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch.nn.functional as F
from torch import Tensor

STEP_ROWS = 16


@runtime_checkable
class SteppingMixer(Protocol):
    """Protocol of token mixers that can continue a sequence from a cache of earlier tokens."""

    def new_cache(self, batch_size: int, length: int) -> Any:
        """Return an empty cache for `step`, for `batch_size` sequences of at most `length` tokens."""

    def step(self, x: Tensor, rope: tuple[Tensor, Tensor] | None, cache: Any) -> Tensor:
        """Return `[B, n, D]` for the next n tokens `x` `[B, n, D]`, and update `cache`.

        `rope` are the tables of their positions. A mixer with `steps_in_blocks = True` gives the same bits for any
        split of the tokens. Any other is called on blocks from their start, see `BlockCache`: its `step` puts new
        tensors into `cache` and never modifies those in it.
        """


class BlockCache:
    """Cache of a mixer at the start of the current block, and the block's inputs so far.

    Each step recomputes the block from there, with zeros in later rows, which a causal mixer ignores.
    """

    def __init__(self, cache: Any):
        self._at_start = cache
        self._x: Tensor | None = None

    def step(self, mixer: Any, x: Tensor, rope: tuple[Tensor, Tensor] | None, rows: slice) -> Tensor:
        """Return `[B, n, D]` for the next n tokens `x` `[B, n, D]`, which are `rows` of the current block.

        `rope`: tables of all positions of the block.
        """
        new = in_block(x, rows.start)  # [B, STEP_ROWS, D]
        self._x = new if self._x is None or rows.start == 0 else self._x + new
        cache = copy(self._at_start)
        mixed = mixer.step(self._x, rope, cache)[:, rows]  # [B, n, D]
        if rows.stop == STEP_ROWS:
            self._at_start = cache
        return mixed


@dataclass
class DecoderCache:
    """Cache of a whole decoder for step-by-step decoding."""

    mixers: Mapping[str, Any]
    """Cache of each block's mixer by the block's name."""
    batch_size: int
    longest: int
    """Largest number of tokens that it can take."""
    length: int = 0
    """Number of tokens seen so far."""


def blocks_of(start: int, count: int, rows: int = STEP_ROWS) -> Iterator[tuple[int, int]]:
    """Yield half-open ranges (start, end) that cover `count` positions from `start`, split at multiples of `rows`."""
    stop = start + count
    while start < stop:
        end = min((start // rows + 1) * rows, stop)
        yield start, end
        start = end


def in_block(x: Tensor, position: int, dim: int = 1, rows: int = STEP_ROWS) -> Tensor:
    """Return `x` with its dimension `dim` filled up to `rows` by zeros, its first element in the row of `position`."""
    before = position % rows
    after = rows - before - x.shape[dim]
    behind = x.ndim - 1 - dim % x.ndim
    return F.pad(x, (*(0, 0) * behind, before, after))


def rows_of(start: int, stop: int, rows: int = STEP_ROWS) -> slice:
    """Return the slice of rows that positions `start` to `stop` (exclusive) have in their block of `rows`."""
    return slice(start % rows, start % rows + stop - start)
