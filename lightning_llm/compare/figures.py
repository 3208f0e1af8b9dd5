"""The report's pictures, as SVG text."""

import io
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from lightning_llm.compare.estimate import Terms
from lightning_llm.compare.pairing import Family
from lightning_llm.compare.reading import Run

COLOURS = {"lossless": "#2a8a3e", "lossy": "#c0392b", "inconclusive": "#b8860b"}
BASELINE_COLOUR = "#222222"


def draw_curves(family: Family, baseline: str, terms: Terms) -> str:
    """Draw validation loss over tokens, and its difference to the baseline's: means, and bands from least to most.

    Each difference is one pair's; the band of a single pair is its line.
    """
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    runs = list({id(pair.baseline): pair.baseline for pairs in family.recipes.values() for pair in pairs}.values())
    _band(left, [_curve(run, terms.metric) for run in runs], BASELINE_COLOUR, baseline)
    for index, (label, pairs) in enumerate(family.recipes.items()):
        curves = [_curve(pair.run, terms.metric) for pair in pairs]
        references = [_curve(pair.baseline, terms.metric) for pair in pairs]
        _band(left, curves, f"C{index}", label)
        gaps = [_difference(ours, theirs) for ours, theirs in zip(curves, references, strict=True)]
        _band(right, gaps, f"C{index}", label)
    left.set(xlabel="tokens", ylabel=f"{terms.metric} (nats per token)", title="Validation loss")
    right.set(xlabel="tokens", ylabel="difference (nats per token)", title=f"Difference to {baseline} at the same seed")
    right.axhline(0, color=BASELINE_COLOUR, linewidth=0.8)
    right.axhline(terms.margin, color=COLOURS["lossy"], linestyle="--", linewidth=1, label=f"margin {terms.margin:g}")
    _spread_out(right, "y", terms)
    for axes in (left, right):
        axes.grid(alpha=0.25)
        axes.legend(fontsize=8)
    return _svg(figure)


def draw_intervals(rows: Sequence[dict[str, Any]], baseline: str, terms: Terms) -> str:
    """Draw each recipe's gap and interval against the margin, and each seed's difference as a dot."""
    figure = Figure(figsize=(11, 1.4 + 0.5 * len(rows)), layout="constrained")
    axes = figure.subplots()
    axes.axvline(0, color=BASELINE_COLOUR, linewidth=0.8)
    axes.axvline(terms.margin, color=COLOURS["lossy"], linestyle="--", linewidth=1, label=f"margin {terms.margin:g}")
    for place, row in enumerate(reversed(rows)):
        colour = COLOURS[row["verdict"]]
        if row["ci"][0] is not None:
            axes.plot(row["ci"], [place, place], color=colour, linewidth=3, solid_capstyle="butt", alpha=0.6)
        if row["gap"] is not None:
            axes.plot(row["gap"], place, marker="o", color=colour)
        seeds = [each["gap"] for each in row["differences"]]
        axes.plot(seeds, [place - 0.22] * len(seeds), linestyle="", marker="|", color="#555555")
    axes.set_yticks(range(len(rows)), [_title(row) for row in reversed(rows)])
    axes.set_ylim(-0.6, len(rows) - 0.4)
    level = f"{100 * terms.confidence:g} % simultaneous intervals"
    axes.set(xlabel=f"gap in {terms.metric} to {baseline} (nats per token)", title=f"{level}; ticks: single seeds")
    axes.grid(alpha=0.25, axis="x")
    _spread_out(axes, "x", terms)
    axes.legend(fontsize=8)
    return _svg(figure)


def draw_speed(rows: Sequence[dict[str, Any]], baseline: str, terms: Terms) -> str | None:
    """Draw each recipe's gap against its speed, and the baseline at (1, 0); None where no speed was measured."""
    known = [row for row in rows if row["tokens_per_second_ratio"] is not None and row["gap"] is not None]
    if not known:
        return None
    figure = Figure(figsize=(6.5, 4.2), layout="constrained")
    axes = figure.subplots()
    axes.axhline(terms.margin, color=COLOURS["lossy"], linestyle="--", linewidth=1, label=f"margin {terms.margin:g}")
    axes.plot(1, 0, marker="*", markersize=12, color=BASELINE_COLOUR, linestyle="")
    axes.annotate(baseline, (1, 0), textcoords="offset points", xytext=(6, 6), fontsize=8)
    for row in known:
        low, high = row["ci"] if row["ci"][0] is not None else (row["gap"], row["gap"])
        error = [[row["gap"] - low], [high - row["gap"]]]
        point = row["tokens_per_second_ratio"], row["gap"]
        filled = "none" if row["emulated"] else "full"
        colour = COLOURS[row["verdict"]]
        axes.errorbar(point[0], point[1], yerr=error, marker="o", fillstyle=filled, color=colour, capsize=3)
        axes.annotate(_title(row), point, textcoords="offset points", xytext=(6, 6), fontsize=8)
    about = "; hollow: emulated, not the format's speed" if any(row["emulated"] for row in known) else ""
    axes.set(xlabel=f"tokens/s over {baseline}'s", ylabel="gap (nats per token)", title=f"Gap against speed{about}")
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8)
    return _svg(figure)


def _title(row: dict[str, Any]) -> str:
    setting = ", ".join(f"{key.rpartition('.')[2]}={value}" for key, value in row["setting"].items())
    return f"{row['name']} ({setting})" if setting else row["name"]


def _curve(run: Run, metric: str) -> dict[int, float]:
    """Return {tokens: loss}."""
    return {run.tokens[step]: loss for step, loss in sorted(run.validations.get(metric, {}).items())}


def _difference(ours: dict[int, float], theirs: dict[int, float]) -> dict[int, float]:
    return {tokens: loss - theirs[tokens] for tokens, loss in ours.items() if tokens in theirs}


def _band(axes: Any, curves: Sequence[dict[int, float]], colour: str, label: str) -> None:
    """Plot the mean over the tokens that all curves have, within the band of the least and the most."""
    common = sorted(set.intersection(*(set(curve) for curve in curves)))
    values = np.array([[curve[tokens] for tokens in common] for curve in curves])  # [curves, points]
    if not values.size:
        return
    values = np.where(np.isfinite(values), values, np.nan)
    axes.plot(common, values.mean(0), color=colour, marker="o", markersize=3, linewidth=1.2, label=label)
    axes.fill_between(common, values.min(0), values.max(0), color=colour, alpha=0.15, linewidth=0)


def _spread_out(axes: Any, axis: str, terms: Terms) -> None:
    """Make an axis of gaps logarithmic beyond two margins where one is so large that the others could not be told."""
    low, high = axes.get_xlim() if axis == "x" else axes.get_ylim()
    if max(-low, high) > 20 * terms.margin:
        getattr(axes, f"set_{axis}scale")("symlog", linthresh=2 * terms.margin)


def _svg(figure: Figure) -> str:
    FigureCanvasSVG(figure)
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()
