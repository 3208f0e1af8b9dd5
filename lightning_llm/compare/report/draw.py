"""Drawings of a report: each draws plain data of `panels.py` on given axes."""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from lightning_llm.compare.format import interval_text, minus, nats, short
from lightning_llm.compare.report.panels import (
    PARAMETERS,
    TOKENS,
    CurvePanel,
    ForestRow,
    Frame,
    LossLine,
    SpeedPoint,
    Trend,
)
from lightning_llm.compare.report.picture import (
    COLOURS,
    FAILED,
    FAINT,
    FLOOR,
    INK,
    MARKERS,
    line_style,
)

FAR = 20.0
"""Largest gap, in margins, that is drawn on a linear axis; beyond it the axis is logarithmic."""


def draw_forest(axes: Any, rows: Sequence[ForestRow], frame: Frame, *, numbers: bool = True) -> None:
    """Draw a forest plot on matplotlib `axes`: per verdict its gap and interval, the seeds below, and failed seeds.

    `numbers`: also print each gap and interval as text.
    """
    places, labels, place = [], [], 0.0
    seen = None
    for row in rows:
        if row.setting != seen and row.setting:
            place -= 0.45 if seen is not None else 0.0
            axes.annotate(
                row.setting, (0, place), xycoords=("axes fraction", "data"), xytext=(2, 0),
                textcoords="offset points", va="center", fontsize=8, color=INK, style="italic",
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
            )  # fmt: skip
            place -= 0.9
        seen = row.setting
        _forest_row(axes, row, place, numbers=numbers)
        places.append(place)
        labels.append(row.name)
        place -= 1.0
    _zero_and_margins(axes, frame, "x", [(place, row.margin, 0.5) for place, row in zip(places, rows, strict=True)])
    axes.set_yticks(places, labels)
    axes.set_ylim(place + 0.3, 0.7)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    _limits(axes, [edge for row in rows for edge in _edges(row)], frame, "x")
    axes.set_xlabel(frame.gap_label)
    if numbers:
        _beside(axes, f"gap [{frame.level}]", 0.75, INK, 8)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=2, borderaxespad=0)


def _edges(row: ForestRow) -> list[float]:
    found = [row.interval.gap, row.interval.low, row.interval.high, *row.seeds.values(), row.floor or 0.0, row.margin]
    return [edge for edge in found if math.isfinite(edge)]


def _forest_row(axes: Any, row: ForestRow, place: float, *, numbers: bool) -> None:
    colour, interval = COLOURS[row.decision], row.interval
    if row.floor:
        axes.plot([-row.floor, row.floor], [place, place], color=FLOOR, linewidth=11, solid_capstyle="butt", zorder=0)
    if interval.bounded:
        axes.plot([interval.low, interval.high], [place, place], color=colour, linewidth=2, solid_capstyle="butt")
    if math.isfinite(interval.gap):
        axes.plot(interval.gap, place, marker=MARKERS[row.decision], markersize=6, color=colour)
    for gap in row.seeds.values():
        axes.plot(gap, place - 0.3, marker="|", markersize=6, color=FAINT)
    for gap in row.outliers.values():  # where the axis reaches as far
        axes.plot(gap, place - 0.3, marker="x", markersize=5, color=FAILED)
    failed = [f"seed {seed} outlier {gap:+.2g}" for seed, gap in row.outliers.items()]
    failed += [f"seed {seed} diverged" for seed in row.diverged_seeds]
    if numbers:
        text = "" if not math.isfinite(interval.gap) else nats(interval.gap, signed=True)
        if interval.bounded:
            text += f" {interval_text(interval.low, interval.high)}"
        _beside(axes, minus(text), place, colour, 8.5)
        _beside(axes, ", ".join(failed), place - 0.42, FAILED, 7.5)


def _beside(axes: Any, text: str, place: float, colour: str, size: float) -> None:
    """Write to the right of the axes."""
    axes.annotate(
        text, (1, place), xycoords=("axes fraction", "data"), xytext=(8, 0), textcoords="offset points", va="center",
        fontsize=size, color=colour, annotation_clip=False,
    )  # fmt: skip


def draw_curve(axes: Any, panel: CurvePanel, frame: Frame, limits: tuple[float, float] | None = None) -> None:
    """Draw a recipe's difference to the baseline over tokens: mean and interval, single seeds, failed seeds, A/A floor.

    `limits`: range of the y axis, None to choose it.
    """
    colour, curve = COLOURS[panel.decision], panel.curve
    if panel.floor:
        axes.axhspan(-panel.floor, panel.floor, color=FLOOR, linewidth=0, zorder=0, label="A/A floor")
    frame = replace(frame, margin=panel.margin)
    _zero_and_margins(axes, frame, "y")
    for seed in panel.seeds:
        if seed.fate:
            label = f"seed {seed.seed} ({seed.fate})"
            axes.plot(seed.tokens, seed.gap, color=FAILED, linewidth=0.9, linestyle="--", label=label)
            low, high = limits or (-math.inf, math.inf)
            axes.plot(seed.tokens[-1], min(max(seed.gap[-1], low), high), marker="x", color=FAILED, clip_on=False)
        else:
            axes.plot(seed.tokens, seed.gap, color=FAINT, linewidth=0.6, alpha=0.7)
    if curve.steps:
        label = f"mean, {panel.band}"
        if all(map(math.isfinite, curve.low)):
            axes.fill_between(curve.tokens, curve.low, curve.high, color=colour, alpha=0.2, linewidth=0)
        else:
            label = "one pair: no interval"
        marker = MARKERS[panel.decision]
        axes.plot(curve.tokens, curve.gap, color=colour, marker=marker, markersize=3, linewidth=1.6, label=label)
    axes.set_title(panel.name, loc="left")
    _token_axis(axes)
    axes.set_ylabel(frame.gap_label)
    if limits:
        axes.set_ylim(*limits)
    _spread_out(axes, frame, "y")
    axes.legend(loc="upper left", fontsize=7.5)


def curve_limits(panels: Sequence[CurvePanel], frame: Frame) -> tuple[float, float]:
    """Return a common range (low, high) of the y axis for the curves of one setting, without failed seeds."""
    edges = [0.0, frame.margin, *(panel.margin for panel in panels)]
    for panel in panels:
        edges += [edge for edge in (*panel.curve.gap, *panel.curve.low, *panel.curve.high) if math.isfinite(edge)]
    low, high = min(edges), max(edges)
    room = 0.06 * (high - low)
    return low - room, high + 5 * room  # for the legend


def draw_losses(axes: Any, lines: Sequence[LossLine], frame: Frame) -> None:
    """Draw the mean validation loss of each recipe over tokens, and the range of the baseline's over its seeds."""
    for place, line in enumerate(lines):
        style = line_style(place - 1)
        colour = INK if place == 0 else style.colour
        if place == 0:
            axes.fill_between(line.tokens, line.low, line.high, color=INK, alpha=0.12, linewidth=0)
        axes.plot(
            line.tokens, line.mean, color=colour, linestyle="-" if place == 0 else style.dashes, linewidth=1.3,
            label=line.name,
        )  # fmt: skip
    _token_axis(axes)
    axes.set_ylabel(f"{frame.metric} ({frame.unit})" if "nats" in frame.unit else frame.metric)
    axes.legend(loc="upper right")


def draw_trend(axes: Any, trend: Trend, frame: Frame) -> None:
    """Draw each recipe's gap and interval over one quantity, such as tokens, and the A/A floor if known."""
    xs = trend.xs
    logarithmic = xs[0] > 0
    if logarithmic:
        axes.set_xscale("log")
    for x in xs:
        floors = [point.floor for line in trend.lines for point in line.points if point.x == x and point.floor]
        if floors:
            axes.plot([x, x], [-max(floors), max(floors)], color=FLOOR, linewidth=14, solid_capstyle="butt", zorder=0)
    _zero_and_margins(axes, frame, "y", _margins(trend))
    step = 0.12 * (math.log(xs[-1] / xs[0]) if logarithmic else xs[-1] - xs[0]) / max(1, len(trend.lines) * len(xs))
    for place, line in enumerate(trend.lines):
        style, aside = line_style(place), step * (place - (len(trend.lines) - 1) / 2)
        points = [point for point in line.points if math.isfinite(point.interval.gap)]
        at = [point.x * math.exp(aside) if logarithmic else point.x + aside for point in points]
        gaps = [point.interval.gap for point in points]
        axes.plot(
            at, gaps, color=style.colour, linestyle=style.dashes, marker=style.marker, markersize=5, linewidth=1.2,
            label=line.name,
        )  # fmt: skip
        for x, point in zip(at, points, strict=True):
            if point.interval.bounded:
                axes.plot([x, x], [point.interval.low, point.interval.high], color=style.colour, linewidth=1.6)
    axes.xaxis.set_major_locator(FixedLocator(xs))
    axes.xaxis.set_minor_locator(NullLocator())
    counts = trend.key in (PARAMETERS, TOKENS)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: short(x) if counts else f"{x:g}"))
    room = (xs[-1] / xs[0]) ** 0.12 if logarithmic else 0.12 * (xs[-1] - xs[0])
    axes.set_xlim(*((xs[0] / room, xs[-1] * room) if logarithmic else (xs[0] - room, xs[-1] + room)))
    axes.set(xlabel=trend.label, ylabel=frame.gap_label)
    _spread_out(axes, frame, "y")
    axes.legend(loc="best", fontsize=7.5)


def draw_speed(axes: Any, points: Sequence[SpeedPoint], frame: Frame) -> None:
    """Draw each recipe's gap and interval against its speed, and the baseline at (1, 0); hollow markers: emulated."""
    _zero_and_margins(axes, frame, "y")
    axes.plot(1, 0, marker="*", markersize=11, color=INK, linestyle="")
    axes.annotate(frame.baseline, (1, 0), textcoords="offset points", xytext=(0, -13), ha="center", fontsize=8)
    for point in points:
        colour, gap = COLOURS[point.decision], point.interval.gap
        if point.interval.bounded:
            axes.plot([point.ratio] * 2, [point.interval.low, point.interval.high], color=colour, linewidth=1.4)
        face = "white" if point.emulated else colour
        axes.plot(point.ratio, gap, marker=MARKERS[point.decision], color=colour, markerfacecolor=face, markersize=6)
        name = f"{point.name} (emulated)" if point.emulated else point.name
        axes.annotate(name, (point.ratio, gap), textcoords="offset points", xytext=(7, 3), fontsize=8)
    low, high = min(1.0, *(each.ratio for each in points)), max(1.0, *(each.ratio for each in points))
    room = max(0.1, high - low)
    axes.set_xlim(low - 0.12 * room, high + 0.45 * room)  # names stand to the right of their points
    axes.margins(y=0.16)  # for the baseline's name
    axes.set(xlabel=f"tokens/s over {frame.baseline}'s", ylabel=frame.gap_label)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}x"))
    _spread_out(axes, frame, "y")
    axes.legend(loc="best")


def _zero_and_margins(
    axes: Any, frame: Frame, axis: str, places: Sequence[tuple[float, float, float]] | None = None
) -> None:
    """Draw zero, and the margin: one line, or where it is not one for all a piece of it at each of `places`.

    Args:
        places: (where along the other axis, the margin there, how far it is drawn either way).
    """
    line = axes.axvline if axis == "x" else axes.axhline
    line(0, color=INK, linewidth=0.8)
    style: dict[str, Any] = {"color": INK, "linestyle": "--", "linewidth": 1.1}
    label = f"margin {frame.margin_text}"
    if len({margin for _, margin, _ in places or ()}) < 2:
        line(frame.margin, **style, label=label)
        return
    for number, (place, margin, reach) in enumerate(places or ()):
        ends = [place - reach, place + reach]
        both = ([margin, margin], ends) if axis == "x" else (ends, [margin, margin])
        axes.plot(*both, **style, label="" if number else label)


def _margins(trend: Trend) -> list[tuple[float, float, float]]:
    """Return the range of each margin of a trend: around its x, up to half way to its neighbors."""
    xs = trend.xs
    reach = min(after - before for before, after in pairwise(xs)) / 2.2
    found = {(point.x, point.margin) for line in trend.lines for point in line.points}
    return [(x, margin, min(reach, 0.2 * x) if xs[0] > 0 else reach) for x, margin in sorted(found)]


def _token_axis(axes: Any) -> None:
    axes.set_xlabel("tokens")
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: short(x) if x > 0 else "0"))


def _limits(axes: Any, edges: Sequence[float], frame: Frame, axis: str) -> None:
    low, high = min(0.0, *edges), max(frame.margin, *edges, 0.0)
    room = 0.06 * (high - low)
    getattr(axes, f"set_{axis}lim")(low - room, high + room)
    _spread_out(axes, frame, axis)


def _spread_out(axes: Any, frame: Frame, axis: str) -> None:
    """Make an axis of gaps logarithmic beyond two margins if a large gap would make the others unreadable."""
    low, high = axes.get_xlim() if axis == "x" else axes.get_ylim()
    if max(-low, high) > FAR * frame.margin:
        getattr(axes, f"set_{axis}scale")("symlog", linthresh=2 * frame.margin)
