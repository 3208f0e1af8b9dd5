"""A whole comparison: runs in, verdicts out, with everything that could not be used and why."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lightning_llm.base.errors import ConfigError, Problem, gathered
from lightning_llm.base.terminal import Waiting
from lightning_llm.compare.baseline import Baseline
from lightning_llm.compare.best_value.best_of import BestOf
from lightning_llm.compare.best_value.grid import borne_out
from lightning_llm.compare.best_value.selection import Selection, select_best
from lightning_llm.compare.data import finite, verdict_data
from lightning_llm.compare.estimate import Terms
from lightning_llm.compare.judge import judge, withheld_beside
from lightning_llm.compare.notes import notes_on
from lightning_llm.compare.report.methods import Methods, methods_of
from lightning_llm.compare.report.study import Study
from lightning_llm.compare.runs.copies import without_copies
from lightning_llm.compare.runs.factor import Factor, choose_factor
from lightning_llm.compare.runs.pairing import Family, pair_runs
from lightning_llm.compare.runs.searched import survived_at
from lightning_llm.compare.runs.unfinished import levels_without_a_run, unfinished_problems
from lightning_llm.compare.runs.usable import newest_of_same, split_usable, why_incomparable
from lightning_llm.compare.sequential.design import Design
from lightning_llm.compare.sequential.looks import Look
from lightning_llm.compare.statistics.all_pairs import PairGap, all_pairs
from lightning_llm.compare.statistics.noise import Floor
from lightning_llm.compare.statistics.paired_curves import paired_curves
from lightning_llm.compare.statistics.seeds import Advice
from lightning_llm.compare.target import NO_TARGETS
from lightning_llm.compare.tokens.token_curve import curve_of
from lightning_llm.compare.tokens.token_margin import in_nats
from lightning_llm.compare.verdict import Verdict
from lightning_llm.tracking.reading import Run, read_run


@dataclass
class Comparison:
    """What was judged; `runs` that were read, `problems` with what was given, `notes` to read along."""

    factor: Factor
    terms: Terms
    runs: list[Run]
    families: list[Family] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)
    floors: list[tuple[Family, Floor]] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    advice: Advice | None = None
    looks: list[Look] = field(default_factory=list)
    selection: Selection | None = None
    all_pairs: list[PairGap] = field(default_factory=list)
    """Every recipe against every other, where that was asked for."""
    design: Design | None = None
    ladder: bool = False
    """Whether a law over sizes and tokens was fitted to it, which its methods then say."""

    @property
    def baselines(self) -> list[Baseline]:
        """The baseline's figures in each setting."""
        return [Baseline(self.factor.baseline_label, family, self.terms) for family in self.families]

    def verdicts_of(self, family: Family) -> list[Verdict]:
        """Return the verdicts in one setting."""
        return [verdict for verdict in self.verdicts if verdict.family is family]

    @property
    def methods(self) -> Methods:
        """What was done, in words, and what that is taken from."""
        chosen, looks = self.selection, self.looks
        return methods_of(
            Study(
                self.factor, self.terms, self.families, self.verdicts, chosen, looks, self.design,
                bool(self.all_pairs), self.ladder,
            )
        )  # fmt: skip

    def as_data(self) -> dict[str, Any]:
        """Return what `compare.json` holds."""
        methods = self.methods
        curves = {
            id(verdict): curve.as_data()
            for family in self.families
            for verdict, curve in zip(self.verdicts_of(family), paired_curves(self.verdicts_of(family)), strict=True)
        }
        return {
            "factor": self.factor.name,
            "baseline": self.factor.baseline_label,
            "margin": finite(self.terms.margin),
            "token_margin": self.terms.token_margin,
            "confidence": self.terms.confidence,
            "metric": self.terms.metric,
            "verdicts": [{**verdict_data(verdict), "curve": curves[id(verdict)]} for verdict in self.verdicts],
            "baselines": [baseline.as_data() for baseline in self.baselines],
            "aa": [floor.as_data(family) for family, floor in self.floors],
            "all_pairs": [each.as_data() for each in self.all_pairs],
            "selection": self.selection.as_data() if self.selection else None,
            "advice": self.advice.as_data() if self.advice else None,
            "looks": [asdict(look) for look in self.looks],
            "sequential": self.design.as_data() if self.design else None,
            "problems": [{"key": each.key, "text": each.text} for each in self.problems],
            "notes": self.notes,
            "methods": methods.texts,
            "references": {reference.key: reference.text for reference in methods.references},
            "runs": [
                {
                    "folder": str(run.folder),
                    "level": self.factor.label(run),
                    "seed": run.seed,
                    "status": run.status,
                    "mlflow_run_id": run.summary.get("mlflow_run_id"),
                    "records_verified": not run.unverified,
                }
                for run in self.runs
            ],
        }


class IncompleteComparisonError(ConfigError):
    """Not all that was given could be judged: `problems` say what, and `comparison` has the verdicts on the rest."""

    def __init__(self, comparison: Comparison):
        self.comparison = comparison
        super().__init__(comparison.problems)

    def __reduce__(self) -> tuple[type["IncompleteComparisonError"], tuple[Any]]:
        return type(self), (self.comparison,)


def read_all(folders: Sequence[Path]) -> tuple[list[Run], list[Problem]]:
    """Return the runs that can be read, and what is wrong with the others."""
    runs: list[Run] = []
    problems: list[Problem] = []
    with Waiting(f"reading {len(folders)} runs") as waiting:
        for number, folder in enumerate(folders):
            waiting.tell(number)
            with gathered(problems):
                runs.append(read_run(folder))
    return runs, problems


def compare_runs(
    runs: Sequence[Run],
    terms: Terms,
    baseline: str | None = None,
    best_of: BestOf | None = None,
    design: Design | None = None,
    damaged: Sequence[Path] = (),
) -> Comparison:
    """Return the verdicts over `runs`; `baseline` is "group=level" or "key=value", None for the usual one.

    `best_of`: each recipe at its best value of a key, by seeds that are not judged. `design`: declared looks, by which
    verdicts are taken; `terms` and `baseline` are then its own. `damaged`: folders of runs that were to be compared and
    cannot be used; beside them, and beside copies under another seed, no recipe is called lossless.

    Raises:
        ConfigError: where no verdict at all can be given, with every reason.
    """
    runs, copies = without_copies(runs)
    damaged = [*damaged, *(Path(each.key) for each in copies)]
    usable, waiting = split_usable(runs)
    problems = [*copies, *unfinished_problems(waiting)]
    unfinished = [run for run in waiting if not run.words]
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
                text = "a recipe is not judged, which may be what the others are held against. Say which: optim=adamw."
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
    _judge_families(comparison, unfinished)
    comparison.verdicts = [withheld_beside(verdict, damaged) for verdict in comparison.verdicts]
    if not comparison.verdicts:
        raise ConfigError(comparison.problems)
    comparison.families = [each for each in comparison.families if comparison.verdicts_of(each)]
    if terms.targets != NO_TARGETS:
        comparison.problems += terms.targets.check([family.words for family in comparison.families])
    if terms.all_pairs:
        _add_all_pairs(comparison, bool(damaged))
    comparison.notes += notes_on(factor, comparison.families, comparison.verdicts, damaged)
    return comparison


def _judge_families(comparison: Comparison, unfinished: Sequence[Run]) -> None:
    """Add the verdicts, and the noise, of each setting; or why there are none. `unfinished`: that may yet go on."""
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
    """Hold every recipe against every other, or note why none is."""
    for family in comparison.families:
        comparison.all_pairs += all_pairs(comparison.verdicts_of(family), damaged)
    if not comparison.all_pairs:
        comparison.notes.append(
            "No table of all pairs: the baseline has not learned, or runs have no validation in common."
        )
