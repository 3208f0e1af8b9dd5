"""Weights as a function of the sample's number, piecewise constant, and the number's address without any state.

What a source has given in the phases before is a sum of `Shares.drawn` of their lengths, known from the config alone:
so it goes through its windows as if it had never stopped, and no window comes twice in an epoch.
"""

from bisect import bisect_right
from collections.abc import Iterator, Mapping

from lightning_llm.data.mixing.addressing import MixturePhase, Shares


class Phases:
    """A `Mixture` of phases, each `Shares` of its own from its first sample on."""

    def __init__(self, phases: Mapping[str, tuple[int, Mapping[str, float]]]):
        """`phases`: by name the first sample, and the weights, all of the same sources; one begins at 0."""
        ordered = sorted(phases.items(), key=lambda each: each[1][0])
        self._phase_names = [name for name, _ in ordered]
        self._starts = [first for _, (first, _) in ordered]
        self._shares = [Shares(weights) for _, (_, weights) in ordered]
        self.names = self._shares[0].names
        self._drawn_before = [[0] * len(self.names)]
        for shares, first, last in zip(self._shares, self._starts, self._starts[1:], strict=False):
            drawn = shares.drawn(last - first)
            self._drawn_before.append([a + b for a, b in zip(self._drawn_before[-1], drawn, strict=True)])

    def ordinal(self, index: int) -> tuple[int, int]:
        """Return the source of sample `index`, and how many of its samples come before, in all phases."""
        phase = bisect_right(self._starts, index) - 1
        source, ordinal = self._shares[phase].ordinal(index - self._starts[phase])
        return source, self._drawn_before[phase][source] + ordinal

    def drawn(self, total: int) -> list[int]:
        """Return how many of the samples [0, total) each source gives."""
        phase = bisect_right(self._starts, total) - 1
        drawn = self._shares[phase].drawn(total - self._starts[phase])
        return [a + b for a, b in zip(self._drawn_before[phase], drawn, strict=True)]

    def phases(self, total: int) -> Iterator[MixturePhase]:
        """Yield each phase that the samples [0, total) reach, in order."""
        ends = [*self._starts[1:], total]
        for name, first, end, shares in zip(self._phase_names, self._starts, ends, self._shares, strict=True):
            last = min(end, total)
            if first < last:
                yield MixturePhase(name, first, last, tuple(shares.drawn(last - first)))
