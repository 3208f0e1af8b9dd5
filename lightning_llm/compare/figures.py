"""The report's pictures, as SVG text."""

import io
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from scipy import special

from lightning_llm.compare.estimate import Terms
from lightning_llm.compare.verdict import Verdict
from lightning_llm.record.reading import Run

COLOURS = {"lossless": "#2a8a3e", "lossy": "#c0392b", "inconclusive": "#b8860b"}
BASELINE_COLOUR = "#222222"


def draw_curves(verdicts: Sequence[Verdict], baseline: str, terms: Terms) -> str:
    """Draw validation loss over tokens, and its difference to the baseline's, of the pairs that did not diverge.

    Losses: mean, and a band from least to most. Differences: mean, and the interval of the mean at each point alone
    (Student's t over seeds); the line alone for a single pair.
    """
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    runs = {id(pair.baseline): pair.baseline for verdict in verdicts for pair in verdict.sound_pairs}
    _band(left, [_curve(run, terms.metric) for run in runs.values()], BASELINE_COLOUR, baseline)
    for index, verdict in enumerate(verdicts):
        curves = [_curve(pair.run, terms.metric) for pair in verdict.sound_pairs]
        references = [_curve(pair.baseline, terms.metric) for pair in verdict.sound_pairs]
        _band(left, curves, f"C{index}", verdict.name)
        gaps = [_difference(ours, theirs) for ours, theirs in zip(curves, references, strict=True)]
        _band(right, gaps, f"C{index}", verdict.name, confidence=terms.confidence)
    left.set(xlabel="tokens", ylabel=f"{terms.metric} ({terms.unit})", title="Validation loss, least to most")
    title = f"Difference to {baseline} at the same seed, {100 * terms.confidence:g} % at each point"
    right.set(xlabel="tokens", ylabel=f"difference ({terms.unit})", title=title)
    right.title.set_fontsize(10)
    right.axhline(0, color=BASELINE_COLOUR, linewidth=0.8)
    right.axhline(
        terms.margin, color=COLOURS["lossy"], linestyle="--", linewidth=1, label=f"margin {terms.margin_words}"
    )
    _spread_out(right, "y", terms)
    for axes in (left, right):
        axes.grid(alpha=0.25)
        if axes.get_legend_handles_labels()[0]:  # no curve is left where every pair diverged
            axes.legend(fontsize=8)
    return _svg(figure)


def draw_intervals(verdicts: Sequence[Verdict], baseline: str, terms: Terms) -> str:
    """Draw each recipe's gap and interval against the margin, and each seed's difference as a dot."""
    figure = Figure(figsize=(11, 1.4 + 0.5 * len(verdicts)), layout="constrained")
    axes = figure.subplots()
    axes.axvline(0, color=BASELINE_COLOUR, linewidth=0.8)
    axes.axvline(
        terms.margin, color=COLOURS["lossy"], linestyle="--", linewidth=1, label=f"margin {terms.margin_words}"
    )
    for row, verdict in enumerate(reversed(verdicts)):
        estimate, colour = verdict.judged.estimate, COLOURS[verdict.colour]
        if math.isfinite(estimate.low):
            interval = [estimate.low, estimate.high]
            axes.plot(interval, [row, row], color=colour, linewidth=3, solid_capstyle="butt", alpha=0.6)
        if estimate.pairs:
            axes.plot(estimate.gap, row, marker="o", color=colour)
        for seed, gap in verdict.judged.measured.differences.items():
            out = seed in estimate.outlier_seeds
            axes.plot(gap, row - 0.22, marker="x" if out else "|", color=COLOURS["lossy"] if out else "#555555")
    names = [f"{each.name} ({each.family.words})" if each.family.words else each.name for each in reversed(verdicts)]
    axes.set_yticks(range(len(verdicts)), names)
    axes.set_ylim(-0.6, len(verdicts) - 0.4)
    level = f"{100 * terms.confidence:g} % simultaneous intervals"
    axes.set(
        xlabel=f"gap in {terms.metric} to {baseline} (nats per token)",
        title=f"{level}; | single seeds, x outliers",
    )
    axes.grid(alpha=0.25, axis="x")
    _spread_out(axes, "x", terms)
    axes.legend(fontsize=8)
    return _svg(figure)


def draw_speed(verdicts: Sequence[Verdict], baseline: str, terms: Terms) -> str | None:
    """Draw each recipe's gap against its speed, and the baseline at (1, 0); None where no speed was measured."""
    judged = [each for each in verdicts if each.judged.estimate.pairs]
    known = [(each, speed) for each in judged if (speed := each.cost.tokens_per_second_ratio) is not None]
    if not known:
        return None
    figure = Figure(figsize=(6.5, 4.2), layout="constrained")
    axes = figure.subplots()
    axes.axhline(
        terms.margin, color=COLOURS["lossy"], linestyle="--", linewidth=1, label=f"margin {terms.margin_words}"
    )
    axes.plot(1, 0, marker="*", markersize=12, color=BASELINE_COLOUR, linestyle="")
    axes.annotate(baseline, (1, 0), textcoords="offset points", xytext=(6, 6), fontsize=8)
    for verdict, speed in known:
        estimate, colour = verdict.judged.estimate, COLOURS[verdict.colour]
        low, high = (estimate.low, estimate.high) if math.isfinite(estimate.low) else (estimate.gap, estimate.gap)
        error = [[estimate.gap - low], [high - estimate.gap]]
        point = speed, estimate.gap
        filled = "none" if verdict.emulated else "full"
        axes.errorbar(point[0], point[1], yerr=error, marker="o", fillstyle=filled, color=colour, capsize=3)
        axes.annotate(verdict.name, point, textcoords="offset points", xytext=(6, 6), fontsize=8)
    about = "; hollow: emulated, not the format's speed" if any(each.emulated for each, _ in known) else ""
    axes.set(xlabel=f"tokens/s over {baseline}'s", ylabel="gap (nats per token)", title=f"Gap against speed{about}")
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8)
    return _svg(figure)


def _curve(run: Run, metric: str) -> dict[int, float]:
    """Return {tokens: loss}."""
    return {run.tokens[step]: loss for step, loss in sorted(run.validations.get(metric, {}).items())}


def _difference(ours: dict[int, float], theirs: dict[int, float]) -> dict[int, float]:
    return {tokens: loss - theirs[tokens] for tokens, loss in ours.items() if tokens in theirs}


def _band(
    axes: Any, curves: Sequence[dict[int, float]], colour: str, label: str, confidence: float | None = None
) -> None:
    """Plot the mean over the tokens that all curves have, within the least and the most, or the mean's interval."""
    common = sorted(set.intersection(*(set(curve) for curve in curves))) if curves else []
    values = np.array([[curve[tokens] for tokens in common] for curve in curves])  # [curves, points]
    if not values.size:
        return
    values = np.where(np.isfinite(values), values, np.nan)
    mean, count = values.mean(0), len(curves)
    low, high = values.min(0), values.max(0)
    if confidence is not None and count > 1:
        half = special.stdtrit(count - 1, 0.5 + confidence / 2) * values.std(0, ddof=1) / math.sqrt(count)
        low, high = mean - half, mean + half
    axes.plot(common, mean, color=colour, marker="o", markersize=3, linewidth=1.2, label=label)
    axes.fill_between(common, low, high, color=colour, alpha=0.15, linewidth=0)


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
