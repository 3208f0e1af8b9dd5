"""The baseline's law, L(N, D) = E + A N^-alpha + B D^-beta, in nats per token; and tests of the scatter about it.

J. Hoffmann et al., "Training Compute-Optimal Large Language Models" (2022, arXiv 2203.15556), equation 2, with N all
parameters and D the tokens of a run with a schedule that ends there. Fitted by least squares on the losses themselves,
because gaps are measured in nats, with a weak prior on the two exponents: over a ladder of a few factors of two in N
and D the exponents and E are hardly identifiable, and the fit would drift to an exponent of 0 or an E below 0.

Letters: R rungs, B simultaneous fits (starts, or draws of a bootstrap). Losses are [B, R]; parameters of the law [B,
5]: E, ln a, ln b, ln alpha, ln beta, with a = A N0^-alpha, b = B D0^-beta at the ladder's geometric mean size N0 and
tokens D0, so that all are of one order of magnitude.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import special

Array = NDArray[np.float64]

PARAMETERS = 5
PRIOR_EXPONENT = (0.35, 0.37)
"""alpha and beta of T. Besiroglu et al., "Chinchilla Scaling: A replication attempt" (2024, arXiv 2404.10102)."""
PRIOR_WIDTH = 0.5
"""SD of ln(exponent) in the prior. One SD is a factor of 1.6."""
LEAST_NOISE = 1e-3
"""Lower limit, in nats, of the SD of a rung's loss: a law with three terms is not more accurate than that."""
STEPS, FEW_STEPS = 60, 10
"""Maximum steps of the descent: of `fit_law`, and of `refit`, which starts at a fitted law and needs few."""


@dataclass(frozen=True)
class Rungs:
    """The measured rungs of a ladder as arrays, each [R]. A rung is one model size at one number of tokens.

    `parameters`: of the model; `tokens`: of the run; `weights`: of the squared residuals, 1 / (SD in nats)^2.
    """

    parameters: Array
    tokens: Array
    weights: Array

    @property
    def centre(self) -> tuple[float, float]:
        """(N0, D0), the geometric means of the parameters and of the tokens."""
        return float(np.exp(np.log(self.parameters).mean())), float(np.exp(np.log(self.tokens).mean()))


@dataclass(frozen=True)
class Law:
    """B fitted laws L(N, D): `theta`, [B, 5], has the columns E, ln a, ln b, ln alpha, ln beta; `centre`: (N0, D0)."""

    theta: Array
    centre: tuple[float, float]

    def parts(self, parameters: Array | float, tokens: Array | float) -> tuple[Array, Array, Array]:
        """Return the three terms of the law at R places: E [B, 1], A N^-alpha [B, R], B D^-beta [B, R]; nats."""
        size, length = (
            np.log(np.atleast_1d(parameters) / self.centre[0]),
            np.log(np.atleast_1d(tokens) / self.centre[1]),
        )
        level, a, b, alpha, beta = (self.theta[:, place, None] for place in range(PARAMETERS))
        return level, np.exp(a - np.exp(alpha) * size), np.exp(b - np.exp(beta) * length)

    def loss(self, parameters: Array | float, tokens: Array | float) -> Array:
        """Return the loss L at R places, [B, R], nats per token."""
        return sum(self.parts(parameters, tokens), start=np.zeros(1))

    @property
    def beta(self) -> Array:
        """The exponent of the tokens, [B]."""
        return np.exp(self.theta[:, 4])

    def constants(self) -> dict[str, float]:
        """Return {"E", "A", "B", "alpha", "beta"} of the first law, for N in parameters, D in tokens and L in nats."""
        level, a, b, alpha, beta = (float(each) for each in self.theta[0])
        alpha, beta = float(np.exp(alpha)), float(np.exp(beta))
        return {
            "E": level,
            "A": float(np.exp(a)) * self.centre[0] ** alpha,
            "B": float(np.exp(b)) * self.centre[1] ** beta,
            "alpha": alpha,
            "beta": beta,
        }


def fit_law(rungs: Rungs, losses: Array) -> Law:
    """Return the least-squares law for the mean losses of the rungs, [R], nats: the best fit of several starts."""
    spread = max(float(np.ptp(losses)), 0.1)
    starts = [
        (losses.min() - share * spread, np.log(spread * split), np.log(spread * (1 - split)), np.log(al), np.log(be))
        for share in (0.2, 1.0, 3.0)
        for split in (0.3, 0.7)
        for al, be in ((0.2, 0.2), (0.35, 0.37), (0.7, 0.6))
    ]
    theta = np.array(starts)
    theta[:, 0] = np.maximum(theta[:, 0], 0.0)
    fitted, cost = _descend(rungs, np.broadcast_to(losses, (len(theta), len(losses))), theta)
    best = int(np.argmin(cost))
    return Law(fitted[best : best + 1], rungs.centre)


def refit(rungs: Rungs, losses: Array, law: Law) -> Law:
    """Return the law of each set of `losses`, [B, R]. Each fit starts at `law`, so it takes few steps."""
    theta, _ = _descend(rungs, losses, np.repeat(law.theta[:1], len(losses), axis=0), FEW_STEPS)
    return Law(theta, law.centre)


def _descend(rungs: Rungs, losses: Array, theta: Array, steps: int = STEPS) -> tuple[Array, Array]:
    """Minimize the cost of all fits at once by Levenberg-Marquardt; return the parameters and their cost.

    Each fit has its own damping; a step that does not lower the cost is rejected. E is kept at 0 or above.
    """
    theta, damping = theta.copy(), np.full(len(theta), 1e-2)
    residuals, jacobian = _residuals(rungs, losses, theta)
    cost = (residuals**2).sum(-1)
    diagonal = np.arange(PARAMETERS)
    for _ in range(steps):
        transposed = jacobian.swapaxes(1, 2)
        damped = transposed @ jacobian
        gradient = (transposed @ residuals[..., None])[..., 0]
        damped[:, diagonal, diagonal] *= 1 + damping[:, None]
        damped[:, diagonal, diagonal] += 1e-12
        tried = theta - np.clip(np.linalg.solve(damped, gradient[..., None])[..., 0], -1.0, 1.0)
        tried[:, 0] = np.maximum(tried[:, 0], 0.0)
        new, new_jacobian = _residuals(rungs, losses, tried)
        new_cost = (new**2).sum(-1)
        better = new_cost < cost
        gained = np.where(better, cost - new_cost, 0.0)
        theta = np.where(better[:, None], tried, theta)
        residuals = np.where(better[:, None], new, residuals)
        jacobian = np.where(better[:, None, None], new_jacobian, jacobian)
        damping = np.clip(np.where(better, damping / 5, damping * 4), 1e-9, 1e9)
        cost = np.where(better, new_cost, cost)
        if not (gained > 1e-8 * (1 + cost)).any() and (better | (damping > 1e6)).all():
            break
    return theta, cost


def _residuals(rungs: Rungs, losses: Array, theta: Array) -> tuple[Array, Array]:
    """Return residuals [B, R + 2], the prior's last, and their derivatives [B, R + 2, 5]."""
    law = Law(theta, rungs.centre)
    level, size_term, token_term = law.parts(rungs.parameters, rungs.tokens)
    root = np.sqrt(rungs.weights)
    alpha, beta = np.exp(theta[:, 3:4]), np.exp(theta[:, 4:5])
    size, length = np.log(rungs.parameters / rungs.centre[0]), np.log(rungs.tokens / rungs.centre[1])
    count = len(rungs.parameters)
    residuals = np.empty((len(theta), count + 2))
    residuals[:, :count] = root * (level + size_term + token_term - losses)
    residuals[:, count:] = (theta[:, 3:] - np.log(PRIOR_EXPONENT)) / PRIOR_WIDTH
    jacobian = np.zeros((len(theta), count + 2, PARAMETERS))
    jacobian[:, :count, 0] = root
    jacobian[:, :count, 1] = root * size_term
    jacobian[:, :count, 2] = root * token_term
    jacobian[:, :count, 3] = root * -alpha * size * size_term
    jacobian[:, :count, 4] = root * -beta * length * token_term
    jacobian[:, count, 3] = jacobian[:, count + 1, 4] = 1 / PRIOR_WIDTH
    return residuals, jacobian


PRIOR_DF = 3
"""Weight of the variance of other sizes in `own_variance`, in pairs of this size. With 3, noise that grows with size is
detected, and two seeds leave enough degrees of freedom."""


def pure_error(values: Array) -> tuple[float, int, float]:
    """Return the scatter of `values`, [rungs, seeds], about the mean of their rung.

    As (SD, degrees of freedom, sum of squares); the SD is NaN without two values on any rung. NaN marks a missing run.
    """
    squares, df = _within(values)
    total, total_df = float(squares.sum()), int(df.sum())
    return (math.sqrt(total / total_df) if total_df else math.nan), total_df, total


def _within(values: Array) -> tuple[Array, Array]:
    """Return each rung's sum of squares about its mean, and its degrees of freedom, [R] both."""
    counts = np.isfinite(values).sum(1)
    means = np.nansum(values, axis=1) / np.maximum(counts, 1)
    return np.nansum((values - means[:, None]) ** 2, axis=1), np.maximum(counts - 1, 0)


def lack_of_fit(between: float, between_df: int, within: float, within_df: int) -> float:
    """Return the p-value of the F test for lack of fit (R. A. Fisher, J. R. Stat. Soc. 85 (1922) 597-612).

    `between`: sum of squares of the rungs' means about the fit; `within`: of the runs about their rung's mean; each
    with its degrees of freedom. NaN if one of them has none.
    """
    if between_df < 1 or within_df < 1 or within == 0:
        return math.nan
    return float(special.fdtrc(between_df, within_df, between / between_df / (within / within_df)))


def unequal_lack_of_fit(terms: Array, values: Array, sizes: Array) -> float:
    """Return the p-value of a test for lack of fit with a separate variance per size; NaN if no rung has two pairs.

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
    """Return (variance of a pair's difference at one size in nats^2, its degrees of freedom).

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
