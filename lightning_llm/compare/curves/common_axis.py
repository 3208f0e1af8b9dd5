"""Put all curves on one axis and into one unit: the points at which they are compared, in nats or bits per byte."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from lightning_llm.base.errors import ConfigError, Problem
from lightning_llm.compare.curves.columns import Unit, words_of
from lightning_llm.compare.curves.curve import LoggedCurve
from lightning_llm.compare.curves.table import Column

SHARED = 0.9
"""Share of the points of the sparsest curve that all others must have for a comparison without interpolation."""
SAME_END = 0.005
"""Difference of the ends of two curves, relative to their range, that is ignored: steps count from 0 or from 1."""
LAG_SHARE = 0.25
"""Largest part of the margin by which averages over unlike logging intervals may differ on the falling trend."""
MOST_DECIMALS = 6
BYTES_PER_TOKEN = "bytes_per_token"
OF_BYTE_COUNTS = {"bytes", "text", "train", "total", "num", "n", "seen", "consumed", "processed", "cumulative"}
"""Words in the names of columns that count bytes of text; those of memory or traffic have others."""


@dataclass(frozen=True)
class CommonAxis:
    """The `points` of the axis at which curves are compared, float64 [points].

    `scale`: factor that makes the points whole numbers; `method`: how values there are obtained, as a sentence;
    `exact`: every curve has a value at each point, so nothing is interpolated.
    """

    points: Column
    scale: int
    method: str
    exact: bool

    @property
    def keys(self) -> list[int]:
        """The points times `scale`: whole numbers, which serve as the steps of a run."""
        return [round(float(each) * self.scale) for each in self.points]

    def values_of(self, curve: LoggedCurve) -> Column:
        """Return the curve's values at the points, [points]; infinite after it diverged, NaN before it begins."""
        at = np.searchsorted(curve.x, self.points)
        there = at < len(curve.x)
        right = np.minimum(at, len(curve.x) - 1)
        hit = there & (curve.x[right] == self.points)
        left = np.where(hit, right, np.maximum(at - 1, 0))
        finite = np.isfinite(curve.values)
        found = np.where(hit, curve.values[right], _between(curve, finite, self.points))
        found = np.where(there & ~(finite[left] & finite[right]), math.inf, found)
        found = np.where(~there, math.inf if curve.diverged else math.nan, found)
        return np.where(self.points < curve.x[0], math.nan, found)


def _between(curve: LoggedCurve, finite: np.ndarray, points: Column) -> Column:
    if not finite.any():
        return np.full(len(points), math.inf)
    return np.interp(points, curve.x[finite], curve.values[finite])


def common_axis(curves: Sequence[LoggedCurve], margin: float) -> CommonAxis:
    """Return the points at which `curves` are compared: without smoothing, and never beyond the end of one.

    If the curves share their points, these are used as they are; otherwise values are interpolated linearly between
    neighbors, at the points of the sparsest curve.

    Raises:
        ConfigError: curves do not overlap, end early, or are logged at intervals too unlike for the margin.
    """
    sound = [curve for curve in curves if not curve.diverged] or list(curves)
    last_begin, first_end = max(sound, key=lambda curve: curve.x[0]), min(sound, key=lambda curve: curve.x[-1])
    low, high = float(last_begin.x[0]), float(first_end.x[-1])
    if low >= high:
        text = (
            f"begins at {low:,.12g} ({last_begin.axis}), where {first_end.log.address} has ended ({high:,.12g}): the "
            "curves do not overlap. Choose the axis with --x, or name logs of the same part of training."
        )
        raise ConfigError(Problem(last_begin.log.address, text))
    if problems := _unfinished(sound):
        raise ConfigError(problems)
    if lagging := _unlike_intervals(sound, margin):
        raise ConfigError(lagging)
    inside = [curve.x[(curve.x >= low) & (curve.x <= high)] for curve in sound]
    sparsest = min(inside, key=len)
    shared = sparsest[np.all([np.isin(sparsest, each) for each in inside], axis=0)]
    exact = len(shared) >= max(1.0, SHARED * len(sparsest))
    points = shared if exact else sparsest
    between = f"{points[0]:,.12g} to {points[-1]:,.12g} {sound[0].axis_words}"
    if exact:
        at = f"Compared at the {len(points)} points that all curves have, {between}"
        method = f"{at}; nothing is interpolated or smoothed."
    else:
        method = (
            f"Compared at the {len(points)} points of the sparsest curve, {between}; the others are interpolated "
            "linearly between their neighboring points, and nothing is smoothed."
        )
    return CommonAxis(points, _scale(points), method, exact)


def _scale(points: Column) -> int:
    """Return the power of ten that makes all points whole numbers, so that no two become equal."""
    for digits in range(MOST_DECIMALS + 1):
        scaled = points * 10**digits
        if np.allclose(scaled, np.round(scaled), rtol=0, atol=1e-6 * 10**digits) and len(
            np.unique(np.round(scaled))
        ) == len(points):
            return 10**digits
    return 10**MOST_DECIMALS


def _unfinished(curves: Sequence[LoggedCurve]) -> list[Problem]:
    """Return the problems of curves that end before the others."""
    latest = max(float(curve.x[-1]) for curve in curves)
    begin = min(float(curve.x[0]) for curve in curves)
    problems = []
    for curve in curves:
        end = float(curve.x[-1])
        if end + float(curve.x[-1] - curve.x[-2]) <= latest and latest - end > SAME_END * (latest - begin):
            text = (
                f"ends at {end:,.12g}, others at {latest:,.12g} ({curve.axis}): it is not finished or cut off. Wait "
                f"for it, compare all up to there with --until {end:.12g}, or log nan if it diverged."
            )
            problems.append(Problem(curve.log.address, text))
    return problems


def _unlike_intervals(curves: Sequence[LoggedCurve], margin: float) -> list[Problem]:
    """Return a problem if training losses may be averages over intervals that differ too much for the margin.

    Most programs log the mean since their last line; half of the difference of two intervals is then the difference of
    their places on the falling trend.
    """
    if curves[0].loss.kind == "validation":
        return []
    closest, widest = (pick(curves, key=lambda curve: curve.spacing) for pick in (min, max))
    values = widest.finite
    late = values[-max(3, len(values) // 4) :]
    slope = abs(float(np.polyfit(np.arange(len(late)), late, 1)[0])) / widest.spacing
    lag = slope * (widest.spacing - closest.spacing) / 2
    if lag <= LAG_SHARE * margin:
        return []
    text = (
        f"logs every {widest.spacing:g}, {closest.log.address} every {closest.spacing:g}: if these are averages, the "
        f"trend alone makes them differ by {lag:.2g}, too much for a margin of {margin:g}. Log all at one interval."
    )
    return [Problem(widest.log.address, text)]


def in_common_unit(curves: Sequence[LoggedCurve]) -> list[LoggedCurve]:
    """Return the curves converted to one unit, if possible.

    To nats per token if all are in bits per token; to bits per byte if tokenizers differ and all logs state their bytes
    per token. Otherwise they are returned as they are, and `stated_problems` reports units that do not agree.
    """
    if all(curve.loss.unit == "bits per token" for curve in curves):
        curves = [_scaled(curve, math.log(2), "nats per token") for curve in curves]
    if not _several_tokenizers(curves) or any(curve.loss.unit != "nats per token" for curve in curves):
        return list(curves)
    ratios = [bytes_per_token(curve) for curve in curves]
    if None in ratios:
        return list(curves)
    return [
        _scaled(curve, 1 / (math.log(2) * ratio), "bits per byte")
        for curve, ratio in zip(curves, ratios, strict=True)
        if ratio is not None
    ]


def _several_tokenizers(curves: Sequence[LoggedCurve]) -> bool:
    return any(
        len({str(curve.table.settings[key]) for curve in curves if key in curve.table.settings}) > 1
        for key in ("tokenizer", "vocab_size")
    )


def bytes_per_token(curve: LoggedCurve) -> float | None:
    """Return the bytes of text per token that a log states, or that its counts of bytes and tokens give; else None."""
    stated = curve.table.settings.get(BYTES_PER_TOKEN)
    if isinstance(stated, int | float) and stated > 0:
        return float(stated)
    for name, values in curve.table.columns.items():
        words = words_of(name)
        counts = "bytes" in words and set(words) <= OF_BYTE_COUNTS
        if counts and curve.tokens is not None and curve.tokens[-1] > 0:
            known = values[np.isfinite(values)]
            if len(known) and known[-1] > 0:
                return float(known[-1] / curve.tokens[-1])
    return None


def _scaled(curve: LoggedCurve, factor: float, unit: Unit) -> LoggedCurve:
    return replace(curve, values=curve.values * factor, loss=replace(curve.loss, unit=unit))
