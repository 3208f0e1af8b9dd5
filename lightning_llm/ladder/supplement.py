"""The ladder in a report: a table of each recipe's cost on each rung, and pictures over size and tokens."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator
from scipy import special

from lightning_llm.compare.format import more_or_fewer, nats, per_parameter, short
from lightning_llm.compare.report.picture import INK, MOST_APART, Panel, Picture, line_style, small_multiples
from lightning_llm.compare.report.tables import Supplement, Table
from lightning_llm.ladder.fit import Effect, Fit, effect_at, more_tokens
from lightning_llm.ladder.law import Array
from lightning_llm.ladder.measured import Rung
from lightning_llm.ladder.predictions import Prediction
from lightning_llm.ladder.report import Report, gap_line, law_line, measured_gap

HEADING = "The ladder: cost of a recipe in tokens"
IN_FIGURES = "The ladder, rung by rung"
POINTS = 24
"""Number of points of a drawn fitted line, evenly spaced in ln."""


@dataclass(frozen=True)
class Axis:
    """An x axis of a picture: `name`, "tokens" or "parameters", its `label`, and the `other` quantity.

    A line is drawn for each value of the other quantity.
    """

    name: str
    label: str
    other: str


AXES = (
    Axis("tokens", "training tokens", "parameters"),
    Axis("parameters", "parameters of the model", "tokens"),
)


@dataclass(frozen=True)
class Line:
    """A recipe's cost along an axis, for one value of the other quantity, which `name` states as text.

    Measured: at `xs`, the rungs with pairs, `costs` as a share of further tokens, with intervals [`lows`, `highs`] from
    the pairs of that rung alone (NaN with one pair). Fitted: at `fitted_xs`, `fitted` within [`fitted_low`,
    `fitted_high`].
    """

    name: str
    xs: Array
    costs: Array
    lows: Array
    highs: Array
    fitted_xs: Array
    fitted: Array
    fitted_low: Array
    fitted_high: Array


@dataclass(frozen=True)
class Predicted:
    """A prediction drawn at `x`: `cost` within [`low`, `high`]; `of`: the value of the other quantity, as text."""

    x: float
    cost: float
    low: float
    high: float
    of: str


@dataclass(frozen=True)
class CostPanel:
    """Data of one picture: the costs of one recipe along one axis, and the predictions for it."""

    name: str
    axis: Axis
    lines: tuple[Line, ...]
    predicted: tuple[Predicted, ...]


def supplement_of(report: Report, predictions: Sequence[Prediction]) -> Supplement:
    """Return the parts that a fitted ladder adds to the report; `predictions`: all recorded ones of its runs."""
    if report.fit is None:
        raise ValueError("there is no fit to report")
    table = _table(report, report.fit, predictions)
    return Supplement((table,), tuple(_pictures(report, report.fit, predictions)), {"ladder": report.as_data()})


def _table(report: Report, fit: Fit, predictions: Sequence[Prediction]) -> Table:
    rows, figures = [], []
    for name in fit.gaps:
        for effect in report.effects(name):
            measured = measured_gap(report.ladder, effect)
            cells = nats(measured, signed=True), nats(effect.gap, signed=True), report.costs(effect)
            rows.append((name, *_place(effect.parameters, effect.tokens), *cells))
            figures.append(_figures("measured", effect, measured))
        for each in predictions:
            if each.claim["recipe"] == name:
                cells = _outcome(each), nats(each.claim["gap"], signed=True), _share(each)
                rows.append((f"{name}, predicted", *_place(each.claim["parameters"], each.claim["tokens"]), *cells))
                figures.append(_predicted(each))
    level = f"{100 * report.confidence:g} %"
    refused = "".join(f" No cost is computed from this fit: {reason}." for reason in report.misfit)
    caption = (
        f"Gaps to {fit.ladder.baseline} in nats per token, as measured and as fitted, and the further tokens that "
        f"compensate them, with {level} intervals, not simultaneous. {law_line(fit)}. "
        + " ".join(f"{gap_line(name, gap)}." for name, gap in fit.gaps.items())
        + refused
    )
    columns = ("recipe", "parameters", "tokens", "tokens per parameter", "measured gap", "fitted", "costs")
    return Table("ladder", IN_FIGURES, caption, columns, tuple(rows), tuple(figures))


def _place(parameters: int, tokens: int) -> tuple[str, str, str]:
    return short(parameters), short(tokens), per_parameter(tokens, parameters)


def _figures(kind: str, effect: Effect, measured: float | None) -> dict[str, Any]:
    low, high = effect.gap_interval()
    return {
        "recipe": effect.recipe, "kind": kind, "parameters": effect.parameters, "tokens": effect.tokens,
        "measured_gap": measured, "fitted_gap": effect.gap, "fitted_gap_low": low, "fitted_gap_high": high,
        "more_tokens": effect.more_tokens, "more_tokens_low": effect.low, "more_tokens_high": effect.high,
    }  # fmt: skip


def _predicted(each: Prediction) -> dict[str, Any]:
    claim, outcome = each.claim, each.outcome
    return {
        "recipe": claim["recipe"], "kind": f"predicted {each.date}", "parameters": claim["parameters"],
        "tokens": claim["tokens"], "measured_gap": outcome["gap"] if outcome else None, "fitted_gap": claim["gap"],
        "fitted_gap_low": claim["gap_interval"][0], "fitted_gap_high": claim["gap_interval"][1],
        "more_tokens": claim["more_tokens"], "more_tokens_low": claim["more_tokens_interval"][0],
        "more_tokens_high": claim["more_tokens_interval"][1],
    }  # fmt: skip


def _outcome(each: Prediction) -> str:
    return nats(each.outcome["gap"], signed=True) if each.outcome else "not run yet"


def _share(each: Prediction) -> str:
    low, high = each.claim["more_tokens_interval"]
    return more_or_fewer(each.claim["more_tokens"], (low, high))


def _pictures(report: Report, fit: Fit, predictions: Sequence[Prediction]) -> Iterator[Picture]:
    """Yield two pictures of each recipe: over tokens, a line per size, and over sizes, a line per token count.

    Of more than `MOST_APART` recipes they are panels of two.
    """
    made = {
        (name, axis.name): _picture(report, panels_of(report, fit, name, axis, predictions), f"{number}-{axis.name}")
        for number, name in enumerate(fit.gaps)
        for axis in AXES
    }
    if len(fit.gaps) <= MOST_APART:
        yield from made.values()
        return
    for axis in AXES:
        caption = _caption(report, "Tokens more that a recipe needs", axis.label, predicted=bool(predictions))
        about = Picture(f"ladder-{axis.name}", HEADING, caption, "", lambda _: None, height=1.6)
        yield small_multiples(about, [Panel(name, made[name, axis.name]) for name in fit.gaps])


def _picture(report: Report, costs: CostPanel, name: str) -> Picture:
    lead = f"{costs.name}: further tokens that it needs"
    caption = _caption(report, lead, costs.axis.label, predicted=bool(costs.predicted))
    paint = partial(draw_costs, panel=costs)
    return Picture(f"ladder-{name}", HEADING, caption, f"{caption} {_described(costs)}", paint, height=3.3)


def _caption(report: Report, lead: str, over: str, *, predicted: bool) -> str:
    text = (
        f"{lead}, over {over}. Lines and bands: the fit with its {100 * report.confidence:g} % intervals; points: each "
        "rung's mean gap read off the baseline's law"
    )
    return f"{text}; stars: predictions with their intervals." if predicted else f"{text}."


def _described(panel: CostPanel) -> str:
    lines = [
        f"{line.name}: " + ", ".join(f"{100 * y:.1f} % at {short(x)}" for x, y in zip(line.xs, line.costs, strict=True))
        for line in panel.lines
        if np.size(line.xs)
    ]
    stars = [
        f"predicted {100 * each.cost:.1f} % [{100 * each.low:.1f}, {100 * each.high:.1f}] at {short(each.x)}, {each.of}"
        for each in panel.predicted
    ]
    return f"{'; '.join([*lines, *stars])}."


def panels_of(report: Report, fit: Fit, recipe: str, axis: Axis, predictions: Sequence[Prediction]) -> CostPanel:
    """Return the data of the picture of one recipe along `axis`; fitted lines extend to the predictions."""
    claims = [each.claim for each in predictions if each.claim["recipe"] == recipe]
    rungs = [rung for rung in fit.ladder.rungs if rung.differences.get(recipe)]
    xs = [*(getattr(rung, axis.name) for rung in rungs), *(claim[axis.name] for claim in claims)]
    fitted_xs = np.geomspace(min(xs), max(xs), POINTS)
    others = sorted({getattr(rung, axis.other) for rung in rungs} | {claim[axis.other] for claim in claims})
    lines = tuple(
        _line(
            report, fit, recipe, axis, other, [rung for rung in rungs if getattr(rung, axis.other) == other], fitted_xs
        )
        for other in others
    )
    predicted = tuple(_predicted_point(claim, axis) for claim in claims)
    return CostPanel(recipe, axis, lines, predicted)


def _predicted_point(claim: Mapping[str, Any], axis: Axis) -> Predicted:
    low, high = claim["more_tokens_interval"]
    return Predicted(claim[axis.name], claim["more_tokens"], low, high, _place_text(claim[axis.other], axis))


def _place_text(other: int, axis: Axis) -> str:
    return f"{short(other)} {axis.other}"


def _line(
    report: Report, fit: Fit, recipe: str, axis: Axis, other: int, rungs: Sequence[Rung], fitted_xs: Array
) -> Line:
    places = [(round(x), other) if axis.name == "parameters" else (other, round(x)) for x in fitted_xs]
    effects = [effect_at(fit, recipe, parameters, tokens, report.confidence) for parameters, tokens in places]
    measured = np.array([_measured(fit, rung, recipe, report.confidence) for rung in rungs]).reshape(-1, 3)
    costs, lows, highs = measured.T
    return Line(
        _place_text(other, axis),
        np.array([float(getattr(rung, axis.name)) for rung in rungs]),
        costs,
        lows,
        highs,
        fitted_xs,
        np.array([each.more_tokens for each in effects]),
        np.array([each.low for each in effects]),
        np.array([each.high for each in effects]),
    )


def _measured(fit: Fit, rung: Rung, recipe: str, confidence: float) -> tuple[float, float, float]:
    """Return a rung's mean gap as a share of further tokens, with Student's interval of its pairs alone."""
    pairs = np.array(list(rung.differences[recipe].values()))
    mean, half = float(pairs.mean()), np.nan
    if len(pairs) > 1:
        quantile = special.stdtrit(len(pairs) - 1, 0.5 + confidence / 2)
        half = float(quantile * pairs.std(ddof=1) / np.sqrt(len(pairs)))
    costs = more_tokens(np.array([mean, mean - half, mean + half]), fit.law, rung.tokens)
    return float(costs[0]), float(costs[1]), float(costs[2])


def draw_costs(axes: Any, panel: CostPanel) -> None:
    """Draw a panel on matplotlib `axes`: fitted lines with bands, measured rungs as points, predictions as stars."""
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


def _limit(axes: Any, panel: CostPanel) -> None:
    """Limit the range to fits, measurements and predictions, without the wide intervals of a few noisy pairs."""
    edges = [0.0]
    for line in panel.lines:
        edges += [*(100 * line.fitted_low), *(100 * line.fitted_high), *(100 * line.costs)]
    for each in panel.predicted:
        edges += [100 * each.low, 100 * each.high]
    low, high = min(edges), max(edges)
    room = 0.08 * (high - low)
    axes.set_ylim(low - room, high + room)
