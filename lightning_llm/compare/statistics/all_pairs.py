"""Every recipe against every other, including the baseline, with simultaneous intervals: `--all-pairs`.

The gap of two recipes is the mean of their differences by seed, as against the baseline. The intervals of all pairs of
M levels are simultaneous by the studentized range (J. W. Tukey, "The problem of multiple comparisons", 1953; C. W.
Dunnett, J. Am. Stat. Assoc. 75 (1980) 796-800 for unequal variances), with seeds as blocks. Variances of similar size
are pooled as in `intervals.py`, none below a pair's own. With M levels of one spread over S seeds that is the residual
of the two-way layout, with its (M - 1) (S - 1) degrees of freedom.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import special  # and not stats, which takes a second to import

from lightning_llm.compare.runs.losses import tail_of
from lightning_llm.compare.statistics.intervals import BASELINE_CORRELATION, Decision, decision_of, pool_variances
from lightning_llm.compare.verdict import Verdict

Array = NDArray[np.float64]


@dataclass(frozen=True)
class PairGap:
    """The `gap` of one recipe to another over `pairs` common seeds, with its interval [`low`, `high`], nats per token.

    The intervals of all pairs of recipes hold jointly. `controlled`: neither differs from the baseline in more than the
    factor. `setting`: the setting as text.
    """

    recipe: str
    other: str
    gap: float
    low: float
    high: float
    pairs: int
    controlled: bool
    setting: str
    margin: float
    damaged: bool = False
    """True if runs of the comparison are damaged, so that nothing is called lossless."""

    @property
    def decision(self) -> Decision:
        """The decision on `recipe` against `other`: "lossless", "lossy" or "inconclusive" at the margin."""
        found = decision_of(self.low, self.high, self.margin)
        return "inconclusive" if self.damaged and found == "lossless" else found

    def as_data(self) -> dict[str, Any]:
        """Return one entry of "all_pairs" in `compare.json`."""
        return {
            "recipe": self.recipe,
            "other": self.other,
            "setting": self.setting,
            "verdict": self.decision,
            "gap": self.gap,
            "ci": [self.low, self.high],
            "pairs": self.pairs,
            "controlled": self.controlled,
        }


def all_pairs(verdicts: Sequence[Verdict], damaged: bool = False) -> list[PairGap]:
    """Return the gap of every recipe to every other, including the baseline, in the verdicts of one group.

    Each pair occurs once. Runs that failed are left out. A recipe whose baseline has not learned has no pairs.
    `damaged`: there are damaged runs in the comparison, so nothing is called lossless.
    """
    verdicts = [each for each in verdicts if each.judged.measured.unlearned is None]
    if not verdicts:
        return []
    terms, setting = verdicts[0].terms, verdicts[0].family.text
    baseline = verdicts[0].factor.baseline_label
    kept = {
        verdict.name: [p for p in verdict.sound_pairs if p.run.seed not in verdict.judged.estimate.outlier_seeds]
        for verdict in verdicts
    }
    runs = [run for pairs in kept.values() for pair in pairs for run in (pair.run, pair.baseline)]
    tail = tail_of(runs, terms.metric, terms.tail_share)
    if tail is None:
        return []
    losses = {baseline: {pair.run.seed: tail.of(pair.baseline) for pairs in kept.values() for pair in pairs}}
    losses |= {name: {pair.run.seed: tail.of(pair.run) for pair in pairs} for name, pairs in kept.items()}
    controlled = {baseline: True} | {verdict.name: verdict.controlled for verdict in verdicts}
    seeds = sorted({seed for own in losses.values() for seed in own})
    matrix = np.array([[own.get(seed, math.nan) for seed in seeds] for own in losses.values()])
    gap, low, high, pairs = pairwise_intervals(matrix, terms.confidence)
    names = list(losses)
    found = []
    for place, (first, second) in enumerate(combinations(range(len(names)), 2)):
        one, other = names[second], names[first]  # the later against the earlier, as recipes against the baseline
        found.append(
            PairGap(
                one, other, float(gap[place]), float(low[place]), float(high[place]), int(pairs[place]),
                controlled[one] and controlled[other], setting, terms.margin, damaged,
            )
        )  # fmt: skip
    return found


def pairwise_intervals(losses: Array, confidence: float = 0.95) -> tuple[Array, Array, Array, NDArray[np.int64]]:
    """Return (gap, low, high, number of common seeds) of all P pairs of levels, [..., P] each; later minus earlier.

    Pairs are in the order of `itertools.combinations`; all intervals hold jointly with `confidence`.

    Args:
        losses: [..., M, S] in nats, NaN if a level has no run at a seed.
    """
    levels = losses.shape[-2]
    first, second = (np.array(each) for each in zip(*combinations(range(levels), 2), strict=True))
    differences = losses[..., second, :] - losses[..., first, :]  # [..., P, S]
    there = np.isfinite(differences)
    pairs = there.sum(-1)
    with np.errstate(invalid="ignore", divide="ignore"):
        gap = np.where(there, differences, 0.0).sum(-1) / np.where(pairs > 0, pairs, np.nan)
        squares = (np.where(there, differences - gap[..., None], 0.0) ** 2).sum(-1)
    own_df = np.maximum(pairs - 1, 0)
    same = there.any(-1) & (squares == 0)  # bitwise equal runs have no spread and are not pooled
    own = np.where((own_df > 0) & ~same, squares / np.maximum(own_df, 1), np.nan)
    found = pool_variances(own, np.where(np.isfinite(own), own_df, 0), partial(_pooled_df, first=first, second=second))
    variance, df = found.variance, found.df
    q = np.full(df.shape, np.nan)
    valid = np.isfinite(variance)
    for each in np.unique(df[valid]):
        q[valid & (df == each)] = range_critical_value(levels, float(each), confidence)
    with np.errstate(invalid="ignore", divide="ignore"):
        half = np.where(same & (own_df > 0), 0.0, q * np.sqrt(variance / pairs))
    return gap, gap - half, gap + half, pairs


def _pooled_df(df: NDArray[np.int64], pool: NDArray[np.bool_], first: Array, second: Array) -> Array:
    """Return the degrees of freedom of the pooled variance, [...], by Satterthwaite as in `intervals.pooled_df`.

    Differences that share a level correlate with 1/2, others do not.
    """
    share = (first[:, None] == first) | (first[:, None] == second) | (second[:, None] == first)
    share = (share | (second[:, None] == second)) & ~np.eye(len(first), dtype=bool)
    own = np.where(pool, df, 0).astype(float)
    total = own.sum(-1)
    both = np.where(share, np.minimum(own[..., :, None], own[..., None, :]), 0.0).sum((-1, -2))
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(total**2 / (total + BASELINE_CORRELATION**2 * both))


@lru_cache(maxsize=1024)
def range_critical_value(levels: int, df: float, confidence: float = 0.95) -> float:
    """Return the critical value of Tukey's studentized range over sqrt(2), for all pairs of `levels` means.

    That is q with P(all |T_ij| <= q) = `confidence` if the means are equal, with `df` degrees of freedom.

    P(range <= w) = M integral phi(z) (Phi(z) - Phi(z - w))^(M - 1) dz, averaged over the scale of the variance's
    estimate, by Gauss quadrature (200 x 96 nodes): to 1e-6, tested against `scipy.stats.studentized_range`.
    """
    from scipy.optimize import brentq

    if levels == 2:
        return float(special.stdtrit(df, 0.5 + confidence / 2))
    nodes, weights = np.polynomial.legendre.leggauss(200)
    z, z_weights = 9 * nodes, 9 * weights * np.exp(-((9 * nodes) ** 2) / 2) / math.sqrt(2 * math.pi)
    u, u_weights = np.polynomial.legendre.leggauss(96)
    scale = np.sqrt(special.chdtri(df, (1 - u) / 2) / df)[:, None]  # [96, 1]

    def excess(q: float) -> float:
        width = q * math.sqrt(2) * scale
        inside = levels * (special.ndtr(z) - special.ndtr(z - width)) ** (levels - 1)  # [96, 200]
        return float(u_weights / 2 @ inside @ z_weights) - confidence

    least = float(special.stdtrit(df, 0.5 + confidence / 2))
    most = float(special.stdtrit(df, 1 - (1 - confidence) / (levels * (levels - 1))))
    return float(brentq(excess, least, most * (1 + 1e-6), xtol=1e-7))
