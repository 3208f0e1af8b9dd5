"""The verb `ladder`: fit the cost of recipes over model sizes and token counts; make and grade predictions."""

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from lightning_llm.base.errors import ConfigError, Problem, gathered
from lightning_llm.compare.best_value import BestOf, best_of_arguments
from lightning_llm.compare.command import note_look, print_escaped, table_console, write_comparison
from lightning_llm.compare.comparison import Comparison
from lightning_llm.compare.format import as_json, short
from lightning_llm.compare.judge import compare_runs
from lightning_llm.compare.looks import declared_looks
from lightning_llm.compare.runs.find import find_runs
from lightning_llm.compare.runs.read_runs import read_found
from lightning_llm.compare.terms import RequestedTerms, terms_of
from lightning_llm.config.schema.sweep import FEWEST_SIZES, FEWEST_TOKENS
from lightning_llm.config.workspace import default_outputs
from lightning_llm.ladder.fit import Fit, fit_ladder
from lightning_llm.ladder.measured import UNLEARNED, Ladder, ladder_of
from lightning_llm.ladder.predictions import FILE, grade, is_of, is_run, predict, read_ledger, target_of, write_ledger
from lightning_llm.ladder.refusal import DECADES, Target, refusals, too_few_pairs, too_small
from lightning_llm.ladder.report import Report, print_report

FOLDER = "compare/ladder"
"""Folder of the report, next to the runs and in MLflow; the report of `compare` is kept."""


def ladder(arguments: argparse.Namespace) -> int:
    """Print the ladder over runs, predictions from it (--predict) or their grades (--grade); return 0.

    Raises:
        ConfigError: the arguments are invalid, or as `ladder_named`.
    """
    return run_ladder(arguments, fit=not (arguments.predict or arguments.grade))


def run_ladder(arguments: argparse.Namespace, *, fit: bool, problems: Sequence[Problem] = ()) -> int:
    """Run `ladder`, also for `compare --ladder`; return the exit code.

    Args:
        arguments: those of `ladder`.
        fit: fit the ladder even if predictions are only graded.
        problems: those that the caller found in the arguments; they are raised together with all others.
    """
    # argparse adds runs that follow --predict to its values; no run is named KEY=VALUE.
    given = arguments.predict or []
    runs = [*arguments.runs, *(each for each in given if "=" not in each)]
    asked = RequestedTerms(arguments.margin, arguments.confidence, arguments.metric, arguments.tail)
    target, best_of = None, None
    found = [*problems, *_problems(arguments)]
    with gathered(found):
        terms_of(asked)
    with gathered(found):
        best_of = best_of_arguments(arguments.best_of, arguments.choose_by)
    with gathered(found):
        target = target_of([each for each in given if "=" in each]) if given else None
    if found:
        raise ConfigError(found)
    decades = DECADES if arguments.beyond is None else arguments.beyond
    ladder_named(
        runs,
        asked,
        arguments.baseline,
        best_of,
        LadderRequest(fit, target, decades, arguments.grade, arguments.ledger, arguments.output),
        show=print_data if arguments.json else print_text,
        say=partial(print_escaped, file=sys.stderr if arguments.json else sys.stdout),
    )
    return 0


def _problems(arguments: argparse.Namespace) -> list[Problem]:
    """Return the problems of a ladder's options, including options without an effect."""
    found = []
    if str(arguments.margin or "").strip().endswith("%"):
        text = (
            "must be in nats: a ladder already reports gaps in tokens. Give nats, which set the verdicts of its report "
            "and its outliers, or remove the option."
        )
        found.append(Problem("--margin", text, arguments.margin))
    if arguments.beyond is not None and not arguments.predict:
        found.append(Problem("--beyond", "has no effect without --predict. Add --predict, or remove it."))
    if arguments.beyond is not None and not arguments.beyond > 0:
        found.append(Problem("--beyond", "must be above 0 (powers of ten).", f"{arguments.beyond:g}"))
    if arguments.ledger is not None and not (arguments.predict or arguments.grade):
        text = "has no effect without --predict or --grade. Add one of them, or remove it."
        found.append(Problem("--ledger", text))
    return found


@dataclass(frozen=True)
class LadderRequest:
    """Options of the verb `ladder`.

    `fit`: fit the ladder; `predict`: the target of a prediction, if any; `decades`: limit of extrapolation, in powers
    of ten; `grade`: compare earlier predictions with the runs; `ledger`: file of the predictions, None for the one
    beside the runs; `output`: another folder for the report, which is then not logged to MLflow.
    """

    fit: bool = False
    predict: Target | None = None
    decades: float = DECADES
    grade: bool = False
    ledger: Path | None = None
    output: Path | None = None


def ladder_named(
    words: Sequence[str],
    terms: RequestedTerms,
    baseline: str | None,
    best_of: BestOf | None,
    asked: LadderRequest,
    *,
    show: Callable[[Report], None],
    say: Callable[[str], None],
) -> Report:
    """Fit the ladder over the named runs, predict from it, grade predictions, show the report, and return it.

    Args:
        words: the RUN arguments; none: the newest sweep that is a ladder.
        terms: requested terms of the verdicts.
        best_of: compare each recipe at its own best value of a key; None: at the values as run.
        asked: what to do.
        show: prints the report.
        say: prints a line, such as the location of the report.

    Raises:
        ConfigError: some of it could not be done; the rest is done and shown.
    """
    found = find_runs(words or [str(newest_ladder(graded=asked.grade and asked.ledger is None))])
    file = asked.ledger or found.home / "compare" / FILE
    if asked.grade and not asked.fit and asked.predict is None and not read_ledger(file):
        raise ConfigError(_nothing_to_grade(file))
    declared = declared_looks(found, terms, baseline, best_of)
    here = terms_of(terms, declared.terms)
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
            allowed = [name for name in report.fit.gaps if name not in report.refused]
            report.predictions = predict(report.fit, allowed, asked.predict, here, file)
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
    """Write the report of the verdicts with the ladder in it; return the lines to print."""
    from lightning_llm.ladder.supplement import supplement_of

    comparison.ladder, comparison.notes = True, [*comparison.notes, *report.notes]
    comparison.problems = list(report.problems)
    known = report.ledger if report.ledger is not None else read_ledger(file)
    ledger = [each for each in known if is_of(each, report.ladder)]
    lines = {f"ladder/{each.claim['recipe']}": each.claim["line"] for each in ledger}
    supplement = supplement_of(report, ledger)
    before = len(comparison.problems)
    printed = write_comparison(comparison, folder, log=log, supplement=supplement, place=FOLDER, lines=lines)
    report.problems += comparison.problems[before:]  # where it cannot be written
    return printed


def _grade(report: Report, file: Path) -> None:
    """Add outcomes to the predictions of `file` that have runs and no outcome yet."""
    report.ledger = read_ledger(file)
    if not report.ledger:
        report.problems.append(_nothing_to_grade(file))
        return
    report.graded = sum([grade(each, report.ladder) for each in report.ledger])
    if report.graded:
        write_ledger(file, report.ledger)


def _nothing_to_grade(file: Path) -> Problem:
    text = f"there is no prediction yet in {file}. Make one before its runs: "
    return Problem("--grade", f"{text}lightning-llm ladder --predict model=NAME data.tokens=NUMBER.")


def _fit(report: Report) -> Fit | None:
    """Return the fit over the usable recipes; the others are reported as problems and stay in the ladder."""
    measured = report.ladder
    if reason := too_small(measured):
        lengths = f"lengths (trainer.max_steps=...){_longer(measured)}"
        more = f"Add sizes (model=A,B,C) and {lengths} to the sweep, or start with sweep/ladder"
        report.problems.append(Problem("RUN", f"there is no ladder to fit: {reason}. {more} (docs/howto/ladder.md)."))
        return None
    few = {name: reasons for name in measured.recipes if (reasons := too_few_pairs(measured, name))}
    for name, reasons in few.items():
        report.refused[name] = [f"its gap cannot be fitted: {reason}" for reason in reasons]
        report.problems += [Problem(name, f"{reason}.") for reason in report.refused[name]]
    kept = measured.of_recipes(set(measured.recipes) - set(few))
    return fit_ladder(kept) if kept.recipes else None


def _longer(measured: Ladder) -> str:
    """Return the minimum length if the baseline has not learned at some lengths; "" if it has learned at all."""
    short_of = [tokens for (_, tokens), why in measured.left_out.items() if why == UNLEARNED]
    return f" of more than {short(max(short_of))} tokens, longer than those that have not learned," if short_of else ""


def _refuse(report: Report, fit: Fit, asked: LadderRequest) -> None:
    """Record the recipes without a prediction and the reasons: problems if a prediction was requested."""
    for name in fit.gaps:
        reasons = refusals(fit, name, asked.predict, asked.decades)
        if asked.predict and is_run(report.ladder, name, asked.predict):
            reasons = [
                "its runs at that size and number of tokens exist already. Use --grade to compare predictions with them"
            ]
        if not reasons:
            continue
        report.refused[name] = reasons
        if asked.predict:
            text = f"no prediction at {asked.predict.text}: {'; '.join(reasons)}."
            report.problems.append(Problem(name, text))


def _on_looks(declared: bool) -> list[str]:
    if not declared:
        return []
    return [
        "These runs are of a sweep with declared looks. Their error rate applies to its verdicts (`compare`), not to "
        "this fit, which uses all existing pairs. A sweep that stops once decided has unequal numbers of pairs."
    ]


def _notes(comparison: Comparison) -> list[str]:
    notes = [
        "N counts all parameters, including embeddings. Intervals are not simultaneous and hold for the data, "
        "schedule and rates of these runs; beyond the ladder they assume that the same three terms continue to hold."
    ]
    loose = sorted({key for verdict in comparison.verdicts for key in verdict.confounders})
    if loose:
        notes.append(f"Not controlled: {', '.join(loose)} also differ within pairs.")
    return notes


def print_data(report: Report) -> None:
    """Print the ladder as JSON."""
    print(as_json(report.as_data()))


def print_text(report: Report) -> None:
    """Print the ladder as text."""
    print_report(report, table_console())


def newest_ladder(*, graded: bool = False) -> Path:
    """Return the folder of the newest sweep with runs of several sizes and numbers of tokens.

    Args:
        graded: prefer one with predictions to grade.

    Raises:
        ConfigError: there is none.
    """
    root = Path(default_outputs())
    begun: dict[Path, float] = {}
    for file in root.glob("*/*/*/config.yaml"):
        folder = file.parent.parent
        begun[folder] = max(begun.get(folder, 0.0), file.stat().st_mtime)
    newest_first = sorted(begun, key=lambda folder: begun[folder], reverse=True)
    if graded:
        with_ledger = [folder for folder in newest_first if (folder / "compare" / FILE).is_file()]
        if with_ledger:
            return with_ledger[0]
    for folder in newest_first:
        if _is_ladder(folder):
            return folder
    text = (
        f"no run was named, and no sweep in {root} is a ladder, of {FEWEST_SIZES} model sizes and {FEWEST_TOKENS} "
        "token counts. Name its folder, or run one: lightning-llm train -m recipe=sweep/ladder"
    )
    raise ConfigError(Problem("RUN", text))


def _is_ladder(folder: Path) -> bool:
    sizes, tokens = set(), set()
    for file in folder.glob("*/config.yaml"):
        try:
            config: Any = yaml.load(file.read_text(encoding="utf-8"), yaml.CSafeLoader)
            shape = {key: value for key, value in config["model"].items() if key not in ("name", "init_from")}
            counts = (
                config["trainer"]["max_steps"],
                *(config["data"][key] for key in ("global_batch_size", "sequence_length")),
            )
            sizes.add(json.dumps(shape, sort_keys=True, default=str))
            tokens.add(math.prod(map(int, counts)))
        except (OSError, yaml.YAMLError, KeyError, TypeError, ValueError, AttributeError):
            continue  # not a readable run of a ladder; other runs decide
        if len(sizes) >= FEWEST_SIZES and len(tokens) >= FEWEST_TOKENS:
            return True
    return False
