"""Curves that were smoothed before they were logged: by their noise from point to point.

The loss of a batch has noise that is independent from step to step. Its second differences over one, two or three
points then have the same variance. A moving average makes neighbors alike: the variance over three points is a
multiple of that over one (an exponential average of factor 0.6: 2.3, of 0.9: 2.9; a window of 3: 4.5, of 5: 3.5). The
trend adds to the longer differences only where it bends, so the ratio without a fitted trend must agree.

A validation loss has no noise of batches, and its own may be smooth. Only a curve with much less of it than the others
is taken for smoothed.
"""

import math
from collections.abc import Sequence

import numpy as np

from lightning_llm.base.errors import Problem
from lightning_llm.compare.curves.curve import LoggedCurve
from lightning_llm.compare.curves.table import Column

FEWEST = 20
"""Points of one curve below which its noise shows nothing, compared with others."""
FEWEST_TRAINING = 60
"""The same for a training loss by itself; in shorter logs the trend bends within a few points."""
SECOND, DETRENDED = 14.0, 6.0
"""Bounds of the two ratios above 1, times the square root of the number of points. Both must be exceeded, since a trend
that bends raises one of them (docs/internals/simulate_curves.py counts ordinary logs that are refused)."""
LESS_NOISE, LESS_NOISE_ERRORS = 2.5, 5.0
"""A curve with this many times less noise than the others, and this many standard errors, was smoothed."""
REMEDY = "Log the loss as it is, without a moving average."


def smoothing_problems(curves: Sequence[LoggedCurve]) -> list[Problem]:
    """Return the problems of curves that look smoothed."""
    finite = [(curve, _later(curve.finite)) for curve in curves]
    usable = [(curve, values) for curve, values in finite if len(values) >= FEWEST]
    problems = [found for curve, values in usable if (found := _less_noise(curve, values, usable))]
    if problems:
        return problems
    training = [
        (curve, values) for curve, values in usable if curve.loss.kind == "training" and len(values) >= FEWEST_TRAINING
    ]
    flagged = [curve for curve, values in training if _is_smooth([values])]
    text = f"its training loss varies too smoothly from point to point: it is smoothed. {REMEDY}"
    if not flagged and _is_smooth([values for _, values in training]):
        flagged = [curve for curve, _ in training][:1]
        text = f"all training losses vary too smoothly from point to point: they are smoothed. {REMEDY}"
    return [Problem(curve.log.address, text) for curve in flagged]


def noise(values: Column) -> float:
    """Return the SD of the noise from point to point, by second differences; the largest tenth is left out."""
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
        f"smoothed, or averaged over more steps. {REMEDY}"
    )
    return Problem(curve.log.address, text)
