"""A gap as tokens: what a recipe's D tokens are worth, read off the baseline's own losses at other numbers of tokens.

The baseline was run for D / 2, D and 2 D tokens, say, each with a decay of its own, at the same seeds. Between them its
loss is E + B D^-beta with the beta at which the three mean losses lie on such a curve: the identity by which a speedup
is read from two losses, ((L_worse - E) / (L_better - E))^(1 / beta), with E and beta from the baseline itself. Given
beta it is linear in the losses, b(D') = sum of w_k(D') b_k. The recipe's run at D, of loss r, is worth m D tokens where
b(m D) = r.

The interval. For each ratio u the differences r_s - b_s(u D), one per seed, have a mean of zero if u is the true one,
whatever noise a seed's runs share, so that a t test over seeds is exact for normal noise; the interval is every u that
it does not reject. For u near 1 that is E. C. Fieller's interval for a ratio of two means, of the gap to the slope of
the baseline's curve ("Some problems in interval estimation", J. R. Stat. Soc. B 16 (1954) 175-185), and it goes on
where a ratio of means will not do. Student's interval of a jackknife over seeds of ln(m) is all but the same where the
slope is known well, and too short where it is not: docs/reference/error_rates.md has both by simulation.
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
"""How far beyond the token counts that were run a loss is still read off, as a factor: a margin of 2 % below D / 2."""
STEEPEST = 3.0
"""Of the exponent: a baseline whose loss bends more over a factor of 4 in tokens is not falling as a law does."""
GRID = 801
"""Ratios that are tried, evenly in ln: over a factor of 4 they are 0.2 % apart, and roots are found between them."""


@dataclass(frozen=True)
class Curve:
    """The baseline's losses over tokens. `tokens`: token counts, ascending, [K], two or three; `losses`: {seed: nats,
    [K]}, of the seeds that were run at all of them; `at`: the tokens of the runs that are judged, one of `tokens`;
    `settled`: seeds at which the baseline's runs at the other counts came to an end, whatever end."""

    tokens: tuple[float, ...]
    losses: dict[int, Array]
    at: float
    settled: frozenset[int] = frozenset()

    @property
    def reach(self) -> tuple[float, float]:
        """The least and the largest ratio to `at` that a loss is read off for."""
        return self.tokens[0] / self.at / REACH, self.tokens[-1] / self.at * REACH

    @cached_property
    def beta(self) -> float:
        """The exponent at which the mean losses lie on E + B D^-beta; 0, a line in ln(D), of two token counts."""
        if len(self.tokens) < 3:
            return 0.0
        logs, means = np.log(np.array(self.tokens) / self.at), np.mean(list(self.losses.values()), axis=0)

        def bend(beta: float) -> float:  # rises with beta; where the losses themselves do not fall it has no root
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
        """Return w [U, K]: the loss at `ratios` [U] times `at` is `w @ losses`; Lagrange's, in D^-beta."""
        logs = np.log(np.array(self.tokens) / self.at)
        nodes, where = _stretched(logs, self.beta), _stretched(np.log(ratios), self.beta)
        found = np.ones((len(ratios), len(nodes)))
        for k, node in enumerate(nodes):
            for other in np.delete(nodes, k):
                found[:, k] *= (where - other) / (node - other)
        return found

    def shares(self, seeds: Sequence[int], ratio: float) -> list[float]:
        """Return, for each seed, the loss at `ratio` times `at` tokens less that at `at`, nats."""
        weights = self.weights(np.array([ratio, 1.0]))
        return [float((weights[0] - weights[1]) @ self.losses[seed]) for seed in seeds]

    def within(self, seeds: Collection[int]) -> "Curve":
        """Return the curve of these seeds alone."""
        return replace(self, losses={seed: losses for seed, losses in self.losses.items() if seed in seeds})

    def margins(self, share: float) -> dict[int, float]:
        """Return {seed: what the baseline loses with D / (1 + share) tokens, nats}: a margin of `share` more tokens."""
        if not self.losses:
            return {}
        return dict(zip(self.losses, self.shares(list(self.losses), 1 / (1 + share)), strict=True))


@dataclass(frozen=True)
class EffectiveData:
    """What the recipe's tokens are worth, as a share of them: `ratio` with [`low`, `high`], and `seeds` it is from.

    0.96: it reached what the baseline reaches with 96 % of the tokens. Where the bound or the ratio lies beyond what
    the baseline was run for it is 0 or infinite: not above, or not below, the last that was. NaN without an interval.
    """

    ratio: float
    low: float
    high: float
    seeds: int
    confidence: float

    @property
    def more_tokens(self) -> float:
        """The share of tokens more that the recipe needs to the baseline's loss, 0.041 for 4.1 %: 1 / ratio - 1."""
        return _more(self.ratio)

    @property
    def more_tokens_interval(self) -> tuple[float, float]:
        """`more_tokens` at the interval's two ends, the lower first."""
        return _more(self.high), _more(self.low)

    def as_data(self) -> dict[str, Any]:
        """Return what `compare.json` has of it; bounds that are beyond the baseline's runs are null."""
        return {
            "ratio": self.ratio,
            "ci": [self.low or None, self.high],
            "more_tokens": self.more_tokens,
            "more_tokens_ci": list(self.more_tokens_interval),
            "seeds": self.seeds,
        }


def _more(ratio: float) -> float:
    """Return the tokens more that a ratio stands for, infinite for a ratio of 0."""
    return 1 / ratio - 1 if ratio else math.inf


def _stretched(logs: Array, beta: float) -> Array:
    """Return (1 - D^-beta) / beta of ln(D), which is ln(D) itself where beta is 0."""
    return -np.expm1(-beta * logs) / beta if abs(beta) > 1e-6 else logs


def effective_data(losses: dict[int, float], curve: Curve, confidence: float = 0.95) -> EffectiveData | None:
    """Return what the recipe of `losses`, {seed: nats}, has made of its tokens; None without a seed in common."""
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

    0 where they are above it from the first, infinite where they never are.
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
