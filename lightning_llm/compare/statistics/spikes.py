"""The verdict on loss spikes, beside those on loss and on stability: from the steps with an `event`, paired by seed.

Spikes come in runs: one that spikes once may spike thirty times, so counts are no Poisson numbers, and a test that
takes them for such finds a difference in one such run. Two tests are exact all the same. Of seeds at which one of the
two runs spiked at all and the other did not: McNemar's, unconditional, as for failures (`stability`), for any number of
seeds. Of how many spikes: the signed differences of the seeds, whose signs are a coin's throw where recipe and baseline
are alike (R. A. Fisher, The Design of Experiments, 1935, section 21), of use from some five seeds on. Each has half of
the recipe's share of the error.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

import numpy as np

from lightning_llm.compare.statistics.stability import (
    HIGHEST_COMMON_RATE,
    STABILITY_MARGIN,
    mcnemar,
    rate_interval,
    upper_bound,
)

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
