"""Ranks that others wait for: each step's seconds of every rank, compared with those of its counterparts.

A rank's excess in a step is how many seconds longer than the (upper) median of its counterparts it took for one part of
the step, over the seconds of the whole step: what it costs everybody. Two tests look at it:

- quick: `steps` in a row, each beyond `LEAST_SLOWDOWN` and beyond `sigmas` times the noise. The noise is 1.4826 times
  the median absolute deviation of excesses from each rank's own median, over the `window_steps` before (Hampel's
  identifier: Davies & Gather 1993), of all counterparts or of the rank itself, whichever is larger. A rank that is slow
  for long does not raise it.
- lasting: in so many of `BLOCK_STEPS` steps beyond `LEAST_SLOWDOWN` that fair coins do it with a chance of `BLOCK_ALPHA`
  shared out over all ranks and parts. As in `outliers`, that holds whatever the noise looks like, and finds a slow rank
  in noise that hides it from the quick one.

Links are slow where even the rank that waits least waits longer than it did (C4's class of a slow collective that all
have come to: arXiv 2406.04594), and nobody's own parts take longer.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from lightning_llm.health.outliers import LEAST_SLOWDOWN, medians_of_others, tail

Work = Literal["data", "compute", "rest", "links"]
PARTS: tuple[Work, ...] = ("data", "compute", "rest")
"""Of a step's seconds what a rank needs for itself, in the order of the columns that `take` is given."""
WAIT = len(PARTS)
"""The column of the seconds that it waits for others."""
SIGMA_OF_DEVIATION = 1.4826
BLOCK_STEPS = 128
BLOCK_ALPHA = 1e-4
OVER_STEPS = 8
"""A rank is named until it has been slow in less than half of these."""


@dataclass(frozen=True)
class Straggler:
    """A rank that has been slow at `work` since a step, or is no more (`over`); links have no rank.

    Of the steps that tell: `seconds` a step is what it takes, `usual_seconds` what counterparts (or links, before) do,
    `share` the difference over the seconds of a step.
    """

    work: Work
    rank: int | None
    since_step: int
    seconds: float
    usual_seconds: float
    share: float
    over: bool = False


class StragglerDetector:
    """Judges step after step; `groups`: the ranks that do the same work, each with its counterparts."""

    def __init__(
        self, groups: Sequence[Sequence[int]], steps: int = 3, sigmas: float = 4.0, window_steps: int = 32
    ) -> None:
        self.groups = [list(each) for each in groups]
        self.world = sum(map(len, self.groups))
        self.steps, self.sigmas, self.window_steps = steps, sigmas, window_steps
        self.named: dict[tuple[Work, int | None], Straggler] = {}
        """Who is slow by now."""
        self._recent: deque[tuple[int, Any, Any, Any]] = deque(maxlen=steps)
        """Of the steps under judgement: number, seconds, excesses, and which of these count."""
        self._excesses: deque[Any] = deque(maxlen=window_steps)
        """Of the steps before those, [parts, ranks]."""
        self._waits: deque[tuple[float, float]] = deque(maxlen=window_steps)
        """Of these, where links were as usual: the least wait of a rank, and the seconds of the whole step."""
        self._block: list[tuple[int, Any, Any]] = []
        self._after: dict[tuple[Work, int | None], deque[bool]] = {}
        tests = self.world * len(PARTS)
        self._needed = next(k for k in range(BLOCK_STEPS + 1) if tail(BLOCK_STEPS, k) <= BLOCK_ALPHA / tests)

    @property
    def is_warm(self) -> bool:
        """Whether there is enough to compare a step with."""
        return len(self._excesses) >= self.window_steps // 4

    def take(self, step: int, seconds: Any) -> list[Straggler]:
        """Take the seconds of `step`, [ranks, PARTS and WAIT]; NaN: not known. Return who is slow from now on, or over.

        Steps come in order.
        """
        seconds = np.asarray(seconds, dtype=np.float64)
        excess = self._excess(seconds)
        counts = (excess > LEAST_SLOWDOWN) & self.is_warm
        if counts.any():
            counts &= excess > self.sigmas * self._noise()
        if len(self._recent) == self.steps:
            _, old, old_excess, old_counts = self._recent[0]
            self._excesses.append(old_excess)
            if not old_counts.any() and ("links", None) not in self.named:
                self._waits.append((float(np.nanmin(old[:, WAIT])), _whole(old)))
        self._recent.append((step, seconds, excess, counts))
        self._block.append((step, seconds, excess))
        found = [*self._quick(), *self._links(), *self._lasting()]
        for each in found:
            self.named[each.work, each.rank] = each
            self._after[each.work, each.rank] = deque([True] * OVER_STEPS, maxlen=OVER_STEPS)
        return [*found, *self._over(step, excess)]

    def _excess(self, seconds: Any) -> Any:
        """Return [parts, ranks]: seconds beyond the median of counterparts over those of a step; NaN without any."""
        excess = np.full((len(PARTS), self.world), np.nan)
        whole = _whole(seconds)
        for group in self.groups:
            if len(group) < 2:
                continue
            for part in range(len(PARTS)):
                own = seconds[group, part]
                excess[part, group] = (own - np.array(medians_of_others(own.tolist()))) / whole
        return excess

    def _noise(self) -> Any:
        """Return [parts, ranks]: sigma of excesses about each rank's own level."""
        past = np.stack(self._excesses)
        deviation = np.abs(past - np.median(past, axis=0))
        sigma = np.median(deviation, axis=0)
        for group in self.groups:
            sigma[:, group] = np.maximum(sigma[:, group], np.median(deviation[:, :, group], axis=(0, 2))[:, None])
        return SIGMA_OF_DEVIATION * sigma

    def _quick(self) -> list[Straggler]:
        if len(self._recent) < self.steps:
            return []
        steps, seconds, excesses, counts = zip(*self._recent, strict=True)
        slow = np.argwhere(np.stack(counts).all(axis=0))
        return [
            self._straggler(int(part), int(rank), steps, np.stack(seconds), np.stack(excesses))
            for part, rank in slow
            if (PARTS[part], int(rank)) not in self.named
        ]

    def _lasting(self) -> list[Straggler]:
        if len(self._block) < BLOCK_STEPS:
            return []
        steps, seconds, excesses = zip(*self._block, strict=True)
        self._block.clear()
        slow = np.argwhere((np.stack(excesses) > LEAST_SLOWDOWN).sum(axis=0) >= self._needed)
        return [
            self._straggler(int(part), int(rank), steps, np.stack(seconds), np.stack(excesses))
            for part, rank in slow
            if (PARTS[part], int(rank)) not in self.named
        ]

    def _straggler(self, part: int, rank: int, steps: Sequence[int], seconds: Any, excesses: Any) -> Straggler:
        """Return what `steps` tell of `rank`: [steps, ranks, parts] and [steps, parts, ranks]."""
        own = float(np.median(seconds[:, rank, part]))
        share = float(np.median(excesses[:, part, rank]))
        whole = float(np.median([_whole(each) for each in seconds]))
        return Straggler(PARTS[part], rank, steps[0], own, own - share * whole, share)

    def _links(self) -> list[Straggler]:
        """Return slow links, where the least wait has risen and no rank is late."""
        if ("links", None) in self.named or len(self._recent) < self.steps or len(self._waits) < self.window_steps // 4:
            return []
        if any(counts.any() for *_, counts in self._recent) or any(rank is not None for _, rank in self.named):
            return []
        usual, limit, whole = self._usual_wait()
        waits = [float(np.nanmin(seconds[:, WAIT])) for _, seconds, _, _ in self._recent]
        if min(waits) <= limit:
            return []
        wait = float(np.median(waits))
        return [Straggler("links", None, self._recent[0][0], wait, usual, (wait - usual) / whole)]

    def _usual_wait(self) -> tuple[float, float, float]:
        """Return the usual least wait, what is too long for one, and the usual seconds of a step."""
        waits, wholes = np.array(self._waits).T
        usual, whole = float(np.median(waits)), float(np.median(wholes))
        sigma = SIGMA_OF_DEVIATION * float(np.median(np.abs(waits - usual)))
        return usual, usual + max(LEAST_SLOWDOWN * whole, self.sigmas * sigma), whole

    def _over(self, step: int, excess: Any) -> list[Straggler]:
        """Return who is slow no more."""
        found = []
        for (work, rank), named in list(self.named.items()):
            after = self._after[work, rank]
            if rank is None:
                after.append(float(np.nanmin(self._recent[-1][1][:, WAIT])) > self._usual_wait()[1])
            else:
                after.append(bool(excess[PARTS.index(work), rank] > LEAST_SLOWDOWN))
            if sum(after) < OVER_STEPS / 2:
                del self.named[work, rank]
                found.append(Straggler(work, rank, step, named.seconds, named.usual_seconds, 0.0, over=True))
        return found


def _whole(seconds: Any) -> float:
    """Return the seconds of a step, the same for ranks that wait for each other, from [ranks, parts]."""
    return float(np.median(np.nansum(seconds, axis=1)))
