"""The ladder in a report: a table of what each recipe costs on each rung, and pictures of that over size and tokens."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from lightning_llm.compare.report.picture import Picture
from lightning_llm.compare.report.small_multiples import MOST_APART, Panel, small_multiples
from lightning_llm.compare.report.supplement import Supplement, Table
from lightning_llm.compare.wording import more_or_fewer, nats, per_parameter, short
from lightning_llm.ladder.draw import draw_costs
from lightning_llm.ladder.effect import Effect
from lightning_llm.ladder.fit import Fit
from lightning_llm.ladder.ledger import Prediction
from lightning_llm.ladder.panels import AXES, panels_of
from lightning_llm.ladder.panels import Panel as Costs
from lightning_llm.ladder.report import Report, measured_gap
from lightning_llm.ladder.wording import gap_line, law_line

HEADING = "The ladder: what a recipe costs in tokens"
IN_FIGURES = "The ladder, rung by rung"


def supplement_of(report: Report, predictions: Sequence[Prediction]) -> Supplement:
    """Return what a fitted ladder adds to the report of its runs; `predictions`: all that were ever made of them."""
    if report.fit is None:
        raise ValueError("there is no fit to report")
    table = _table(report, report.fit, predictions)
    return Supplement((table,), tuple(_pictures(report, report.fit, predictions)), {"ladder": report.as_data()})


def _table(report: Report, fit: Fit, predictions: Sequence[Prediction]) -> Table:
    rows, figures = [], []
    for name in fit.gaps:
        for effect in report.effects(name):
            measured = measured_gap(report.ladder, effect)
            words = nats(measured, signed=True), nats(effect.gap, signed=True), report.costs(effect)
            rows.append((name, *_place(effect.parameters, effect.tokens), *words))
            figures.append(_figures("measured", effect, measured))
        for each in predictions:
            if each.claim["recipe"] == name:
                words = _outcome(each), nats(each.claim["gap"], signed=True), _share(each)
                rows.append((f"{name}, predicted", *_place(each.claim["parameters"], each.claim["tokens"]), *words))
                figures.append(_predicted(each))
    level = f"{100 * report.confidence:g} %"
    refused = "".join(f" No cost is read off this fit: {reason}." for reason in report.misfit)
    caption = (
        f"Gaps to {fit.ladder.baseline} in nats per token, as measured and by the fit, and the tokens more that make "
        f"up for them, with {level} intervals, one by one. {law_line(fit)}. "
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


def _picture(report: Report, costs: Costs, name: str) -> Picture:
    lead = f"{costs.name}: tokens more that it needs"
    caption = _caption(report, lead, costs.axis.label, predicted=bool(costs.predicted))
    paint = partial(draw_costs, panel=costs)
    return Picture(f"ladder-{name}", HEADING, caption, f"{caption} {_said(costs)}", paint, height=3.3)


def _caption(report: Report, lead: str, over: str, *, predicted: bool) -> str:
    text = (
        f"{lead}, over {over}. Lines and bands: the fit with its {100 * report.confidence:g} % intervals; points: each "
        "rung's mean gap read off the baseline's law"
    )
    return f"{text}; stars: what was predicted, with its interval." if predicted else f"{text}."


def _said(panel: Costs) -> str:
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
