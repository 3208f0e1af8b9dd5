"""The verdicts on stability (runs that fail where the baseline's do not) and on loss spikes.

A run failed if it diverged, or if its pair is so far off that the seed was a catastrophe (`outlier_seeds`). The number
of failures in S runs is binomial: its rate has an exact interval (C. J. Clopper and E. S. Pearson, Biometrika 26 (1934)
404-413). Runs of one seed are a matched pair, so only seeds at which exactly one of the two failed are informative:
McNemar's test, exact and unconditional (S. Suissa and J. J. Shuster, Biometrics 47 (1991) 361-372). The conditional
test could never decide at three seeds: 3 of 3 against 0 of 3 gives p = 1/8.

Spikes cluster: a run that spikes once may spike thirty times. Counts are not Poisson, and a test that assumes so finds
a difference in one such run. Two tests are exact nevertheless. For seeds at which only one of the two runs spiked:
McNemar's unconditional test, as for failures, for any number of seeds. For the number of spikes: the signed differences
of the seeds, with random signs if recipe and baseline are equal (R. A. Fisher, The Design of Experiments, 1935, section
21), useful from about five seeds on. Each test has half of the recipe's share of the error.
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
"""Failure rate, common to recipe and baseline, up to which the test holds its level. No bound is assumed if the
baseline shows a higher rate."""
STABILITY_MARGIN = 0.1
"""A recipe is as stable as the baseline if its rate of failing at seeds at which the baseline does not is shown to be
below this: by 29 seeds without such a failure, by 46 with one."""
OUTLIER_FACTOR = 10.0
"""Factor by which the difference of an outlier exceeds everything else (`outlier_seeds`)."""
FEWEST_TO_STAND_OUT_FROM = 2
"""Number of normal pairs, of this or other recipes, needed before one can be an outlier."""

Steadiness = Literal["as stable", "unstable", "open"]


@dataclass(frozen=True)
class Stability:
    """The verdict on stability: does a recipe fail more often than the baseline, over `seeds` paired seeds?

    `failed`, `baseline_failed`: the seeds at which the recipe's and the baseline's run failed. `p`: one-sided p-value
    of the recipe failing more often; it is unstable if `p` is at most `level`, its share of the error. `confidence`: of
    the intervals of failure rates.
    """

    seeds: int
    failed: tuple[int, ...]
    baseline_failed: tuple[int, ...]
    p: float
    level: float
    confidence: float

    @property
    def recipe_alone(self) -> int:
        """Number of seeds at which only the recipe failed."""
        return len(set(self.failed) - set(self.baseline_failed))

    @property
    def baseline_alone(self) -> int:
        """Number of seeds at which only the baseline failed."""
        return len(set(self.baseline_failed) - set(self.failed))

    @property
    def verdict(self) -> Steadiness:
        """ "unstable" if the recipe is shown to fail more often, "as stable" if it is shown not to, else "open".

        As stable: its rate of failing at seeds at which the baseline does not is shown to be below `STABILITY_MARGIN`.
        """
        if self.p <= self.level:
            return "unstable"
        return "as stable" if upper_bound(self.recipe_alone, self.seeds, 1 - self.level) <= STABILITY_MARGIN else "open"

    @property
    def allows_lossless(self) -> bool:
        """True if the recipe may be called lossless: it failed no more often than the baseline, or is as stable."""
        return self.verdict == "as stable" or (self.verdict == "open" and self.recipe_alone <= self.baseline_alone)

    def as_data(self) -> dict[str, Any]:
        """Return the entry "stability" of `compare.json`."""
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
    """Return the verdict on the stability of a recipe, from the seeds at which it and the baseline failed.

    `seeds`: number of paired seeds; `recipes`: number compared with the baseline together, which share the error
    1 - `confidence` (Bonferroni).
    """
    recipe_alone = len(set(failed) - set(baseline_failed))
    baseline_alone = len(set(baseline_failed) - set(failed))
    highest = HIGHEST_COMMON_RATE if len(baseline_failed) <= HIGHEST_COMMON_RATE * seeds else 0.5
    p = mcnemar(recipe_alone, baseline_alone, seeds, highest)
    level = (1 - confidence) / recipes
    return Stability(seeds, tuple(sorted(failed)), tuple(sorted(baseline_failed)), p, level, confidence)


def rate_interval(failed: int, runs: int, confidence: float = 0.95) -> tuple[float, float]:
    """Return the exact two-sided interval (low, high) of a failure rate, given that `failed` of `runs` runs failed.

    Clopper and Pearson 1934.
    """
    tail = (1 - confidence) / 2
    low = float(special.betaincinv(failed, runs - failed + 1, tail)) if failed else 0.0
    high = float(special.betaincinv(failed + 1, runs - failed, 1 - tail)) if failed < runs else 1.0
    return low, high


def upper_bound(failed: int, runs: int, confidence: float = 0.95) -> float:
    """Return the exact one-sided upper bound of a failure rate, given that `failed` of `runs` runs failed.

    Without failures about 3 / `runs` ("rule of three").
    """
    return float(special.betaincinv(failed + 1, runs - failed, confidence)) if failed < runs else 1.0


@lru_cache(maxsize=4096)
def mcnemar(recipe_alone: int, baseline_alone: int, seeds: int, highest_rate: float = HIGHEST_COMMON_RATE) -> float:
    """Return the one-sided p-value of the recipe failing more often than the baseline, paired by seed.

    McNemar's test, exact and unconditional. `recipe_alone`, `baseline_alone`: seeds at which only that run failed.

    Ordered by McNemar's z = (a - b) / sqrt(a + b). Under the null the recipe fails alone with probability r, and so
    does the baseline; p is the maximum over r. r is at most x (1 - x) for a common rate x up to `highest_rate`: with
    shared initial weights and data, the two do not disagree more often than unrelated runs.
    """
    if recipe_alone <= baseline_alone:
        return 1.0
    seen = (recipe_alone - baseline_alone) / math.sqrt(recipe_alone + baseline_alone)
    r = np.linspace(0, highest_rate * (1 - highest_rate), 201)[1:]
    total = np.zeros_like(r)
    for discordant in range(1, seeds + 1):
        # The fewest of `discordant` seeds with failures of the recipe that are as extreme as observed.
        fewest = math.ceil((discordant + seen * math.sqrt(discordant)) / 2 - 1e-9)
        if fewest <= discordant:
            tail = float(special.bdtrc(fewest - 1, discordant, 0.5))
            here = special.bdtr(discordant, seeds, 2 * r) - special.bdtr(discordant - 1, seeds, 2 * r)
            total += here * tail
    return float(min(total.max(), 1.0))


def seeds_to_show_stability(failed: int, level: float, most: int) -> int | None:
    """Return the total number of seeds that shows a failure rate below `STABILITY_MARGIN` if no further run fails.

    `failed`: failures so far; `level`: one minus the confidence. None if more than `most` seeds are needed.
    """
    return next((n for n in range(failed + 1, most + 1) if upper_bound(failed, n, 1 - level) <= STABILITY_MARGIN), None)


def outlier_seeds(differences: Mapping[int, float], others: Sequence[float], margin: float, floor: float) -> list[int]:
    """Return the seeds, fewer than half, with a difference `OUTLIER_FACTOR` times as large as everything else.

    `differences`: {seed: nats}, recipe minus baseline; `others`: those of other recipes; `floor`: the A/A floor, nats.

    A catastrophe at one of S seeds has t of about 1 for any S, so the interval could never show it. "Everything else"
    is the margin, the A/A floor, this recipe's other pairs, and the median of `others`, the pairs of other recipes.
    Distances are from zero, in nats, so a recipe that is as far off at every seed has no outliers but a gap.
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
"""`sign_flip` enumerates all 2^S signs of up to MOST_ENUMERATED seeds; for more seeds it draws DRAWS of them."""


@dataclass(frozen=True)
class Spikes:
    """The verdict on loss spikes: does a recipe spike more often than the baseline?

    `counts`: {seed: (spikes of the recipe's run, of the baseline's)}, over `steps` optimizer steps each. `p_runs`:
    one-sided p-value of more runs with a spike; `p_counts`: of more spikes; `level`: half of the recipe's share of the
    error, with which the smaller of the two is compared.
    """

    counts: dict[int, tuple[int, int]]
    steps: int
    p_runs: float
    p_counts: float
    level: float
    confidence: float

    @property
    def total(self) -> tuple[int, int]:
        """(spikes of all runs of the recipe, spikes of all runs of the baseline)."""
        return sum(ours for ours, _ in self.counts.values()), sum(theirs for _, theirs in self.counts.values())

    @property
    def recipe_alone(self) -> int:
        """Number of seeds at which only the recipe's run spiked."""
        return sum(ours > 0 and not theirs for ours, theirs in self.counts.values())

    @property
    def baseline_alone(self) -> int:
        """Number of seeds at which only the baseline's run spiked."""
        return sum(theirs > 0 and not ours for ours, theirs in self.counts.values())

    @property
    def verdict(self) -> SpikeDecision:
        """ "more spikes" if either test shows it, "as calm" if the recipe is shown not to spike more, else "open".

        As calm: its rate of spiking at seeds at which the baseline does not is shown to be below `STABILITY_MARGIN`.
        """
        if min(self.p_runs, self.p_counts) <= self.level:
            return "more spikes"
        bound = upper_bound(self.recipe_alone, len(self.counts), 1 - 2 * self.level) if self.counts else 1.0
        return "as calm" if bound <= STABILITY_MARGIN and self.total[0] <= self.total[1] else "open"

    @property
    def text(self) -> str:
        """The counts and the verdict as text: "3 spikes, the baseline 0"; "" without any spikes."""
        ours, theirs = self.total
        if not ours + theirs:
            return ""
        decided = "" if self.verdict == "open" else f": {self.verdict}, p = {min(1, 2 * self.p):.2g}"
        return f"{ours} spikes, the baseline {theirs}{decided}"

    @property
    def p(self) -> float:
        """The smaller p-value of the two tests."""
        return min(self.p_runs, self.p_counts)

    def as_data(self) -> dict[str, Any]:
        """Return the entry "spike_verdict" of `compare.json`."""
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
    """Return the verdict on the spikes of a recipe.

    Args:
        counts: {seed: spikes of the recipe's run, of the baseline's}, of pairs in which neither run failed.
        steps: optimizer steps of each.
        recipes: number compared with the baseline together, which share the error (Bonferroni).
        confidence: of the intervals of rates.
        error: error rate of the tests, for a declared look its share; None: 1 minus the confidence.
    """
    own = dict(sorted(counts.items()))
    alone = sum(ours > 0 and not theirs for ours, theirs in own.values())
    other = sum(theirs > 0 and not ours for ours, theirs in own.values())
    spiked = sum(theirs > 0 for _, theirs in own.values())
    # as for failures: no bound is assumed if the baseline spikes more often than the bound
    highest = HIGHEST_COMMON_RATE if spiked <= HIGHEST_COMMON_RATE * len(own) else 0.5
    p_runs = mcnemar(alone, other, len(own), highest) if own else 1.0
    p_counts = sign_flip(np.array([ours - theirs for ours, theirs in own.values()], dtype=float))
    level = (1 - confidence if error is None else error) / recipes / 2
    return Spikes(own, steps, p_runs, p_counts, level, confidence)


def sign_flip(differences: np.ndarray) -> float:
    """Return the one-sided p-value of `differences` with a mean above 0, by a sign-flip (permutation) test.

    Exact up to `MOST_ENUMERATED` nonzero differences; above that by seeded draws, including the observed signs.
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
