"""Group-sequential boundaries: the share of the error for each declared look, and the confidence that results.

K. K. G. Lan and D. L. DeMets, "Discrete sequential boundaries for clinical trials", Biometrika 70 (1983) 659-663: a
spending function gives the part of the error alpha that may be used up by a look after a share t of all seeds. The
critical value of each look then follows from the joint distribution of the statistics over the looks: P(first beyond at
look k) = the error spent there. Paired t statistics, gap minus margin over its standard error, are pivotal if the gap
equals the margin: their joint distribution depends neither on it nor on the spread. So it can be simulated (seeded) for
the exact procedure that judges: recipes against one baseline, with guarded pooled variances (`intervals.spread_of`).

The result is the confidence of each look's intervals. Intervals at these confidences hold jointly over all looks and
recipes, whenever one stops and for whatever reason: the repeated confidence intervals of C. Jennison and B. W.
Turnbull, J. R. Stat. Soc. B 51 (1989) 305-361. With one look they are those of `intervals.py`.
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
"""Number of simulated sweeps: with 50,000 an error of 0.05 has a standard error of 0.001."""
MOST_NUMBERS = 20_000_000
"""Largest number of random numbers drawn at once; for many recipes fewer sweeps are simulated."""
LEAST_SPENT = 1e-5
"""Smallest error of one look. A look with a smaller share has intervals at this error: it practically never decides,
and adds at most this much to the total error."""


def spent(spending: Spending, share: float, alpha: float) -> float:
    """Return the part of the two-sided error `alpha` that may be used by looks up to `share` of all seeds (0 to 1).

    linear: alpha t (K. Kim and D. L. DeMets, Biometrika 74 (1987) 149-154, with rho = 1). pocock: alpha ln(1 + (e - 1)
    t) and obrien_fleming: 4 - 4 Phi(z(1 - alpha / 4) / sqrt(t)), both from Lan and DeMets (1983), named after the
    boundaries of equally spaced looks that they approximate.
    """
    if spending == "linear":
        return alpha * share
    if spending == "pocock":
        return alpha * math.log(1 + (math.e - 1) * share)
    return float(4 * special.ndtr(-special.ndtri(1 - alpha / 4) / math.sqrt(share)))


def increments(looks: tuple[int, ...], alpha: float, spending: Spending) -> tuple[float, ...]:
    """Return the part of the error `alpha` that each look uses; the parts sum to `alpha`.

    `looks`: number of seeds at each look, ascending.
    """
    total = [spent(spending, seeds / looks[-1], alpha) for seeds in looks]
    return tuple(now - before for now, before in zip(total, [0.0, *total], strict=False))


@lru_cache(maxsize=64)
def boundary(
    looks: tuple[int, ...], recipes: int, confidence: float, spending: Spending, draws: int = DRAWS
) -> tuple[float, ...]:
    """Return the confidence of the intervals of each look, such that all of them hold jointly with `confidence`.

    Args:
        looks: number of seeds at each look, ascending, at least 2 looks.
        recipes: number compared with the baseline together.
        confidence: of all intervals at all looks together.
        spending: how the error is divided over the looks.
        draws: simulated sweeps, fewer for many recipes (`MOST_NUMBERS`).
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
    """Return the level at which the most distant recipe is just not zero, [n]; one t per sweep, which orders sweeps.

    Degrees of freedom differ if a recipe has left the pool.
    """
    spread = spread_of(differences)
    t = np.abs(spread.gap) / np.sqrt(spread.variance / spread.pairs)
    levels: NDArray[np.float64] = special.stdtr(spread.df, -t).min(-1)
    return levels


def _ranks(levels: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return levels as the share of all levels that are at most as large: uniform, like those of exact intervals.

    The guard of the pool makes the intervals of one look conservative. Treating levels as uniform keeps that reserve,
    as with one look, for spreads less similar than those simulated here.
    """
    ranks = np.empty(len(levels))
    ranks[np.argsort(levels, kind="stable")] = np.arange(1, len(levels) + 1) / len(levels)
    return ranks
