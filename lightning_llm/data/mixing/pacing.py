"""A curriculum's order: the windows that a run would take anyway, of each epoch of a source in the order they lie in.

Which windows these are is what the seed's permutation gives, so that runs with and without a curriculum learn from the
same windows where their streams are the same. Within each stretch of the `Pace` the order is shuffled.
Samples that a run leaves out move no other; what it takes for them, at its end, comes in the seed's order.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np

from lightning_llm.config.schema.data import Pace

Permute = Callable[[int, int, int, int], int]
"""(i, n, source, epoch) -> the image of i under a permutation of [0, n)."""
BLOCK_OF = 1 << 16
"""Added to the number of an epoch, which no run reaches, to key the shuffling within its blocks."""


class Pacing:
    """Position in an epoch of a source -> window, a function of how many samples the run takes of each source."""

    def __init__(self, pace: Pace, windows: Sequence[int], drawn: Sequence[int] | None, permute: Permute):
        """`drawn`: how many samples the run takes of each source, if it leaves none out; None: whole epochs."""
        self.pace, self.windows, self.drawn, self.permute = pace, windows, drawn, permute
        self._sorted = lru_cache(maxsize=2 * max(1, len(windows)))(self._sorted_windows)

    def place(self, source: int, epoch: int, i: int) -> int:
        """Return the window of the `i`-th sample of `epoch`."""
        count = self._count(source, epoch)
        if i >= count:  # beyond the run, or in place of samples that it leaves out
            return self.permute(i, self.windows[source], source, epoch)
        block = i * self.pace.blocks // count
        first, last = -(-block * count // self.pace.blocks), -(-(block + 1) * count // self.pace.blocks)
        within = self.permute(i - first, last - first, source, BLOCK_OF + epoch * self.pace.blocks + block)
        rank = first + within
        return int(self._sorted(source, epoch)[count - 1 - rank if self.pace.falling else rank])

    def _count(self, source: int, epoch: int) -> int:
        windows = self.windows[source]
        return windows if self.drawn is None else max(0, min(windows, self.drawn[source] - epoch * windows))

    def _sorted_windows(self, source: int, epoch: int) -> np.ndarray:
        windows, count = self.windows[source], self._count(source, epoch)
        if count == windows:
            return np.arange(windows)
        return np.sort(np.fromiter((self.permute(j, windows, source, epoch) for j in range(count)), np.int64, count))

    def __reduce__(self) -> tuple[type["Pacing"], tuple[Pace, Sequence[int], Sequence[int] | None, Permute]]:
        return Pacing, (self.pace, self.windows, self.drawn, self.permute)
