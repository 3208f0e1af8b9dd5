"""Steps of a decoder that keeps what it has seen: rows of fixed blocks, so that bits do not show how tokens came in.

A matrix product of other shape may be another kernel, which sums in another order: of fp32 `[M, K] x [K, N]` on a CPU
with AVX-512 (torch 2.13, MKL), M = 1 to 15 differ from M >= 16 in the last bits. So a step computes a whole block of
`STEP_ROWS` positions, the new tokens in the rows of their positions and nothing in the others: whatever is computed for
a position has one shape and one place, with the prompt in one call or token by token. Bits are equal by construction.
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
    """A mixer module that can go on from what it has seen."""

    def new_cache(self, batch_size: int, length: int) -> Any:
        """Return what `step` keeps of `batch_size` sequences of at most `length` tokens, before the first of them."""

    def step(self, x: Tensor, rope: tuple[Tensor, Tensor] | None, cache: Any) -> Tensor:
        """Return `[B, n, D]` for the next n tokens `x` `[B, n, D]`, and keep in `cache` what later ones need.

        `rope` are the tables of their positions. A mixer that says `steps_in_blocks = True` gives the same bits however
        the tokens come. Any other is called by blocks from their beginning, see `BlockCache`: its `step` puts new
        tensors into `cache` and leaves those that are there as they are.
        """


class BlockCache:
    """What a mixer had kept at the beginning of the block in progress, and the block's inputs so far.

    Each step runs the block anew from there, the rows still to come as zeros, which a causal mixer does not look at.
    """

    def __init__(self, cache: Any):
        self._at_start = cache
        self._x: Tensor | None = None

    def step(self, mixer: Any, x: Tensor, rope: tuple[Tensor, Tensor] | None, rows: slice) -> Tensor:
        """Return `[B, n, D]` for the next n tokens `x` `[B, n, D]`, `rows` of their block; `rope` is of the block."""
        new = in_block(x, rows.start)  # [B, STEP_ROWS, D]
        self._x = new if self._x is None or rows.start == 0 else self._x + new
        cache = copy(self._at_start)
        mixed = mixer.step(self._x, rope, cache)[:, rows]  # [B, n, D]
        if rows.stop == STEP_ROWS:
            self._at_start = cache
        return mixed


@dataclass
class DecoderCache:
    """What each block's mixer keeps, by the block's name, and how many tokens were seen, of at most `longest`."""

    mixers: Mapping[str, Any]
    batch_size: int
    longest: int
    length: int = 0


def blocks_of(start: int, count: int, rows: int = STEP_ROWS) -> Iterator[tuple[int, int]]:
    """Yield (first, last + 1) of positions `start` to `start + count`, cut where a block of `rows` positions ends."""
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
    """Return the rows of positions `start` to `stop` in their block."""
    return slice(start % rows, start % rows + stop - start)
