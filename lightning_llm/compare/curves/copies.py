"""Two logs of one run: equal, shifted, rescaled or rounded copies of a curve, and seeds with exchanged labels."""

import math
from collections.abc import Sequence
from itertools import combinations

import numpy as np

from lightning_llm.base.errors import Problem
from lightning_llm.compare.curves.checks import LOWEST_RATIO, resolution
from lightning_llm.compare.curves.curve import LoggedCurve
from lightning_llm.compare.curves.smoothness import noise
from lightning_llm.compare.curves.table import Column

MOST_EQUAL = 0.5
"""Largest share of equal values, or of equal stretches, in the later half of two runs."""
STRETCH = 4
"""Changes in a stretch."""
FEWEST = 8
"""Points by which a shifted or rescaled copy is known."""
FINER = 5
"""Noise from point to point, in rounding steps, below which equal or affine values may be chance."""
CLOSEST = 0.02
"""Smallest difference of runs of two seeds, relative to their noise from point to point."""
TOGETHER, NOT_TOGETHER = 0.8, 0.4
"""Correlations of the noise of two training losses on the same batches, and on others."""
REMEDY = "Name two logs of different runs; of two real runs, log all digits."
BITS = 1 / math.log(2)


def copy_problems(curves: Sequence[LoggedCurve]) -> list[Problem]:
    """Return a problem for each curve that copies an earlier one, and for seeds that look exchanged."""
    problems: dict[str, Problem] = {}
    for first, second in combinations(curves, 2):
        if second.log.address not in problems and (how := _how_copied(first, second)):
            text = f"{how} {first.log.address} ({first.log.label}): both are logs of one run. {REMEDY}"
            problems[second.log.address] = Problem(second.log.address, text)
    return list(problems.values()) or _exchanged(curves)


def _how_copied(first: LoggedCurve, second: LoggedCurve) -> str:
    """Return how the later half of one curve repeats the other, as the start of a sentence; "" if it does not."""
    ours, theirs = _at_common(first, second)
    steps = resolution(first.finite), resolution(second.finite)
    if len(ours) >= 3 and np.array_equal(ours, theirs):
        return "has the same losses as"
    half = ours[len(ours) // 2 :], theirs[len(theirs) // 2 :]
    if len(half[0]) >= FEWEST:
        noises = noise(half[0]), noise(half[1])
        rounding = max(steps)
        if rounding < min(noises) / FINER and np.mean(half[0] == half[1]) > MOST_EQUAL:
            return "has mostly the same losses as"
        if _is_affine(*half, steps) and rounding < min(noises) / FINER:
            return "has, shifted, rescaled or rounded, the losses of"
        within = float(np.abs(half[1] - half[0]).max()) <= 0.51 * rounding + 1e-9
        if within and min(steps) < rounding / FINER and len(half[0]) >= 2 * FEWEST:
            return "has, rounded, the losses of"
        known = None not in (first.log.seed, second.log.seed)
        apart = float(np.std(half[1] - half[0]))
        if known and first.log.seed != second.log.seed and apart < CLOSEST * min(noises) and rounding < apart:
            return "has another seed than, but nearly the losses of,"
    return "repeats stretches of the losses of" if _repeats(first.finite, second.finite, max(steps)) else ""


def _at_common(first: LoggedCurve, second: LoggedCurve) -> tuple[Column, Column]:
    """Return the finite values of both curves at their common points."""
    _, ours, theirs = np.intersect1d(first.x, second.x, assume_unique=True, return_indices=True)
    values = first.values[ours], second.values[theirs]
    both = np.isfinite(values[0]) & np.isfinite(values[1])
    return values[0][both], values[1][both]


def _is_affine(ours: Column, theirs: Column, steps: tuple[float, float]) -> bool:
    """Return whether `theirs` is a + b `ours` up to the rounding of both."""
    spread = float(np.std(ours))
    if spread == 0:
        return False
    slope, offset = np.polyfit(ours - ours.mean(), theirs, 1)
    rest = np.abs(theirs - (slope * (ours - ours.mean()) + offset))
    allowed = 0.55 * (steps[1] + abs(slope) * steps[0]) + 5e-7 * np.abs(theirs).max()
    return bool(slope > 0.1 and rest.max() <= allowed)


def _repeats(ours: Column, theirs: Column, step: float) -> bool:
    """Return whether most stretches of changes in the later half of one curve occur in the other, at any place."""
    if min(len(ours), len(theirs)) < 2 * FEWEST or step > min(noise(ours), noise(theirs)) / FINER:
        return False
    unit = step or 1e-9
    changes = [np.round(np.diff(values) / unit).astype(np.int64) for values in (ours, theirs)]
    grams = [[tuple(each[at : at + STRETCH]) for at in range(len(each) - STRETCH + 1)] for each in changes]
    known = set(grams[0])
    late = grams[1][len(grams[1]) // 2 :]
    return sum(gram in known for gram in late) > MOST_EQUAL * len(late)


def _exchanged(curves: Sequence[LoggedCurve]) -> list[Problem]:
    """Return the problems of training losses that move with another seed's of the other arm, and not with their own."""
    training = [curve for curve in curves if curve.loss.kind == "training" and curve.log.seed is not None]
    by_label = {(curve.log.arm, curve.log.seed): curve for curve in training}
    problems = {}
    for one, other in combinations(training, 2):
        partner = by_label.get((other.log.arm, one.log.seed))
        if one.log.arm == other.log.arm or one.log.seed == other.log.seed or partner is None:
            continue
        if _together(one, other) > TOGETHER and _together(one, partner) < NOT_TOGETHER:
            text = (
                f"moves with {other.log.label} and not with {partner.log.label}, so their seeds look exchanged. "
                "Correct the labels; if the data of a seed differ between arms, leave the seeds out."
            )
            problems[one.log.address] = Problem(one.log.address, text)
    return list(problems.values())


def _together(one: LoggedCurve, other: LoggedCurve) -> float:
    """Return the correlation of the second differences of two curves; 0 with too few common points."""
    ours, theirs = _at_common(one, other)
    bends = [np.diff(values[len(values) // 5 :], 2) for values in (ours, theirs)]
    if len(bends[0]) < 3 * FEWEST or min(map(np.std, bends)) == 0:
        return 0.0
    return float(np.corrcoef(bends[0], bends[1])[0, 1])


def scale_problems(curves: Sequence[LoggedCurve], baseline: str) -> list[Problem]:
    """Return the problems of losses in another unit than the baseline's: a constant factor, or far below them."""
    problems = []
    for curve in curves:
        others = [other for other in curves if other.log.arm == baseline and curve.log.arm != baseline]
        for other in others:
            ours, theirs = _at_common(other, curve)
            if len(ours) < 3 or not np.all(ours > 0):
                continue
            ratio = theirs / ours
            late = float(np.median(ratio[len(ratio) // 2 :]))
            factor = any(abs(late * each - 1) < 0.01 for each in (BITS, 1 / BITS)) and np.std(ratio) < 0.02 * late
            if late < LOWEST_RATIO or factor:
                guess = "bits and nats" if factor else "another unit, tokenizer or column"
                text = (
                    f"its losses are {late:.3f} times those of {other.log.address}: {guess}. Log both in nats per "
                    "token, of the same tokenizer."
                )
                problems.append(Problem(curve.log.address, text))
                break
    return problems
