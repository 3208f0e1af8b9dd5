"""`compare --ladder`, `--predict` and `--grade`: a ladder from runs, what it says of sizes to come, and what came."""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path

from lightning_llm.compare.command import best_of_words, terms_of
from lightning_llm.compare.comparison import Comparison, compare_runs
from lightning_llm.compare.data import json_ready
from lightning_llm.compare.declared_looks import AskedTerms
from lightning_llm.compare.ended_jobs import read_found
from lightning_llm.compare.estimate import Terms
from lightning_llm.compare.find import find_runs
from lightning_llm.compare.selection import BestOf
from lightning_llm.errors import ConfigError, Problem
from lightning_llm.ladder.effect import effect_at
from lightning_llm.ladder.fit import Fit, fit_ladder
from lightning_llm.ladder.ledger import FILE, Prediction, add_predictions, grade, now, read_ledger, write_ledger
from lightning_llm.ladder.measured import Ladder, ladder_of
from lightning_llm.ladder.refusal import DECADES, Target, refusals, too_few_pairs, too_small
from lightning_llm.ladder.report import Report
from lightning_llm.ladder.target import target_of
from lightning_llm.ladder.wording import line_of
from lightning_llm.version import __version__


@dataclass(frozen=True)
class Asked:
    """`predict`: where, if anywhere; `decades`: how far beyond the ladder at most; `grade`: hold earlier predictions
    against the runs; `ledger`: the file they stand in, None for the one beside the runs."""

    predict: Target | None = None
    decades: float = DECADES
    grade: bool = False
    ledger: Path | None = None


def ladder(arguments: argparse.Namespace) -> int:
    """Print the ladder over runs, predict from it, or grade what was predicted; return 0.

    Raises:
        ConfigError: as `ladder_named`.
    """
    terms = terms_of(AskedTerms(arguments.margin, arguments.confidence, arguments.metric, arguments.tail), None)
    if arguments.beyond <= 0:
        raise ConfigError(Problem("--beyond", f"is {arguments.beyond:g}, must be above 0 (powers of ten)."))
    target = target_of(arguments.predict) if arguments.predict else None
    ladder_named(
        arguments.runs,
        terms,
        arguments.baseline,
        best_of_words(arguments.best_of, arguments.choose_by),
        Asked(target, arguments.beyond, arguments.grade, arguments.ledger),
        show=_print_data if arguments.json else _print_text,
        say=partial(print, file=sys.stderr if arguments.json else sys.stdout),
    )
    return 0


def ladder_named(
    words: Sequence[str],
    terms: Terms,
    baseline: str | None,
    best_of: BestOf | None,
    asked: Asked,
    *,
    show: Callable[[Report], None],
    say: Callable[[str], None],
) -> Report:
    """Return the ladder over the runs that `words` name, with what was asked for done; it is shown.

    Raises:
        ConfigError: not all could be done; the rest is done and shown.
    """
    found = find_runs(words)
    runs, problems, notes = read_found(found)
    try:
        comparison = compare_runs(runs, terms, baseline, best_of)
    except ConfigError as error:
        raise ConfigError([*found.problems, *problems, *error.problems]) from error
    measured = ladder_of(comparison)
    report = Report(measured, terms.confidence, problems=[*found.problems, *problems, *comparison.problems])
    report.notes += notes
    file = asked.ledger or found.home / "compare" / FILE
    if asked.grade:
        _grade(report, file)
    if asked.predict or not asked.grade:
        report.fit = _fit(report)
    if report.fit is not None:
        _refuse(report, report.fit, asked)
        report.notes += _notes(comparison)
        if asked.predict is not None:
            _predict(report, report.fit, asked.predict, terms, file)
    show(report)
    if report.predictions:
        say(f"predictions {file}")
    if report.problems:
        raise ConfigError(report.problems)
    return report


def _grade(report: Report, file: Path) -> None:
    """Give outcomes to the predictions of `file` whose runs are there; those that have one keep it."""
    report.ledger = read_ledger(file)
    if not report.ledger:
        text = f"there is no prediction in {file}. Make one first: --ladder --predict model=NAME data.tokens=NUMBER."
        report.problems.append(Problem("--grade", text))
        return
    report.graded = sum([grade(each, report.ladder) for each in report.ledger])
    if report.graded:
        write_ledger(file, report.ledger)


def _fit(report: Report) -> Fit | None:
    """Return the fit over what can be fitted; what cannot is among the report's problems."""
    measured = report.ladder
    if reasons := too_small(measured):
        report.problems += [Problem("--ladder", f"there is no ladder to fit: {reason}.") for reason in reasons]
        return None
    few = {name: reasons for name in measured.recipes if (reasons := too_few_pairs(measured, name))}
    for name, reasons in few.items():
        report.problems += [Problem(name, f"its gap cannot be fitted: {reason}.") for reason in reasons]
        for rung in measured.rungs:
            rung.differences.pop(name, None)
    return fit_ladder(measured) if measured.recipes else None


def _refuse(report: Report, fit: Fit, asked: Asked) -> None:
    """Note of which recipes nothing is predicted, and why: a problem where a prediction was asked for."""
    for name in fit.gaps:
        reasons = refusals(fit, name, asked.predict, asked.decades)
        if asked.predict and _is_run(report.ladder, name, asked.predict):
            reasons = [
                "its runs at that size and number of tokens are there already; --grade holds predictions to them"
            ]
        if not reasons:
            continue
        report.refused[name] = reasons
        if asked.predict:
            text = f"no prediction at {asked.predict.words}: {'; '.join(reasons)}."
            report.problems.append(Problem(name, text))


def _is_run(measured: Ladder, recipe: str, target: Target) -> bool:
    return any(
        rung.parameters == target.parameters and abs(rung.tokens - target.tokens) <= 0.02 * target.tokens
        for rung in measured.rungs
        if rung.differences.get(recipe)
    )


def _predict(report: Report, fit: Fit, target: Target, terms: Terms, file: Path) -> None:
    """Write down what each recipe that is not refused will cost at `target`."""
    date = now()
    made = [_prediction(fit, name, target, terms, date) for name in fit.gaps if name not in report.refused]
    report.predictions = add_predictions(file, made) if made else []


def _prediction(fit: Fit, recipe: str, target: Target, terms: Terms, date: str) -> Prediction:
    effect = effect_at(fit, recipe, target.parameters, target.tokens, terms.confidence)
    gap = fit.gaps[recipe]
    fitted_to = fit.ladder.rows()
    return Prediction(
        date,
        claim={
            "line": line_of(effect, gap, target.name),
            "recipe": recipe,
            "baseline": fit.ladder.baseline,
            "metric": fit.ladder.metric,
            "model": target.name,
            "parameters": target.parameters,
            "tokens": target.tokens,
            "more_tokens": effect.more_tokens,
            "more_tokens_interval": [effect.low, effect.high],
            "gap": effect.gap,
            "gap_interval": list(effect.gap_interval()),
            "baseline_loss": float(fit.law.loss(target.parameters, target.tokens)[0, 0]),
            "growth_p": json_ready(gap.growth[1]),
        },
        terms={
            "confidence": terms.confidence,
            "tail": terms.tail_share,
            "gap_se": effect.gap_se,
            "pair_sd": effect.pair_sd,
            "df": effect.df,
            "graded_by": "the mean gap of S pairs within t(df) sqrt(gap_se^2 + pair_sd^2 / S) of `gap`",
            "law": fit.law.constants(),
            "gap_terms": dict(zip(("c_D", "c_N", "c_O"), map(float, gap.terms), strict=True)),
            "fitted_to": {
                "rungs": len(fit.ladder.rungs),
                "runs": len(fitted_to),
                "digest": sha256(json.dumps(fitted_to, sort_keys=True).encode()).hexdigest()[:16],
            },
            "version": __version__,
        },
    )


def _notes(comparison: Comparison) -> list[str]:
    notes = [
        "N are all parameters, embeddings included. Intervals hold one by one, for the data, schedule and rates "
        "of these runs; beyond the ladder they hold if the same three terms go on doing so."
    ]
    loose = sorted({key for verdict in comparison.verdicts for key in verdict.confounders})
    if loose:
        notes.append(f"Not controlled: within pairs {', '.join(loose)} differ, too.")
    return notes


def _print_data(report: Report) -> None:
    print(json.dumps(json_ready(report.as_data()), indent=1, allow_nan=False))


def _print_text(report: Report) -> None:
    from rich.console import Console

    from lightning_llm.ladder.report import print_report

    console = Console(markup=False) if sys.stdout.isatty() else Console(markup=False, width=180, no_color=True)
    print_report(report, console)
