"""Pictures of a ladder as plain data: what a recipe costs in tokens, over tokens or over sizes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import special

from lightning_llm.compare.wording import short
from lightning_llm.ladder.effect import effect_at, more_tokens
from lightning_llm.ladder.fit import Fit
from lightning_llm.ladder.law import Array
from lightning_llm.ladder.ledger import Prediction
from lightning_llm.ladder.measured import Rung
from lightning_llm.ladder.report import Report

POINTS = 24
"""Of a fitted line, evenly in ln."""


@dataclass(frozen=True)
class Axis:
    """`name`: of the quantity along it, "tokens" or "parameters"; a line is drawn for each value of the other."""

    name: str
    label: str
    other: str


AXES = (
    Axis("tokens", "training tokens", "parameters"),
    Axis("parameters", "parameters of the model", "tokens"),
)


@dataclass(frozen=True)
class Line:
    """One size's, or token count's. `xs`: rungs with pairs, `costs` there, a share of tokens more, with [`lows`,
    `highs`] by their pairs alone (NaN of one pair); the fit at `fitted_xs`: `fitted` within [`fitted_low`,
    `fitted_high`]."""

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
    """A prediction at `x`, of the other quantity `of` in words."""

    x: float
    cost: float
    low: float
    high: float
    of: str


@dataclass(frozen=True)
class Panel:
    """One recipe's costs along one axis."""

    name: str
    axis: Axis
    lines: tuple[Line, ...]
    predicted: tuple[Predicted, ...]


def panels_of(report: Report, fit: Fit, recipe: str, axis: Axis, predictions: Sequence[Prediction]) -> Panel:
    """Return the panel of one recipe along `axis`; the fit's lines go on to what was predicted."""
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
    predicted = tuple(_predicted(claim, axis) for claim in claims)
    return Panel(recipe, axis, lines, predicted)


def _predicted(claim: Mapping[str, Any], axis: Axis) -> Predicted:
    low, high = claim["more_tokens_interval"]
    return Predicted(claim[axis.name], claim["more_tokens"], low, high, _words(claim[axis.other], axis))


def _words(other: int, axis: Axis) -> str:
    return f"{short(other)} {axis.other}"


def _line(
    report: Report, fit: Fit, recipe: str, axis: Axis, other: int, rungs: Sequence[Rung], fitted_xs: Array
) -> Line:
    places = [(round(x), other) if axis.name == "parameters" else (other, round(x)) for x in fitted_xs]
    effects = [effect_at(fit, recipe, parameters, tokens, report.confidence) for parameters, tokens in places]
    measured = np.array([_measured(fit, rung, recipe, report.confidence) for rung in rungs]).reshape(-1, 3)
    costs, lows, highs = measured.T
    return Line(
        _words(other, axis),
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
    """Return a rung's mean gap as a share of tokens more, by the law, with Student's interval of its pairs alone."""
    pairs = np.array(list(rung.differences[recipe].values()))
    mean, half = float(pairs.mean()), np.nan
    if len(pairs) > 1:
        quantile = special.stdtrit(len(pairs) - 1, 0.5 + confidence / 2)
        half = float(quantile * pairs.std(ddof=1) / np.sqrt(len(pairs)))
    costs = more_tokens(np.array([mean, mean - half, mean + half]), fit.law, rung.tokens)
    return float(costs[0]), float(costs[1]), float(costs[2])
