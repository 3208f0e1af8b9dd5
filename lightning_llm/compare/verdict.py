"""From pairs to verdicts: one per recipe and setting, as plain data (`compare.json`), and each as one line."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lightning_llm.compare.factor import Factor
from lightning_llm.compare.losses import TAIL_SHARE, Tail, cost_of, diverged, tail_of
from lightning_llm.compare.noise import Floor, measure_floor
from lightning_llm.compare.pairing import Family, Pair
from lightning_llm.compare.reading import Run
from lightning_llm.compare.statistics import (
    POWER,
    Intervals,
    critical_value,
    seeds_needed,
    simultaneous_intervals,
    verdict_of,
)
from lightning_llm.errors import Problem

HIGH_PRECISION = "val_loss_high_precision"


@dataclass(frozen=True)
class Terms:
    """What a verdict is asked for: `margin` in nats per token, `confidence` of all intervals of a family together."""

    margin: float = 0.01
    confidence: float = 0.95
    metric: str = "val_loss"
    tail_share: float = TAIL_SHARE


@dataclass
class Recipe:
    """One recipe of a family on the way to its verdict. `differences`: {seed: nats}, of pairs that did not diverge."""

    label: str
    pairs: list[Pair]
    tail: Tail | None
    differences: dict[int, float]
    diverged_seeds: list[int]


@dataclass(frozen=True)
class Estimate:
    """A recipe's gap in numbers; NaN where there is none. `pool`: recipes that share the variance; `stand_in`: whether
    the A/A floor takes the place of the spread between seeds."""

    gap: float
    low: float
    high: float
    sd: float
    df: float
    pool: int
    stand_in: bool


def judge(
    family: Family, factor: Factor, terms: Terms
) -> tuple[list[dict[str, Any]], dict[str, Any] | None, list[Problem]]:
    """Return the verdicts of one family, its A/A floor as data, and what could not be judged."""
    recipes: list[Recipe] = []
    problems: list[Problem] = []
    for label, pairs in family.recipes.items():
        recipe = _measure(label, pairs, terms)
        if recipe.tail is None and not recipe.diverged_seeds:
            text = f"{label} and {factor.baseline_label} have no validation of '{terms.metric}' at a common step."
            problems.append(Problem(str(pairs[0].run.folder), text))
            continue
        recipes.append(recipe)
    floor = measure_floor(family, terms.metric, terms.tail_share)
    aa = floor.as_data(family) if family.aa_groups else None
    if not recipes:
        return [], aa, problems
    seeds = sorted({pair.run.seed for recipe in recipes for pair in recipe.pairs})
    matrix = np.array([[recipe.differences.get(seed, math.nan) for seed in seeds] for recipe in recipes])
    intervals = simultaneous_intervals(matrix, terms.confidence)
    estimates = [_estimate(recipe, index, intervals, floor, terms) for index, recipe in enumerate(recipes)]
    rows = [_row(*each, floor, family, factor, terms) for each in zip(recipes, estimates, strict=True)]
    return rows, aa, problems


def _measure(label: str, pairs: list[Pair], terms: Terms) -> Recipe:
    whole = [pair for pair in pairs if not pair.run.non_finite]
    runs = [run for pair in whole for run in (pair.run, pair.baseline)]
    tail = tail_of(runs, terms.metric, terms.tail_share) if runs else None
    lost = [pair for pair in pairs if diverged(pair.run, tail, pair.baseline)]
    differences = {
        pair.run.seed: tail.of(pair.run) - tail.of(pair.baseline) for pair in pairs if tail and pair not in lost
    }
    return Recipe(label, pairs, tail, differences, sorted(pair.run.seed for pair in lost))


def _estimate(recipe: Recipe, index: int, intervals: Intervals, floor: Floor, terms: Terms) -> Estimate:
    """Return entry `index` of the intervals, or for one pair the interval that the A/A floor gives, if there is one."""
    every = (intervals.gap, intervals.low, intervals.high, intervals.sd, intervals.df)
    gap, low, high, sd, df = (float(each[index]) for each in every)
    if len(recipe.differences) == 1 and floor.sd is not None and not recipe.diverged_seeds:
        half = critical_value(len(intervals.gap), floor.pairs, terms.confidence) * floor.sd
        return Estimate(gap, gap - half, gap + half, floor.sd, floor.pairs, 1, True)
    return Estimate(gap, low, high, sd, df, int(intervals.pooled.sum()) if intervals.pooled[index] else 1, False)


def _row(
    recipe: Recipe, estimate: Estimate, floor: Floor, family: Family, factor: Factor, terms: Terms
) -> dict[str, Any]:
    """Return one verdict as data; the order is that of the file."""
    verdict = "lossy" if recipe.diverged_seeds else verdict_of(estimate.low, estimate.high, terms.margin)
    confounders = _confounders(recipe.pairs)
    run = recipe.pairs[0].run
    sound = [pair for pair in recipe.pairs if pair.run.seed not in recipe.diverged_seeds]
    row: dict[str, Any] = {
        "name": recipe.label,
        "verdict": verdict,
        "gap": _number(estimate.gap),
        "ci": [_number(estimate.low), _number(estimate.high)],
        "pairs": len(recipe.pairs),
        "controlled": not confounders,
        "confounders": confounders,
        "parameters": run.parameters,
        "tokens": _tokens(recipe),
        "model": run.config.get("model.name"),
        "setting": family.setting,
        "baseline": factor.baseline_label,
        "margin": terms.margin,
        "confidence": terms.confidence,
        "reason": "",
        "more_seeds": _more_seeds(recipe, estimate, len(family.recipes), terms) if verdict == "inconclusive" else None,
        "aa_floor": floor.sd,
        "aa_pairs": floor.pairs,
        "floor_stands_in": estimate.stand_in,
        "sd": _number(estimate.sd),
        "df": _number(estimate.df),
        "pooled_with": estimate.pool - 1,
        "comparisons": len(family.recipes),
        "diverged_seeds": recipe.diverged_seeds,
        "differences": [{"seed": seed, "gap": value} for seed, value in sorted(recipe.differences.items())],
        "tail_steps": list(recipe.tail.steps) if recipe.tail else [],
        "loss": _mean(recipe, [pair.run for pair in sound]),
        "baseline_loss": _mean(recipe, [pair.baseline for pair in sound]),
        "gap_high_precision": _high_precision_gap(recipe),
        "gap_by_source": _gap_by_source(recipe),
        **cost_of(sound, recipe.tail),
    }
    row["reason"] = _reason(row)
    row["line"] = line_of(row)
    return row


def _tokens(recipe: Recipe) -> int | None:
    """Return the tokens that the judged losses are after, by the baseline: a run that diverged may have ended early."""
    seen = recipe.pairs[0].baseline.tokens
    return seen.get(recipe.tail.steps[-1]) if recipe.tail else max(seen.values(), default=None)


def _more_seeds(recipe: Recipe, estimate: Estimate, recipes: int, terms: Terms) -> int | None:
    count = len(recipe.differences)
    if count < 2:
        return None
    needed = seeds_needed(estimate.gap, estimate.sd, terms.margin, recipes, estimate.pool, terms.confidence)
    return None if needed is None else max(needed - count, 1)


def _confounders(pairs: Sequence[Pair]) -> list[dict[str, Any]]:
    """Return [{"key", "values"}]: each key that differs within any pair, with all values met, the baseline's first."""
    found: dict[str, list[Any]] = {}
    for pair in pairs:
        for key, values in pair.confounders.items():
            for value in values:
                if value not in found.setdefault(key, []):
                    found[key].append(value)
    return [{"key": key, "values": values} for key, values in sorted(found.items())]


def _mean(recipe: Recipe, runs: list[Run]) -> float | None:
    losses = [recipe.tail.of(run) for run in runs if recipe.tail]
    return math.fsum(losses) / len(losses) if losses else None


def _high_precision_gap(recipe: Recipe) -> float | None:
    """Return the gap of the same weights without casts in the forward pass; None where the recipe quantises nothing."""
    if recipe.tail is None:
        return None
    high = Tail(HIGH_PRECISION, recipe.tail.steps)
    pairs = [pair for pair in recipe.pairs if pair.run.seed in recipe.differences]
    if not pairs or any(set(high.steps) - set(pair.run.validations.get(HIGH_PRECISION, {})) for pair in pairs):
        return None
    return math.fsum(high.of(pair.run) - _own_high_precision(pair.baseline, recipe.tail) for pair in pairs) / len(pairs)


def _own_high_precision(run: Run, tail: Tail) -> float:
    return Tail(HIGH_PRECISION if HIGH_PRECISION in run.validations else tail.metric, tail.steps).of(run)


def _gap_by_source(recipe: Recipe) -> dict[str, float]:
    """Return the mean gap on each source of the validation set that all runs scored."""
    pairs = [pair for pair in recipe.pairs if pair.run.seed in recipe.differences]
    if recipe.tail is None or not pairs:
        return {}
    keys = set.intersection(*(set(run.validations) for pair in pairs for run in (pair.run, pair.baseline)))
    found = {}
    for key in sorted(key for key in keys if key.startswith("val_loss/")):
        tail = Tail(key, recipe.tail.steps)
        value = math.fsum(tail.of(pair.run) - tail.of(pair.baseline) for pair in pairs) / len(pairs)
        if math.isfinite(value):
            found[key.removeprefix("val_loss/")] = value
    return found


def _reason(row: dict[str, Any]) -> str:
    """Return what has to be said beside the numbers, as one phrase; empty where they say it all."""
    if row["diverged_seeds"]:
        seeds = f"seed{'s' * (len(row['diverged_seeds']) > 1)} {', '.join(map(str, row['diverged_seeds']))}"
        return f"diverged at {seeds} where the baseline did not, which is lossy by definition"
    if row["floor_stands_in"]:
        text = f"one pair: the A/A floor of {_count(row['aa_pairs'], 'pair')} stands in for the spread between seeds"
        return text if row["verdict"] != "inconclusive" else f"{text}; more seeds would measure it"
    if len(row["differences"]) == 1:
        return "one pair alone shows no spread; at least 1 more seed, or an A/A run, is needed to tell"
    if row["verdict"] != "inconclusive":
        return ""
    if row["more_seeds"] is None:
        return "the gap is too near the margin for more seeds to decide"
    return f"{_count(row['more_seeds'], 'more seed')} would decide"


def line_of(row: dict[str, Any]) -> str:
    """Return a verdict in one line: with the model's size, the tokens and the margin, every time."""
    numbers = []
    if row["gap"] is not None:
        numbers.append(f"gap {row['gap']:+.4f}")
    if row["ci"][0] is not None:
        numbers.append(f"{100 * row['confidence']:g} % CI [{row['ci'][0]:+.4f}, {row['ci'][1]:+.4f}]")
    numbers.append(_count(row["pairs"], "pair"))
    if row["aa_floor"] is not None:
        numbers.append(f"A/A floor {row['aa_floor']:.4f}")
    scale = f"{short(row['parameters'])} parameters, {short(row['tokens'])} tokens"
    reason = f", {row['reason']}" if row["reason"] else ""
    text = f"{row['name']} at {scale}: {row['verdict']} at margin {row['margin']:g} ({', '.join(numbers)}){reason}"
    if not row["controlled"]:
        keys = [each["key"] for each in row["confounders"]]
        more = f" and {len(keys) - 4} more" if len(keys) > 4 else ""
        text += f"; not controlled: the runs differ in {', '.join(keys[:4])}{more} too"
    return text


def power_statement() -> str:
    """Return what "N more seeds would decide" assumes."""
    return f"'N more seeds would decide': with probability {POWER:.0%}, if the true gap and spread are those observed."


def short(number: int | float | None) -> str:
    """Return a count to two or three digits: 6.9M, 1.6M, 768K."""
    if number is None:
        return "unknown"
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.3g}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
