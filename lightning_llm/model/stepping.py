"""Cached decoding in fixed blocks of rows, so that the bits do not depend on how tokens are split into calls.

A matrix product of another shape may use another kernel with another order of sums: of fp32 `[M, K] x [K, N]` on a CPU
with AVX-512 (torch 2.13, MKL), M = 1 to 15 differ from M >= 16 in the last bits. So a step computes a whole block of
`STEP_ROWS` positions, with the new tokens in the rows of their positions and zeros elsewhere. Each position is computed
with one shape in one row, for a prompt in one call or token by token. Bits are equal by construction.

Attention keeps keys and values (`KeyValueCache`), other mixers their state at the start of a block (`BlockCache`).
"""

from collections.abc import Iterator, Mapping
from copy import copy
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_llm.model.attention.cpu_kernel import ROWS

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


class KeyValueCache:
    """Room for `length` tokens, or for those that a window still sees, in whole blocks of `ROWS` tokens.

    The number of slots that a query sees depends only on its position. So every matrix product of a position has one
    shape, for any split of the tokens into calls. The first `append` allocates all memory, in the dtype and on the
    device of its tensors.
    """

    def __init__(self, batch_size: int, length: int, window: int | None = None):
        blocks = -(-length // ROWS)
        if window is not None:
            blocks = min(blocks, -(-(window - 1) // ROWS) + 1)
        self.batch_size, self.window = batch_size, window
        self.capacity = blocks * ROWS
        self.longest = length
        self.length = 0
        """Tokens seen so far; the next one's position."""
        self.first = 0
        """Position of the first slot, a multiple of `ROWS`."""
        self._slots: tuple[Tensor, Tensor] | None = None

    def append(self, k: Tensor, v: Tensor) -> None:
        """Append `k` and `v` `[B, n, G, K]` of the next n tokens, all within one block of `ROWS` positions.

        Raises ValueError if they exceed the length of the cache or differ from its batch size.
        """
        count = k.shape[1]
        if k.shape[0] != self.batch_size or self.length + count > self.longest:
            made, asked = f"{self.batch_size} x {self.longest}", f"{k.shape[0]} x {self.length + count}"
            raise ValueError(f"the cache has room for {made} tokens, but {asked} were given")
        if self._slots is None:
            sizes = [(self.batch_size, self.capacity, *new.shape[2:]) for new in (k, v)]
            self._slots = k.new_zeros(sizes[0]), v.new_zeros(sizes[1])  # zeros: a hidden value is multiplied by 0
        self._move_to(max(0, self.block_end - self.capacity))
        start = self.length - self.first
        for slots, new in zip(self._slots, (k, v), strict=True):
            slots[:, start : start + count] = new
        self.length += count

    @property
    def block_end(self) -> int:
        """The position after the block of the next token."""
        return (self.length // ROWS + 1) * ROWS

    def seen_from(self, block: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return keys and values `[B, S, G, K]`, and the mask, bool `[1, 1, ROWS, S]`, of the queries of a block.

        The block, the one of the last token appended, begins at position `block`; S leads up to its end. Slots of
        tokens still to come hold zeros and are hidden.
        """
        if self._slots is None:
            raise ValueError("the cache is empty")
        k, v = (slots[:, : block + ROWS - self.first] for slots in self._slots)  # [B, S, G, K]
        queries = torch.arange(block, block + ROWS, device=k.device)[:, None]  # [ROWS, 1]
        keys = torch.arange(self.first, block + ROWS, device=k.device)  # [S]
        seen = keys <= queries  # [ROWS, S]
        if self.window is not None:
            seen = seen & (keys > queries - self.window)
        return k, v, seen[None, None]

    def _move_to(self, first: int) -> None:
        """Drop the slots before position `first`."""
        dropped = first - self.first
        if dropped > 0 and self._slots is not None:
            for slots in self._slots:
                slots[:, :-dropped] = slots[:, dropped:].clone()
                slots[:, -dropped:] = 0
            self.first = first
