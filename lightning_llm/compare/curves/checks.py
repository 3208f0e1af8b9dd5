"""Checks of curves by themselves and of the units that the logs state: problems that would falsify a verdict.

How smoothing is recognized: the loss of a batch has noise that is independent from step to step. Its second differences
over one, two or three points then have the same variance. A moving average makes neighbors alike: the variance over
three points is a multiple of that over one (an exponential average of factor 0.6: 2.3, of 0.9: 2.9; a window of 3: 4.5,
of 5: 3.5). The trend adds to the longer differences only where it bends, so the ratio without a fitted trend must
agree. A validation loss has no noise of batches, and its own may be smooth. Only a curve with much less noise than the
others counts as smoothed.
"""

import math
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from lightning_llm.base.errors import Problem
from lightning_llm.compare.curves.curve import LoggedCurve
from lightning_llm.compare.curves.table import Column

MOST_NATS = 15.0
"""Largest plausible loss in nats per token: above ln(vocabulary), the loss of guessing, for each vocabulary in use."""
ROUNDING_SHARE = 0.2
"""Largest allowed rounding of logged losses, as a share of the margin."""
CHANCE = 1e-3
"""Probability below which repeated values are no coincidence."""
LOWEST_RATIO = 0.8
"""Lowest loss relative to the baseline's that two runs in one unit can have."""
DECIMALS = [10.0**-digits for digits in range(1, 7)]
GRIDS = sorted(
    [f * 10.0**-d for d in range(1, 7) for f in (1, 2, 2.5, 5)] + [2.0**-k for k in range(1, 17)], reverse=True
)
"""Steps to which losses are rounded: decimals, and the spacing of 16-bit floats."""


def problems_of(curve: LoggedCurve, margin: float) -> list[Problem]:
    """Return the problems of one curve by itself: implausible, rounded or filled-in values, and gaps near its end."""
    found = [_values(curve), _rounded(curve, margin), _padded(curve), _gap_in_tail(curve)]
    return [Problem(curve.log.address, text) for text in found if text]


def _values(curve: LoggedCurve) -> str:
    finite = curve.finite
    if len(finite) == 0:
        return ""
    if finite.min() < 0:
        return f"column {curve.loss.name} has values below 0, and no cross-entropy has. Choose another --metric."
    level = max(float(np.median(finite)), float(np.median(finite[: max(1, len(finite) // 10)])))
    if curve.loss.unit != "bits per byte" and level > MOST_NATS:
        return (
            f"column {curve.loss.name} is {level:.4g} at its beginning or middle, more than guessing gives in nats per "
            "token: a perplexity or a sum. Log the mean loss per token, the logarithm of the perplexity."
        )
    return ""


def resolution(values: Column) -> float:
    """Return the step to which `values` are rounded, such as 0.01: the largest of `GRIDS` that divides all; else 0."""
    later = values[len(values) // 2 :] if len(values) >= 16 else values
    if not len(later):
        return 0.0
    for step in GRIDS if len(later) >= 8 else DECIMALS:
        ratio = later / step
        # Losses stored as 32-bit floats are this far from their decimals.
        if np.all(np.abs(ratio - np.round(ratio)) < np.maximum(1e-6, 1e-7 * ratio)):
            return step
    return 0.0


def _rounded(curve: LoggedCurve, margin: float) -> str:
    step = resolution(curve.finite)
    if step <= ROUNDING_SHARE * margin * (1 + 1e-9):
        return ""
    return (
        f"its losses are rounded to {step:g}, too coarse for a margin of {margin:g}. Log more digits, or give a margin "
        f"of at least {step / ROUNDING_SHARE:g}."
    )


def _padded(curve: LoggedCurve) -> str:
    """Return the problem of a stretch of equal values, or of values on one straight line, that is no coincidence."""
    values, x = np.where(np.isfinite(curve.values), curve.values, math.nan), curve.x
    begin, count = _longest(np.diff(values) == 0)
    if count >= 2 and _by_chance(values, begin, count) < CHANCE:
        return (
            f"repeats the value {values[begin]:.6g} {count + 1} times from {x[begin]:,.12g} on: filled in, not "
            "measured. Remove the repeated rows."
        )
    slopes = np.diff(values) / np.diff(x)
    bend, scale = np.abs(np.diff(slopes)), np.abs(slopes[1:])
    begin, count = _longest((bend <= 1e-6 * scale) & (scale > 0)) if resolution(curve.finite) == 0 else (0, 0)
    if count >= 3:
        return (
            f"its values from {x[begin]:,.12g} to {x[begin + count + 1]:,.12g} are on a straight line: filled in, not "
            "measured. Remove these rows."
        )
    return ""


def _longest(true: np.ndarray) -> tuple[int, int]:
    """Return (first index, length) of the longest run of true values."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], true.astype(int), [0]])))
    begins, ends = edges[::2], edges[1::2]
    if not len(begins):
        return 0, 0
    longest = int(np.argmax(ends - begins))
    return int(begins[longest]), int(ends[longest] - begins[longest])


def _by_chance(values: Column, begin: int, count: int) -> float:
    """Return the probability that rounding alone makes so many neighbors equal, by the changes next to them."""
    changes = np.abs(np.diff(values))
    near = np.concatenate([changes[max(0, begin - 10) : begin], changes[begin + count : begin + count + 10]])
    near = near[np.isfinite(near) & (near > 0)]
    if not len(near):
        return 0.0
    equal = min(0.9, max(resolution(values[np.isfinite(values)]), 1e-7) / float(np.median(near)))
    return float(len(values) * equal**count)


def _gap_in_tail(curve: LoggedCurve) -> str:
    late = curve.x[-1] - 0.2 * (curve.x[-1] - curve.x[0])
    for low, high in curve.gaps:
        if high > late:
            return (
                f"has no values between {low:,.12g} and {high:,.12g}, near its end, where losses are compared. Restore "
                f"them, or compare up to there with --until {low:.12g}."
            )
    return ""


def stated_problems(curves: Sequence[LoggedCurve]) -> list[Problem]:
    """Return a problem if logs state different kinds of loss, units or tokenizers, which must agree."""
    problems = []
    for what, of in (("a {} loss", lambda curve: curve.loss.kind), ("{}", lambda curve: curve.loss.unit)):
        groups: dict[str, LoggedCurve] = {}
        for curve in curves:
            groups.setdefault(of(curve), curve)
        if len(groups) > 1:
            (one, first), (other, second) = list(groups.items())[:2]
            text = (
                f"column {second.loss.name} is {what.format(other)}, but {first.loss.name} of {first.log.address} is "
                f"{what.format(one)}. Compare the same: name one column with --metric."
            )
            problems.append(Problem(second.log.address, text))
    if all(curve.loss.unit == "bits per byte" for curve in curves):
        return problems
    for key in ("tokenizer", "vocab_size"):
        known = [curve for curve in curves if key in curve.table.settings]
        for curve in known[1:]:
            ours, theirs = curve.table.settings[key], known[0].table.settings[key]
            if ours != theirs:
                text = (
                    f"states {key} {ours}, but {known[0].log.address} states {theirs}: losses per token of two "
                    "tokenizers are not comparable. Log bits per byte on both sides (a column bpb, or bytes_per_token)."
                )
                problems.append(Problem(curve.log.address, text))
                break
    return problems


def label_problems(curves: Sequence[LoggedCurve]) -> list[Problem]:
    """Return a problem for each file named after another recipe (arm) than the one that the arguments give it."""
    problems = []
    arms = list(dict.fromkeys(curve.log.arm for curve in curves))
    for curve in curves:
        path = Path(curve.log.address)
        for place in (path.stem, path.parent.name):
            named = {arm for arm in arms if len(arm) > 1 and _has_word(place, arm)}
            if curve.log.arm in named:
                break
            if named:
                text = (
                    f"is named {curve.log.label}, but '{place}' has the name of {sorted(named)[0]}. Correct the "
                    "arm, or rename the file."
                )
                problems.append(Problem(curve.log.address, text))
                break
    return problems


def _has_word(text: str, word: str) -> bool:
    return re.search(rf"(?<![A-Za-z0-9]){re.escape(word)}(?![A-Za-z0-9])", text) is not None


FEWEST_FOR_NOISE = 20
"""Least number of points of a curve for its noise to be compared with that of others."""
FEWEST_TRAINING = 60
"""Least number of points of a training loss for its noise to be judged by itself; in shorter logs the trend bends
within a few points."""
SECOND, DETRENDED = 14.0, 6.0
"""Bounds of the two ratios above 1, times the square root of the number of points. Both must be exceeded, since a trend
that bends raises one of them (docs/internals/simulate_curves.py counts ordinary logs that are refused)."""
LESS_NOISE, LESS_NOISE_ERRORS = 2.5, 5.0
"""A curve with so many times less noise than the others, and so many standard errors less, counts as smoothed."""
REMEDY_OF_SMOOTHED = "Log the loss as it is, without a moving average."


def smoothing_problems(curves: Sequence[LoggedCurve]) -> list[Problem]:
    """Return a problem for each curve that looks as if it was smoothed before it was logged."""
    finite = [(curve, _later(curve.finite)) for curve in curves]
    usable = [(curve, values) for curve, values in finite if len(values) >= FEWEST_FOR_NOISE]
    problems = [found for curve, values in usable if (found := _less_noise(curve, values, usable))]
    if problems:
        return problems
    training = [
        (curve, values) for curve, values in usable if curve.loss.kind == "training" and len(values) >= FEWEST_TRAINING
    ]
    flagged = [curve for curve, values in training if _is_smooth([values])]
    text = f"its training loss varies too smoothly from point to point: it is smoothed. {REMEDY_OF_SMOOTHED}"
    if not flagged and _is_smooth([values for _, values in training]):
        flagged = [curve for curve, _ in training][:1]
        text = f"all training losses vary too smoothly from point to point: they are smoothed. {REMEDY_OF_SMOOTHED}"
    return [Problem(curve.log.address, text) for curve in flagged]


def noise(values: Column) -> float:
    """Return the SD of the noise of `values` from point to point, from second differences without the largest tenth."""
    return math.sqrt(_second(values, 1) / 6)


def _later(values: Column) -> Column:
    """Return the values without the first fifth, in which the loss falls fastest."""
    return values[len(values) // 5 :]


def _second(values: Column, lag: int) -> float:
    """Return the mean squared second difference over `lag` points, without the largest tenth."""
    bends = np.sort((values[2 * lag :] - 2 * values[lag:-lag] + values[: -2 * lag]) ** 2)
    return float(bends[: max(3, int(0.9 * len(bends)))].mean())


def _detrended(values: Column) -> Column:
    """Return the values without a polynomial of degree 4 in the logarithm of their number."""
    begun = len(values) // 4
    place = np.log(np.arange(begun + 1, begun + 1 + len(values)))
    place = 2 * (place - place[0]) / (place[-1] - place[0]) - 1
    fitted = np.polynomial.chebyshev.chebfit(place, values, 4)
    return values - np.polynomial.chebyshev.chebval(place, fitted)


def _is_smooth(curves: Sequence[Column]) -> bool:
    """Return whether the noise of the curves together is that of smoothed values."""
    count = sum(map(len, curves))
    if not count:
        return False
    second, detrended = [], []
    for values in curves:
        near = _second(values, 1)
        if near <= (1e-9 * abs(values).max()) ** 2:
            return True  # no noise at all
        second.append(_second(values, 3) / near * len(values))
        rest = _detrended(values)
        far = np.mean([np.mean((rest[lag:] - rest[:-lag]) ** 2) for lag in (3, 4, 5)])
        detrended.append(far / np.mean(np.diff(rest) ** 2) * len(values))
    bounds = 1 + SECOND / math.sqrt(count), 1 + DETRENDED / math.sqrt(count)
    return sum(second) / count > bounds[0] and sum(detrended) / count > bounds[1]


def _less_noise(curve: LoggedCurve, values: Column, all_curves: Sequence[tuple[LoggedCurve, Column]]) -> Problem | None:
    """Return the problem of a curve with much less noise than the others of its spacing."""
    others = [
        noise(each) for other, each in all_curves if other is not curve and 0.67 < other.spacing / curve.spacing < 1.5
    ]
    usual = float(np.median(others)) if others else 0.0
    own = noise(values)
    if usual == 0 or own * math.exp(max(math.log(LESS_NOISE), LESS_NOISE_ERRORS / math.sqrt(len(values)))) >= usual:
        return None
    text = (
        f"its losses vary {usual / max(own, 1e-12):.1f} times less from point to point than those of the other logs: "
        f"smoothed, or averaged over more steps. {REMEDY_OF_SMOOTHED}"
    )
    return Problem(curve.log.address, text)
