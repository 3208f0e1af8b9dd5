"""A gap in tokens: the number of baseline tokens that a recipe's D tokens are worth, from the baseline's losses.

The baseline was run for D / 2, D and 2 D tokens, for example, each with its own decay, at the same seeds. Between them
its loss is E + B D^-beta, with the beta at which the three mean losses lie on such a curve. This is the identity that
gives a speedup from two losses, ((L_worse - E) / (L_better - E))^(1 / beta), with E and beta from the baseline itself.
Given beta it is linear in the losses, b(D') = sum of w_k(D') b_k. The recipe's run at D, with loss r, is worth m D
tokens, where b(m D) = r.

The interval. For each ratio u the differences r_s - b_s(u D), one per seed, have mean zero if u is the true ratio,
whatever noise the runs of a seed share. So a t test over seeds is exact for normal noise, and the interval is every u
that it does not reject. For u near 1 that is E. C. Fieller's interval for a ratio of two means, of the gap to the slope
of the baseline's curve ("Some problems in interval estimation", J. R. Stat. Soc. B 16 (1954) 175-185); it also exists
where a ratio of means fails. Student's interval of a jackknife over seeds of ln(m) is almost the same where the slope
is known well, and too short where it is not: docs/reference/error_rates.md has simulations of both.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import special

Array = NDArray[np.float64]

REACH = 1.25
"""Largest factor by which losses are extrapolated beyond the token counts that were run."""
STEEPEST = 3.0
"""Largest exponent beta: a baseline with more curvature over a factor of 4 in tokens does not follow a power law."""
GRID = 801
"""Number of ratios tried, evenly spaced in ln: 0.2 % apart over a factor of 4, with roots interpolated between them."""


@dataclass(frozen=True)
class Curve:
    """The baseline's losses over tokens.

    `tokens`: ascending token counts, [K], two or three; `losses`: {seed: nats, [K]} of the seeds run at all of them;
    `at`: tokens of the judged runs, one of `tokens`; `settled`: seeds at which the baseline's runs at the other counts
    have ended, finished or not.
    """

    tokens: tuple[float, ...]
    losses: dict[int, Array]
    at: float
    settled: frozenset[int] = frozenset()

    @property
    def reach(self) -> tuple[float, float]:
        """(smallest, largest) ratio of tokens to `at` for which a loss is computed."""
        return self.tokens[0] / self.at / REACH, self.tokens[-1] / self.at * REACH

    @cached_property
    def beta(self) -> float:
        """The exponent for which the mean losses lie on E + B D^-beta; 0 (linear in ln D) for two token counts."""
        if len(self.tokens) < 3:
            return 0.0
        logs, means = np.log(np.array(self.tokens) / self.at), np.mean(list(self.losses.values()), axis=0)

        def bend(beta: float) -> float:  # increasing in beta; no root if the losses do not fall
            x = _stretched(logs, beta)
            return float((means[0] - means[1]) * (x[2] - x[1]) - (means[1] - means[2]) * (x[1] - x[0]))

        if bend(-STEEPEST) * bend(STEEPEST) >= 0:
            return 0.0
        low, high = -STEEPEST, STEEPEST
        rising = bend(high) > 0
        for _ in range(40):  # by halves; scipy.optimize takes half a second to import
            middle = (low + high) / 2
            low, high = (low, middle) if (bend(middle) > 0) == rising else (middle, high)
        return (low + high) / 2

    def weights(self, ratios: Array) -> Array:
        """Return weights w, [U, K], such that `w @ losses` are the losses at `ratios` ([U]) times `at` tokens.

        They are Lagrange polynomials in D^-beta.
        """
        logs = np.log(np.array(self.tokens) / self.at)
        nodes, where = _stretched(logs, self.beta), _stretched(np.log(ratios), self.beta)
        found = np.ones((len(ratios), len(nodes)))
        for k, node in enumerate(nodes):
            for other in np.delete(nodes, k):
                found[:, k] *= (where - other) / (node - other)
        return found

    def shares(self, seeds: Sequence[int], ratio: float) -> list[float]:
        """Return, for each of `seeds`, the loss at `ratio` times `at` tokens minus the loss at `at` tokens, nats."""
        weights = self.weights(np.array([ratio, 1.0]))
        return [float((weights[0] - weights[1]) @ self.losses[seed]) for seed in seeds]

    def within(self, seeds: Collection[int]) -> "Curve":
        """Return the curve with the losses of these seeds only."""
        return replace(self, losses={seed: losses for seed, losses in self.losses.items() if seed in seeds})

    def margins(self, share: float) -> dict[int, float]:
        """Return {seed: margin in nats} for a margin of `share` more tokens, 0.02 for 2 %.

        It is the increase of the baseline's loss from D tokens to D / (1 + share).
        """
        if not self.losses:
            return {}
        return dict(zip(self.losses, self.shares(list(self.losses), 1 / (1 + share)), strict=True))


@dataclass(frozen=True)
class EffectiveData:
    """Effective number of tokens of a recipe: `ratio` to its own, with interval [`low`, `high`], from `seeds` seeds.

    0.96: it reached the loss that the baseline reaches with 96 % of the tokens. A ratio or bound beyond the token
    counts of the baseline is 0 or infinite. The bounds are NaN without an interval.
    """

    ratio: float
    low: float
    high: float
    seeds: int
    confidence: float

    @property
    def more_tokens(self) -> float:
        """Share of further tokens that the recipe needs for the baseline's loss: 1 / ratio - 1, 0.041 for 4.1 %."""
        return _more(self.ratio)

    @property
    def more_tokens_interval(self) -> tuple[float, float]:
        """The interval of `more_tokens`, the lower bound first."""
        return _more(self.high), _more(self.low)

    def as_data(self) -> dict[str, Any]:
        """Return the entry "effective_data" of `compare.json`; bounds beyond the baseline's runs are null."""
        return {
            "ratio": self.ratio,
            "ci": [self.low or None, self.high],
            "more_tokens": self.more_tokens,
            "more_tokens_ci": list(self.more_tokens_interval),
            "seeds": self.seeds,
        }


def _more(ratio: float) -> float:
    """Return the share of further tokens for a ratio, infinite for a ratio of 0."""
    return 1 / ratio - 1 if ratio else math.inf


def _stretched(logs: Array, beta: float) -> Array:
    """Return (1 - D^-beta) / beta from ln(D), which is ln(D) for beta = 0."""
    return -np.expm1(-beta * logs) / beta if abs(beta) > 1e-6 else logs


def effective_data(losses: dict[int, float], curve: Curve, confidence: float = 0.95) -> EffectiveData | None:
    """Return how many tokens of the baseline a recipe's tokens are worth, from its `losses`, {seed: nats}.

    None if no seed has both a loss of the recipe and a curve of the baseline.
    """
    seeds = sorted(losses.keys() & curve.losses.keys())
    if not seeds:
        return None
    least, most = curve.reach
    ratios = np.exp(np.linspace(math.log(least), math.log(most), GRID))
    baseline = np.array([curve.losses[seed] for seed in seeds])  # [S, K]
    differences = np.array([losses[seed] for seed in seeds])[:, None] - baseline @ curve.weights(ratios).T  # [S, U]
    mean = differences.mean(0)
    ratio = _crossing(ratios, mean)
    if len(seeds) < 2:
        return EffectiveData(ratio, math.nan, math.nan, len(seeds), confidence)
    error = differences.std(0, ddof=1) / math.sqrt(len(seeds))
    quantile = float(special.stdtrit(len(seeds) - 1, 0.5 + confidence / 2))
    # `mean` rises with u, as the baseline's loss falls. Rejected from below: surely worse than u D tokens are.
    low = _crossing(ratios, mean + quantile * error)
    high = _crossing(ratios, mean - quantile * error, last=True)
    return EffectiveData(ratio, min(low, ratio), max(high, ratio), len(seeds), confidence)


def _crossing(ratios: Array, values: Array, *, last: bool = False) -> float:
    """Return the ratio at which `values` cross zero upwards: the first time, or the last.

    0 if they are above zero from the start, infinite if they never are.
    """
    if last:
        below = np.flatnonzero(values <= 0)
        place = int(below[-1]) + 1 if len(below) else 0
    else:
        above = np.flatnonzero(values > 0)
        place = int(above[0]) if len(above) else len(ratios)
    if place == 0:
        return 0.0
    if place == len(ratios):
        return math.inf
    before, after = values[place - 1], values[place]
    share = -before / (after - before) if after != before else 0.0
    return float(np.exp(np.log(ratios[place - 1]) + share * np.log(ratios[place] / ratios[place - 1])))
