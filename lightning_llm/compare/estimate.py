"""From a recipe's pairs to its verdict on loss, its verdict on stability, and the two together; the A/A floor."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import variance
from typing import Any

import numpy as np

from lightning_llm.compare.runs.differences import ROUNDING, all_differences
from lightning_llm.compare.runs.losses import Tail, diverged, has_learned, learned_below, tail_of
from lightning_llm.compare.runs.pairing import ComparisonGroup, Pair
from lightning_llm.compare.statistics.intervals import Decision, Intervals, decision_of, simultaneous_intervals
from lightning_llm.compare.statistics.stability import Stability, judge_stability, outlier_seeds
from lightning_llm.compare.terms import LookLevels, Terms
from lightning_llm.config.config_hash import below
from lightning_llm.tracking.reading import Run


@dataclass(frozen=True)
class Measured:
    """One recipe of a family as its runs came out.

    `differences`: {seed: nats} of pairs of which neither run diverged; `diverged_seeds`, `baseline_diverged_seeds`:
    where one did; `missing_seeds`: where the recipe's run did not come to its end and the baseline's did; `identical`:
    every pair is equal to the last bit; `unlearned`: (the baseline's loss, what it should be below) where no run of the
    baseline has learned anything, so that nothing follows for the recipe. Of a margin in tokens `margins`: {seed: nats}
    by the baseline's own runs at that seed, None of one in nats; `unpriced_seeds`: of sound pairs that have none, which
    are no part of `differences`.
    """

    label: str
    pairs: list[Pair] = field(default_factory=list)
    tail: Tail | None = None
    differences: dict[int, float] = field(default_factory=dict)
    diverged_seeds: list[int] = field(default_factory=list)
    baseline_diverged_seeds: list[int] = field(default_factory=list)
    missing_seeds: list[int] = field(default_factory=list)
    identical: bool = False
    unlearned: tuple[float, float] | None = None
    margins: dict[int, float] | None = None
    unpriced_seeds: list[int] = field(default_factory=list)

    @property
    def seeds(self) -> list[int]:
        """Every seed at which there is a pair, whatever became of it."""
        failed = {*self.diverged_seeds, *self.baseline_diverged_seeds}
        return sorted({*self.differences, *failed, *self.unpriced_seeds})


@dataclass(frozen=True)
class Estimate:
    """A recipe's gap over the seeds at which neither run failed, `outlier_seeds` left out; NaN where there is none.

    `sd`: of one pair's difference, with `df` degrees of freedom, as the interval has it; `pool`: recipes that share the
    variance; `pool_sd`: the SD that they share, which `sd` is at least; `comparisons`: intervals that hold together.
    """

    gap: float = math.nan
    low: float = math.nan
    high: float = math.nan
    sd: float = math.nan
    df: float = math.nan
    pool_sd: float = math.nan
    pool: int = 1
    comparisons: int = 1
    pairs: int = 0
    outlier_seeds: tuple[int, ...] = ()


@dataclass(frozen=True)
class VerdictInputs:
    """A recipe's verdict: `loss` by the interval alone, `stability`, and what the two come to, `decision`.

    `margin`: that it was held against, nats; of one in tokens the mean over the seeds that the gap is of.
    """

    measured: Measured
    estimate: Estimate
    loss: Decision
    stability: Stability
    decision: Decision
    margin: float = math.nan


def measure(
    label: str,
    pairs: Sequence[Pair],
    missing_seeds: Sequence[int],
    terms: Terms,
    margins: Mapping[int, float] | None = None,
) -> Measured:
    """Return what the recipe's pairs came to: tail, differences, and what became of each seed.

    `margins`: {seed: nats} of a margin in tokens.
    """
    runs = [run for pair in pairs for run in (pair.run, pair.baseline) if not run.diverged]
    tail = tail_of(runs, terms.metric, terms.tail_share)
    learned = any(has_learned(pair.baseline, tail) for pair in pairs)
    lost = {pair.run.seed for pair in pairs if diverged(pair.run, tail, learnable=learned)}
    baseline_lost = {pair.run.seed for pair in pairs if diverged(pair.baseline, tail, learnable=learned)}
    sound = [pair for pair in pairs if tail and pair.run.seed not in lost | baseline_lost]
    priced = [pair for pair in sound if margins is None or pair.run.seed in margins]
    return Measured(
        label=label,
        pairs=list(pairs),
        tail=tail,
        differences={pair.run.seed: tail.of(pair.run) - tail.of(pair.baseline) for pair in priced if tail},
        diverged_seeds=sorted(lost),
        baseline_diverged_seeds=sorted(baseline_lost),
        missing_seeds=list(missing_seeds),
        identical=bool(sound) and not lost and all(_equal_bits(pair, terms.metric) for pair in sound),
        unlearned=None if learned else _unlearned(pairs, tail),
        margins=None if margins is None else {pair.run.seed: margins[pair.run.seed] for pair in priced},
        unpriced_seeds=sorted(pair.run.seed for pair in sound if pair not in priced),
    )


def _unlearned(pairs: Sequence[Pair], tail: Tail | None) -> tuple[float, float] | None:
    """Return (the lowest loss of the baseline, what it should be below); None where all of its runs diverged."""
    if tail is None:
        return None
    known = [pair.baseline for pair in pairs if not diverged(pair.baseline, tail, learnable=False)]
    return min(((tail.of(run), learned_below(run, tail.metric)) for run in known), default=None)


def _equal_bits(pair: Pair, metric: str) -> bool:
    """Whether the two runs had the same losses throughout: there is nothing to estimate."""
    ours, theirs = pair.run, pair.baseline
    return ours.validations[metric] == theirs.validations[metric] and ours.last_loss == theirs.last_loss


def judge_all(
    recipes: Sequence[Measured], floor_sd: float | None, terms: Terms, levels: LookLevels | None = None
) -> list[VerdictInputs]:
    """Return the verdict on each recipe of one family; intervals and tests hold together.

    `levels`: of one declared look of several, over all of which they then hold; None: of the only look.
    """
    if not recipes:
        return []
    usual = _usual_margin(recipes, terms)
    outliers = [_outliers(recipe, recipes, floor_sd or 0.0, usual) for recipe in recipes]
    found = []
    confidence = levels.intervals if levels else terms.confidence
    for recipe, out, estimate in zip(recipes, outliers, _estimates(recipes, outliers, confidence), strict=True):
        failed = {*recipe.diverged_seeds, *(seed for seed in out if recipe.differences[seed] > 0)}
        baseline_failed = {*recipe.baseline_diverged_seeds, *(seed for seed in out if recipe.differences[seed] < 0)}
        stability = judge_stability(
            len(recipe.seeds), sorted(failed), sorted(baseline_failed), len(recipes), terms.confidence
        )
        if levels:
            stability = replace(stability, level=levels.failures / len(recipes))
        kept = [nats for seed, nats in (recipe.margins or {}).items() if seed not in out]
        margin = math.fsum(kept) / len(kept) if kept else usual
        loss = decision_of(estimate.low, estimate.high, margin)
        found.append(VerdictInputs(recipe, estimate, loss, stability, _decision(recipe, loss, stability), margin))
    return found


def _usual_margin(recipes: Sequence[Measured], terms: Terms) -> float:
    """Return the margin in nats; of one in tokens the mean over the seeds at which it is known."""
    if terms.token_margin is None:
        return terms.margin
    margins = {seed: nats for recipe in recipes for seed, nats in (recipe.margins or {}).items()}
    return math.fsum(margins.values()) / len(margins) if margins else terms.margin


def _decision(recipe: Measured, loss: Decision, stability: Stability) -> Decision:
    """Return the verdict on both counts.

    Lossy where either says so. Lossless where the loss says so and no more seeds failed than of the baseline's, or so
    few that the rate is shown to be small; and no run is missing that may have gone wrong. Nothing at all where the
    baseline has not learned: what does not train cannot be damaged.
    """
    if recipe.unlearned:
        return "inconclusive"
    if loss == "lossy" or stability.verdict == "unstable":
        return "lossy"
    return loss if stability.allows_lossless and not recipe.missing_seeds else "inconclusive"


def _outliers(recipe: Measured, recipes: Sequence[Measured], floor_sd: float, margin: float) -> list[int]:
    others = [value for other in recipes if other is not recipe for value in other.differences.values()]
    return outlier_seeds(recipe.differences, others, margin, floor_sd)


def _estimates(recipes: Sequence[Measured], outliers: Sequence[list[int]], confidence: float) -> list[Estimate]:
    """Return the gap of each recipe, with intervals that hold together."""
    rows = [_row(recipe, out) for recipe, out in zip(recipes, outliers, strict=True)]
    seeds = sorted({seed for row in rows for seed in row})
    # Runs of equal bits show no spread; in the pool they would only make it smaller for the others.
    spread = [{} if recipe.identical else row for recipe, row in zip(recipes, rows, strict=True)]
    matrix = np.array([[row.get(seed, math.nan) for seed in seeds] for row in spread]).reshape(len(rows), len(seeds))
    intervals = simultaneous_intervals(matrix, confidence)
    return [
        Estimate(0.0, 0.0, 0.0, 0.0, pool_sd=0.0, pairs=len(row))
        if recipe.identical
        else _estimate(index, intervals, tuple(out))
        for index, (recipe, row, out) in enumerate(zip(recipes, rows, outliers, strict=True))
    ]


def _row(recipe: Measured, outliers: Sequence[int]) -> dict[int, float]:
    """Return {seed: difference} of the pairs that the gap is of; of a margin in tokens with its noise in their spread.

    Such a margin is itself measured, by the baseline's other runs of the seed. "The gap is below it" is that a mean of
    difference less margin, seed by seed, is below 0, which a t test over seeds holds exactly: the set of ratios that it
    does not reject is Fieller's interval (`effective_data`). Each difference less how far the margin of its seed lies
    above their mean has the same mean as before, and that statistic's spread.
    """
    row = {seed: value for seed, value in recipe.differences.items() if seed not in outliers}
    if recipe.margins is None or not row:
        return row
    mean = math.fsum(recipe.margins[seed] for seed in row) / len(row)
    return {seed: value - (recipe.margins[seed] - mean) for seed, value in row.items()}


def _estimate(index: int, intervals: Intervals, outliers: tuple[int, ...]) -> Estimate:
    every = (intervals.gap, intervals.low, intervals.high, intervals.sd, intervals.df, intervals.pool_sd)
    gap, low, high, sd, df, pool_sd = (float(each[index]) for each in every)
    return Estimate(
        gap=gap, low=low, high=high, sd=sd, df=df, pool_sd=pool_sd,
        pool=int(intervals.members.sum()) if intervals.pooled[index] else 1,
        comparisons=max(1, int((intervals.pairs > 1).sum())),
        pairs=int(intervals.pairs[index]),
        outlier_seeds=outliers,
    )  # fmt: skip


@dataclass(frozen=True)
class Floor:
    """The run-to-run noise over groups of runs of one recipe and seed that differ in the order of sums alone.

    `losses`: the tail losses of each group's runs that differ at all; `identical`: runs equal to another to the last
    bit, which show no noise and are only counted; `unlearned`: runs left out because their group has learned nothing;
    `keys`: what the runs differ in.
    """

    losses: list[list[float]]
    identical: int
    keys: list[str]
    unlearned: int = 0

    @property
    def pairs(self) -> int:
        """Independent pairs, the degrees of freedom of `sd`: one less than runs, per group."""
        return sum(len(group) - 1 for group in self.losses)

    @property
    def sd(self) -> float | None:
        """SD of a pair's difference, whose mean is zero: for groups of two the root mean square difference."""
        if not self.pairs:
            return None
        squares = math.fsum((len(group) - 1) * variance(group) for group in self.losses)
        return math.sqrt(2 * squares / self.pairs)

    def as_data(self, family: ComparisonGroup) -> dict[str, Any]:
        """Return what `compare.json` has under "aa"."""
        return {
            "setting": family.setting,
            "floor": self.sd,
            "pairs": self.pairs,
            "losses": self.losses,
            "identical": self.identical,
            "unlearned": self.unlearned,
            "keys": self.keys,
            "runs": [[str(run.folder) for run in group] for group in family.aa_groups],
        }


def measure_floor(family: ComparisonGroup, metric: str, tail_share: float) -> Floor:
    """Return the family's noise floor over the tails of `metric`; runs that diverged or learned nothing are left out.

    How far apart runs land that learn nothing says nothing of how far apart those land that do.
    """
    losses, identical, unlearned, keys = [], 0, 0, set()
    for group in family.aa_groups:
        whole = [run for run in group if not run.diverged]  # one that ended early has few steps in common
        tail = tail_of(whole, metric, tail_share)
        learned = any(has_learned(run, tail) for run in whole)
        kept = [run for run in whole if tail is not None and not diverged(run, tail, learnable=learned)]
        if not learned:
            unlearned += len(kept)
            continue
        distinct: list[Run] = []
        for run in kept:
            if any(run.validations[metric] == other.validations[metric] for other in distinct):
                identical += 1
            else:
                distinct.append(run)
        if tail is not None and len(distinct) > 1:
            losses.append([tail.of(run) for run in distinct])
            keys |= {key for run in distinct[1:] for key in all_differences(distinct[0], run) if below(key, ROUNDING)}
    return Floor(losses, identical, sorted(keys), unlearned)
