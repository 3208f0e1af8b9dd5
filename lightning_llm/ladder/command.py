"""`compare --ladder`, `--predict` and `--grade`: a ladder from runs, what it says of sizes to come, and what came."""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from lightning_llm.base.errors import ConfigError, Problem, gathered
from lightning_llm.compare.best_value.best_of import BestOf
from lightning_llm.compare.command import note_look, print_escaped, write_comparison
from lightning_llm.compare.comparison import Comparison, compare_runs
from lightning_llm.compare.data import json_ready
from lightning_llm.compare.flags import best_of_words, of_ladder, terms_of
from lightning_llm.compare.runs.ended_jobs import read_found
from lightning_llm.compare.runs.find import find_runs
from lightning_llm.compare.sequential.declared_looks import AskedTerms, declared_looks
from lightning_llm.compare.wording import short
from lightning_llm.ladder.fit import Fit, fit_ladder
from lightning_llm.ladder.ledger import FILE, grade, is_of, read_ledger, write_ledger
from lightning_llm.ladder.measured import UNLEARNED, Ladder, ladder_of
from lightning_llm.ladder.newest import newest_ladder
from lightning_llm.ladder.predicting import is_run, predict
from lightning_llm.ladder.refusal import DECADES, Target, refusals, too_few_pairs, too_small
from lightning_llm.ladder.report import Report
from lightning_llm.ladder.target import target_of

FOLDER = "compare/ladder"
"""Of the report, beside the runs and in MLflow: that of `compare` alone stays what it is."""


@dataclass(frozen=True)
class Asked:
    """`fit`: the ladder itself; `predict`: where, if anywhere; `decades`: how far beyond the ladder at most; `grade`:
    hold earlier predictions against the runs; `ledger`: the file they stand in, None for the one beside the runs;
    `output`: another folder for the report, which then goes to no MLflow either."""

    fit: bool = False
    predict: Target | None = None
    decades: float = DECADES
    grade: bool = False
    ledger: Path | None = None
    output: Path | None = None


def ladder(arguments: argparse.Namespace) -> int:
    """Print the ladder over runs, predict from it, or grade what was predicted; return 0.

    Raises:
        ConfigError: with all that is wrong with the arguments; else as `ladder_named`.
    """
    problems = of_ladder(arguments)
    asked = AskedTerms(arguments.margin, arguments.confidence, arguments.metric, arguments.tail)
    target, best_of = None, None
    with gathered(problems):
        terms_of(asked, None)
    with gathered(problems):
        best_of = best_of_words(arguments.best_of, arguments.choose_by)
    with gathered(problems):
        target = target_of(arguments.predict) if arguments.predict is not None else None
    if problems:
        raise ConfigError(problems)
    decades = DECADES if arguments.beyond is None else arguments.beyond
    ladder_named(
        arguments.runs,
        asked,
        arguments.baseline,
        best_of,
        Asked(arguments.ladder, target, decades, arguments.grade, arguments.ledger, arguments.output),
        show=_print_data if arguments.json else _print_text,
        say=partial(print_escaped, file=sys.stderr if arguments.json else sys.stdout),
    )
    return 0


def ladder_named(
    words: Sequence[str],
    terms: AskedTerms,
    baseline: str | None,
    best_of: BestOf | None,
    asked: Asked,
    *,
    show: Callable[[Report], None],
    say: Callable[[str], None],
) -> Report:
    """Return the ladder over the runs that `words` name, the newest one without; what was asked for is done and shown.

    Raises:
        ConfigError: not all could be done; the rest is done and shown.
    """
    found = find_runs(words or [str(newest_ladder(graded=asked.grade and asked.ledger is None))])
    file = asked.ledger or found.home / "compare" / FILE
    if asked.grade and not asked.fit and asked.predict is None and not read_ledger(file):
        raise ConfigError(_nothing_to_grade(file))
    declared = declared_looks(found, terms, baseline, best_of)
    here = terms_of(terms, declared.design)
    runs, problems, notes, damaged = read_found(found)
    try:
        comparison = compare_runs(runs, here, declared.baseline or baseline, best_of, damaged=damaged)
    except ConfigError as error:
        raise ConfigError([*found.problems, *problems, *error.problems]) from error
    report = Report(ladder_of(comparison), here.confidence)
    report.problems = [*found.problems, *problems, *comparison.problems]
    report.notes += [*notes, *_on_looks(declared.design is not None or bool(declared.notes))]
    if asked.grade:
        _grade(report, file)
    if asked.predict or asked.fit:
        report.fit = _fit(report)
    if report.fit is not None:
        _refuse(report, report.fit, asked)
        report.notes += _notes(comparison)
        if asked.predict is not None:
            report.predictions = predict(report, report.fit, asked.predict, here, file)
    show(report)
    lines = [f"predictions {file}"] if report.predictions else []
    if report.fit is not None:
        note_look(comparison, found.home / "compare")
        lines += _write(comparison, report, file, asked.output or found.home / FOLDER, log=asked.output is None)
    for line in lines:
        say(line)
    if report.problems:
        raise ConfigError(report.problems)
    return report


def _write(comparison: Comparison, report: Report, file: Path, folder: Path, *, log: bool) -> list[str]:
    """Write the report of the verdicts with the ladder in it; return what to say of it."""
    from lightning_llm.ladder.supplement import supplement_of

    comparison.ladder, comparison.notes = True, [*comparison.notes, *report.notes]
    comparison.problems = list(report.problems)
    known = report.ledger if report.ledger is not None else read_ledger(file)
    ledger = [each for each in known if is_of(each, report.ladder)]
    lines = {f"ladder/{each.claim['recipe']}": each.claim["line"] for each in ledger}
    supplement = supplement_of(report, ledger)
    before = len(comparison.problems)
    said = write_comparison(comparison, folder, log=log, supplement=supplement, place=FOLDER, lines=lines)
    report.problems += comparison.problems[before:]  # where it cannot be written
    return said


def _grade(report: Report, file: Path) -> None:
    """Give outcomes to the predictions of `file` whose runs are there; those that have one keep it."""
    report.ledger = read_ledger(file)
    if not report.ledger:
        report.problems.append(_nothing_to_grade(file))
        return
    report.graded = sum([grade(each, report.ladder) for each in report.ledger])
    if report.graded:
        write_ledger(file, report.ledger)


def _nothing_to_grade(file: Path) -> Problem:
    text = f"there is no prediction yet in {file}. Make one before its runs: compare --predict model=NAME "
    return Problem("--grade", f"{text}data.tokens=NUMBER.")


def _fit(report: Report) -> Fit | None:
    """Return the fit over what can be fitted; what cannot is among the report's problems, and stays in its ladder."""
    measured = report.ladder
    if reason := too_small(measured):
        lengths = f"lengths (trainer.max_steps=...){_longer(measured)}"
        more = f"Add sizes (model=A,B,C) and {lengths} to the sweep, or begin with sweep/ladder"
        report.problems.append(Problem("--ladder", f"there is no ladder to fit: {reason}. {more} (docs/ladder.md)."))
        return None
    few = {name: reasons for name in measured.recipes if (reasons := too_few_pairs(measured, name))}
    for name, reasons in few.items():
        report.refused[name] = [f"its gap cannot be fitted: {reason}" for reason in reasons]
        report.problems += [Problem(name, f"{reason}.") for reason in report.refused[name]]
    kept = measured.of_recipes(set(measured.recipes) - set(few))
    return fit_ladder(kept) if kept.recipes else None


def _longer(measured: Ladder) -> str:
    """Return what lengths have to be above where the baseline has not learned at some; "" where it has at all."""
    short_of = [tokens for (_, tokens), why in measured.left_out.items() if why == UNLEARNED]
    return f" of more than {short(max(short_of))} tokens, longer than those that have not learned," if short_of else ""


def _refuse(report: Report, fit: Fit, asked: Asked) -> None:
    """Note of which recipes nothing is predicted, and why: a problem where a prediction was asked for."""
    for name in fit.gaps:
        reasons = refusals(fit, name, asked.predict, asked.decades)
        if asked.predict and is_run(report.ladder, name, asked.predict):
            reasons = [
                "its runs at that size and number of tokens are there already; --grade holds predictions to them"
            ]
        if not reasons:
            continue
        report.refused[name] = reasons
        if asked.predict:
            text = f"no prediction at {asked.predict.words}: {'; '.join(reasons)}."
            report.problems.append(Problem(name, text))


def _on_looks(declared: bool) -> list[str]:
    if not declared:
        return []
    return [
        "These runs are of a sweep that declared looks, whose error is that of its verdicts (compare without --ladder)."
        " The fit takes all pairs that are there; where a sweep stops once it is decided, these are not all alike many."
    ]


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
    from lightning_llm.base.terminal import new_console
    from lightning_llm.ladder.report import print_report

    console = new_console(markup=False) if sys.stdout.isatty() else new_console(markup=False, width=180, no_color=True)
    print_report(report, console)
