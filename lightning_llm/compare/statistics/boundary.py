"""Group-sequential boundaries: how much of the error each declared look may spend, and the confidence that takes.

K. K. G. Lan and D. L. DeMets, "Discrete sequential boundaries for clinical trials", Biometrika 70 (1983) 659-663: a
spending function says how much of the error alpha may be used up by a look after a share t of all seeds. Given it, the
critical value of each look follows from the joint law of the statistics over the looks: P(first beyond at look k) =
what is spent there. Paired t statistics, gap less margin over its standard error, are pivotal where the gap is the
margin: neither it nor the spread is in their joint law, so that can be drawn (seeded), for the very procedure that
judges: recipes against one baseline, variances pooled and guarded (`intervals.spread_of`).

What is returned is the confidence that each look's intervals are taken at. Intervals at these confidences hold together
over all looks and recipes, whenever one stops and for whatever reason: the repeated confidence intervals of C. Jennison
and B. W. Turnbull, J. R. Stat. Soc. B 51 (1989) 305-361. At one look they are those of `intervals.py`.
"""

import math
from functools import lru_cache
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray
from scipy import special  # and not stats, which takes a second to import

from lightning_llm.compare.statistics.intervals import spread_of

Spending = Literal["linear", "pocock", "obrien_fleming"]
SPENDINGS: tuple[Spending, ...] = get_args(Spending)
DRAWS = 50_000
"""Sweeps that a boundary is made from: an error of 0.05 is met to 0.001 (its standard error)."""
MOST_NUMBERS = 20_000_000
"""That are drawn at once: fewer sweeps for many recipes."""
LEAST_SPENT = 1e-5
"""A look of less has intervals at this error: it never decides, and adds no more than that to the whole."""


def spent(spending: Spending, share: float, alpha: float) -> float:
    """Return how much of the error `alpha`, two-sided, is spent after `share` of all seeds (0 to 1).

    linear: alpha t (K. Kim and D. L. DeMets, Biometrika 74 (1987) 149-154, with rho = 1). pocock: alpha ln(1 + (e - 1)
    t), obrien_fleming: 4 - 4 Phi(z(1 - alpha / 4) / sqrt(t)), both Lan and DeMets (1983), whose names say which
    boundary of equal looks they come near.
    """
    if spending == "linear":
        return alpha * share
    if spending == "pocock":
        return alpha * math.log(1 + (math.e - 1) * share)
    return float(4 * special.ndtr(-special.ndtri(1 - alpha / 4) / math.sqrt(share)))


def increments(looks: tuple[int, ...], alpha: float, spending: Spending) -> tuple[float, ...]:
    """Return what each look, after so many seeds, spends of `alpha`; together all of it."""
    total = [spent(spending, seeds / looks[-1], alpha) for seeds in looks]
    return tuple(now - before for now, before in zip(total, [0.0, *total], strict=False))


@lru_cache(maxsize=64)
def boundary(
    looks: tuple[int, ...], recipes: int, confidence: float, spending: Spending, draws: int = DRAWS
) -> tuple[float, ...]:
    """Return the confidence that the intervals of each look are taken at, so that all hold with `confidence`.

    Args:
        looks: seeds at each, ascending, 2 at least.
        recipes: held against the baseline together.
        confidence: of all intervals at all looks together.
        spending: how the error is shared out over the looks.
        draws: simulated sweeps, fewer where there are many recipes (`MOST_NUMBERS`).
    """
    draws = max(2000, min(draws, MOST_NUMBERS // ((recipes + 1) * looks[-1])))
    runs = np.random.default_rng(0).standard_normal((draws, recipes + 1, looks[-1]))
    differences = runs[:, 1:] - runs[:, :1]
    inside = np.ones(draws, dtype=bool)
    found, total = [], 0.0
    for seeds, share in zip(looks, increments(looks, 1 - confidence, spending), strict=True):
        total += share
        ranks = _ranks(_smallest_levels(differences[..., :seeds]))
        due = round(total * draws) - int((~inside).sum())
        error = float(np.sort(ranks[inside])[due - 1]) if due > 0 else 0.0
        inside &= ranks > error
        found.append(1 - max(error, LEAST_SPENT))
    return tuple(found)


def _smallest_levels(differences: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the level at which the most distant recipe is just not zero, [n]; by one t each, which orders sweeps.

    Degrees of freedom differ where a recipe has left the pool.
    """
    spread = spread_of(differences)
    t = np.abs(spread.gap) / np.sqrt(spread.variance / spread.pairs)
    levels: NDArray[np.float64] = special.stdtr(spread.df, -t).min(-1)
    return levels


def _ranks(levels: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return levels as the share of all that are at most as large: uniform, as those of exact intervals at one look.

    The guard makes one look's intervals hold in more than their confidence. Taken as uniform, that stays in reserve, as
    it does at one look, for spreads that are less alike than those drawn here.
    """
    ranks = np.empty(len(levels))
    ranks[np.argsort(levels, kind="stable")] = np.arange(1, len(levels) + 1) / len(levels)
    return ranks
