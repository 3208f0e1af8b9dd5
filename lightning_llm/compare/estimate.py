"""From the pairs of a recipe to its verdict on loss, its verdict on stability and the combined decision.

Also the A/A floor: the noise between runs of one recipe and seed that differ only in rounding.
"""

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
    """Measured results of the recipe `label` over its `pairs`; `tail`: the validations at the end that are averaged.

    `differences`: {seed: nats per token, recipe minus baseline} of pairs in which neither run diverged.
    `diverged_seeds`, `baseline_diverged_seeds`: seeds at which the recipe's or the baseline's run diverged.
    `missing_seeds`: seeds at which the baseline's run finished and the recipe's did not.
    `identical`: the runs of every pair are bitwise equal. `unlearned`: (the baseline's loss, the required loss) if no
    baseline run has learned anything, so nothing can be concluded. `margins`: {seed: nats} of a margin in tokens, from
    the baseline's own runs at that seed; None for a margin in nats. `unpriced_seeds`: seeds of sound pairs without such
    a margin, which are not in `differences`.
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
        """Every seed that has a pair, including failed ones."""
        failed = {*self.diverged_seeds, *self.baseline_diverged_seeds}
        return sorted({*self.differences, *failed, *self.unpriced_seeds})


@dataclass(frozen=True)
class Estimate:
    """The `gap` of a recipe to the baseline with its interval [`low`, `high`], nats per token; NaN without pairs.

    It is the mean over `pairs` pairs in which neither run failed, without `outlier_seeds`. `sd`: of one pair's
    difference, with `df` degrees of freedom, as used by the interval; `pool`: number of recipes that share the
    variance; `pool_sd`: the shared SD, a lower limit of `sd`; `comparisons`: number of simultaneous intervals.
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
    """Results from which a verdict is made: on `loss` (by the interval alone), on `stability`, and both combined.

    `decision`: the combined decision. `margin`: the margin used, in nats; for a margin in tokens its mean over the
    seeds of the gap.
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
    """Return the measured results of the recipe `label` over its `pairs`, one per seed.

    `missing_seeds`: seeds at which only the baseline finished; `margins`: {seed: nats} for a margin in tokens, else
    None.
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
    """Return (lowest loss of the baseline, required loss); None if all of its runs diverged."""
    if tail is None:
        return None
    known = [pair.baseline for pair in pairs if not diverged(pair.baseline, tail, learnable=False)]
    return min(((tail.of(run), learned_below(run, tail.metric)) for run in known), default=None)


def _equal_bits(pair: Pair, metric: str) -> bool:
    """True if the two runs have the same losses throughout, so there is nothing to estimate."""
    ours, theirs = pair.run, pair.baseline
    return ours.validations[metric] == theirs.validations[metric] and ours.last_loss == theirs.last_loss


def judge_all(
    recipes: Sequence[Measured], floor_sd: float | None, terms: Terms, levels: LookLevels | None = None
) -> list[VerdictInputs]:
    """Return the results of each recipe of one group, by intervals and tests that are simultaneous over the recipes.

    `floor_sd`: noise of runs that differ only in rounding, nats, None if not known; `levels`: error rates of one of
    several declared looks, None for a single look.
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
    """Return the margin in nats; for a margin in tokens the mean over the seeds at which it is known."""
    if terms.token_margin is None:
        return terms.margin
    margins = {seed: nats for recipe in recipes for seed, nats in (recipe.margins or {}).items()}
    return math.fsum(margins.values()) / len(margins) if margins else terms.margin


def _decision(recipe: Measured, loss: Decision, stability: Stability) -> Decision:
    """Return the combined decision.

    Lossy if either verdict is bad. Lossless if the loss is, no run is missing, and no more seeds failed than of the
    baseline or so few that the failure rate is shown to be small. Inconclusive if the baseline has not learned.
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
    """Return the gap of each recipe with simultaneous intervals."""
    rows = [_row(recipe, out) for recipe, out in zip(recipes, outliers, strict=True)]
    seeds = sorted({seed for row in rows for seed in row})
    # Bitwise equal runs have no spread; in the pool they would make the spread of the others too small.
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
    """Return {seed: difference} of the pairs in the gap; for a margin in tokens including its noise.

    Such a margin is itself measured, from the baseline's other runs of the seed. "The gap is below it" means that the
    mean over seeds of difference minus margin is below 0, which a t test over seeds tests exactly: the ratios that it
    does not reject are Fieller's interval (`effective_data`). Subtracting from each difference the deviation of its
    seed's margin from the mean margin keeps the mean and gives it the spread of that statistic.
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
    """The A/A floor: noise between runs of one recipe and seed that differ only in the order of sums.

    `losses`: losses of the distinct runs of each group, averaged over the tail; `identical`: number of runs bitwise
    equal to another, which show no noise; `unlearned`: number of runs left out because their group has not learned;
    `keys`: the keys that differ.
    """

    losses: list[list[float]]
    identical: int
    keys: list[str]
    unlearned: int = 0

    @property
    def pairs(self) -> int:
        """Independent pairs, the degrees of freedom of `sd`: runs minus one, per group."""
        return sum(len(group) - 1 for group in self.losses)

    @property
    def sd(self) -> float | None:
        """SD of the difference between two runs that differ only in rounding, nats per token.

        For groups of two runs it is their root mean square difference. None without two distinct runs.
        """
        if not self.pairs:
            return None
        squares = math.fsum((len(group) - 1) * variance(group) for group in self.losses)
        return math.sqrt(2 * squares / self.pairs)

    def as_data(self, family: ComparisonGroup) -> dict[str, Any]:
        """Return one entry of "aa" in `compare.json`."""
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
    """Return the A/A floor of a group by `metric`, without runs that diverged or learned nothing.

    The distance between runs that learn nothing is not informative about runs that learn.
    """
    losses, identical, unlearned, keys = [], 0, 0, set()
    for group in family.aa_groups:
        whole = [run for run in group if not run.diverged]  # a run that ended early has few steps in common
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
