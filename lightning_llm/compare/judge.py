"""Verdicts on a family of recipes, at one look or at the looks that were declared."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from lightning_llm.base.errors import Problem
from lightning_llm.compare.cost import cost_of
from lightning_llm.compare.estimate import Judged, Measured, Terms, judge_all, measure
from lightning_llm.compare.runs.factor import Factor
from lightning_llm.compare.runs.pairing import Family
from lightning_llm.compare.sequential.design import Design
from lightning_llm.compare.sequential.verdicts import Stage, judge_by_looks
from lightning_llm.compare.statistics.noise import Floor, measure_floor
from lightning_llm.compare.statistics.seeds import SeedPlan, plan_seeds
from lightning_llm.compare.tokens.effective_data import Curve
from lightning_llm.compare.verdict import Verdict


def judge(
    family: Family, factor: Factor, terms: Terms, curve: Curve | None = None, design: Design | None = None
) -> tuple[list[Verdict], Floor, list[Problem]]:
    """Return the verdicts of one family, its A/A floor, and what could not be judged; by `design`'s looks, if any.

    `curve`: the baseline's losses at other numbers of tokens, for what gaps are worth in those.
    """
    recipes: list[Measured] = []
    problems: list[Problem] = []
    margins = None if terms.token_margin is None or curve is None else curve.margins(terms.token_margin)
    for label, pairs in family.recipes.items():
        recipe = measure(label, pairs, family.missing.get(label, ()), terms, margins)
        if recipe.tail is None and not recipe.seeds:
            text = f"{label} and {factor.baseline_label} have no validation of '{terms.metric}' at a common step."
            problems.append(Problem(str(pairs[0].run.folder), text))
            continue
        recipes.append(recipe)
    floor = measure_floor(family, terms.metric, terms.tail_share)
    if design is not None and recipes:

        def floor_at(seeds: Sequence[int]) -> float | None:
            groups = [group for group in family.aa_groups if group[0].seed in seeds]
            return measure_floor(replace(family, aa_groups=groups), terms.metric, terms.tail_share).sd

        known = replace(family, recipes={each.label: each.pairs for each in recipes})
        staged = judge_by_looks(known, floor_at, design, curve).values()
        found = [_verdict(each, floor, family, factor, terms, curve, stage) for each, stage in staged]
        return found, floor, problems
    judged = judge_all(recipes, floor.sd, terms)
    return [_verdict(each, floor, family, factor, terms, curve) for each in judged], floor, problems


def _verdict(
    judged: Judged,
    floor: Floor,
    family: Family,
    factor: Factor,
    terms: Terms,
    curve: Curve | None,
    stage: Stage | None = None,
) -> Verdict:
    if terms.token_margin is not None:
        terms = replace(terms, margin=judged.margin)
    if curve is not None and stage is not None:
        curve = curve.within(stage.seeds)
    sound = [pair for pair in judged.measured.pairs if pair.run.seed in judged.measured.differences]
    cost = cost_of(sound, judged.measured.tail)
    plan = plan_seeds(judged, terms) if stage is None else SeedPlan()  # declared looks say when to go on
    return Verdict(judged, family, factor, terms, floor, plan, cost, curve=curve, stage=stage)


def withheld_beside(verdict: Verdict, damaged: Sequence[Path]) -> Verdict:
    """Return `verdict`, inconclusive instead of lossless where runs of the comparison are `damaged`.

    What they would have shown is unknown, and so may be which recipe they are of; the intervals of a family, and the
    variance that it shares, rest on all of its runs.
    """
    if not damaged or verdict.decision != "lossless":
        return verdict
    judged = replace(verdict.judged, decision="inconclusive", loss="inconclusive")
    return replace(verdict, judged=judged, plan=SeedPlan(), damaged=tuple(damaged))


def open_verdicts(verdicts: Sequence[Verdict]) -> dict[str, int]:
    """Return {recipe: how many more seeds would decide} of those that are open and can be decided so."""
    found: dict[str, int] = {}
    for verdict in verdicts:
        if verdict.decision == "inconclusive" and verdict.plan.more is not None:
            found[verdict.name] = max(found.get(verdict.name, 0), verdict.plan.more)
    return found
