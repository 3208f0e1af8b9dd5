"""From pairs to verdicts: one per recipe and setting, as plain data (`compare.json`), and each as one line."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lightning_llm.compare.differences import ROUNDING, all_differences, below
from lightning_llm.compare.factor import Factor
from lightning_llm.compare.losses import TAIL_SHARE, Tail, cost_of, diverged, tail_of
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
class Floor:
    """The run-to-run noise: `sd` of an A/A pair's difference, whose mean is zero by design, over `differences`."""

    differences: list[float]
    identical: int
    keys: list[str]

    @property
    def sd(self) -> float | None:
        """Root mean square difference; None where there is no pair, or only pairs equal to the last bit."""
        if not self.differences:
            return None
        return math.sqrt(math.fsum(each**2 for each in self.differences) / len(self.differences))


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
    floor = measure_floor(family, terms)
    if not recipes:
        return [], _floor_data(floor, family), problems
    seeds = sorted({pair.run.seed for recipe in recipes for pair in recipe.pairs})
    matrix = np.array([[recipe.differences.get(seed, math.nan) for seed in seeds] for recipe in recipes])
    intervals = simultaneous_intervals(matrix, terms.confidence)
    rows = [_row(recipe, index, intervals, floor, family, factor, terms) for index, recipe in enumerate(recipes)]
    return rows, _floor_data(floor, family), problems


def _measure(label: str, pairs: list[Pair], terms: Terms) -> Recipe:
    whole = [pair for pair in pairs if not pair.run.non_finite]
    runs = [run for pair in whole for run in (pair.run, pair.baseline)]
    tail = tail_of(runs, terms.metric, terms.tail_share) if runs else None
    lost = [pair for pair in pairs if diverged(pair.run, tail, pair.baseline)]
    differences = {
        pair.run.seed: tail.of(pair.run) - tail.of(pair.baseline) for pair in pairs if tail and pair not in lost
    }
    return Recipe(label, pairs, tail, differences, sorted(pair.run.seed for pair in lost))


def measure_floor(family: Family, terms: Terms) -> Floor:
    """Return the noise floor. A pair whose losses are the same to the last bit shows no noise, and is only counted."""
    differences, identical, keys = [], 0, set()
    for one, other in family.aa_pairs:
        tail = tail_of([one, other], terms.metric, terms.tail_share)
        if tail is None or diverged(one, tail) or diverged(other, tail):
            continue
        if one.validations[terms.metric] == other.validations[terms.metric]:
            identical += 1
            continue
        differences.append(tail.of(other) - tail.of(one))
        keys |= set(_rounding_keys(one, other))
    return Floor(differences, identical, sorted(keys))


def _rounding_keys(one: Run, other: Run) -> list[str]:
    return [key for key in all_differences(one, other) if below(key, ROUNDING)]


def _floor_data(floor: Floor, family: Family) -> dict[str, Any] | None:
    if not family.aa_pairs:
        return None
    return {
        "setting": family.setting,
        "floor": floor.sd,
        "pairs": len(floor.differences),
        "differences": floor.differences,
        "identical_pairs": floor.identical,
        "keys": floor.keys,
        "runs": [[str(one.folder), str(other.folder)] for one, other in family.aa_pairs],
    }


def _row(
    recipe: Recipe, index: int, intervals: Intervals, floor: Floor, family: Family, factor: Factor, terms: Terms
) -> dict[str, Any]:
    """Return one verdict as data; the order is that of the file."""
    low, high = float(intervals.low[index]), float(intervals.high[index])
    gap, sd, df = (float(each[index]) for each in (intervals.gap, intervals.sd, intervals.df))
    count = len(recipe.differences)
    stand_in = count == 1 and floor.sd is not None and not recipe.diverged_seeds
    if stand_in and floor.sd is not None:
        sd, df = floor.sd, float(len(floor.differences))
        half = critical_value(len(family.recipes), df, terms.confidence) * sd
        low, high = gap - half, gap + half
    verdict = "lossy" if recipe.diverged_seeds else verdict_of(low, high, terms.margin)
    pool = int(intervals.pooled.sum()) if intervals.pooled[index] else 1
    more = None
    if verdict == "inconclusive" and count > 1:
        needed = seeds_needed(gap, sd, terms.margin, len(family.recipes), pool, terms.confidence)
        more = None if needed is None else max(needed - count, 1)
    confounders = _confounders(recipe.pairs)
    run = recipe.pairs[0].run
    tokens = run.tokens.get(recipe.tail.steps[-1]) if recipe.tail else None
    row: dict[str, Any] = {
        "name": recipe.label,
        "verdict": verdict,
        "gap": _number(gap),
        "ci": [_number(low), _number(high)],
        "pairs": len(recipe.pairs),
        "controlled": not confounders,
        "confounders": confounders,
        "parameters": run.parameters,
        "tokens": tokens,
        "model": run.config.get("model.name"),
        "setting": family.setting,
        "baseline": factor.baseline_label,
        "margin": terms.margin,
        "confidence": terms.confidence,
        "reason": "",
        "more_seeds": more,
        "aa_floor": floor.sd,
        "aa_pairs": len(floor.differences),
        "floor_stands_in": stand_in,
        "sd": _number(sd),
        "df": _number(df),
        "pooled_with": pool - 1,
        "comparisons": len(family.recipes),
        "diverged_seeds": recipe.diverged_seeds,
        "differences": [{"seed": seed, "gap": value} for seed, value in sorted(recipe.differences.items())],
        "tail_steps": list(recipe.tail.steps) if recipe.tail else [],
        "loss": _mean(recipe, [pair.run for pair in recipe.pairs]),
        "baseline_loss": _mean(recipe, [pair.baseline for pair in recipe.pairs]),
        "gap_high_precision": _high_precision_gap(recipe),
        "gap_by_source": _gap_by_source(recipe),
        **cost_of([pair for pair in recipe.pairs if pair.run.seed not in recipe.diverged_seeds], recipe.tail),
    }
    row["reason"] = _reason(row)
    row["line"] = line_of(row)
    return row


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
    losses = [recipe.tail.of(run) for run in runs if recipe.tail and run.seed not in recipe.diverged_seeds]
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
        seeds = ", ".join(map(str, row["diverged_seeds"]))
        return f"diverged at seed {seeds} where the baseline did not, which is lossy by definition"
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
    return f"{number:g}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
