"""Ranks that others wait for: each step's seconds of every rank, compared with those of its counterparts.

A rank's excess in a step is how many seconds longer than the (upper) median of its counterparts it took for one part of
the step, over the seconds of the whole step: what it costs everybody. Two tests look at it:

- quick: `steps` in a row, each beyond `LEAST_SLOWDOWN` and beyond `sigmas` times the noise. The noise is 1.4826 times
  the median absolute deviation of excesses from each rank's own median, over the `window_steps` before (Hampel's
  identifier: Davies & Gather 1993), of all counterparts or of the rank itself, whichever is larger. A rank that is slow
  for long does not raise it.
  Rank 0 writes the run's records, which no other does: between steps it is compared with itself, before.
- lasting: in so many of `BLOCK_STEPS` steps beyond `LEAST_SLOWDOWN` that fair coins do it with a chance of
  `BLOCK_ALPHA`, shared out over all ranks and parts. As in `outliers`, that holds whatever the noise looks like, and
  finds a slow rank in noise that hides it from the quick one.

Links are slow where even the rank that waits least waits longer than it did (C4's class of a slow collective that all
have come to: arXiv 2406.04594), and nobody's own parts take longer.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

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
OF_RANK_0 = PARTS.index("rest"), 0
"""The part of the step, and the rank, that has no counterpart anywhere."""
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


class _Step(NamedTuple):
    """A step: `seconds` [ranks, columns]; [parts, ranks]: `raw` excesses, those that are judged, which are `slow`."""

    number: int
    seconds: Any
    raw: Any
    excess: Any
    slow: Any

    @property
    def least_wait(self) -> float:
        """Seconds that the rank waits which waits least."""
        return float(np.nanmin(self.seconds[:, WAIT]))

    @property
    def whole(self) -> float:
        """Seconds of the step, the same for ranks that wait for each other."""
        return float(np.median(np.nansum(self.seconds, axis=1)))


class StragglerDetector:
    """Judges step after step. `groups`: the ranks that compute the same; data are all ranks' alike."""

    def __init__(
        self, groups: Sequence[Sequence[int]], steps: int = 3, sigmas: float = 3.5, window_steps: int = 32
    ) -> None:
        self.world = sum(map(len, groups))
        everyone = [list(range(self.world))]
        self.groups = {part: [list(each) for each in groups] if part == "compute" else everyone for part in PARTS}
        self.steps, self.sigmas, self.window_steps = steps, sigmas, window_steps
        self.named: dict[tuple[Work, int | None], Straggler] = {}
        """Who is slow by now."""
        self._recent: deque[_Step] = deque(maxlen=steps)
        """Those under judgement."""
        self._past: deque[Any] = deque(maxlen=window_steps)
        """Raw excesses of the steps before."""
        self._waits: deque[tuple[float, float]] = deque(maxlen=window_steps)
        """Of those, where links were as usual: the least wait of a rank, and the seconds of the whole step."""
        self._block: list[_Step] = []
        self._after: dict[tuple[Work, int | None], deque[bool]] = {}
        """Of who is named: in which of the last steps it was slow."""
        tests = self.world * len(PARTS)
        self._needed = next(k for k in range(BLOCK_STEPS + 1) if tail(BLOCK_STEPS, k) <= BLOCK_ALPHA / tests)

    @property
    def is_warm(self) -> bool:
        """Whether there is enough to compare a step with."""
        return len(self._past) >= self.window_steps // 4

    def take(self, step: int, seconds: Any) -> list[Straggler]:
        """Take the seconds of `step`, [ranks, PARTS and WAIT]; NaN: not known. Return who is slow from now on, or over.

        Steps come in order.
        """
        judged = self._judged(step, np.asarray(seconds, dtype=np.float64))
        if len(self._recent) == self.steps:
            oldest = self._recent[0]
            self._past.append(oldest.raw)
            if not oldest.slow.any() and ("links", None) not in self.named:
                self._waits.append((oldest.least_wait, oldest.whole))
        self._recent.append(judged)
        self._block.append(judged)
        found = [*self._quick(), *self._lasting(), *self._links()]
        for each in found:
            self.named[each.work, each.rank] = each
            self._after[each.work, each.rank] = deque([True] * OVER_STEPS, maxlen=OVER_STEPS)
        return [*found, *self._over(judged)]

    def _judged(self, step: int, seconds: Any) -> _Step:
        judged = _Step(step, seconds, np.full((len(PARTS), self.world), np.nan), None, None)
        for place, part in enumerate(PARTS):
            for group in (each for each in self.groups[part] if len(each) > 1):
                own = seconds[group, place]
                judged.raw[place, group] = (own - np.array(medians_of_others(own.tolist()))) / judged.whole
        excess = judged.raw.copy()
        if self.is_warm:
            excess[OF_RANK_0] -= np.median([each[OF_RANK_0] for each in self._past])
        slow = (excess > LEAST_SLOWDOWN) & self.is_warm
        if slow.any():
            slow &= excess > self.sigmas * self._noise()
        return judged._replace(excess=excess, slow=slow)

    def _noise(self) -> Any:
        """Return [parts, ranks]: sigma of excesses about each rank's own level."""
        past = np.stack(self._past)
        deviation = np.abs(past - np.median(past, axis=0))
        sigma = np.median(deviation, axis=0)
        for place, part in enumerate(PARTS):
            for group in self.groups[part]:
                sigma[place, group] = np.maximum(sigma[place, group], np.median(deviation[:, place, group]))
        return SIGMA_OF_DEVIATION * sigma

    def _quick(self) -> list[Straggler]:
        if len(self._recent) < self.steps:
            return []
        return self._new(np.stack([each.slow for each in self._recent]).all(axis=0), list(self._recent))

    def _lasting(self) -> list[Straggler]:
        if len(self._block) < BLOCK_STEPS:
            return []
        block, self._block = self._block, []
        slow = np.stack([each.raw > LEAST_SLOWDOWN for each in block]).sum(axis=0) >= self._needed
        slow[OF_RANK_0] = False
        return self._new(slow, block)

    def _new(self, slow: Any, steps: Sequence[_Step]) -> list[Straggler]:
        """Return those of `slow`, [parts, ranks], that are not named yet, by what `steps` tell."""
        found = []
        for place, rank in np.argwhere(slow).tolist():
            if (PARTS[place], rank) in self.named:
                continue
            own = float(np.median([each.seconds[rank, place] for each in steps]))
            share = float(np.median([each.excess[place, rank] for each in steps]))
            usual = own - share * float(np.median([each.whole for each in steps]))
            found.append(Straggler(PARTS[place], rank, steps[0].number, own, usual, share))
        return found

    def _links(self) -> list[Straggler]:
        """Return slow links, where the least wait has risen and no rank is late."""
        if len(self._recent) < self.steps or len(self._waits) < self.window_steps // 4 or self.named:
            return []
        usual, limit, whole = self._usual_wait()
        waits = [each.least_wait for each in self._recent]
        if min(waits) <= limit or any(each.slow.any() for each in self._recent):
            return []
        wait = float(np.median(waits))
        return [Straggler("links", None, self._recent[0].number, wait, usual, (wait - usual) / whole)]

    def _usual_wait(self) -> tuple[float, float, float]:
        """Return the usual least wait, what is too long for one, and the usual seconds of a step."""
        waits, wholes = np.array(self._waits).T
        usual, whole = float(np.median(waits)), float(np.median(wholes))
        sigma = SIGMA_OF_DEVIATION * float(np.median(np.abs(waits - usual)))
        return usual, usual + max(LEAST_SLOWDOWN * whole, self.sigmas * sigma), whole

    def _over(self, step: _Step) -> list[Straggler]:
        """Return who is slow no more."""
        found = []
        for (work, rank), named in list(self.named.items()):
            if rank is None:
                slow = step.least_wait > self._usual_wait()[1]
            else:
                slow = bool(step.excess[PARTS.index(work), rank] > LEAST_SLOWDOWN)
            after = self._after[work, rank]
            after.append(slow)
            if sum(after) < OVER_STEPS / 2:
                del self.named[work, rank]
                found.append(Straggler(work, rank, step.number, named.seconds, named.usual_seconds, 0.0, over=True))
        return found


LISTED_RANKS = 32
"""How many ranks have figures in a record, of thousands: those that compute longest."""
DATA, COMPUTE = PARTS.index("data"), PARTS.index("compute")


class RankSeconds:
    """Adds up what `StragglerDetector.take` is given; `hosts`: the machine of each rank."""

    def __init__(self, hosts: Sequence[str]) -> None:
        self.hosts = list(hosts)
        self.steps = 0
        self._since: list[Any] = []
        self._sum = np.zeros((len(self.hosts), WAIT + 1))
        self._jitters: list[Any] = []

    def add(self, seconds: Any) -> None:
        """Take a step's seconds, [ranks, columns]."""
        self.steps += 1
        self._since.append(seconds)
        self._sum += seconds

    def since_last(self) -> dict[str, float]:
        """Return the figures of a record over the steps since the last, and begin anew."""
        seconds = np.stack(self._since)  # [steps, ranks, columns]
        self._since = []
        compute, jitter = _spread(seconds[:, :, COMPUTE])
        self._jitters.append(jitter)
        columns = {
            "rank_compute_seconds": compute,
            "rank_jitter": jitter,
            "rank_wait_seconds": seconds[:, :, WAIT].mean(axis=0),
            "rank_data_seconds": seconds[:, :, DATA].mean(axis=0),
        }
        listed = sorted(np.argsort(-compute)[:LISTED_RANKS].tolist())
        known = {name: values for name, values in columns.items() if not np.isnan(values).any()}
        return {f"{name}/{rank}": float(values[rank]) for name, values in known.items() for rank in listed}

    def of_all_steps(self) -> list[dict[str, Any]]:
        """Return each rank's totals, and the median of its jitter; of many, those that computed longest."""
        jitters = [*self._jitters, *([_spread(np.stack(self._since)[:, :, COMPUTE])[1]] if self._since else [])]
        jitter = np.median(np.stack(jitters), axis=0)
        listed = sorted(np.argsort(-self._sum[:, COMPUTE])[:LISTED_RANKS].tolist())
        names = {"data_seconds": DATA, "compute_seconds": COMPUTE, "wait_seconds": WAIT}
        return [
            {
                "rank": rank,
                "host": self.hosts[rank],
                "steps": self.steps,
                **{key: _known(self._sum[rank, column]) for key, column in names.items()},
                "jitter": float(jitter[rank]),
            }
            for rank in listed
        ]


def _spread(seconds: Any) -> tuple[Any, Any]:
    """Return the median over steps, and by how much of it the 95th percentile exceeds it: of each rank."""
    middle, high = np.percentile(seconds, (50, 95), axis=0)
    return middle, high / np.maximum(middle, 1e-12) - 1


def _known(seconds: float) -> float | None:
    return None if np.isnan(seconds) else round(float(seconds), 6)
