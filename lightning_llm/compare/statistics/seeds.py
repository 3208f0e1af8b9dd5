"""The number of further seeds that would decide an open verdict, the command that runs them, and their power.

The spread is itself an estimate: three pairs give it within a factor of about two. A number of seeds that takes it for
the truth decides too rarely (in 58 to 77 % of cases instead of the intended 80 %). So the probability is averaged over
the possible true spreads: the variance is the estimate times df / chi^2(df), its fiducial distribution and the
posterior under Jeffreys' prior ("assurance": A. O'Hagan, J. W. Stevens and M. J. Campbell, Pharmaceut. Statist. 4
(2005) 187-201).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import special  # and not stats, which takes a second to import

from lightning_llm.compare.estimate import VerdictInputs
from lightning_llm.compare.runs.differences import parent_runs_are_replicates
from lightning_llm.compare.statistics.intervals import critical_value, pool_variances
from lightning_llm.compare.statistics.stability import seeds_to_show_stability
from lightning_llm.compare.terms import Terms
from lightning_llm.tracking.reading import Run
from lightning_llm.tracking.sweep_definition import command_with_seeds

POWER = 0.8
MOST_SEEDS = 999
PLANNED_GAP = 3
"""True gap, in margins, of the lossy recipe for which seeds are planned."""
SPREADS = 20
"""Number of equally probable points over which the distribution of the true spread is averaged."""
FEWEST_SEEDS = 3
"""Pairs needed for a usable estimate of the spread."""
MOST_ADVISED = 12
"""Largest number of further seeds that is advised as long as some recipe is decided by fewer."""


@dataclass(frozen=True)
class SeedPlan:
    """Numbers of seeds that would decide an inconclusive verdict with probability `POWER`.

    `more`: further seeds that decide if the true gap is 0; None if seeds would not help. Total numbers: `if_no_gap` for
    a true gap of 0, `if_lossy` for one of `PLANNED_GAP` margins, None above `MOST_SEEDS`; `if_stable`: to show that the
    failure rate is small enough for lossless, if only failures prevent it.
    """

    more: int | None = None
    if_no_gap: int | None = None
    if_lossy: int | None = None
    if_stable: int | None = None


@dataclass(frozen=True)
class Advice:
    """The `command` that adds `more_seeds` seeds to a sweep, and the names of the recipes that these would decide."""

    command: str
    more_seeds: int
    decides: tuple[str, ...]

    def as_data(self) -> dict[str, Any]:
        """Return the entry "advice" of `compare.json`."""
        return {"command": self.command, "more_seeds": self.more_seeds, "decides": list(self.decides)}


def plan_seeds(judged: VerdictInputs, terms: Terms) -> SeedPlan:
    """Return the numbers of seeds that would decide a verdict, from the estimated spread and its uncertainty.

    All None if the verdict is decided, or seeds would not help. `more` is also None if the existing seeds would mostly
    have shown a gap of 0 and the interval is no wider than the margin: then the gap is near the margin, and more seeds
    hardly decide.
    """
    estimate, count = judged.estimate, len(judged.measured.seeds)
    if judged.decision != "inconclusive" or judged.measured.unlearned or judged.measured.missing_seeds:
        return SeedPlan()
    if judged.loss == "lossless":
        needed = seeds_to_show_stability(judged.stability.recipe_alone, judged.stability.level, MOST_SEEDS)
        return SeedPlan(more=None if needed is None else max(needed - count, 1), if_stable=needed)
    if estimate.pairs < 2:
        return SeedPlan(more=max(FEWEST_SEEDS - estimate.pairs, 1))
    confidence = terms.next_confidence or terms.confidence
    no_gap, lossy = (
        seeds_needed(gap, estimate.pool_sd, terms.margin, estimate.comparisons, estimate.pool, confidence, estimate.df)
        for gap in (0.0, PLANNED_GAP * terms.margin)
    )
    near = estimate.high - estimate.low <= terms.margin
    open_ended = no_gap is None or (no_gap <= estimate.pairs and near)
    return SeedPlan(None if no_gap is None or open_ended else max(no_gap - estimate.pairs, 1), no_gap, lossy)


def advise(open_verdicts: dict[str, int], sweeps: Sequence[Path], runs: Sequence[Run]) -> Advice | None:
    """Return the command that adds deciding seeds to the judged sweep, which then skips finished jobs.

    `open_verdicts`: {inconclusive recipe: number of further seeds that would decide}. None if it is empty, or unless
    the runs are of exactly one sweep.
    """
    if len(sweeps) != 1 or not open_verdicts or parent_runs_are_replicates(runs):  # which need new parent runs first
        return None
    few = [more for more in open_verdicts.values() if more <= MOST_ADVISED]
    more = max(few) if few else min(open_verdicts.values())
    seeds = sorted({run.seed for run in runs if run.folder.parent == sweeps[0]})
    following = max(seeds, default=-1) + 1
    command = command_with_seeds(sweeps[0], [*seeds, *range(following, following + more)])
    decides = tuple(name for name, needed in open_verdicts.items() if needed <= more)
    return Advice(command, more, decides) if command else None


def seeds_needed(
    gap: float, sd: float, margin: float, recipes: int = 1, pool: int = 1, confidence: float = 0.95,
    df: float = math.inf,
) -> int | None:  # fmt: skip
    """Return the smallest total number of seeds that decides with probability `POWER` if `gap` is the true gap, nats.

    `sd`: estimated SD of a pair's difference, nats. `gap` is chosen beforehand, never the observed one: power at the
    observed gap only restates its distance from the margin (J. M. Hoenig and D. M. Heisey, "The abuse of power", The
    American Statistician 55 (2001) 19-24). `df`: degrees of freedom of the estimate `sd`, infinite if it is known. None
    if more than `MOST_SEEDS` would be needed.
    """

    def enough(seeds: int) -> bool:
        return expected_power(gap, sd, df, seeds, margin, recipes, pool, confidence) >= POWER

    few, many = 1, 2
    while not enough(many):
        few, many = many, 2 * many
        if few > MOST_SEEDS:
            return None
    while many - few > 1:
        middle = (few + many) // 2
        few, many = (few, middle) if enough(middle) else (middle, many)
    return many if many <= MOST_SEEDS else None


def power(
    gap: float, sd: float, seeds: int, margin: float, recipes: int = 1, pool: int = 1, confidence: float = 0.95
) -> float:
    """Return the probability that a recipe with this true gap gets the correct verdict over so many seeds.

    `sd` is the true SD of a pair's difference; `recipes` are compared with the baseline together, and `pool` of them,
    with this spread, share a variance. The correct verdict is lossless for a gap below the margin, else lossy. For a
    recipe with its own variance the probability is that of a noncentral t. In a pool it depends on the variance that is
    used, so the probabilities given the variances are averaged over simulated ones (the mean is independent of them).
    """
    if sd == 0:
        return 1.0
    distance = abs(margin - gap) * math.sqrt(seeds) / sd
    return float(_power_at(np.array([distance]), seeds, recipes, pool, confidence)[0])


def expected_power(
    gap: float, sd: float, df: float, seeds: int, margin: float, recipes: int = 1, pool: int = 1,
    confidence: float = 0.95,
) -> float:  # fmt: skip
    """Return the probability of the correct verdict (`power`), averaged over what the true SD may be.

    `sd`: estimated SD of a pair's difference, nats, with `df` degrees of freedom; other arguments as of `power`.
    """
    if sd == 0 or math.isinf(df):
        return power(gap, sd, seeds, margin, recipes, pool, confidence)
    distances = abs(margin - gap) * math.sqrt(seeds) / (sd * _spread_factors(df))
    return float(_power_at(distances, seeds, recipes, pool, confidence).mean())


def _power_at(
    distances: NDArray[np.float64], seeds: int, recipes: int, pool: int, confidence: float
) -> NDArray[np.float64]:
    """Return the probability of the correct verdict, [n], at `distances` from the margin in standard errors, [n]."""
    if pool == 1:
        q = critical_value(recipes, seeds - 1, confidence)
        return np.asarray(1 - special.nctdtr(seeds - 1, distances, q))
    half = _drawn_widths(pool, seeds - 1, recipes, confidence)
    return np.array([special.ndtr(distance - half).mean() for distance in distances])


@lru_cache(maxsize=64)
def _drawn_widths(pool: int, df: int, recipes: int, confidence: float) -> NDArray[np.float64]:
    """Return half widths of intervals in true standard errors, [draws * pool], for simulated variances."""
    variances = _drawn_variances(pool, df)
    found = pool_variances(variances, np.full(variances.shape, df))
    each, which = np.unique(found.df, return_inverse=True)
    q = np.array([critical_value(recipes, float(nu), confidence) for nu in each])[which].reshape(variances.shape)
    return (q * np.sqrt(found.variance)).ravel()


@lru_cache(maxsize=64)
def _spread_factors(df: float) -> NDArray[np.float64]:
    """Return sqrt(df / chi^2(df)) at `SPREADS` points of equal probability, [SPREADS]."""
    above = (np.arange(SPREADS) + 0.5) / SPREADS
    return np.asarray(np.sqrt(df / special.chdtri(df, above)))


@lru_cache(maxsize=16)
def _drawn_variances(pool: int, df: int) -> NDArray[np.float64]:
    """Return sample variances of `pool` recipes' differences to one baseline, [draws, pool], true variance 1.

    Each is the mean square of `df` contrasts over seeds, which are independent, and share the baseline's noise.
    """
    draws = max(200, min(4000, 4_000_000 // ((pool + 1) * df)))  # fewer draws suffice with more degrees of freedom
    noise = np.random.default_rng(0).standard_normal((draws, pool + 1, df)) / math.sqrt(2)
    return np.asarray(((noise[:, 1:] - noise[:, :1]) ** 2).mean(-1))
