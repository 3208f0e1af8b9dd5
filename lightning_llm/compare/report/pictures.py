"""The report's pictures: which pictures a comparison has, their captions and alternative texts."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal

from lightning_llm.compare.comparison import Comparison
from lightning_llm.compare.format import interval_text, nats
from lightning_llm.compare.report import draw
from lightning_llm.compare.report.panels import (
    CurvePanel,
    ForestRow,
    Frame,
    Interval,
    Trend,
    curve_panels,
    forest_rows,
    frame_of,
    loss_lines,
    speed_points,
    trends,
)
from lightning_llm.compare.report.picture import MOST_APART, Panel, Picture, small_multiples
from lightning_llm.compare.runs.pairing import ComparisonGroup

SHADED = " Shaded around zero: the A/A floor."
LOOKED_UP = 0.82
"""Height in inches of each of many panels: two pictures of twelve panels fit on a page."""
MOST_ROWS = 16
"""Maximum number of verdicts in one picture without panels."""


def pictures_of(comparison: Comparison) -> list[Picture]:
    """Return the pictures of the report in order. They are drawn when their `svg` or `pdf` is read.

    With more than `MOST_APART` settings, pictures of one kind become panels of one picture.
    """
    frame, rows = frame_of(comparison), forest_rows(comparison)
    families = [family for family in comparison.families if comparison.verdicts_of(family)]
    several = len(families) > MOST_APART
    found = [_forests(rows, frame) if several and len(rows) > MOST_ROWS else _forest(rows, frame)]
    found += _trends(comparison, frame)
    if several:
        return found + list(_over_settings(comparison, families, frame))
    for number, family in enumerate(families):
        suffix = f"-{number}" if len(families) > 1 else ""
        found += _of_family(comparison, family, frame_of(comparison, family), suffix)
    return found


def _over_settings(comparison: Comparison, families: Sequence[ComparisonGroup], frame: Frame) -> Iterator[Picture]:
    """Yield the curves of differences (a picture per recipe), the losses and the gaps against speed: panels by setting.

    The panels of a picture share one scale.
    """
    keys, titles = _titles([family.text for family in families])
    kinds: dict[str, list[Panel]] = {}
    for title, family in zip(titles, families, strict=True):
        for picture in _of_family(comparison, family, frame_of(comparison, family), ""):
            caption, alt = (text.replace(f" at {family.text}", "") for text in (picture.caption, picture.alt))
            kinds.setdefault(picture.name, []).append(Panel(title, replace(picture, caption=caption, alt=alt)))
    group = f"Along the run, by {keys}"
    for name in sorted(kinds, key=lambda name: ("curve", "loss", "speed").index(name.partition("-")[0])):
        panels = kinds[name]
        captions = dict.fromkeys(panel.picture.caption for panel in panels)
        shared: Literal["x", "y", ""] = "y" if name.startswith("curve") else ""
        about = _about(name, group, f"{' '.join(captions)} Panels: {keys}.", LOOKED_UP)
        yield small_multiples(replace(about, folded=True), panels, shared, 2 * frame.margin)


def _about(name: str, group: str, caption: str, height: float) -> Picture:
    """Return name, group and caption of a picture of panels; each panel is `height` inches high."""
    return Picture(name, group, caption, "", lambda _: None, height=height)


def _titles(settings: Sequence[str]) -> tuple[str, list[str]]:
    """Return the keys of the settings, and each setting's values as a title."""
    parts = [dict(part.partition("=")[::2] for part in each.split(", ")) for each in settings]
    if len({tuple(each) for each in parts}) > 1 or not all("=" in part for part in settings[0].split(", ")):
        return "setting", list(settings)  # a value contains commas
    return ", ".join(parts[0]), [", ".join(each.values()) for each in parts]


def _forest(rows: Sequence[ForestRow], frame: Frame) -> Picture:
    intervals = f"{frame.level} simultaneous intervals" + (" over recipes and looks" if frame.looks else "")
    caption = (
        f"Gap to {frame.baseline} in {frame.metric}, with {intervals}. Ticks below: single seeds."
        f"{SHADED if any(row.floor for row in rows) else ''} A recipe is lossless if its interval ends below the "
        "margin, lossy if it begins above it."
    )
    alt = f"{caption} " + " ".join(
        f"{' '.join(filter(None, (row.name, row.setting)))}: {_number(row.interval)}, {row.qualified}." for row in rows
    )
    height = 1.1 + 0.33 * (len(rows) + 1.4 * len({row.setting for row in rows if row.setting}))
    paint = partial(draw.draw_forest, rows=rows, frame=frame)
    narrow = Picture("gaps", "Gaps", caption, alt, partial(paint, numbers=False), height=height)
    return Picture("gaps", "Gaps", caption, alt, paint, 7.2, height, narrow)


def _forests(rows: Sequence[ForestRow], frame: Frame) -> Picture:
    """Return the gaps with a panel per setting: as rows of one panel they would be taller than a page."""
    whole = _forest(rows, frame)
    settings = list(dict.fromkeys(row.setting for row in rows))
    keys, titles = _titles(settings)
    panels = []
    for title, setting in zip(titles, settings, strict=True):
        own = [replace(row, setting="") for row in rows if row.setting == setting]
        paint = partial(draw.draw_forest, rows=own, frame=frame, numbers=False)
        panels.append(Panel(title, replace(_forest(own, frame), paint=paint)))
    height = 0.25 + 0.2 * max(Counter(row.setting for row in rows).values())
    about = _about("gaps", "Gaps", f"{whole.caption} Panels: {keys}.", height)
    return replace(small_multiples(about, panels, "x", 2 * frame.margin), narrow=whole.narrow, alt=whole.alt)


def _trends(comparison: Comparison, frame: Frame) -> Iterator[Picture]:
    """Yield the gap over each quantity: a picture for each setting of all else, or panels of one picture for many."""
    numbered = list(enumerate(trends(comparison)))
    for key in dict.fromkeys(trend.key for _, trend in numbered):
        own = [(trend, _trend(trend, frame, number)) for number, trend in numbered if trend.key == key]
        if len(own) < MOST_APART:
            yield from (picture for _, picture in own)
            continue
        caption = f"Gap over {own[0][0].label}, with the intervals of the verdicts."
        panels = [Panel(trend.setting, picture) for trend, picture in own]
        about = _about(f"over-{_file_name(key)}", "Trends of the gap", caption, 1.25)
        yield small_multiples(about, panels, "y", 2 * frame.margin)


def _trend(trend: Trend, frame: Frame, number: int) -> Picture:
    where = f", {trend.setting}" if trend.setting else ""
    caption = f"Gap over {trend.label}{where}, with the intervals of the verdicts."
    if any(point.floor for line in trend.lines for point in line.points):
        caption += SHADED
    described = "; ".join(
        f"{line.name}: " + ", ".join(f"{point.x:g}: {_number(point.interval)}" for point in line.points)
        for line in trend.lines
    )
    name = f"over-{_file_name(trend.key)}-{number}"
    paint = partial(draw.draw_trend, trend=trend, frame=frame)
    return Picture(name, "Trends of the gap", caption, f"{caption} {described}.", paint)


def _of_family(comparison: Comparison, family: ComparisonGroup, frame: Frame, suffix: str) -> Iterator[Picture]:
    """Yield the curves of differences, a picture per recipe, then the losses, and the gaps against speed."""
    where = f" at {family.text}" if family.text else ""
    panels = curve_panels(comparison, family)
    limits = draw.curve_limits(panels, frame)
    group = f"Differences along the run{where}"
    for panel in panels:
        paint = partial(draw.draw_curve, panel=panel, frame=frame, limits=limits)
        caption = f"{panel.name}: difference to {frame.baseline} at the same seed. Thin lines: single seeds."
        if panel.look:
            caption += f" The band is at the confidence of its {panel.look}: {panel.band}."
        if panel.floor:
            caption += SHADED
        alt = f"{caption} {_course(panel)}"
        yield Picture(f"curve-{_file_name(panel.name)}{suffix}", group, caption, alt, paint, height=2.7)
    if lines := loss_lines(comparison, family):
        caption = f"Mean {frame.metric}{where}; shaded: the range over {frame.baseline}'s seeds."
        ends = "; ".join(f"{line.name} ends at {nats(line.mean[-1])}" for line in lines)
        paint = partial(draw.draw_losses, lines=lines, frame=frame)
        yield Picture(f"loss{suffix}", f"Loss and speed{where}", caption, f"{caption} {ends}.", paint, height=2.9)
    if points := speed_points(comparison, family):
        emulated = [point.name for point in points if point.emulated]
        caption = f"Gap against speed{where}."
        caption += " Hollow markers: emulated, so the speed is not that of the format." if emulated else ""
        described = "; ".join(f"{point.name}: {point.ratio:.2f}x, {_number(point.interval)}" for point in points)
        paint = partial(draw.draw_speed, points=points, frame=frame)
        yield Picture(f"speed{suffix}", f"Loss and speed{where}", caption, f"{caption} {described}.", paint, height=2.9)


def _course(panel: CurvePanel) -> str:
    curve = panel.curve
    fates = [f"seed {seed.seed} {seed.fate}" for seed in panel.seeds if seed.fate]
    if curve.steps:
        end = Interval(curve.gap[-1], curve.low[-1], curve.high[-1])
        fates.insert(0, f"It is {_number(end)} at the last validation")
    return f"{'; '.join(fates)}." if fates else ""


def _number(interval: Interval) -> str:
    if not math.isfinite(interval.gap):
        return "no gap"
    gap = nats(interval.gap, signed=True)
    if not interval.bounded:
        return gap
    return f"{gap} {interval_text(interval.low, interval.high)}"


def _file_name(text: str) -> str:
    return "".join(letter if letter.isalnum() or letter == "_" else "-" for letter in text)
