"""Verdicts at each recipe's own best rate that are valid whichever rate was chosen: intersection-union tests.

The claim is about the best of a grid: gap = min over v of mean[recipe, v] - min over u of mean[baseline, u]. A choice
by few seeds may be wrong, and the noisier of two recipes chooses worse: compared at the chosen rates alone, it would be
called lossy although it is not lossy at its best. So the side that would gain from a better choice is tested at every
value of the grid:

lossy:    at each of its own values v, the recipe's gap to the baseline at the chosen value is above the margin;
lossless: the recipe at its chosen value is within the margin of the baseline at every value u.

Each claim is that several hypotheses are all wrong. Each hypothesis is tested at the full level, so the joint test has
that level, too (R. L. Berger, Technometrics 24 (1982) 295-300), without a correction for the size of the grid. The
other side's value is chosen by seeds that are not judged; a wrong choice there only makes the claim harder.

Letters: K recipes besides the baseline, R values, S judging seeds; arrays may have further leading axes.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from lightning_llm.compare.runs.losses import Tail, diverged, tail_of
from lightning_llm.compare.statistics.intervals import Array, simultaneous_intervals
from lightning_llm.tracking.reading import Run

if TYPE_CHECKING:
    from lightning_llm.compare.best_value import Selection
    from lightning_llm.compare.verdict import Verdict

FEWEST_JUDGED = 2
"""Least number of pairs at a value of the grid for that value to be judged."""


@dataclass(frozen=True)
class GridBounds:
    """Bounds of simultaneous intervals of gaps over a grid of R values, each [..., K, R] for K recipes, in nats.

    `low`: of the recipe at each own value against the baseline's chosen value; `high`: of the recipe at its chosen
    value against each value of the baseline; `worse`, `baseline_worse`: runs diverged there, so that value is not the
    best; `judged`, `baseline_judged`: there are enough pairs.
    """

    low: Array
    high: Array
    worse: NDArray[np.bool_]
    baseline_worse: NDArray[np.bool_]
    judged: NDArray[np.bool_]
    baseline_judged: NDArray[np.bool_]

    def lossy(self, margin: float) -> NDArray[np.bool_]:
        """Return whether each recipe is lossy at all of its own judged values, [..., K]; `margin` in nats."""
        with np.errstate(invalid="ignore"):
            return np.asarray(((self.low > margin) | self.worse | ~self.judged).all(-1) & self.judged.any(-1))

    def lossless(self, margin: float) -> NDArray[np.bool_]:
        """Return whether each recipe is lossless against the baseline at all its judged values, [..., K]."""
        with np.errstate(invalid="ignore"):
            within = (self.high < margin) | self.baseline_worse | ~self.baseline_judged
        return np.asarray(within.all(-1) & self.baseline_judged.any(-1))


def grid_bounds(losses: Array, chosen: NDArray[np.int64], confidence: float = 0.95) -> GridBounds:
    """Return the interval bounds that `lossy` and `lossless` test over the grid.

    At each value the intervals of the K recipes are simultaneous (Dunnett), with `confidence`.

    Args:
        losses: [..., 1 + K, R, S] in nats at judging seeds, the baseline first; NaN: no run, infinite: diverged.
        chosen: [..., 1 + K] index of each chosen value, chosen by other seeds.
    """
    values = losses.shape[-2]
    lost: NDArray[np.bool_] = np.asarray(np.isinf(losses).any(-1))  # [..., 1 + K, R]
    clean = np.where(np.isinf(losses), np.nan, losses)
    best = np.take_along_axis(clean, chosen[..., None, None], -2)[..., 0, :]  # [..., 1 + K, S]
    base, others = best[..., :1, :], best[..., 1:, :]
    recipes = others.shape[-2]
    low = np.full((*others.shape[:-1], values), np.nan)
    high, judged, baseline_judged = low.copy(), np.zeros(low.shape, bool), np.zeros(low.shape, bool)
    for value in range(values):
        against = others - clean[..., :1, value, :]
        high[..., value] = simultaneous_intervals(against, confidence).high
        baseline_judged[..., value] = np.isfinite(against).sum(-1) >= FEWEST_JUDGED
        for recipe in range(recipes):
            differences = others - base
            differences[..., recipe, :] = (clean[..., 1 + recipe, value, :][..., None, :] - base)[..., 0, :]
            low[..., recipe, value] = simultaneous_intervals(differences, confidence).low[..., recipe]
            judged[..., recipe, value] = np.isfinite(differences[..., recipe, :]).sum(-1) >= FEWEST_JUDGED
    worse, baseline_worse = lost[..., 1:, :], np.broadcast_to(lost[..., :1, :], low.shape)
    return GridBounds(low, high, worse, baseline_worse, judged | worse, baseline_judged | baseline_worse)


def plateau(losses: Mapping[float, float], margin: float) -> tuple[float, float] | None:
    """Return (smallest, largest) value of the tuned key with a loss within `margin` of the lowest loss.

    `losses`: {value: loss}, interpolated linearly over log(value). The range ends at the end of the grid if that is
    within the margin, too. None without a finite loss.
    """
    known = sorted((value, loss) for value, loss in losses.items() if math.isfinite(loss))
    if not known:
        return None
    place = min(range(len(known)), key=lambda index: known[index][1])
    limit = known[place][1] + margin
    return _end(known[: place + 1][::-1], limit), _end(known[place:], limit)


def _end(known: Sequence[tuple[float, float]], limit: float) -> float:
    """Return the value at which the losses, from the lowest outwards, first exceed `limit`; the last value if none
    does."""
    for (inner, low), (outer, high) in pairwise(known):
        if high > limit:
            share = (limit - low) / (high - low)
            if inner <= 0 or outer <= 0:
                return inner + share * (outer - inner)
            return math.exp(math.log(inner) + share * (math.log(outer) - math.log(inner)))
    return known[-1][0]


@dataclass(frozen=True)
class Tuned:
    """Result of the tests over the whole grid, for the verdict on one recipe.

    `value`, `baseline_value`: the values of `key` chosen for the recipe and the baseline. `withheld`: the decision
    ("lossy" or "lossless") that the grid does not support, None if it does; `because`: the values that contradict it,
    as ("own" or "baseline's", value); `unjudged`: values of either side with too few judging pairs.
    """

    key: str
    value: Any
    baseline_value: Any
    withheld: str | None = None
    because: tuple[tuple[str, Any], ...] = ()
    unjudged: tuple[Any, ...] = ()

    @property
    def text(self) -> str:
        """The reason why a decision is withheld, as text; "" if none is."""
        if not self.withheld:
            return ""
        name = self.key.rpartition(".")[2]
        values = ", ".join(f"{value:g}" for _, value in self.because)
        if self.withheld == "lossy":
            claim = f"lossy at {name}={self.value:g}, but not shown to be lossy at its own {values}"
        else:
            claim = f"lossless against the baseline at {name}={self.baseline_value:g}, but not at {values}"
        return f"{claim}: the best value is not known"

    def as_data(self) -> dict[str, Any]:
        """Return the entry "tuned" of a verdict in `compare.json`."""
        return {
            "key": self.key,
            "value": self.value,
            "baseline_value": self.baseline_value,
            "withheld": self.withheld,
            "because": [{"whose": whose, "value": value} for whose, value in self.because],
            "unjudged": list(self.unjudged),
        }


def borne_out(verdicts: Sequence["Verdict"], selection: "Selection") -> list["Verdict"]:
    """Return the verdicts of one group; lossy and lossless become inconclusive unless the whole grid supports them."""
    if not verdicts:
        return []
    arms = [selection.grid_of(verdicts[0].pairs[0].baseline)]
    arms += [selection.grid_of(verdict.pairs[0].run) for verdict in verdicts]
    values = sorted({value for arm in arms for value in arm.runs})
    outliers = {verdict.name: verdict.judged.estimate.outlier_seeds for verdict in verdicts}
    seeds = sorted({seed for arm in arms for runs in arm.runs.values() for seed in runs})
    kept = [run for arm in arms for runs in arm.runs.values() for run in runs.values() if not run.diverged]
    terms = verdicts[0].terms
    tail = tail_of(kept, terms.metric, terms.tail_share)
    if tail is None:
        return list(verdicts)
    losses = np.full((len(arms), len(values), len(seeds)), math.nan)
    for number, arm in enumerate(arms):
        for value, runs in arm.runs.items():
            for seed, run in runs.items():
                if number and seed in outliers[verdicts[number - 1].name] and value == arm.value:
                    continue
                losses[number, values.index(value), seeds.index(seed)] = _loss(run, tail)
    chosen = np.array([values.index(arm.value) for arm in arms])
    margin = terms.margin
    if terms.token_margin is not None:  # one margin per seed, so its noise is part of the differences
        losses[1:] -= _margins(verdicts, seeds)
        margin = 0.0
    bounds = grid_bounds(_settled(losses, chosen), chosen, terms.confidence)
    lossy, lossless = bounds.lossy(margin), bounds.lossless(margin)
    found = []
    for place, verdict in enumerate(verdicts):
        own, base = arms[1 + place], arms[0]
        against: list[tuple[str, Any]] = []
        withheld = None
        if verdict.judged.loss == "lossy" and verdict.decision == "lossy" and not lossy[place]:
            withheld = None if verdict.judged.stability.verdict == "unstable" else "lossy"
            fails = ~(bounds.low[place] > margin) & ~bounds.worse[place] & bounds.judged[place]
            against = [("own", values[index]) for index in np.flatnonzero(fails)]
        elif verdict.decision == "lossless" and not lossless[place]:
            withheld = "lossless"
            fails = ~(bounds.high[place] < margin) & ~bounds.baseline_worse[place] & bounds.baseline_judged[place]
            against = [("baseline's", values[index]) for index in np.flatnonzero(fails)]
        unjudged = [
            value
            for index, value in enumerate(values)
            if (value in own.tried and not bounds.judged[place, index])
            or (value in base.tried and not bounds.baseline_judged[place, index])
        ]
        tuned = Tuned(selection.key, own.value, base.value, withheld, tuple(against), tuple(unjudged))
        judged = replace(verdict.judged, decision="inconclusive") if withheld else verdict.judged
        found.append(replace(verdict, judged=judged, tuned=tuned))
    return found


def _margins(verdicts: Sequence["Verdict"], seeds: Sequence[int]) -> Array:
    """Return the margin in tokens at each of `seeds`, [S] in nats, NaN if unknown."""
    known = {seed: nats for verdict in verdicts for seed, nats in (verdict.judged.measured.margins or {}).items()}
    return np.array([known.get(seed, math.nan) for seed in seeds])


def _loss(run: Run, tail: Tail) -> float:
    return math.inf if diverged(run, tail, learnable=True) else tail.of(run)


def _settled(losses: Array, chosen: "np.ndarray[Any, Any]") -> Array:
    """Return `losses` without runs that failed at a chosen value: the stability verdict covers those."""
    found = losses.copy()
    for arm, place in enumerate(chosen):
        found[arm, place] = np.where(np.isinf(found[arm, place]), math.nan, found[arm, place])
    return found
