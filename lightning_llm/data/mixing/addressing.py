"""Global sample index -> window of a source: a pure function, O(sources) per sample, nothing to resume.

First, a `Mixture` assigns the index to a source. `Shares` is the mixture of constant weights. It divides the indices
into blocks of `BLOCK` samples (or a power of ten more). The weights share out the positions of a block by the
largest-remainder method (Hamilton). Within the block the sources are interleaved by smooth weighted round robin
(nginx's load balancer), so that every prefix, not only every block, is close to the weights. All blocks have the same
pattern, so the number of a source's samples before any index is one multiplication.

That number is the source's ordinal. ordinal // windows is the epoch. ordinal % windows goes through a permutation keyed
by (seed, source, epoch), so that every epoch takes each window exactly once, in a new order. The permutation is a
Feistel network with cycle walking (J. Black, P. Rogaway: Ciphers with Arbitrary Finite Domains, CT-RSA 2002), with
MurmurHash3's finalizer as the round function.

A run may skip samples (`data.skip_samples`, rollbacks), given as ranges [first, last] of the whole order. Position p of
a run is the p-th sample of the order that is not skipped, so the address of a batch is a function of its step and of
this list alone.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np

from lightning_llm.base.keyed_hash import hash_words, mix, name_word
from lightning_llm.config.schema.data import Pace

Range = tuple[int, int]
SKIPPED_SAMPLES = "skipped_samples"
"""The key of progress.json and summary.json for the skipped samples."""
BLOCK = 1_000
LARGEST_BLOCK = 100_000
SMALLEST_SHARE = 10 / LARGEST_BLOCK
ROUNDS = 8
BOUND = name_word("data.max_tokens")
"""Replaces the run's seed in the choice of the windows that `data.max_tokens` keeps, which is equal for all seeds."""
BLOCK_OF = 1 << 16
"""Added to an epoch's number in the keys of shuffling within its blocks; no run has as many epochs."""
Permute = Callable[[int, int, int, int], int]
"""(i, n, source, epoch) -> the image of i under the permutation of [0, n) for this source and epoch."""


@dataclass(frozen=True)
class Address:
    """One window of training tokens: index of its source, its number within the source, and the source's epoch.

    All count from 0.
    """

    source: int
    window: int
    epoch: int


def largest_remainder(weights: Sequence[float], total: int) -> list[int]:
    """Return integers in proportion to `weights` that sum to `total`; of equal remainders the first is rounded up."""
    whole = sum(weights)
    exact = [total * w / whole for w in weights]
    counts = [int(x) for x in exact]
    by_remainder = sorted(range(len(weights)), key=lambda s: (counts[s] - exact[s], s))
    for s in by_remainder[: total - sum(counts)]:
        counts[s] += 1
    return counts


def interleave(counts: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return a sequence with each source s `counts[s]` times, evenly spread, as two lists over its positions.

    The first list has the source at each position, the second the number of earlier positions with the same source.
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


@dataclass(frozen=True)
class MixturePhase:
    """A phase of a run, samples [first, last), with `drawn`: its number of samples from each source."""

    name: str
    first: int
    last: int
    drawn: tuple[int, ...]


class Mixture(Protocol):
    """Assignment of a run's samples to sources, as pure functions of the sample's number (from 0)."""

    names: Sequence[str]
    """Names of the sources; methods refer to a source by its index here."""

    def ordinal(self, index: int) -> tuple[int, int]:
        """Return (source of sample `index`, number of earlier samples of that source)."""

    def drawn(self, total: int) -> list[int]:
        """Return the number of samples from each source among samples [0, total)."""

    def phases(self, total: int) -> "Iterator[MixturePhase]":
        """Yield the phases of the samples [0, total): ranges with constant weights, in order."""


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
        """Return (source of sample `index`, number of earlier samples of that source)."""
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
        """Yield one phase "all" with all samples, because the weights are constant."""
        yield MixturePhase("all", 0, total, tuple(self.drawn(total)))


@lru_cache(maxsize=256)
def _round_keys(seed: int, name: int, epoch: int) -> tuple[int, ...]:
    return tuple(hash_words(name, epoch, r, seed=seed) for r in range(ROUNDS))


def permute(i: int, n: int, keys: Sequence[int]) -> int:
    """Return the image of `i` under a permutation of [0, n), n <= 2^64, that the 32-bit round `keys` select.

    A Feistel network (unbalanced if the number of bits is odd) permutes [0, 2^bits), 2^bits < 2n. A value outside
    [0, n) passes through it again until it is inside, which takes fewer than two passes on average.
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


def merged(ranges: Iterable[Sequence[int]]) -> tuple[Range, ...]:
    """Return `ranges` sorted, with overlapping or adjacent ones merged. A range is [first, last], both included."""
    found: list[Range] = []
    for first, last in sorted((int(first), int(last)) for first, last in ranges):
        if found and first <= found[-1][1] + 1:
            found[-1] = found[-1][0], max(found[-1][1], last)
        else:
            found.append((first, last))
    return tuple(found)


def index_of(position: int, skipped: Sequence[Range]) -> int:
    """Return the index in the whole order of the sample at `position` of a run that skips the samples `skipped`.

    Both count from 0. `skipped` is the result of `merged`.
    """
    index = position
    for first, last in skipped:
        if index < first:
            break
        index += last - first + 1
    return index


def before(index: int, skipped: Sequence[Range]) -> tuple[Range, ...]:
    """Return the part of the merged `skipped` before sample `index` of the whole order."""
    return tuple((first, min(last, index - 1)) for first, last in skipped if first < index)


class SampleOrder:
    """Order of a run's training samples: position (from 0) -> `Address` of a window.

    Shuffling of a source is keyed by its name, so that adding a source does not reorder the others. With
    `shuffle=False` every epoch takes the windows in stored order.
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
        """Define the order.

        Args:
            mixture: assigns samples to sources.
            windows: {source name: number of its windows}, at least 1 for a source that is sampled.
            seed: seed of the shuffling.
            shuffle: False: windows in stored order.
            skipped: skipped samples, a result of `merged`.
            limits: {source name: maximum number of windows to use}. Their choice depends on the name alone, and a
                smaller limit chooses a subset of a larger one's; with `shuffle=False` it takes the first windows.
            pace: order within an epoch, see `MixtureConfig.pace`; None: shuffled as a whole.
            total: number of samples that `pace` orders; None: whole epochs.
        """
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
        """Return the address of the training sample at `position` (from 0)."""
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

    The windows of an epoch are those that the seed's permutation selects, sorted by their place in the stream. So runs
    with and without a curriculum train on the same windows if their streams are equal. Within each block of the `Pace`
    the order is shuffled. Skipping a sample does not move others; the samples that replace skipped ones come at the end
    of the run, in the seed's order.
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
