"""The verdicts on stability (runs that fail where the baseline's do not) and on loss spikes, beside the one on loss.

A run failed where it diverged, or where its pair lies so far out that the seed was a catastrophe (`outlier_seeds`).
How many of S runs fail is binomial: its rate has an exact interval (C. J. Clopper and E. S. Pearson,
Biometrika 26 (1934) 404-413). Runs of one seed are a matched pair, so that only the seeds at which one of the two
failed tell them apart: McNemar's test, exact and unconditional (S. Suissa and J. J. Shuster, Biometrics 47 (1991)
361-372). The conditional one could never decide at three seeds: 3 of 3 against 0 of 3 is p = 1/8 there.

Spikes come in runs: one that spikes once may spike thirty times, so counts are no Poisson numbers, and a test that
takes them for such finds a difference in one such run. Two tests are exact all the same. Of seeds at which one of the
two runs spiked at all and the other did not: McNemar's, unconditional, as for failures, for any number of
seeds. Of how many spikes: the signed differences of the seeds, whose signs are a coin's throw where recipe and baseline
are alike (R. A. Fisher, The Design of Experiments, 1935, section 21), of use from some five seeds on. Each has half of
the recipe's share of the error.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from statistics import median
from typing import Any, Literal

import numpy as np
from scipy import special  # and not stats, which takes a second to import

HIGHEST_COMMON_RATE = 0.3
"""The failure rate, common to recipe and baseline, up to which the test holds its level. Of a baseline that shows a
higher one no bound is assumed."""
STABILITY_MARGIN = 0.1
"""A recipe is as stable as the baseline where its rate of failing at seeds where the baseline does not is shown to be
below this: by 29 seeds without such a failure, by 46 with one."""
OUTLIER_FACTOR = 10.0
"""How many times as far out as all else an outlier lies (`outlier_seeds`)."""
FEWEST_TO_STAND_OUT_FROM = 2
"""Pairs, of this recipe or of others, that have to be near before one can be called far."""

Steadiness = Literal["as stable", "unstable", "open"]


@dataclass(frozen=True)
class Stability:
    """`failed`, `baseline_failed`: seeds at which the recipe's, or the baseline's, run failed, of `seeds` paired ones.

    `p`: of failing more often than the baseline, one-sided; `level`: below which that decides, one recipe's share.
    """

    seeds: int
    failed: tuple[int, ...]
    baseline_failed: tuple[int, ...]
    p: float
    level: float
    confidence: float

    @property
    def recipe_alone(self) -> int:
        """At how many seeds the recipe failed and the baseline did not."""
        return len(set(self.failed) - set(self.baseline_failed))

    @property
    def baseline_alone(self) -> int:
        """At how many seeds it was the other way round."""
        return len(set(self.baseline_failed) - set(self.failed))

    @property
    def verdict(self) -> Steadiness:
        """Unstable by the test; as stable where the rate of failing where the baseline does not is below the margin."""
        if self.p <= self.level:
            return "unstable"
        return "as stable" if upper_bound(self.recipe_alone, self.seeds, 1 - self.level) <= STABILITY_MARGIN else "open"

    @property
    def allows_lossless(self) -> bool:
        """Whether the recipe failed at no more seeds than the baseline, or is shown to fail hardly more often."""
        return self.verdict == "as stable" or (self.verdict == "open" and self.recipe_alone <= self.baseline_alone)

    def as_data(self) -> dict[str, Any]:
        """Return what `compare.json` has under "stability"."""
        return {
            "verdict": self.verdict,
            "seeds": self.seeds,
            "failed_seeds": list(self.failed),
            "rate_ci": list(rate_interval(len(self.failed), self.seeds, self.confidence)),
            "rate_upper_bound": upper_bound(len(self.failed), self.seeds, self.confidence),
            "baseline_failed_seeds": list(self.baseline_failed),
            "baseline_rate_ci": list(rate_interval(len(self.baseline_failed), self.seeds, self.confidence)),
            "discordant": [self.recipe_alone, self.baseline_alone],
            "p": self.p,
            "level": self.level,
        }


def judge_stability(
    seeds: int, failed: Sequence[int], baseline_failed: Sequence[int], recipes: int, confidence: float
) -> Stability:
    """Return the verdict on one of `recipes` that are held against the baseline together (Bonferroni)."""
    recipe_alone = len(set(failed) - set(baseline_failed))
    baseline_alone = len(set(baseline_failed) - set(failed))
    highest = HIGHEST_COMMON_RATE if len(baseline_failed) <= HIGHEST_COMMON_RATE * seeds else 0.5
    p = mcnemar(recipe_alone, baseline_alone, seeds, highest)
    level = (1 - confidence) / recipes
    return Stability(seeds, tuple(sorted(failed)), tuple(sorted(baseline_failed)), p, level, confidence)


def rate_interval(failed: int, runs: int, confidence: float = 0.95) -> tuple[float, float]:
    """Return the exact two-sided interval of a rate of which `failed` of `runs` did (Clopper and Pearson 1934)."""
    tail = (1 - confidence) / 2
    low = float(special.betaincinv(failed, runs - failed + 1, tail)) if failed else 0.0
    high = float(special.betaincinv(failed + 1, runs - failed, 1 - tail)) if failed < runs else 1.0
    return low, high


def upper_bound(failed: int, runs: int, confidence: float = 0.95) -> float:
    """Return the exact one-sided upper bound of a rate; about 3 / `runs` where none did ("rule of three")."""
    return float(special.betaincinv(failed + 1, runs - failed, confidence)) if failed < runs else 1.0


@lru_cache(maxsize=4096)
def mcnemar(recipe_alone: int, baseline_alone: int, seeds: int, highest_rate: float = HIGHEST_COMMON_RATE) -> float:
    """Return the one-sided p-value of the recipe failing more often: exact, unconditional, paired by seed.

    Ordered by McNemar's z = (a - b) / sqrt(a + b). Under the null the recipe fails alone with probability r, and so
    does the baseline; p is the largest over r. r is at most x (1 - x) for a common rate x up
    to `highest_rate`: sharing initial weights and data, the two do not differ in fate more often than unrelated runs.
    """
    if recipe_alone <= baseline_alone:
        return 1.0
    seen = (recipe_alone - baseline_alone) / math.sqrt(recipe_alone + baseline_alone)
    r = np.linspace(0, highest_rate * (1 - highest_rate), 201)[1:]
    total = np.zeros_like(r)
    for discordant in range(1, seeds + 1):
        # The fewest of `discordant` seeds that are as extreme as what was seen where the recipe failed at them.
        fewest = math.ceil((discordant + seen * math.sqrt(discordant)) / 2 - 1e-9)
        if fewest <= discordant:
            tail = float(special.bdtrc(fewest - 1, discordant, 0.5))
            here = special.bdtr(discordant, seeds, 2 * r) - special.bdtr(discordant - 1, seeds, 2 * r)
            total += here * tail
    return float(min(total.max(), 1.0))


def seeds_to_show_stability(failed: int, level: float, most: int) -> int | None:
    """Return how many seeds in all show a rate below `STABILITY_MARGIN`, with no further failure; None above `most`."""
    return next((n for n in range(failed + 1, most + 1) if upper_bound(failed, n, 1 - level) <= STABILITY_MARGIN), None)


def outlier_seeds(differences: Mapping[int, float], others: Sequence[float], margin: float, floor: float) -> list[int]:
    """Return the seeds, fewer than half, whose pairs lie `OUTLIER_FACTOR` times as far out as all else.

    A catastrophe at one seed of S has t of about 1 at any S: the interval could never tell. "All else" is the margin,
    the A/A floor, this recipe's other pairs, and the median of `others`: what pairs of the other recipes come to.
    Distances are from zero, in nats, so that a recipe that is as far out at every seed has no outliers: it has a gap.
    """
    ranked = sorted(differences, key=lambda seed: abs(differences[seed]))
    typical = median(map(abs, others)) if others else 0.0
    for near in range(len(ranked) // 2 + 1, len(ranked)):
        if max(near, len(others)) < FEWEST_TO_STAND_OUT_FROM:
            continue
        scale = max(margin, floor, typical, abs(differences[ranked[near - 1]]))
        if abs(differences[ranked[near]]) > OUTLIER_FACTOR * scale:
            return sorted(ranked[near:])
    return []


SpikeDecision = Literal["more spikes", "as calm", "open"]
MOST_ENUMERATED, DRAWS = 14, 20_000
"""Seeds whose 2^S signs are all gone through; of more, so many are drawn."""


@dataclass(frozen=True)
class Spikes:
    """`counts`: {seed: (the recipe's, the baseline's)}, of `steps` optimizer steps each.

    `p_runs`, `p_counts`: of the two tests, one-sided; `level`: half of the recipe's share of the error, which the
    smaller of them must be below.
    """

    counts: dict[int, tuple[int, int]]
    steps: int
    p_runs: float
    p_counts: float
    level: float
    confidence: float

    @property
    def total(self) -> tuple[int, int]:
        """Spikes of the recipe's runs, and of the baseline's."""
        return sum(ours for ours, _ in self.counts.values()), sum(theirs for _, theirs in self.counts.values())

    @property
    def recipe_alone(self) -> int:
        """At how many seeds the recipe's run spiked and the baseline's did not."""
        return sum(ours > 0 and not theirs for ours, theirs in self.counts.values())

    @property
    def baseline_alone(self) -> int:
        """At how many it was the other way round."""
        return sum(theirs > 0 and not ours for ours, theirs in self.counts.values())

    @property
    def verdict(self) -> SpikeDecision:
        """More spikes by either test; as calm where spiking alone is shown to be rarer than the stability margin."""
        if min(self.p_runs, self.p_counts) <= self.level:
            return "more spikes"
        bound = upper_bound(self.recipe_alone, len(self.counts), 1 - 2 * self.level) if self.counts else 1.0
        return "as calm" if bound <= STABILITY_MARGIN and self.total[0] <= self.total[1] else "open"

    @property
    def words(self) -> str:
        """The counts and the verdict in a phrase; empty where no run had a spike."""
        ours, theirs = self.total
        if not ours + theirs:
            return ""
        decided = "" if self.verdict == "open" else f": {self.verdict}, p = {min(1, 2 * self.p):.2g}"
        return f"{ours} spikes, the baseline {theirs}{decided}"

    @property
    def p(self) -> float:
        """The smaller of the two."""
        return min(self.p_runs, self.p_counts)

    def as_data(self) -> dict[str, Any]:
        """Return what `compare.json` has under "spike_verdict"."""
        runs, spiked = len(self.counts), [sum(each[i] > 0 for each in self.counts.values()) for i in (0, 1)]
        return {
            "verdict": self.verdict,
            "counts": [{"seed": s, "recipe": ours, "baseline": theirs} for s, (ours, theirs) in self.counts.items()],
            "steps": self.steps,
            "spiked_runs": spiked[0],
            "spiked_runs_ci": list(rate_interval(spiked[0], runs, self.confidence)) if runs else None,
            "baseline_spiked_runs": spiked[1],
            "baseline_spiked_runs_ci": list(rate_interval(spiked[1], runs, self.confidence)) if runs else None,
            "discordant": [self.recipe_alone, self.baseline_alone],
            "p_runs": self.p_runs,
            "p_counts": self.p_counts,
            "level": self.level,
        }


def judge_spikes(
    counts: Mapping[int, tuple[int, int]], steps: int, recipes: int, confidence: float, error: float | None = None
) -> Spikes:
    """Return the verdict on one of `recipes` that are held against the baseline together.

    Args:
        counts: {seed: spikes of the recipe's run, of the baseline's}, of pairs of which neither run failed.
        steps: optimizer steps of each.
        recipes: share the error (Bonferroni).
        confidence: of the intervals of rates.
        error: of the tests, by which one of declared looks has a share; None: 1 less the confidence.
    """
    own = dict(sorted(counts.items()))
    alone = sum(ours > 0 and not theirs for ours, theirs in own.values())
    other = sum(theirs > 0 and not ours for ours, theirs in own.values())
    spiked = sum(theirs > 0 for _, theirs in own.values())
    # as for failures: of a baseline that spikes more often than the bound, no bound is assumed
    highest = HIGHEST_COMMON_RATE if spiked <= HIGHEST_COMMON_RATE * len(own) else 0.5
    p_runs = mcnemar(alone, other, len(own), highest) if own else 1.0
    p_counts = sign_flip(np.array([ours - theirs for ours, theirs in own.values()], dtype=float))
    level = (1 - confidence if error is None else error) / recipes / 2
    return Spikes(own, steps, p_runs, p_counts, level, confidence)


def sign_flip(differences: np.ndarray) -> float:
    """Return the one-sided p-value of a mean above 0 where each difference is as likely to have the other sign.

    Exact up to `MOST_ENUMERATED` differences that are not 0; beyond by seeded draws, the observed signs among them.
    """
    differences = differences[differences != 0]
    count = len(differences)
    if not count or differences.sum() <= 0:
        return 1.0
    if count <= MOST_ENUMERATED:
        signs = np.array(list(product((1, -1), repeat=count)))
        return float(np.mean(signs @ np.abs(differences) >= differences.sum() - 1e-9))
    signs = np.random.default_rng(0).choice((-1, 1), (DRAWS, count))
    beyond = int(np.sum(signs @ np.abs(differences) >= differences.sum() - 1e-9))
    return (beyond + 1) / (DRAWS + 1)
