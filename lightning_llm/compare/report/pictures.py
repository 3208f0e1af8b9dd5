"""The report's pictures: which there are of a comparison, their captions and what they say to who does not see them."""

import io
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from lightning_llm.compare.comparison import Comparison
from lightning_llm.compare.pairing import Family
from lightning_llm.compare.report import draw
from lightning_llm.compare.report.panels import (
    CurvePanel,
    ForestRow,
    Frame,
    Interval,
    curve_panels,
    forest_rows,
    frame_of,
    loss_lines,
    speed_points,
)
from lightning_llm.compare.report.style import drawing_style
from lightning_llm.compare.report.trends import Trend, trends
from lightning_llm.compare.wording import nats

SHADED = " Shaded around zero: the A/A floor."

WIDTH, HEIGHT = 4.7, 3.1
"""Of a picture, in inches: two stand side by side on a screen, one fills a phone's."""


@dataclass(frozen=True)
class Picture:
    """One picture: `name` is its file's, `alt` says in words what it shows, `paint` draws it on matplotlib axes.

    `width`, `height`: in inches; `margins`: what axes leave free left, right, below and above, for a page that places
    them itself.
    """

    name: str
    group: str
    caption: str
    alt: str
    paint: Callable[[Any], None]
    width: float = WIDTH
    height: float = HEIGHT
    margins: tuple[float, float, float, float] = (0.75, 0.1, 0.5, 0.3)
    narrow: "Picture | None" = None
    """The same for a phone, where it is not narrow itself."""

    @cached_property
    def svg(self) -> str:
        """The picture as SVG text."""
        return _saved(self._figure, "svg").decode()

    @cached_property
    def pdf(self) -> bytes:
        """The picture as a PDF, for LaTeX."""
        return _saved(self._figure, "pdf")

    @cached_property
    def _figure(self) -> Any:
        """The picture as drawn once, its layout found."""
        from matplotlib.figure import Figure

        with drawing_style():
            figure = Figure(figsize=(self.width, self.height), layout="constrained")
            self.paint(figure.subplots())
            figure.draw_without_rendering()
            figure.set_layout_engine("none")  # which takes longer than all else, and would be asked for each file
        return figure


def _saved(figure: Any, form: str) -> bytes:
    buffer = io.BytesIO()
    date = {"svg": "Date", "pdf": "CreationDate"}[form]
    with drawing_style():
        figure.savefig(buffer, format=form, metadata={date: None})
    return buffer.getvalue()


def pictures_of(comparison: Comparison) -> list[Picture]:
    """Return what there is to draw, in order; nothing is drawn yet."""
    frame, rows = frame_of(comparison), forest_rows(comparison)
    families = [family for family in comparison.families if comparison.verdicts_of(family)]
    found = [_forest(rows, frame)]
    for number, trend in enumerate(trends(comparison)):
        found.append(_trend(trend, frame, number))
    for number, family in enumerate(families):
        suffix = f"-{number}" if len(families) > 1 else ""
        found += _of_family(comparison, family, frame_of(comparison, family), suffix)
    return found


def _forest(rows: Sequence[ForestRow], frame: Frame) -> Picture:
    hold = f"{frame.level} intervals that hold together" + (" over all looks, too" if frame.looks else "")
    caption = (
        f"Gap to {frame.baseline} in {frame.metric}, with {hold}. Ticks below: single seeds."
        f"{SHADED if any(row.floor for row in rows) else ''} A recipe is lossless where its interval ends below the "
        "margin, lossy where it begins above it."
    )
    alt = f"{caption} " + " ".join(
        f"{' '.join(filter(None, (row.name, row.setting)))}: {_number(row.interval)}, {row.qualified}." for row in rows
    )
    height = 1.1 + 0.33 * (len(rows) + 1.4 * len({row.setting for row in rows if row.setting}))
    paint = partial(draw.draw_forest, rows=rows, frame=frame)
    narrow = Picture("gaps", "Gaps", caption, alt, partial(paint, numbers=False), height=height)
    return Picture("gaps", "Gaps", caption, alt, paint, 7.2, height, (1.6, 1.9, 0.5, 0.4), narrow)


def _trend(trend: Trend, frame: Frame, number: int) -> Picture:
    where = f", {trend.setting}" if trend.setting else ""
    caption = f"Gap over {trend.label}{where}, with the intervals of the verdicts."
    if any(point.floor for line in trend.lines for point in line.points):
        caption += SHADED
    said = "; ".join(
        f"{line.name}: " + ", ".join(f"{point.x:g}: {_number(point.interval)}" for point in line.points)
        for line in trend.lines
    )
    name = f"over-{_file_name(trend.key)}-{number}"
    paint = partial(draw.draw_trend, trend=trend, frame=frame)
    return Picture(name, "How the gap moves", caption, f"{caption} {said}.", paint)


def _of_family(comparison: Comparison, family: Family, frame: Frame, suffix: str) -> Iterator[Picture]:
    """Yield the curves of differences, a picture per recipe, then the losses, and the gaps against speed."""
    where = f" at {family.words}" if family.words else ""
    panels = curve_panels(comparison, family)
    limits = draw.curve_limits(panels, frame)
    group = f"Differences along the run{where}"
    for panel in panels:
        paint = partial(draw.draw_curve, panel=panel, frame=frame, limits=limits)
        caption = f"{panel.name}: difference to {frame.baseline} at the same seed. Thin: single seeds."
        if panel.look:
            caption += f" The band is at the confidence of its {panel.look}: {panel.band}."
        if panel.floor:
            caption += SHADED
        alt = f"{caption} {_course(panel)}"
        yield Picture(f"curve-{_file_name(panel.name)}{suffix}", group, caption, alt, paint, height=2.7)
    if lines := loss_lines(comparison, family):
        caption = f"Mean {frame.metric}{where}; shaded: from the least to the most of {frame.baseline}'s seeds."
        ends = "; ".join(f"{line.name} ends at {nats(line.mean[-1])}" for line in lines)
        paint = partial(draw.draw_losses, lines=lines, frame=frame)
        yield Picture(f"loss{suffix}", f"Loss and speed{where}", caption, f"{caption} {ends}.", paint, height=2.9)
    if points := speed_points(comparison, family):
        emulated = [point.name for point in points if point.emulated]
        caption = f"Gap against speed{where}."
        caption += " Hollow: emulated, whose speed says nothing of the format's." if emulated else ""
        said = "; ".join(f"{point.name}: {point.ratio:.2f}x, {_number(point.interval)}" for point in points)
        paint = partial(draw.draw_speed, points=points, frame=frame)
        yield Picture(f"speed{suffix}", f"Loss and speed{where}", caption, f"{caption} {said}.", paint, height=2.9)


def _course(panel: CurvePanel) -> str:
    curve = panel.curve
    words = [f"seed {seed.seed} {seed.fate}" for seed in panel.seeds if seed.fate]
    if curve.steps:
        end = Interval(curve.gap[-1], curve.low[-1], curve.high[-1])
        words.insert(0, f"It is {_number(end)} at the last validation")
    return f"{'; '.join(words)}." if words else ""


def _number(interval: Interval) -> str:
    if not math.isfinite(interval.gap):
        return "no gap can be given"
    gap = nats(interval.gap, signed=True)
    if not interval.bounded:
        return gap
    return f"{gap} [{nats(interval.low, signed=True)}, {nats(interval.high, signed=True)}]"


def _file_name(words: str) -> str:
    return "".join(letter if letter.isalnum() or letter == "_" else "-" for letter in words)
