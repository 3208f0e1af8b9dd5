"""Verdicts over logs of other trainers: read the logs, check the curves, put them on one axis, judge them as runs."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import stdev

from lightning_llm.base.errors import ConfigError, Problem, did_you_mean, gathered
from lightning_llm.compare.comparison import Comparison
from lightning_llm.compare.curves.as_runs import ARM, runs_of, with_seeds
from lightning_llm.compare.curves.checks import label_problems, problems_of, smoothing_problems, stated_problems
from lightning_llm.compare.curves.columns import axis_of, find_loss
from lightning_llm.compare.curves.common_axis import common_axis, in_common_unit
from lightning_llm.compare.curves.copies import copy_problems, part_problems, scale_problems
from lightning_llm.compare.curves.curve import LoggedCurve, curve_of
from lightning_llm.compare.curves.named import NamedLog, mixed_seeds, pattern_for
from lightning_llm.compare.curves.readers import read_table
from lightning_llm.compare.curves.table import LoggedTable
from lightning_llm.compare.format import count, nats
from lightning_llm.compare.judge import judge_families
from lightning_llm.compare.runs.factor import Factor, as_text
from lightning_llm.compare.runs.pairing import ADD_PARTNER, pair_runs
from lightning_llm.compare.statistics.seeds import MOST_SEEDS, seeds_needed
from lightning_llm.compare.terms import RequestedTerms, Terms, terms_of
from lightning_llm.compare.verdict import Verdict
from lightning_llm.compare.verdict_text import notes_on_scope

VALIDATED = "the text of validations"
NOT_VERIFIED = (
    "the data and their order",
    VALIDATED,
    "the code and its version",
    "initial weights",
    "the parallel layout and the machine",
    "learning rate, schedule and batch size",
    "whether values were averaged or smoothed before they were logged",
)
"""Facts that are verified for runs of this program, and that logs of other trainers do not show."""


@dataclass(frozen=True)
class LogOptions:
    """Options for reading logs (--x, --format, --tokens-per-step, --until); None: detect the value.

    `x`: the axis, "step", "tokens" or a column; `format`: the format of every log; `until`: the last value of x to
    compare, None for the whole log.
    """

    x: str | None = None
    format: str | None = None
    tokens_per_step: float | None = None
    until: float | None = None

    def check(self) -> None:
        """Raise ConfigError for numbers that are out of range."""
        numbers = {"--tokens-per-step": self.tokens_per_step, "--until": self.until}
        problems = [
            Problem(flag, "must be a number above 0.", f"{value:g}")
            for flag, value in numbers.items()
            if value is not None and not (math.isfinite(value) and value > 0)
        ]
        if problems:
            raise ConfigError(problems)


def read_logs(logs: Sequence[NamedLog], options: LogOptions) -> list[tuple[NamedLog, LoggedTable]]:
    """Return (log, its table of numbers) for each of `logs`. Raises ConfigError with every log that cannot be read."""
    problems: list[Problem] = []
    tables = []
    for log in logs:
        with gathered(problems):
            tables.append((log, read_table(log.address, options.format)))
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    return tables


def curves_of(
    tables: Sequence[tuple[NamedLog, LoggedTable]], asked: RequestedTerms, options: LogOptions
) -> list[LoggedCurve]:
    """Return the loss curve of each table, all over the same axis, checked by themselves and against each other.

    Raises:
        ConfigError: with every problem of the first check that finds any.
    """
    terms = curve_terms(asked)
    problems: list[Problem] = []
    losses = []
    for _, table in tables:
        with gathered(problems):
            losses.append(find_loss(table, asked.metric))
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    pairs = [(table, loss) for (_, table), loss in zip(tables, losses, strict=True)]
    axis = axis_of(pairs, options.x, options.tokens_per_step is not None)
    curves: list[LoggedCurve] = []
    for (log, table), loss in zip(tables, losses, strict=True):
        with gathered(problems):
            curves.append(curve_of(log, table, loss, axis, options.tokens_per_step).until(options.until))
    if problems:
        raise ConfigError(problems)
    too_few = [curve for curve in curves if len(curve.x) < 2]
    problems += [Problem(each.log.address, f"has no two points up to --until {options.until}.") for each in too_few]
    problems += mixed_seeds([curve.log for curve in curves])
    problems += _repeated_seeds(curves)
    curves = curves if problems else in_common_unit(curves)
    problems += stated_problems(curves) + label_problems(curves)
    if not problems:
        problems += [problem for curve in curves for problem in problems_of(curve, terms.margin)]
    problems = (
        problems
        or copy_problems(curves)
        or part_problems(curves)
        or smoothing_problems(curves)
        or _contradictory_steps(curves)
    )
    if problems:
        raise ConfigError(problems)
    return curves


def curve_terms(asked: RequestedTerms) -> Terms:
    """Return the terms of verdicts over logs. Raises ConfigError for a margin in tokens, which needs other runs."""
    terms = terms_of(replace(asked, metric=None))
    if not math.isfinite(terms.margin):
        text = (
            "in tokens requires the baseline's own runs of other lengths. Give the margin in nats, e.g. --margin 0.01."
        )
        raise ConfigError(Problem("--margin", text))
    return terms


def compare_curves(curves: Sequence[LoggedCurve], terms: Terms, baseline: str | None) -> Comparison:
    """Return the comparison of `curves`: a verdict on each arm (side of the comparison) against the arm `baseline`.

    Raises:
        ConfigError: the baseline is missing, the curves do not overlap, or runs have no partner.
    """
    arms = list(dict.fromkeys(curve.log.arm for curve in curves))
    named = (baseline or "").removeprefix(f"{ARM}=")
    if len(arms) == 1:
        pattern = pattern_for(Path(curves[0].log.address))
        text = f"all logs are of the arm {arms[0]}. Name arms as ARM/SEED=PATH, or by --pattern '{pattern}'."
        raise ConfigError(Problem("--from", text))
    if named not in arms:
        lead = "is not given" if baseline is None else f"'{named}' is the arm of no log"
        hint = did_you_mean(named, arms) if baseline else ""
        text = f"{lead}. Choose one of the arms: {', '.join(arms)}.{hint}"
        raise ConfigError(Problem("--baseline", text))
    if problems := scale_problems(curves, named):
        raise ConfigError(problems)
    loss = curves[0].loss
    names = list(dict.fromkeys(curve.loss.name for curve in curves))
    metric = names[0] if len(names) == 1 else f"{loss.kind} loss"
    terms = replace(terms, metric=metric, measured_in=loss.unit)
    axis = common_axis(curves, terms.margin)
    runs = runs_of(with_seeds(curves), axis, metric, terms.margin)
    ordered = [named, *(arm for arm in arms if arm != named)]
    factor = Factor(ARM, (ARM,), {(as_text(arm),): arm for arm in ordered}, (as_text(named),))
    comparison = Comparison(factor, terms, runs, logs=[curve.as_data() for curve in curves])
    comparison.not_verified = not_verified(curves)
    comparison.families, unpaired = pair_runs(runs, factor, (), metric)
    if unpaired and any(curve.log.seed is not None for curve in curves):
        raise ConfigError([_without_partner(each) for each in unpaired])
    judge_families(comparison, ())
    if not comparison.verdicts:
        raise ConfigError(comparison.problems or unpaired)
    comparison.notes += notes_on_logs(comparison, curves, axis.method, len(unpaired))
    return comparison


def _without_partner(problem: Problem) -> Problem:
    text = problem.text.removesuffix(ADD_PARTNER)
    return replace(problem, text=f"{text}Add its log, or name all logs without seeds to pair them in order.")


def _repeated_seeds(curves: Sequence[LoggedCurve]) -> list[Problem]:
    """Return problems of arms with one seed twice, given on the command line or stated in the files."""
    first: dict[tuple[str, int], LoggedCurve] = {}
    problems = []
    for curve in curves:
        if curve.log.seed is not None:
            other = first.setdefault((curve.log.arm, curve.log.seed), curve)
            if other is not curve:
                text = (
                    f"states seed {curve.log.seed}, as {other.log.address} does. Give each run of an arm its own seed."
                )
                problems.append(Problem(curve.log.address, text))
    return problems


def _contradictory_steps(curves: Sequence[LoggedCurve]) -> list[Problem]:
    """Return the problems of curves over steps that pass other numbers of tokens per step, as far as they are known."""
    if curves[0].axis != "step":
        return []
    rates = [(curve, float(curve.tokens[-1] / curve.x[-1])) for curve in curves if curve.tokens is not None]
    problems = []
    for curve, rate in rates[1:]:
        first, usual = rates[0]
        if not 1 / 1.02 < rate / usual < 1.02:
            text = (
                f"passes {rate:,.6g} tokens per step, {first.log.address} {usual:,.6g}: equal steps are not equal "
                "tokens. Compare by --x tokens."
            )
            problems.append(Problem(curve.log.address, text))
    return problems


def not_verified(curves: Sequence[LoggedCurve]) -> list[str]:
    """Return the facts about the runs that their logs do not show, for the report."""
    return [each for each in NOT_VERIFIED if each != VALIDATED or curves[0].loss.kind == "validation"]


def notes_on_logs(comparison: Comparison, curves: Sequence[LoggedCurve], method: str, unpaired: int) -> list[str]:
    """Return the notes on verdicts over logs.

    `method`: sentence on how the curves were put on one axis; `unpaired`: number of runs left out without a partner.
    """
    notes = [f"Settings not verified. The logs do not show: {'; '.join(comparison.not_verified)}.", method]
    if all(curve.log.seed is None for curve in curves):
        left_out = f" {count(unpaired, 'run')} without a partner left out." if unpaired else ""
        notes.append(
            "Seeds are not known, so runs are paired in the order of their names, as independent replicates. Pairs "
            f"of one seed have less noise: name logs ARM/SEED=PATH.{left_out}"
        )
    for verdict in comparison.verdicts:
        notes += [note for note in (_on_replicates(verdict, comparison), _on_better(verdict)) if note]
    return notes + notes_on_scope(comparison.factor, comparison.verdicts)


def _on_replicates(verdict: Verdict, comparison: Comparison) -> str:
    """Return how many pairs would decide a single pair, by the noise of the arms' own replicates."""
    estimate, tail = verdict.judged.estimate, verdict.judged.measured.tail
    if estimate.pairs != 1 or tail is None:
        return ""
    for arm in (comparison.factor.baseline_label, verdict.name):
        losses = [tail.of(run) for run in comparison.runs if comparison.factor.label(run) == arm and not run.diverged]
        losses = [loss for loss in losses if math.isfinite(loss)]
        if len(losses) < 2:
            continue
        sd = math.sqrt(2) * stdev(losses)
        needed = seeds_needed(0.0, sd, verdict.terms.margin, confidence=verdict.terms.confidence, df=len(losses) - 1)
        place = "inside" if abs(estimate.gap) < 2 * sd else "outside"
        decide = f"about {needed}" if needed else f"more than {MOST_SEEDS}"
        return (
            f"{verdict.name}: the gap of one pair, {nats(estimate.gap, signed=True)}, is {place} twice the SD of the "
            f"difference of two of {arm}'s {len(losses)} runs, {nats(sd)}. If the true gap is 0, {decide} pairs would "
            "decide."
        )
    return ""


def _on_better(verdict: Verdict) -> str:
    """Return a note on an arm that is better than the baseline by more than the margin: labels may be exchanged."""
    if not verdict.judged.estimate.gap < -verdict.terms.margin:
        return ""
    return (
        f"{verdict.name} is better than {verdict.factor.baseline_label} by more than the margin. Check that their "
        "labels are not exchanged and that both have the same data and schedule."
    )
