"""From runs to verdicts: select runs, pair them, and judge each group of recipes at one look or at declared looks."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from lightning_llm.base.errors import ConfigError, Problem
from lightning_llm.compare.best_value import BestOf, select_best
from lightning_llm.compare.comparison import Comparison
from lightning_llm.compare.cost import cost_of
from lightning_llm.compare.effective_data import Curve
from lightning_llm.compare.estimate import Floor, Measured, VerdictInputs, judge_all, measure, measure_floor
from lightning_llm.compare.looks import Design
from lightning_llm.compare.runs.factor import Factor, choose_factor
from lightning_llm.compare.runs.pairing import ComparisonGroup, pair_runs
from lightning_llm.compare.runs.usable import (
    levels_without_a_run,
    newest_of_same,
    split_usable,
    survived_at,
    unfinished_problems,
    why_incomparable,
    without_copies,
)
from lightning_llm.compare.sequential_verdicts import SequentialState, judge_by_looks
from lightning_llm.compare.statistics.all_pairs import all_pairs
from lightning_llm.compare.statistics.seeds import SeedPlan, plan_seeds
from lightning_llm.compare.terms import Terms
from lightning_llm.compare.time_to_target import NO_TARGETS
from lightning_llm.compare.token_margin import curve_of, in_nats
from lightning_llm.compare.tuned import borne_out
from lightning_llm.compare.verdict import Verdict
from lightning_llm.compare.verdict_text import notes_on
from lightning_llm.tracking.reading import Run


def compare_runs(
    runs: Sequence[Run],
    terms: Terms,
    baseline: str | None = None,
    best_of: BestOf | None = None,
    design: Design | None = None,
    damaged: Sequence[Path] = (),
) -> Comparison:
    """Return the comparison of `runs`: pair them by seed, judge each recipe, and add notes.

    `baseline`: "group=level" or "key=value", None for the default. `best_of`: compare each recipe at its best value of
    a key, chosen by seeds that are not judged. `design`: declared looks; `terms` and `baseline` are then those of the
    design. `damaged`: folders of runs that cannot be used. If there are any, or copies under another seed, no recipe is
    called lossless.

    Raises:
        ConfigError: no verdict can be given, with every reason.
    """
    runs, copies = without_copies(runs)
    damaged = [*damaged, *(Path(each.key) for each in copies)]
    usable, waiting = split_usable(runs)
    problems = [*copies, *unfinished_problems(waiting)]
    unfinished = [run for run in waiting if not run.overrides]
    if incomparable := why_incomparable(usable, terms.metric):
        raise ConfigError([*problems, incomparable])
    usable, notes = newest_of_same(usable)
    selection = None
    try:
        if best_of is not None:
            selection = select_best(usable, unfinished, best_of, terms)
            usable, unfinished = selection.runs, selection.unfinished
            notes += selection.lines()
            problems += selection.problems
            if selection.problems and baseline is None:
                text = "is missing, and a recipe that is not judged may be the default. Name one, e.g. optim=adamw."
                raise ConfigError(Problem("--baseline", text))
        factor = choose_factor(usable, baseline, best_of.key if best_of else None)
    except ConfigError as error:
        raise ConfigError([*problems, *error.problems]) from error
    comparison = Comparison(factor, terms, usable, problems=problems, notes=notes, selection=selection)
    comparison.design = design
    comparison.families, unpaired = pair_runs(usable, factor, unfinished, terms.metric)
    survived = survived_at(usable)
    for family in comparison.families:
        family.survived_at = survived
    comparison.problems += [*unpaired, *levels_without_a_run(waiting, usable, factor)]
    judge_families(comparison, unfinished)
    comparison.verdicts = [withheld_beside(verdict, damaged) for verdict in comparison.verdicts]
    if not comparison.verdicts:
        raise ConfigError(comparison.problems)
    comparison.families = [each for each in comparison.families if comparison.verdicts_of(each)]
    if terms.targets != NO_TARGETS:
        comparison.problems += terms.targets.check([family.text for family in comparison.families])
    if terms.all_pairs:
        _add_all_pairs(comparison, bool(damaged))
    comparison.notes += notes_on(factor, comparison.families, comparison.verdicts, damaged)
    return comparison


def judge_families(comparison: Comparison, unfinished: Sequence[Run]) -> None:
    """Judge each group of `comparison`: add its verdicts and noise floor, or a problem if it has none.

    `unfinished`: unfinished runs, of which baseline runs of other lengths matter for a margin in tokens.
    """
    factor, terms, usable, selection = comparison.factor, comparison.terms, comparison.runs, comparison.selection
    of_baseline = [run for run in (*usable, *unfinished) if factor.level(run) == factor.baseline]
    for family in comparison.families:
        curve = curve_of(family, usable, factor, terms)
        try:
            here = in_nats(terms, family, curve, of_baseline)
        except ConfigError as error:
            comparison.problems += error.problems
            continue
        verdicts, floor, found = judge(family, factor, here, curve, comparison.design)
        if selection is not None:
            verdicts = borne_out(verdicts, selection)
        comparison.verdicts += verdicts
        comparison.problems += found
        if family.aa_groups:
            comparison.floors.append((family, floor))


def _add_all_pairs(comparison: Comparison, damaged: bool) -> None:
    """Compare every recipe with every other, or add a note if that is not possible."""
    for family in comparison.families:
        comparison.all_pairs += all_pairs(comparison.verdicts_of(family), damaged)
    if not comparison.all_pairs:
        comparison.notes.append(
            "No table of all pairs: the baseline has not learned, or runs have no validation in common."
        )


def judge(
    family: ComparisonGroup, factor: Factor, terms: Terms, curve: Curve | None = None, design: Design | None = None
) -> tuple[list[Verdict], Floor, list[Problem]]:
    """Return the verdicts of one group, the noise of its runs that differ only in rounding, and problems.

    `design`: judge at these declared looks; None: at one look. `curve`: the baseline's losses at other numbers of
    tokens, which convert gaps to tokens.
    """
    recipes: list[Measured] = []
    problems: list[Problem] = []
    margins = None if terms.token_margin is None or curve is None else curve.margins(terms.token_margin)
    for label, pairs in family.recipes.items():
        recipe = measure(label, pairs, family.missing.get(label, ()), terms, margins)
        if recipe.tail is None and not recipe.seeds:
            text = f"{label} and {factor.baseline_label} have no validation of '{terms.metric}' at a common step. "
            text += "Validate all runs at the same steps, or choose another --metric."
            problems.append(Problem(str(pairs[0].run.folder), text))
            continue
        recipes.append(recipe)
    floor = measure_floor(family, terms.metric, terms.tail_share)
    if design is not None and recipes:

        def floor_at(seeds: Sequence[int]) -> float | None:
            groups = [group for group in family.aa_groups if group[0].seed in seeds]
            return measure_floor(replace(family, aa_groups=groups), terms.metric, terms.tail_share).sd

        known = replace(family, recipes={each.label: each.pairs for each in recipes})
        judged_with_state = judge_by_looks(known, floor_at, design, curve).values()
        found = [_verdict(each, floor, family, factor, terms, curve, state) for each, state in judged_with_state]
        return found, floor, problems
    judged = judge_all(recipes, floor.sd, terms)
    return [_verdict(each, floor, family, factor, terms, curve) for each in judged], floor, problems


def _verdict(
    judged: VerdictInputs,
    floor: Floor,
    family: ComparisonGroup,
    factor: Factor,
    terms: Terms,
    curve: Curve | None,
    sequential: SequentialState | None = None,
) -> Verdict:
    if terms.token_margin is not None:
        terms = replace(terms, margin=judged.margin)
    if curve is not None and sequential is not None:
        curve = curve.within(sequential.seeds)
    sound = [pair for pair in judged.measured.pairs if pair.run.seed in judged.measured.differences]
    cost = cost_of(sound, judged.measured.tail)
    plan = plan_seeds(judged, terms) if sequential is None else SeedPlan()  # declared looks fix the seeds
    return Verdict(judged, family, factor, terms, floor, plan, cost, curve=curve, sequential=sequential)


def withheld_beside(verdict: Verdict, damaged: Sequence[Path]) -> Verdict:
    """Return `verdict`; a lossless one becomes inconclusive if there are `damaged` runs in the comparison.

    The results of damaged runs are unknown, and possibly even their recipe. The intervals of a group and its pooled
    variance depend on all of its runs.
    """
    if not damaged or verdict.decision != "lossless":
        return verdict
    judged = replace(verdict.judged, decision="inconclusive", loss="inconclusive")
    return replace(verdict, judged=judged, plan=SeedPlan(), damaged=tuple(damaged))


def open_verdicts(verdicts: Sequence[Verdict]) -> dict[str, int]:
    """Return {recipe: number of further seeds that would decide it} for inconclusive recipes with a known number."""
    found: dict[str, int] = {}
    for verdict in verdicts:
        if verdict.decision == "inconclusive" and verdict.plan.more is not None:
            found[verdict.name] = max(found.get(verdict.name, 0), verdict.plan.more)
    return found
