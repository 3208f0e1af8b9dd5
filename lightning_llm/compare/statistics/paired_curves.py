"""Intervals of paired differences at each validation of a run, and on each source of the validation text.

The model is that of the gap (`intervals.py`), applied to each step or source separately: the intervals are simultaneous
over the recipes that share a baseline, not over steps or sources. For a recipe judged at one of several declared looks
they use that look's confidence and seeds, like its own interval.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lightning_llm.compare.runs.losses import LOSS, Tail
from lightning_llm.compare.runs.pairing import Pair
from lightning_llm.compare.statistics.intervals import Array, simultaneous_intervals
from lightning_llm.compare.verdict import Verdict


@dataclass(frozen=True)
class Curve:
    """The gap of a recipe to the baseline along the run, at the validations that all of its pairs have.

    Each field has one entry per validation, ascending in `steps`. `low`, `high`: the interval with `confidence`, for
    each validation separately, NaN with one pair; `pairs`: number of pairs, as in the verdict's gap.
    """

    steps: tuple[int, ...]
    tokens: tuple[int, ...]
    gap: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    pairs: int
    confidence: float

    def as_data(self) -> dict[str, Any]:
        """Return the entry "curve" of a verdict in `compare.json`."""
        return {
            "steps": list(self.steps),
            "tokens": list(self.tokens),
            "gap": list(self.gap),
            "low": list(self.low),
            "high": list(self.high),
            "confidence": self.confidence,
        }


@dataclass(frozen=True)
class SourceGap:
    """The gap on one validation source with its interval [`low`, `high`], nats per token; NaN bounds with one pair."""

    gap: float
    low: float
    high: float


def kept_pairs(verdict: Verdict) -> list[Pair]:
    """Return the pairs over which the gap is averaged: neither run diverged, and the pair is no outlier."""
    return [pair for pair in verdict.sound_pairs if pair.run.seed not in verdict.judged.estimate.outlier_seeds]


def paired_curves(verdicts: Sequence[Verdict]) -> list[Curve]:
    """Return the curve of each verdict of one group; a verdict without pairs has an empty curve."""
    common = [_common_steps(verdict) for verdict in verdicts]
    steps = sorted({step for each in common for step in each})
    seeds = sorted({pair.run.seed for verdict in verdicts for pair in kept_pairs(verdict)})
    differences = np.full((len(steps), len(verdicts), len(seeds)), math.nan)  # [T, K, S]
    for recipe, (verdict, there) in enumerate(zip(verdicts, common, strict=True)):
        for pair in kept_pairs(verdict):
            for step in there:
                at = steps.index(step), recipe, seeds.index(pair.run.seed)
                differences[at] = difference(pair, verdict, step)
    gap, low, high = _intervals(verdicts, differences, seeds)
    found = []
    for recipe, (verdict, there) in enumerate(zip(verdicts, common, strict=True)):
        rows = [steps.index(step) for step in there]
        pairs = kept_pairs(verdict)
        found.append(
            Curve(
                steps=tuple(there),
                tokens=tuple(pairs[0].baseline.tokens.get(step, 0) for step in there) if pairs else (),
                gap=tuple(float(gap[row, recipe]) for row in rows),
                low=tuple(float(low[row, recipe]) for row in rows),
                high=tuple(float(high[row, recipe]) for row in rows),
                pairs=len(pairs),
                confidence=verdict.interval_confidence,
            )
        )
    return found


def source_gaps(verdicts: Sequence[Verdict]) -> list[dict[str, SourceGap]]:
    """Return {validation source: gap over the tail} of each verdict of one group (the sources of `gap_by_source`)."""
    sources = sorted({source for verdict in verdicts for source in verdict.gap_by_source})
    seeds = sorted({pair.run.seed for verdict in verdicts for pair in kept_pairs(verdict)})
    differences = np.full((len(sources), len(verdicts), len(seeds)), math.nan)  # [sources, K, S]
    for recipe, verdict in enumerate(verdicts):
        for row, source in enumerate(sources):
            tail = verdict.judged.measured.tail
            if tail is None or source not in verdict.gap_by_source:
                continue
            own = Tail(f"{LOSS}/{source}", tail.steps)
            for pair in kept_pairs(verdict):
                differences[row, recipe, seeds.index(pair.run.seed)] = own.of(pair.run) - own.of(pair.baseline)
    gap, low, high = _intervals(verdicts, differences, seeds)
    return [
        {
            source: SourceGap(*(float(each[row, recipe]) for each in (gap, low, high)))
            for row, source in enumerate(sources)
            if math.isfinite(gap[row, recipe])
        }
        for recipe in range(len(verdicts))
    ]


def difference(pair: Pair, verdict: Verdict, step: int) -> float:
    """Return the recipe's metric minus the baseline's at the validation after `step`; above 0 is worse."""
    tail = verdict.judged.measured.tail
    at = Tail(verdict.terms.metric, (step,), bool(tail and tail.higher_is_better))
    return at.of(pair.run) - at.of(pair.baseline)


def _common_steps(verdict: Verdict) -> list[int]:
    metric = verdict.terms.metric
    found = [
        {step for step, loss in run.validations.get(metric, {}).items() if math.isfinite(loss)}
        for pair in kept_pairs(verdict)
        for run in (pair.run, pair.baseline)
    ]
    return sorted(set.intersection(*found)) if found else []


def _intervals(verdicts: Sequence[Verdict], differences: Array, seeds: Sequence[int]) -> tuple[Array, Array, Array]:
    """Return gap, low and high, [..., K], of `differences`, [..., K, S] over `seeds`.

    A recipe bitwise equal to the baseline has no spread and joins no pool. Recipes judged at a look are judged together
    with the others' results up to then.
    """
    gap, low, high = (np.full(differences.shape[:-1], math.nan) for _ in range(3))
    if not differences.size:
        return gap, low, high
    same = np.array([verdict.judged.measured.identical for verdict in verdicts])
    spread = np.where(same[:, None], math.nan, differences)
    looks = [None if verdict.sequential is None else verdict.sequential.levels for verdict in verdicts]
    for look in dict.fromkeys(looks):
        here = [place for place, other in enumerate(looks) if other == look]
        sequential = verdicts[here[0]].sequential
        seen = [sequential is None or seed in sequential.seeds for seed in seeds]
        found = simultaneous_intervals(np.where(seen, spread, math.nan), verdicts[here[0]].interval_confidence)
        for into, values in ((gap, found.gap), (low, found.low), (high, found.high)):
            into[..., here] = np.where(same, 0.0, values)[..., here]
    return gap, low, high
