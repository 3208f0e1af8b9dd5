"""Parts of one log that are named as logs of several seeds: every second row, or one half after the other."""

from collections.abc import Sequence
from itertools import permutations

import numpy as np

from lightning_llm.base.errors import Problem
from lightning_llm.compare.curves.curve import LoggedCurve
from lightning_llm.compare.curves.smoothness import noise

FEWEST = 16
"""Points of a curve below which its parts are not recognized."""
CLOSE = 1e-6
"""Difference of points, in spacings, that counts as none."""
REMEDY = "Parts of one run are not independent: name one whole log per run."


def part_problems(curves: Sequence[LoggedCurve]) -> list[Problem]:
    """Return a problem for each arm with logs that look like parts of one log."""
    arms = list(dict.fromkeys(curve.log.arm for curve in curves))
    problems = []
    for arm in arms:
        long = [curve for curve in curves if curve.log.arm == arm and len(curve.finite) >= FEWEST]
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
        f"dealt out to {len(curves)} seeds. {REMEDY}"
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
        f"and ends with {ends:.4g}: the later part of one log. {REMEDY}"
    )
    return Problem(second.log.address, text)
