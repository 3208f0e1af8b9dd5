"""Scatter of runs about their rungs, and tests whether rungs scatter more about a fit."""

import math

import numpy as np
from scipy import special

from lightning_llm.ladder.law import Array

PRIOR_DF = 3
"""Weight of the scatter of other sizes, in pairs of this size: noise that grows with size is detected, and two seeds
keep enough degrees of freedom."""


def pure_error(values: Array) -> tuple[float, int, float]:
    """Return the SD about the rungs' means over [R, S], its degrees of freedom, and the sum of squares."""
    squares, df = _within(values)
    total, total_df = float(squares.sum()), int(df.sum())
    return (math.sqrt(total / total_df) if total_df else math.nan), total_df, total


def _within(values: Array) -> tuple[Array, Array]:
    """Return each rung's sum of squares about its mean, and its degrees of freedom, [R] both."""
    counts = np.isfinite(values).sum(1)
    means = np.nansum(values, axis=1) / np.maximum(counts, 1)
    return np.nansum((values - means[:, None]) ** 2, axis=1), np.maximum(counts - 1, 0)


def lack_of_fit(between: float, between_df: int, within: float, within_df: int) -> float:
    """Return p of the F test for lack of fit (R. A. Fisher, J. R. Stat. Soc. 85 (1922) 597-612)."""
    if between_df < 1 or within_df < 1 or within == 0:
        return math.nan
    return float(special.fdtrc(between_df, within_df, between / between_df / (within / within_df)))


def unequal_lack_of_fit(terms: Array, values: Array, sizes: Array) -> float:
    """Return p of a test for lack of fit with a separate variance per size; NaN if no rung has two pairs.

    The sum of squares of the rungs' means about the least squares fit is compared with its expectation if the fit is
    correct, from the pure error of each size (M. B. Brown and A. B. Forsythe, Technometrics 16 (1974) 129-132); both
    have the degrees of freedom of G. E. P. Box (Ann. Math. Stat. 25 (1954) 290-302, theorem 3.1). With one variance for
    all sizes this is Fisher's test.

    Args:
        terms: of each rung, [R, K].
        values: of its pairs, [R, S], NaN without a pair.
        sizes: of each rung, [R], any number that identifies the size.
    """
    on = np.isfinite(values).any(1)
    (squares, df), sizes = _within(values[on]), sizes[on]
    if not df.sum() or not squares.sum():
        return math.nan
    counts = df + 1
    weighted = np.sqrt(counts)[:, None] * terms[on] / np.abs(terms[on]).max(0)
    left = np.eye(len(counts)) - weighted @ np.linalg.pinv(weighted)  # residual matrix of the rungs' means, [R, R]
    means = np.nanmean(values[on], axis=1)
    between = float(((left @ (np.sqrt(counts) * means)) ** 2).sum())
    variances, doubt = np.empty(len(counts)), 0.0
    for size in np.unique(sizes):
        here = sizes == size
        known = here if df[here].any() else np.full(len(here), True)
        variances[here] = squares[known].sum() / df[known].sum()
        doubt += float((left.diagonal() * variances)[here].sum()) ** 2 / df[known].sum()
    expected = float((left.diagonal() * variances).sum())
    between_df = expected**2 / float(variances @ left**2 @ variances)
    return float(special.fdtrc(between_df, expected**2 / doubt, between / expected))


def own_variance(miss: Array, values: Array, prior: float) -> tuple[float, float]:
    """Return the variance of a pair at one size, nats^2, and its degrees of freedom.

    It is the variance of the pairs about their mean deviation from a prediction, moderated by `prior` with `PRIOR_DF`
    degrees of freedom (G. K. Smyth, Stat. Appl. Genet. Mol. Biol. 3 (2004) 3, section 3), and at least `prior`.

    Args:
        miss: measured minus predicted mean of each rung, nats, [R].
        values: of the rungs' pairs, [R, S], NaN without a pair.
        prior: variance of a pair at other sizes, nats^2.
    """
    counts = np.isfinite(values).sum(1)
    within, _ = _within(values)
    between = counts * (miss - np.average(miss, weights=counts)) ** 2
    own_df = int(counts.sum()) - 1
    moderated = (PRIOR_DF * prior + float(within.sum() + between.sum())) / (PRIOR_DF + own_df)
    return max(moderated, prior), float(PRIOR_DF + own_df)
