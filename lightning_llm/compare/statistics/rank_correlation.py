"""How well one number ranks what another one ranks: Spearman's correlation, with an interval."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

CONFIDENCE = 0.95
FEWEST = 4
"""Points below which an interval says nothing."""


@dataclass(frozen=True)
class RankCorrelation:
    """Spearman's `rho` over `count` points, and its interval at 95 %; [-1, 1] where there are too few points."""

    rho: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, one: Sequence[float], other: Sequence[float]) -> "RankCorrelation":
        """Return it over pairs of numbers; nan where there are fewer than 2, or one of the two never varies.

        The interval is Fisher's transform with the variance of D. G. Bonett and T. A. Wright (Psychometrika 65 (2000)
        23): `(1 + rho^2 / 2) / (count - 3)`. Of a perfect order it is that of the next one, two neighbours exchanged,
        and reaches to the end: few points that happen to agree are no certainty.
        """
        count = len(one)
        if count < 2 or np.ptp(one) == 0 or np.ptp(other) == 0:
            return cls(math.nan, -1.0, 1.0, count)
        rho = float(stats.spearmanr(one, other).statistic)
        if count < FEWEST:
            return cls(rho, -1.0, 1.0, count)
        nearest = 1 - 12 / (count * (count**2 - 1))  # to a perfect order
        inner = max(-nearest, min(nearest, rho))
        half = float(stats.norm.ppf(0.5 + CONFIDENCE / 2)) * math.sqrt((1 + inner**2 / 2) / (count - 3))
        low, high = (math.tanh(math.atanh(inner) + side * half) for side in (-1, 1))
        return cls(rho, -1.0 if rho < inner else low, 1.0 if rho > inner else high, count)

    def words(self) -> str:
        """Return it for a terminal."""
        return f"{self.rho:+.2f} [{self.low:+.2f}, {self.high:+.2f}]"
