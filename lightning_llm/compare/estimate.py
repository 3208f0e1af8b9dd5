"""From a recipe's pairs to its gap and interval: also where its own pairs are too few to show how far they scatter."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lightning_llm.compare.losses import TAIL_SHARE, Tail, diverged, tail_of
from lightning_llm.compare.noise import Floor
from lightning_llm.compare.pairing import Pair
from lightning_llm.compare.statistics import (
    PLANNED_GAP,
    Intervals,
    critical_value,
    family_spread,
    seeds_needed,
    simultaneous_intervals,
)

STAND_IN_FACTOR = 3.0
"""How many times the A/A floor, or the pair's own wander where that is larger, the SD of a pair is taken to be where no
other recipe shows its spread. A floor is rounding noise alone, and a recipe helps one seed and hurts another: pairs
scattered by 1 to 3 floors at a learning rate of 4e-3, and by 20 to 150 at 2e-3, where rounding noise dies out. There
they scattered by 0.4 to 5 times their wander (docs/compare.md)."""
FEWEST_TO_WANDER = 4
"""Validations in the second half of a run: fewer show no wander, and one pair stays inconclusive."""


@dataclass(frozen=True)
class Terms:
    """What a verdict is asked for: `margin` in nats per token, `confidence` of all intervals of a family together."""

    margin: float = 0.01
    confidence: float = 0.95
    metric: str = "val_loss"
    tail_share: float = TAIL_SHARE


@dataclass(frozen=True)
class Recipe:
    """One recipe of a family on the way to its verdict. `differences`: {seed: nats}, of pairs that did not diverge.

    `pairs`: those that can be judged; `diverged_seeds`: of them, where the recipe lost its loss; `missing_seeds`: where
    its run did not come to its end and the baseline's did; `identical`: every pair is equal to the last bit; `wander`:
    of a single pair (`_wander`), NaN where there are more, or where it cannot be told.
    """

    label: str
    pairs: list[Pair]
    tail: Tail | None
    differences: dict[int, float]
    diverged_seeds: list[int]
    missing_seeds: list[int]
    identical: bool
    wander: float = math.nan


@dataclass(frozen=True)
class Estimate:
    """A recipe's gap in numbers; NaN where there is none.

    `pool`: recipes that share the variance; `claims`: recipes whose intervals hold together; `stand_in`: what takes the
    place of the spread between seeds where there is one pair (`_stand_in`): "floor alone", "floor", "family" or "".
    """

    gap: float
    low: float = math.nan
    high: float = math.nan
    sd: float = math.nan
    df: float = math.nan
    pool: int = 1
    claims: int = 1
    stand_in: str = ""


def measure(label: str, pairs: Sequence[Pair], missing_seeds: Sequence[int], terms: Terms) -> Recipe:
    """Return the recipe with its tail and its differences; pairs whose baseline has no finite tail are left out."""
    whole = [pair for pair in pairs if not pair.run.lost_its_loss]
    runs = [run for pair in whole for run in (pair.run, pair.baseline)]
    tail = tail_of(runs, terms.metric, terms.tail_share) if runs else None
    judged = [pair for pair in pairs if tail is None or math.isfinite(tail.of(pair.baseline))]
    lost = [pair for pair in judged if diverged(pair.run, tail, pair.baseline)]
    differences = {
        pair.run.seed: tail.of(pair.run) - tail.of(pair.baseline) for pair in judged if tail and pair not in lost
    }
    return Recipe(
        label=label,
        pairs=judged,
        tail=tail,
        differences=differences,
        diverged_seeds=sorted(pair.run.seed for pair in lost),
        missing_seeds=list(missing_seeds),
        identical=bool(differences) and not lost and all(_equal_bits(pair, terms.metric) for pair in judged),
        wander=_wander(judged[0], terms.metric) if len(judged) == 1 else math.nan,
    )


def _equal_bits(pair: Pair, metric: str) -> bool:
    """Whether the two runs had the same losses throughout: there is nothing to estimate."""
    ours, theirs = pair.run, pair.baseline
    return ours.validations[metric] == theirs.validations[metric] and ours.last_loss == theirs.last_loss


def estimates(recipes: Sequence[Recipe], floor: Floor, terms: Terms) -> list[Estimate]:
    """Return the gap of each recipe of one family, with intervals that hold together."""
    seeds = sorted({seed for recipe in recipes for seed in recipe.differences})
    # Runs of equal bits show no spread; in the pool they would only make it smaller for the others.
    rows = [{} if recipe.identical else recipe.differences for recipe in recipes]
    matrix = np.array([[row.get(seed, math.nan) for seed in seeds] for row in rows]).reshape(len(rows), -1)
    beside_others = any(len(row) > 1 for row in rows)
    alone = [
        len(row) == 1
        and floor.sd is not None
        and not recipe.diverged_seeds
        and (beside_others or math.isfinite(recipe.wander))
        for row, recipe in zip(rows, recipes, strict=True)
    ]
    intervals = simultaneous_intervals(matrix, terms.confidence, beside=sum(alone))
    claims = int((intervals.pairs > 1).sum()) + sum(alone)
    found = []
    for index, recipe in enumerate(recipes):
        if recipe.identical:
            found.append(Estimate(0.0, 0.0, 0.0, 0.0))
        elif alone[index]:
            found.append(_stand_in(float(intervals.gap[index]), recipe.wander, intervals, floor, claims, terms))
        else:
            found.append(_own(index, intervals, claims))
    return found


def _own(index: int, intervals: Intervals, claims: int) -> Estimate:
    every = (intervals.gap, intervals.low, intervals.high, intervals.sd, intervals.df)
    gap, low, high, sd, df = (float(each[index]) for each in every)
    pool = int(intervals.pooled.sum()) if intervals.pooled[index] else 1
    return Estimate(gap, low, high, sd, df, pool, claims)


def _wander(pair: Pair, metric: str) -> float:
    """Return how far the pair's difference strays from a straight line over the second half of its validations.

    The residual SD, in nats; NaN for fewer than `FEWEST_TO_WANDER` of them, or where one is not finite.
    """
    ours, theirs = pair.run.validations.get(metric, {}), pair.baseline.validations.get(metric, {})
    common = sorted(set(ours) & set(theirs))
    steps = [step for step in common if step > common[-1] / 2] if common else []
    differences = np.array([ours[step] - theirs[step] for step in steps])
    if len(steps) < FEWEST_TO_WANDER or not np.isfinite(differences).all():
        return math.nan
    residuals = differences - np.polynomial.Polynomial.fit(steps, differences, 1)(np.array(steps))
    return float(np.sqrt((residuals**2).sum() / (len(steps) - 2)))


def _stand_in(gap: float, wander: float, intervals: Intervals, floor: Floor, claims: int, terms: Terms) -> Estimate:
    """Return the estimate of one pair by what other runs know of the spread.

    Where other recipes of the family have two pairs and more, that is the wider of their spread, all pooled, and of the
    A/A floor; else `STAND_IN_FACTOR` times the larger of the floor and of the pair's own wander.
    """
    family_sd, family_df = family_spread(intervals)
    noise = floor.sd if floor.sd is not None else math.nan
    known = [("floor alone", STAND_IN_FACTOR * max(noise, wander), float(floor.pairs))]
    if family_df:
        known = [("floor", noise, float(floor.pairs)), ("family", family_sd, family_df)]
    widths = [(critical_value(claims, df, terms.confidence) * sd, sd, df, name) for name, sd, df in known]
    half, sd, df, name = max(widths)
    return Estimate(gap, gap - half, gap + half, sd, df, claims=claims, stand_in=name)


def plan(estimate: Estimate, terms: Terms) -> tuple[int | None, int | None]:
    """Return how many seeds in all would decide if the true gap is 0, and if it is `PLANNED_GAP` margins.

    By the spread as estimated, and with the recipes judged together and pooled as they are; None: more than
    `statistics.MOST_SEEDS`.
    """
    no_gap, lossy = (
        seeds_needed(gap, estimate.sd, terms.margin, estimate.claims, estimate.pool, terms.confidence)
        for gap in (0.0, PLANNED_GAP * terms.margin)
    )
    return no_gap, lossy
