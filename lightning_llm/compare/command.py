"""Compare the runs that a command names: print the verdicts, write the report, log to MLflow. Imports no torch."""

import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from lightning_llm.base.errors import ConfigError, Problem
from lightning_llm.base.terminal import escaped, new_console
from lightning_llm.compare.best_value import BestOf, has_grid
from lightning_llm.compare.comparison import Comparison, IncompleteComparisonError
from lightning_llm.compare.error_budget import judged_at_look, refuse_with_declared_looks
from lightning_llm.compare.format import as_json
from lightning_llm.compare.judge import compare_runs, open_verdicts
from lightning_llm.compare.looks import Design, declared_looks
from lightning_llm.compare.recorded_looks import look_at, looks_statement, record_look
from lightning_llm.compare.requirement import Gate
from lightning_llm.compare.runs.find import RunSelection, find_runs
from lightning_llm.compare.runs.read_runs import read_found
from lightning_llm.compare.statistics.seeds import advise
from lightning_llm.compare.terms import RequestedTerms, Terms, terms_of
from lightning_llm.config.workspace import command

if TYPE_CHECKING:
    from rich.console import Console

    from lightning_llm.compare.report.tables import Supplement

RATE = "optim.learning_rate"
"""Key for which a sweep may have a grid per recipe, so that each can be compared at its best value."""


def compare_named(
    arguments: Sequence[str],
    asked: RequestedTerms,
    baseline: str | None,
    best_of: BestOf | None,
    output: Path | None,
    *,
    show: Callable[[Comparison], None],
    say: Callable[[str], None],
    gate: Gate | None = None,
) -> Comparison:
    """Compare the runs that `arguments` name, show the verdicts, write the report, and return the comparison.

    Args:
        arguments: the RUN arguments (see `find_runs`).
        asked: the requested terms; a term that is None is as declared for the sweep, or else the default.
        baseline: "group=level" or "key=value"; None for the default.
        best_of: compare each recipe at its best value of a key; None: at the values as run.
        output: another folder for the report; nothing is then logged to MLflow.
        show: prints the verdicts.
        say: prints a line on the location of the report.
        gate: the required verdict (--require) and the series of looks; the comparison's `requirement` has the outcome.

    Raises:
        IncompleteComparisonError: not all runs could be judged; the verdicts on the others are shown and written.
        ConfigError: nothing could be judged.
    """
    terms_of(asked)  # report invalid terms before anything is read
    found = find_runs(arguments)
    declared = declared_looks(found, asked, baseline, best_of)
    terms, baseline = terms_of(asked, declared.terms), declared.baseline or baseline
    if asked.all_pairs and (why := against_all_pairs(terms, best_of, declared.design, found)):
        raise ConfigError(Problem("--all-pairs", why))
    runs, problems, ended, damaged = read_found(found)
    try:
        if best_of is not None:
            best_of = replace(best_of, sweeps=tuple(found.sweeps))

        def judge(at: Terms) -> Comparison:
            return compare_runs(runs, at, baseline, best_of, declared.design, damaged)

        comparison = under_gate(judge, terms, gate, found, declared.design)
    except ConfigError as error:
        raise ConfigError([*found.problems, *problems, *error.problems]) from error
    comparison.problems = [*found.problems, *problems, *comparison.problems]
    comparison.advice = advise(open_verdicts(comparison.verdicts), found.sweeps, runs)
    comparison.notes += [*declared.notes, *ended]
    if best_of is None:
        given = [*(arguments or [str(found.home)]), "--best-of", RATE, *flags_of(asked, baseline, RATE)]
        comparison.notes += _best_value_note(comparison, command("compare", *given))
    if comparison.design is None and gate is None:
        note_look(comparison, found.home / "compare")
    show(comparison)
    for line in write_comparison(comparison, output or found.home / "compare", log=output is None):
        say(line)
    if comparison.requirement is not None and not comparison.problems:
        say(f"require {comparison.requirement.text}")
    if comparison.problems:
        raise IncompleteComparisonError(comparison)
    return comparison


def _best_value_note(comparison: Comparison, better: str) -> list[str]:
    """Return a note with the command `better`, which compares each recipe at its best learning rate of several.

    [] for declared looks, whose error rate --best-of would void.
    """
    if comparison.design is not None or comparison.factor.name == RATE or not has_grid(comparison.runs, RATE):
        return []
    return [f"Recipes ran at several values of {RATE}. To compare each at its best value: {better}"]


def under_gate(
    judge: Callable[[Terms], Comparison], terms: Terms, gate: Gate | None, found: RunSelection, design: Design | None
) -> Comparison:
    """Return the comparison; with a `gate` (--require) its intervals use only a part of the series' error budget.

    A sweep with declared looks has planned its error rate itself and uses no budget. `judge`: returns the comparison
    under given terms.
    """
    if gate is None:
        return judge(terms)
    if design is not None:
        refuse_with_declared_looks(gate, found.sweeps)
        comparison = judge(terms)
    else:
        comparison = judged_at_look(judge, terms, gate, found.home / "compare")
    comparison.required = gate.required
    return comparison


def against_all_pairs(terms: Terms, best_of: BestOf | None, design: Design | None, found: RunSelection) -> str:
    """Return why --all-pairs cannot be used here, and the remedy; "" if it can."""
    if best_of is not None:
        return f"cannot be combined with --best-of {best_of.key}. Remove one of the two."
    if design is not None:
        runs = f"{shlex.quote(str(found.sweeps[0]))}/[0-9]*/"
        return (
            "cannot be used for a sweep with declared looks: its intervals lack the declared error rate. Remove it, or "
            "name the runs instead of their sweep, which judges the existing runs at one undeclared look: "
            f"{command('compare')} {runs} --all-pairs"
        )
    if terms.token_margin is not None:
        return (
            "requires a margin in nats: a margin in tokens refers to the baseline's own curve. Use --margin 0.01, or "
            "remove --all-pairs."
        )
    return ""


def flags_of(asked: RequestedTerms, baseline: str | None, key: str) -> list[str]:
    """Return flags of `compare` that repeat these terms and this baseline, for a command with --best-of `key`.

    The baseline's name must not contain a value of `key` there: "optim=adamw (learning_rate=0.002)" becomes
    "optim=adamw".
    """
    value = rf" \((\w+\.)*{re.escape(key.rpartition('.')[2])}=[^,()]*\)$"
    given = {
        "--baseline": baseline and re.sub(value, "", baseline), "--metric": asked.metric, "--margin": asked.margin,
        "--confidence": asked.confidence, "--tail": asked.tail,
    }  # fmt: skip
    arguments = [word for flag, value in given.items() if value is not None for word in (flag, str(value))]
    return [*arguments, *(word for target in asked.targets.arguments for word in ("--target", target))]


def note_look(comparison: Comparison, folder: Path) -> None:
    """Record in `folder` that verdicts on these runs were taken (a look), and add a note if it is not the first."""
    try:
        comparison.looks = record_look(look_at(comparison.verdicts, comparison.terms), folder)
    except (OSError, ValueError) as error:
        comparison.notes.append(f"This look at the runs is not recorded in {folder}: {error}.")
        return
    if len(comparison.looks) > 1:
        comparison.notes.append(f"This is look {len(comparison.looks)} at these runs. {looks_statement()}")


def write_comparison(
    comparison: Comparison,
    folder: Path,
    *,
    log: bool,
    supplement: "Supplement | None" = None,
    place: str = "compare",
    lines: Mapping[str, str] | None = None,
) -> list[str]:
    """Write the report to `folder` and, with `log`, the verdicts to MLflow; return the lines to print.

    If the report cannot be written, a problem is added to the comparison. `supplement`: further parts of the report;
    `place`, `lines`: see `log_verdicts`.
    """
    from lightning_llm.compare.report.tables import NOTHING
    from lightning_llm.compare.report.write import write_report
    from lightning_llm.compare.tracking import log_verdicts

    try:
        folder.mkdir(parents=True, exist_ok=True)
        data = comparison.as_data() | dict(supplement.data if supplement else {})
        (folder / "compare.json").write_text(as_json(data) + "\n", encoding="utf-8")
        failed = write_report(comparison, folder, supplement or NOTHING)
    except OSError as error:
        text = f"the report cannot be written to {folder} ({error.strerror}). Name another folder."
        comparison.problems.append(Problem("--output", text))
        return []
    note = log_verdicts(comparison, folder, place, lines) if log else None
    printed = [f"note   {each}" for each in failed]
    if (folder / "report.html").is_file():
        printed.append(f"report {folder / 'report.html'}")
    return [*printed, *([note] if note else [])]


def print_table(comparison: Comparison) -> None:
    """Print the verdicts and the notes on them."""
    from lightning_llm.compare.table import print_comparison

    print_comparison(comparison, table_console())


def table_console() -> "Console":
    """Return a console for tables. If stdout is no terminal, it is 180 columns wide and without color.

    Markup is off, because text from configs contains [lists].
    """
    return new_console(markup=False) if sys.stdout.isatty() else new_console(markup=False, width=180, no_color=True)


def print_data(comparison: Comparison) -> None:
    """Print the verdicts as JSON."""
    print(as_json(comparison.as_data()))


def print_escaped(line: str, file: TextIO | None = None) -> None:
    """Print a line with a path; control characters in the path are escaped."""
    print(escaped(line), file=file)
