"""Detection of stragglers: compares the seconds of each rank in every step with those of its counterparts.

The excess of a rank in a step is the time by which one part of the step took longer than the (upper) median of its
counterparts, divided by the time of the whole step: the cost for all ranks. Two tests use it:

- quick: `steps` consecutive steps, each beyond `LEAST_SLOWDOWN` and beyond `sigmas` times the noise. The noise is
  1.4826 times the median absolute deviation of excesses from each rank's own median over the preceding `window_steps`
  (Hampel's identifier: Davies & Gather 1993), the larger one of all counterparts and of the rank itself. A rank that is
  slow for long does not raise it.
  Only rank 0 writes the run's records, so between steps it is compared with its own past.
- lasting: so many of `BLOCK_STEPS` steps beyond `LEAST_SLOWDOWN` that fair coins would reach them with probability
  `BLOCK_ALPHA`, divided over all ranks and parts. As in `outliers`, this holds under any noise, and finds slow ranks
  that noise hides from the quick test.

Links are slow if even the rank that waits least waits longer than before (a slow collective that all ranks have
reached, a class of C4: arXiv 2406.04594), and no rank's own parts take longer.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from lightning_llm.health.outliers import LEAST_SLOWDOWN, medians_of_others, tail

Work = Literal["data", "compute", "rest", "links"]
PARTS: tuple[Work, ...] = ("data", "compute", "rest")
"""Parts of a step's time that a rank needs itself, in the order of the columns passed to `take`."""
WAIT = len(PARTS)
"""Column of the seconds waiting for others."""
SIGMA_OF_DEVIATION = 1.4826
BLOCK_STEPS = 128
BLOCK_ALPHA = 1e-4
OF_RANK_0 = PARTS.index("rest"), 0
"""The (part of the step, rank) without counterparts."""
OVER_STEPS = 8
"""A rank is named until it was slow in less than half of this many steps."""


@dataclass(frozen=True)
class Straggler:
    """A rank that is slow at one part of the step, or slow links; also the message that this is over."""

    work: Work
    """The part of the step, or "links"."""
    rank: int | None
    """None for links."""
    since_step: int
    """First of the steps that decided it."""
    seconds: float
    """Seconds per step of this rank in that part, over the deciding steps."""
    usual_seconds: float
    """Seconds per step of its counterparts; for links, those of the past."""
    share: float
    """The difference of both, divided by the time of a whole step."""
    over: bool = False
    """True: the rank, or the links, are no longer slow."""


class _Step(NamedTuple):
    """A step: `seconds` [ranks, columns]; [parts, ranks]: `raw` excesses, the judged ones, and which are `slow`."""

    number: int
    seconds: Any
    raw: Any
    excess: Any
    slow: Any

    @property
    def least_wait(self) -> float:
        """Seconds waited by the rank that waits least."""
        return float(np.nanmin(self.seconds[:, WAIT]))

    @property
    def whole(self) -> float:
        """Seconds of the step, the same for ranks that wait for each other."""
        return float(np.median(np.nansum(self.seconds, axis=1)))


class StragglerDetector:
    """Detector of slow ranks and links in a run, fed with the seconds of every step (`take`)."""

    def __init__(
        self, groups: Sequence[Sequence[int]], steps: int = 3, sigmas: float = 3.5, window_steps: int = 32
    ) -> None:
        """Set the ranks to compare and the quick test.

        Args:
            groups: sets of ranks that compute the same; computation is compared within a set, all else over all ranks.
            steps: number of consecutive slow steps that name a rank.
            sigmas: limit of the excess in multiples of the noise.
            window_steps: number of preceding steps from which the noise is estimated.
        """
        self.world = sum(map(len, groups))
        everyone = [list(range(self.world))]
        self.groups = {part: [list(each) for each in groups] if part == "compute" else everyone for part in PARTS}
        self.steps, self.sigmas, self.window_steps = steps, sigmas, window_steps
        self.named: dict[tuple[Work, int | None], Straggler] = {}
        """Ranks that are slow now."""
        self._recent: deque[_Step] = deque(maxlen=steps)
        """Steps being judged."""
        self._past: deque[Any] = deque(maxlen=window_steps)
        """Raw excesses of the preceding steps."""
        self._waits: deque[tuple[float, float]] = deque(maxlen=window_steps)
        """Least wait of a rank and seconds of the step, for preceding steps with normal links."""
        self._block: list[_Step] = []
        self._after: dict[tuple[Work, int | None], deque[bool]] = {}
        """For each named rank, whether it was slow in each of the last steps."""
        tests = self.world * len(PARTS)
        self._needed = next(k for k in range(BLOCK_STEPS + 1) if tail(BLOCK_STEPS, k) <= BLOCK_ALPHA / tests)

    @property
    def is_warm(self) -> bool:
        """Whether enough steps have been taken to estimate the noise; before that no rank is named."""
        return len(self._past) >= self.window_steps // 4

    def take(self, step: int, seconds: Any) -> list[Straggler]:
        """Judge one step; return the stragglers that it makes known, and those that are over (`Straggler.over`).

        `seconds`: [ranks, columns] with a column for each of `PARTS` and one for waiting; NaN where unknown. Call it
        for every step, in order.
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
        """Return [parts, ranks]: sigma of excesses around each rank's own level."""
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
        """Return stragglers for the entries of `slow`, [parts, ranks], that are not named yet, measured over
        `steps`."""
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
        """Return slow links if the least wait has risen and no rank is late."""
        if len(self._recent) < self.steps or len(self._waits) < self.window_steps // 4 or self.named:
            return []
        usual, limit, whole = self._usual_wait()
        waits = [each.least_wait for each in self._recent]
        if min(waits) <= limit or any(each.slow.any() for each in self._recent):
            return []
        wait = float(np.median(waits))
        return [Straggler("links", None, self._recent[0].number, wait, usual, (wait - usual) / whole)]

    def _usual_wait(self) -> tuple[float, float, float]:
        """Return (usual least wait, limit of the least wait, usual seconds of a step)."""
        waits, wholes = np.array(self._waits).T
        usual, whole = float(np.median(waits)), float(np.median(wholes))
        sigma = SIGMA_OF_DEVIATION * float(np.median(np.abs(waits - usual)))
        return usual, usual + max(LEAST_SLOWDOWN * whole, self.sigmas * sigma), whole

    def _over(self, step: _Step) -> list[Straggler]:
        """Return the stragglers that are no longer slow."""
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
"""Number of ranks with figures in a record: those that compute longest."""
DATA, COMPUTE = PARTS.index("data"), PARTS.index("compute")


class RankSeconds:
    """Sums and spreads of all ranks' seconds, for the run's records and its summary."""

    def __init__(self, hosts: Sequence[str]) -> None:
        """`hosts`: the machine name of each rank."""
        self.hosts = list(hosts)
        self.steps = 0
        self._since: list[Any] = []
        self._sum = np.zeros((len(self.hosts), WAIT + 1))
        self._jitters: list[Any] = []

    def add(self, seconds: Any) -> None:
        """Add the seconds of one step, [ranks, columns], as given to `StragglerDetector.take`."""
        self.steps += 1
        self._since.append(seconds)
        self._sum += seconds

    def since_last(self) -> dict[str, float]:
        """Return entries for a step record over the steps since the last call, such as "rank_compute_seconds/3"."""
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
        """Return one entry per rank for summary.json: total seconds by part and the median of its jitter.

        At most `LISTED_RANKS` ranks are listed, those that computed longest.
        """
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
    """Return for each rank the median over steps, and the relative excess of the 95th percentile over it."""
    middle, high = np.percentile(seconds, (50, 95), axis=0)
    return middle, high / np.maximum(middle, 1e-12) - 1


def _known(seconds: float) -> float | None:
    return None if np.isnan(seconds) else round(float(seconds), 6)
