"""The number of seeds that would decide, and how often a verdict is the right one.

The spread is itself an estimate: three pairs know it to a factor of two or so. A number of seeds that takes it for the
truth decides too seldom (in 58 to 77 % of cases where 80 % was promised), so the probability is averaged over what the
true spread may be: the variance is the estimate times df / chi^2(df), its fiducial distribution and the posterior under
Jeffreys' prior ("assurance": A. O'Hagan, J. W. Stevens and M. J. Campbell, Pharmaceut. Statist. 4 (2005) 187-201).
"""

import math
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy import special  # and not stats, which takes a second to import

from lightning_llm.compare.statistics.intervals import critical_value
from lightning_llm.compare.statistics.pool import pool_variances

POWER = 0.8
MOST_SEEDS = 999
PLANNED_GAP = 3
"""In margins: the gap of a recipe that is to be found lossy, when seeds are planned."""
SPREADS = 20
"""Points at which the distribution of the true spread is averaged, of equal probability."""


def power(
    gap: float, sd: float, seeds: int, margin: float, recipes: int = 1, pool: int = 1, confidence: float = 0.95
) -> float:
    """Return the probability that a recipe of this true gap gets the verdict it deserves over so many seeds.

    `sd` is the true one of a pair's difference; `recipes` are held against the baseline together, `pool` of them, of
    this spread, share a variance. The verdict deserved is lossless for a gap below the margin, else lossy. For a recipe
    with a variance of its own the probability is that of a noncentral t. In a pool it depends on which variance a
    recipe is judged by, so that probabilities given the variances are averaged over drawn ones (the mean is independent
    of them).
    """
    if sd == 0:
        return 1.0
    distance = abs(margin - gap) * math.sqrt(seeds) / sd
    return float(_power_at(np.array([distance]), seeds, recipes, pool, confidence)[0])


def expected_power(
    gap: float, sd: float, df: float, seeds: int, margin: float, recipes: int = 1, pool: int = 1,
    confidence: float = 0.95,
) -> float:  # fmt: skip
    """Return `power` averaged over the true spread, of which `sd` is an estimate with `df` degrees of freedom."""
    if sd == 0 or math.isinf(df):
        return power(gap, sd, seeds, margin, recipes, pool, confidence)
    distances = abs(margin - gap) * math.sqrt(seeds) / (sd * _spread_factors(df))
    return float(_power_at(distances, seeds, recipes, pool, confidence).mean())


def seeds_needed(
    gap: float, sd: float, margin: float, recipes: int = 1, pool: int = 1, confidence: float = 0.95,
    df: float = math.inf,
) -> int | None:  # fmt: skip
    """Return the fewest seeds in all that decide with probability `POWER` if `gap` is the true one.

    `gap` is one that is to be told from the margin, chosen beforehand, and never the one observed: power at what was
    observed says only how far from the margin that lay (J. M. Hoenig and D. M. Heisey, "The abuse of power", The
    American Statistician 55 (2001) 19-24). `df`: degrees of freedom that `sd` was estimated with, infinite for a known
    one. None where more than `MOST_SEEDS` would be needed.
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


def _power_at(
    distances: NDArray[np.float64], seeds: int, recipes: int, pool: int, confidence: float
) -> NDArray[np.float64]:
    """Return the probability of the right verdict, [n], at `distances` from the margin in standard errors, [n]."""
    if pool == 1:
        q = critical_value(recipes, seeds - 1, confidence)
        return np.asarray(1 - special.nctdtr(seeds - 1, distances, q))
    half = _drawn_widths(pool, seeds - 1, recipes, confidence)
    return np.array([special.ndtr(distance - half).mean() for distance in distances])


@lru_cache(maxsize=64)
def _drawn_widths(pool: int, df: int, recipes: int, confidence: float) -> NDArray[np.float64]:
    """Return half widths of intervals in true standard errors, [draws * pool], by drawn variances."""
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
    draws = max(200, min(4000, 4_000_000 // ((pool + 1) * df)))  # the more degrees of freedom the less they scatter
    noise = np.random.default_rng(0).standard_normal((draws, pool + 1, df)) / math.sqrt(2)
    return np.asarray(((noise[:, 1:] - noise[:, :1]) ** 2).mean(-1))
