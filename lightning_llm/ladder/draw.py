"""A ladder's picture: what a recipe costs in tokens along an axis, with the fit, its band and what was predicted."""

from typing import Any

import numpy as np
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

from lightning_llm.compare.report.style import INK, line_style
from lightning_llm.compare.wording import short
from lightning_llm.ladder.panels import Panel


def draw_costs(axes: Any, panel: Panel) -> None:
    """Draw a line and a band per value of the other quantity, rungs as points, predictions as stars."""
    axes.set_xscale("log")
    axes.axhline(0, color=INK, linewidth=0.8)
    for place, line in enumerate(panel.lines):
        style = line_style(place)
        axes.fill_between(
            line.fitted_xs, 100 * line.fitted_low, 100 * line.fitted_high, color=style.colour, alpha=0.1, linewidth=0
        )
        axes.plot(
            line.fitted_xs,
            100 * line.fitted,
            color=style.colour,
            linestyle=style.dashes,
            linewidth=1.3,
            label=line.name,
        )
        axes.plot(line.xs, 100 * line.costs, color=style.colour, marker=style.marker, markersize=5, linestyle="")
    _limit(axes, panel)
    for place, line in enumerate(panel.lines):
        known = np.isfinite(line.lows)
        for x, low, high in zip(line.xs[known], line.lows[known], line.highs[known], strict=True):
            axes.plot([x, x], [100 * low, 100 * high], color=line_style(place).colour, linewidth=1, scaley=False)
    for number, each in enumerate(panel.predicted):
        axes.plot([each.x, each.x], [100 * each.low, 100 * each.high], color=INK, linewidth=1.6)
        axes.plot(
            each.x, 100 * each.cost, marker="*", markersize=11, color=INK, linestyle="",
            label="" if number else "predicted",
        )  # fmt: skip
    axes.set(xlabel=panel.axis.label, ylabel="tokens more that it needs (%)")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: short(x)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_title(panel.name, loc="left")
    axes.legend(loc="best", fontsize=7.5)


def _limit(axes: Any, panel: Panel) -> None:
    """Keep the range to what is fitted, measured and predicted: the interval of two loud pairs squeezes nobody."""
    edges = [0.0]
    for line in panel.lines:
        edges += [*(100 * line.fitted_low), *(100 * line.fitted_high), *(100 * line.costs)]
    for each in panel.predicted:
        edges += [100 * each.low, 100 * each.high]
    low, high = min(edges), max(edges)
    room = 0.08 * (high - low)
    axes.set_ylim(low - room, high + room)
