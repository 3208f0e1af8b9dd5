"""Global sample index -> window of a source: a pure function, O(sources) per sample, nothing to resume.

Two steps. The index is first given to a source, by a `Mixture`. That of weights which stay is `Shares`: indices come in
blocks of `BLOCK` or a power of ten more, a block's positions are shared out by the weights with the largest-remainder
method (Hamilton), and within the block they are interleaved by smooth weighted round robin (the balancer of nginx), so
that every prefix, not only every block, is close to the weights. The same pattern serves every block, hence the count
of a source's samples before any index is one multiplication. That count is the source's ordinal; ordinal // windows is
the epoch, and ordinal % windows goes through a permutation keyed by (seed, source, epoch): every epoch takes each
window exactly once, in a new order.

The permutation is a Feistel network with cycle walking (J. Black, P. Rogaway: Ciphers with Arbitrary Finite Domains,
CT-RSA 2002), with MurmurHash3's finaliser as the round function.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np

from lightning_llm.base.keyed_hash import hash_words, mix, name_word
from lightning_llm.config.schema.data import Pace
from lightning_llm.data.mixing.skipped import Range, before, index_of

BLOCK = 1_000
LARGEST_BLOCK = 100_000
SMALLEST_SHARE = 10 / LARGEST_BLOCK
ROUNDS = 8
BOUND = name_word("data.max_tokens")
"""In place of a run's seed, where it is chosen which windows there are: the same ones for every seed."""
BLOCK_OF = 1 << 16
"""Added to the number of an epoch, which no run reaches, to key the shuffling within its blocks."""

Permute = Callable[[int, int, int, int], int]
"""(i, n, source, epoch) -> the image of i under a permutation of [0, n)."""


@dataclass(frozen=True)
class Address:
    """One window: `source` by its position in the mix, `window` within the source, `epoch` of the source (from 0)."""

    source: int
    window: int
    epoch: int


def largest_remainder(weights: Sequence[float], total: int) -> list[int]:
    """Return whole counts that sum to `total` in proportion to `weights`; ties go to the first."""
    whole = sum(weights)
    exact = [total * w / whole for w in weights]
    counts = [int(x) for x in exact]
    by_remainder = sorted(range(len(weights)), key=lambda s: (counts[s] - exact[s], s))
    for s in by_remainder[: total - sum(counts)]:
        counts[s] += 1
    return counts


def interleave(counts: Sequence[int]) -> tuple[list[int], list[int]]:
    """Spread `counts[s]` positions of each source s evenly over sum(counts) positions.

    Returns the source at each position, and how many positions of that same source come before it.
    """
    total = sum(counts)
    credit = [0] * len(counts)
    drawn = [0] * len(counts)
    pattern, before = [], []
    for _ in range(total):
        credit = [c + n for c, n in zip(credit, counts, strict=True)]
        s = credit.index(max(credit))
        credit[s] -= total
        pattern.append(s)
        before.append(drawn[s])
        drawn[s] += 1
    return pattern, before


class Mixture(Protocol):
    """The source of each sample of a run: pure functions of the sample's number."""

    names: Sequence[str]
    """The sources, by their positions."""

    def ordinal(self, index: int) -> tuple[int, int]:
        """Return the source of sample `index` (from 0), and how many samples of that source come before it."""

    def drawn(self, total: int) -> list[int]:
        """Return the number of samples from each source among samples [0, total)."""

    def phases(self, total: int) -> "Iterator[MixturePhase]":
        """Yield the stretches of the samples [0, total) that differ in their weights."""


@dataclass(frozen=True)
class MixturePhase:
    """The samples [first, last) of a run; `drawn`: the number from each source."""

    name: str
    first: int
    last: int
    drawn: tuple[int, ...]


class Shares:
    """`Mixture` of constant weights; a source of weight 0 is never sampled.

    Raises:
        ValueError: the smallest share but 0 is below `SMALLEST_SHARE`.
    """

    def __init__(self, weights: Mapping[str, float]):
        self.names = list(weights)
        shares = list(weights.values())
        given = [share for share in shares if share]
        smallest = min(given) / sum(given)
        if smallest < SMALLEST_SHARE:
            raise ValueError(f"a weight's share is {smallest:.2e}, the smallest possible is {SMALLEST_SHARE:.0e}")
        self.block = BLOCK
        while self.block * smallest < 10 and self.block < LARGEST_BLOCK and len(given) > 1:
            self.block *= 10
        self.counts = largest_remainder(shares, self.block)
        self._pattern, self._before = interleave(self.counts)

    def ordinal(self, index: int) -> tuple[int, int]:
        """Return the source of sample `index`, and how many of its samples come before."""
        block, position = divmod(index, self.block)
        source = self._pattern[position]
        return source, block * self.counts[source] + self._before[position]

    def drawn(self, total: int) -> list[int]:
        """Return the number of samples from each source among samples [0, total)."""
        blocks, position = divmod(total, self.block)
        drawn = [blocks * count for count in self.counts]
        for source in self._pattern[:position]:
            drawn[source] += 1
        return drawn

    def phases(self, total: int) -> Iterator[MixturePhase]:
        """Yield the one phase there is."""
        yield MixturePhase("all", 0, total, tuple(self.drawn(total)))


@lru_cache(maxsize=256)
def _round_keys(seed: int, name: int, epoch: int) -> tuple[int, ...]:
    return tuple(hash_words(name, epoch, r, seed=seed) for r in range(ROUNDS))


def permute(i: int, n: int, keys: Sequence[int]) -> int:
    """Return the image of `i` under a permutation of [0, n), n <= 2^64, chosen by the 32-bit round `keys`.

    An (unbalanced where the bit count is odd) Feistel network permutes [0, 2^bits), 2^bits < 2n; a value outside
    [0, n) is sent through again until it falls inside, fewer than two passes on average.
    """
    if n == 1:
        return 0
    bits = max(2, (n - 1).bit_length())
    low_bits = bits // 2
    high_bits = bits - low_bits
    low_mask, high_mask = (1 << low_bits) - 1, (1 << high_bits) - 1
    while True:
        high, low = i >> low_bits, i & low_mask
        for r in range(0, len(keys), 2):
            high ^= mix(low ^ keys[r]) & high_mask
            low ^= mix(high ^ keys[r + 1]) & low_mask
        i = high << low_bits | low
        if i < n:
            return i


class SampleOrder:
    """Position in a run's training -> `Address`, as a function of (mixture, windows, seed, shuffle, skipped) alone.

    `skipped`: merged ranges of the samples that are left out (`data.mixing.skipped`).

    `windows` (how many windows a source holds, at least 1 of one that is drawn) is keyed by source name; the key of a
    source's shuffling is its name, so that adding a source reorders no other. With `shuffle=False` every epoch takes
    the windows in their order.

    `limits`: how many windows of a source there are to be, at most, by its name. Which these are is a function of the
    name alone, and those of a smaller limit are among those of a larger one; with `shuffle=False` they are the first.
    """

    def __init__(
        self,
        mixture: Mixture,
        windows: Mapping[str, int],
        seed: int,
        shuffle: bool = True,
        skipped: Sequence[Range] = (),
        limits: Mapping[str, int] | None = None,
        pace: Pace | None = None,
        total: int | None = None,
    ):
        """`pace`: see `MixtureConfig`; of a run of `total` samples, None: of whole epochs."""
        self.mixture = mixture
        self.names = mixture.names
        self.seed = seed
        self.shuffle = shuffle
        self.skipped = skipped
        self._available = [windows[name] for name in self.names]
        self.windows = [min(windows[name], (limits or {}).get(name, windows[name])) for name in self.names]
        self._name_words = [name_word(name) for name in self.names]
        self.pacing: Pacing | None = None
        if pace is not None:
            self.pacing = Pacing(pace, self.windows, self._drawn_in_order(total), self._shuffled)

    def locate(self, position: int) -> Address:
        """Return the address of the sample at `position` (from 0)."""
        source, ordinal = self.mixture.ordinal(index_of(position, self.skipped))
        epoch, i = divmod(ordinal, self.windows[source])
        if self.pacing is not None:
            i = self.pacing.place(source, epoch, i)
        elif self.shuffle:
            i = self._shuffled(i, self.windows[source], source, epoch)
            if self.windows[source] < self._available[source]:
                i = permute(i, self._available[source], _round_keys(BOUND, self._name_words[source], 0))
        return Address(source, i, epoch)

    def _shuffled(self, i: int, n: int, source: int, epoch: int) -> int:
        return permute(i, n, _round_keys(self.seed, self._name_words[source], epoch))

    def _drawn_in_order(self, total: int | None) -> list[int] | None:
        """Return the number of samples that a run takes from each source if it skips none.

        A rollback skips later samples, which must not change the order of earlier ones.
        """
        return None if total is None else self.mixture.drawn(total)

    def drawn(self, total: int) -> list[int]:
        """Return the number of samples from each source among positions [0, total)."""
        if total == 0:
            return self.mixture.drawn(0)
        end = index_of(total - 1, self.skipped) + 1
        counts = self.mixture.drawn(end)
        for first, last in before(end, self.skipped):
            left_out = zip(self.mixture.drawn(last + 1), self.mixture.drawn(first), strict=True)
            counts = [count - (more - less) for count, (more, less) in zip(counts, left_out, strict=True)]
        return counts


class Pacing:
    """Order of a curriculum: position in an epoch of a source -> window, given the run's samples per source.

    The windows are those that the seed's permutation gives, in the order they lie in: runs with and without a
    curriculum learn from the same windows where their streams are the same. Within each stretch of the `Pace` the
    order is shuffled. Samples that a run leaves out move no other; those taken in their place, at the end of the run,
    come in the seed's order.
    """

    def __init__(self, pace: Pace, windows: Sequence[int], drawn: Sequence[int] | None, permute: Permute):
        """`drawn`: number of samples that the run takes from each source if it skips none; None: whole epochs."""
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
