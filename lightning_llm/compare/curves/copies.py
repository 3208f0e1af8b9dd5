"""Detect logs of one run under several names: copies of a curve, parts of it, and seeds with exchanged labels.

A copy is equal, shifted, rescaled, rounded or filtered; parts are every k-th row, or one half after the other.
"""

import math
from collections.abc import Sequence
from itertools import combinations, permutations

import numpy as np
from numpy.typing import NDArray

from lightning_llm.base.errors import Problem
from lightning_llm.compare.curves.checks import LOWEST_RATIO, noise, resolution
from lightning_llm.compare.curves.curve import LoggedCurve
from lightning_llm.compare.curves.table import Column

MOST_EQUAL = 0.5
"""Largest share of equal values, or of equal stretches, in the later halves of two curves of different runs."""
STRETCH = 4
"""Number of changes from point to point in a stretch."""
POLYNOMIAL = 0x9E3779B97F4A7C15
"""An odd number with many digits, so that no two stretches of small changes have one polynomial."""
FEWEST = 8
"""Least number of common points for detecting a shifted or rescaled copy."""
FINER = 5
"""Least noise from point to point, in rounding steps, for equal or rescaled values to be no coincidence."""
CLOSEST = 0.02
"""Smallest difference of runs of two seeds, relative to their noise from point to point."""
PREDICTED = 1e-3
"""Largest part of the noise that a filter does not predict of a copy with some noise added."""
TOGETHER, NOT_TOGETHER = 0.8, 0.4
"""Correlations of the noise of two training losses on the same batches, and on others."""
SAME_LEVEL = 1.02
"""Largest ratio of a curve's losses to the baseline's with which it counts as being on the baseline's level."""
REMEDY = "Name two logs of different runs; of two real runs, log all digits."
BITS = 1 / math.log(2)
FEWEST_OF_PART = 16
"""Least number of points of a curve for detecting parts of one log."""
CLOSE = 1e-6
"""Largest difference of two points, in spacings, that counts as none."""
REMEDY_OF_PART = "Parts of one run are not independent: name one whole log per run."


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
        if first.loss.kind == "training" and _is_filtered(*half, rounding, min(noises)):
            return "is a filtered copy of the losses of"
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


def _is_filtered(ours: Column, theirs: Column, rounding: float, own_noise: float) -> bool:
    """Return whether `theirs` differs from `ours`, but follows from it by a linear filter of a few points.

    Least squares on 1, ours[k], ours[k-1], ours[k-2] and theirs[k-1] cover shifts, factors, exponential averages and
    windows of up to 3 points. Two runs on the same batches have noise of their own, which no filter predicts.
    """
    if len(ours) < 3 * FEWEST or rounding > PREDICTED * own_noise * 10:
        return False
    if float(np.sqrt(np.mean((theirs - ours) ** 2))) < CLOSEST * own_noise:
        return False  # may be two layouts of one run, which differ by rounding
    inputs = np.stack([np.ones(len(ours) - 2), ours[2:], ours[1:-1], ours[:-2], theirs[1:-1]], axis=1)
    weights = np.linalg.lstsq(inputs, theirs[2:], rcond=None)[0]
    rest = float(np.std(theirs[2:] - inputs @ weights))
    gain = math.sqrt(1 + float(np.sum(weights[1:] ** 2)))
    return rest < PREDICTED * own_noise + 0.3 * rounding * gain


def _repeats(ours: Column, theirs: Column, step: float) -> bool:
    """Return whether most stretches of changes in the later half of one curve occur in the other, at any place."""
    if min(len(ours), len(theirs)) < 2 * FEWEST or step > min(noise(ours), noise(theirs)) / FINER:
        return False
    unit = step or 1e-9
    known, found = (_stretches(np.round(np.diff(values) / unit)) for values in (ours, theirs))
    return float(np.mean(np.isin(found[len(found) // 2 :], known))) > MOST_EQUAL


def _stretches(changes: Column) -> NDArray[np.uint64]:
    """Return one number for each `STRETCH` changes in a row: a polynomial of them modulo 2^64, equal for equal ones."""
    windows = np.lib.stride_tricks.sliding_window_view(changes.astype(np.int64).view(np.uint64), STRETCH)
    powers = np.array([POLYNOMIAL**place % 2**64 for place in range(STRETCH)], dtype=np.uint64)
    stretches: NDArray[np.uint64] = (windows * powers).sum(axis=1, dtype=np.uint64)
    return stretches


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
            if late < SAME_LEVEL and _learns_nothing(ours, theirs):
                text = (
                    f"its losses do not fall, but those of {other.log.address} do, to the same level: another column, "
                    "or another part of training. Log the loss from the same step on."
                )
                problems.append(Problem(curve.log.address, text))
                break
    return problems


def _learns_nothing(ours: Column, theirs: Column) -> bool:
    """Return whether `ours` falls by far more than its noise, and `theirs` by less than a tenth of it."""
    if len(ours) < 2 * FEWEST:
        return False
    part = max(3, len(ours) // 10)
    fell, falls = (float(np.median(each[:part]) - np.median(each[-part:])) for each in (ours, theirs))
    return fell > 10 * noise(ours) and falls < 0.1 * fell


def part_problems(curves: Sequence[LoggedCurve]) -> list[Problem]:
    """Return a problem for each arm with logs that look like parts of one log."""
    arms = list(dict.fromkeys(curve.log.arm for curve in curves))
    problems = []
    for arm in arms:
        long = [curve for curve in curves if curve.log.arm == arm and len(curve.finite) >= FEWEST_OF_PART]
        found = [_interleaved(long), *(_continued(one, other) for one, other in permutations(long, 2))]
        problems += [problem for problem in found if problem][:1]
    return problems


def _interleaved(curves: Sequence[LoggedCurve]) -> Problem | None:
    """Return a problem if the points of k > 1 evenly spaced curves interleave, shifted by multiples of 1/k."""
    if len(curves) < 2:
        return None
    spacing = curves[0].spacing
    regular = all(np.all(np.abs(np.diff(curve.x) / spacing - 1) < CLOSE) for curve in curves)
    shift = np.array([curve.x[0] - curves[0].x[0] for curve in curves]) / spacing * len(curves)
    if not regular or np.any(np.abs(shift - np.round(shift)) > CLOSE * len(curves)):
        return None
    if sorted(int(each) % len(curves) for each in np.round(shift)) != list(range(len(curves))):
        return None
    text = (
        f"its points lie evenly between those of {curves[0].log.address} ({curves[0].log.label}): rows of one log, "
        f"dealt out to {len(curves)} seeds. {REMEDY_OF_PART}"
    )
    return Problem(curves[1].log.address, text)


def _continued(first: LoggedCurve, second: LoggedCurve) -> Problem | None:
    """Return the problem of `second` if it begins where `first` ends, though their axes begin together."""
    if abs(first.x[0] - second.x[0]) > first.spacing:
        return None
    (begins, ends), (again, _) = (
        (float(np.median(each[: len(each) // 10 or 1])), float(np.median(each[-(len(each) // 10) or -1 :])))
        for each in (first.finite, second.finite)
    )
    fell = begins - ends
    if fell <= 10 * noise(first.finite) or begins - again < 0.8 * fell or abs(again - ends) > 0.2 * fell:
        return None
    text = (
        f"begins with losses of {again:.4g}, where {first.log.address} ({first.log.label}) begins with {begins:.4g} "
        f"and ends with {ends:.4g}: the later part of one log. {REMEDY_OF_PART}"
    )
    return Problem(second.log.address, text)
