"""From pairs to verdicts: one per recipe and setting, as plain data (`compare.json`), and each as one line."""

import math
from collections.abc import Sequence
from typing import Any

from lightning_llm.compare.estimate import Estimate, Recipe, Terms, estimates, measure, plan
from lightning_llm.compare.factor import Factor
from lightning_llm.compare.losses import Tail, cost_of
from lightning_llm.compare.noise import Floor, measure_floor
from lightning_llm.compare.pairing import Family, Pair
from lightning_llm.compare.reading import Run
from lightning_llm.compare.statistics import Verdict, verdict_of
from lightning_llm.compare.wording import line_of, reason_of
from lightning_llm.errors import Problem

OWN, HIGH_PRECISION = "val_loss", "val_loss_high_precision"


def judge(
    family: Family, factor: Factor, terms: Terms
) -> tuple[list[dict[str, Any]], dict[str, Any] | None, list[Problem]]:
    """Return the verdicts of one family, its A/A floor as data, and what could not be judged."""
    recipes: list[Recipe] = []
    problems: list[Problem] = []
    for label, pairs in family.recipes.items():
        recipe = measure(label, pairs, family.missing.get(label, ()), terms)
        for pair in pairs:
            if pair not in recipe.pairs:
                text = f"its '{terms.metric}' is not finite in the tail; nothing can be held against it."
                problems.append(Problem(str(pair.baseline.folder), text))
        if not recipe.pairs:
            continue
        if recipe.tail is None and not recipe.diverged_seeds:
            text = f"{label} and {factor.baseline_label} have no validation of '{terms.metric}' at a common step."
            problems.append(Problem(str(pairs[0].run.folder), text))
            continue
        recipes.append(recipe)
    floor = measure_floor(family, terms.metric, terms.tail_share)
    aa = floor.as_data(family) if family.aa_groups else None
    if not recipes:
        return [], aa, problems
    found = zip(recipes, estimates(recipes, floor, terms), strict=True)
    return [_row(recipe, estimate, floor, family, factor, terms) for recipe, estimate in found], aa, problems


def _verdict(recipe: Recipe, estimate: Estimate, terms: Terms) -> Verdict:
    """Return the verdict; with seeds missing that may have gone wrong, never lossless."""
    if recipe.diverged_seeds:
        return "lossy"
    verdict = verdict_of(estimate.low, estimate.high, terms.margin)
    return "inconclusive" if verdict == "lossless" and recipe.missing_seeds else verdict


def _row(
    recipe: Recipe, estimate: Estimate, floor: Floor, family: Family, factor: Factor, terms: Terms
) -> dict[str, Any]:
    """Return one verdict as data; the order is that of the file."""
    verdict = _verdict(recipe, estimate, terms)
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
        **_seeds(recipe, estimate, verdict, terms),
        "aa_floor": floor.sd,
        "aa_pairs": floor.pairs,
        "floor_stands_in": estimate.stand_in.startswith("floor"),
        "stand_in": estimate.stand_in,
        "sd": _number(estimate.sd),
        "df": _number(estimate.df),
        "pooled_with": estimate.pool - 1,
        "comparisons": estimate.claims,
        "identical": recipe.identical,
        "diverged_seeds": recipe.diverged_seeds,
        "missing_seeds": recipe.missing_seeds,
        "differences": [{"seed": seed, "gap": value} for seed, value in sorted(recipe.differences.items())],
        "tail_steps": list(recipe.tail.steps) if recipe.tail else [],
        "loss": _mean(recipe, [pair.run for pair in sound]),
        "baseline_loss": _mean(recipe, [pair.baseline for pair in sound]),
        "gap_high_precision": _high_precision_gap(recipe),
        "gap_by_source": _gap_by_source(recipe),
        **cost_of(sound, recipe.tail),
    }
    row["reason"] = reason_of(row)
    row["line"] = line_of(row)
    return row


def _tokens(recipe: Recipe) -> int | None:
    """Return the tokens that the judged losses are after, by the baseline: a run that diverged may have ended early."""
    seen = recipe.pairs[0].baseline.tokens
    return seen.get(recipe.tail.steps[-1]) if recipe.tail else max(seen.values(), default=None)


def _seeds(recipe: Recipe, estimate: Estimate, verdict: Verdict, terms: Terms) -> dict[str, int | None]:
    """Return how many seeds would decide where these did not: in all, and beside those at hand.

    None of the latter where those at hand would mostly have told a gap of 0, and the interval is no wider than the
    margin: then the gap is near the margin, and more seeds hardly decide.
    """
    count, near = len(recipe.differences), estimate.high - estimate.low <= terms.margin
    none: dict[str, int | None] = dict.fromkeys(("more_seeds", "seeds_if_no_gap", "seeds_if_lossy"))
    if verdict != "inconclusive" or count < 2 or estimate.high < terms.margin:
        return none
    no_gap, lossy = plan(estimate, terms)
    more = None if no_gap is None or (no_gap <= count and near) else max(no_gap - count, 1)
    return {"more_seeds": more, "seeds_if_no_gap": no_gap, "seeds_if_lossy": lossy}


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
    if recipe.tail is None or not (recipe.tail.metric == OWN or recipe.tail.metric.startswith(f"{OWN}/")):
        return None
    high = Tail(recipe.tail.metric.replace(OWN, HIGH_PRECISION, 1), recipe.tail.steps)
    pairs = [pair for pair in recipe.pairs if pair.run.seed in recipe.differences]
    if not pairs or any(set(high.steps) - set(pair.run.validations.get(high.metric, {})) for pair in pairs):
        return None
    base = [high if high.metric in pair.baseline.validations else recipe.tail for pair in pairs]
    gaps = (high.of(pair.run) - tail.of(pair.baseline) for pair, tail in zip(pairs, base, strict=True))
    return math.fsum(gaps) / len(pairs)


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


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
