"""The verbs `compare` and `diff`. Neither imports torch."""

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from lightning_llm.base.errors import ConfigError, Problem, gathered
from lightning_llm.base.terminal.text import escaped
from lightning_llm.compare.best_of import BestOf
from lightning_llm.compare.comparison import Comparison, IncompleteComparisonError, compare_runs, read_all
from lightning_llm.compare.data import json_ready
from lightning_llm.compare.declared_looks import AskedTerms, declared_looks
from lightning_llm.compare.differences import all_differences
from lightning_llm.compare.ended_jobs import read_found
from lightning_llm.compare.find import Found, find_runs
from lightning_llm.compare.flags import against_all_pairs, best_of_words, flags_of, of_scores, of_verdicts, terms_of
from lightning_llm.compare.judge import open_verdicts
from lightning_llm.compare.looks import look_at, record_look
from lightning_llm.compare.losses import LOSS
from lightning_llm.compare.seeds import advise
from lightning_llm.compare.selection import has_grid
from lightning_llm.compare.target import NO_TARGETS, Targets, read_targets
from lightning_llm.compare.wording import looks_statement
from lightning_llm.config.commands import command
from lightning_llm.config.identity import NOT_IDENTITY, below

if TYPE_CHECKING:
    from lightning_llm.compare.report.supplement import Supplement


RATE = "optim.learning_rate"
"""The key of which a sweep may have a grid for each recipe, at whose best it is to be judged."""


def compare(arguments: argparse.Namespace) -> int:
    """Print the verdicts over runs and write them to files; return 0.

    Raises:
        ConfigError: as `compare_named`.
    """
    scored = arguments.time_to_target
    problems = of_scores(arguments) if scored else of_verdicts(arguments)
    targets, best_of = NO_TARGETS, None
    with gathered(problems):
        targets = read_targets(arguments.target)
    asked = AskedTerms(
        arguments.margin, arguments.confidence, arguments.metric, arguments.tail, targets, arguments.all_pairs
    )
    if not scored:
        with gathered(problems):
            best_of = best_of_words(arguments.best_of, arguments.choose_by)
        with gathered(problems):
            terms_of(asked, None)
    if problems:
        raise ConfigError(problems)
    if scored:
        return _time_to_target(arguments, targets)
    compare_named(
        arguments.runs,
        asked,
        arguments.baseline,
        best_of,
        arguments.output,
        show=_print_data if arguments.json else print_table,
        say=partial(print_escaped, file=sys.stderr if arguments.json else sys.stdout),
    )
    return 0


def _time_to_target(arguments: argparse.Namespace, targets: Targets) -> int:
    """Print the scores of --time-to-target; return 0. Raises ConfigError."""
    from lightning_llm.compare.benchmark_command import benchmark_named, print_benchmark

    benchmark_named(
        arguments.runs,
        arguments.metric or LOSS,
        targets,
        arguments.baseline,
        (arguments.trials or "").split(",") if arguments.trials else (),
        arguments.output,
        show=(lambda found: print(_json(found.as_data()))) if arguments.json else print_benchmark,
        write=_json,
        say=partial(print_escaped, file=sys.stderr if arguments.json else sys.stdout),
    )
    return 0


def compare_named(
    words: Sequence[str],
    asked: AskedTerms,
    baseline: str | None,
    best_of: BestOf | None,
    output: Path | None,
    *,
    show: Callable[[Comparison], None],
    say: Callable[[str], None],
) -> Comparison:
    """Return the verdicts over the runs that `words` name; they are shown, and written to files beside the runs.

    Args:
        words: RUN arguments, see `find_runs`.
        asked: the terms; what is None there is as it was declared for the sweep, or else as usual.
        output: another folder for the report, which then goes to no MLflow either.
        show: prints the verdicts.
        say: prints a line on where the report went.

    Raises:
        IncompleteComparisonError: not all could be judged; the rest is shown and written.
        ConfigError: nothing could be judged.
    """
    terms_of(asked, None)  # what is wrong with them, before anything is read
    found = find_runs(words)
    declared = declared_looks(found, asked, baseline, best_of)
    terms, baseline = terms_of(asked, declared.design), declared.baseline or baseline
    if asked.all_pairs and (why := against_all_pairs(terms, best_of, declared.design, found)):
        raise ConfigError(Problem("--all-pairs", why))
    runs, problems, ended, damaged = read_found(found)
    try:
        if best_of is not None:
            best_of = replace(best_of, sweeps=tuple(found.sweeps))
        comparison = compare_runs(runs, terms, baseline, best_of, declared.design, damaged)
    except ConfigError as error:
        raise ConfigError([*found.problems, *problems, *error.problems]) from error
    comparison.problems = [*found.problems, *problems, *comparison.problems]
    comparison.advice = advise(open_verdicts(comparison.verdicts), found.sweeps, runs)
    comparison.notes += [*declared.notes, *ended]
    is_open = best_of is None and comparison.design is None  # at each one's best, declared looks have lost their error
    if is_open and comparison.factor.name != RATE and has_grid(comparison.runs, RATE):
        same = flags_of(asked, baseline, RATE)
        better = command("compare", *(words or [str(found.home)]), "--best-of", RATE, *same)
        comparison.notes.append(f"Recipes ran at several values of {RATE}. Each at its own best: {better}")
    if comparison.design is None:
        note_look(comparison, found.home / "compare")
    show(comparison)
    for line in write_comparison(comparison, output or found.home / "compare", log=output is None):
        say(line)
    if comparison.problems:
        raise IncompleteComparisonError(comparison)
    return comparison


def note_look(comparison: Comparison, folder: Path) -> None:
    """Write this look down beside the runs, whatever folder the report goes to, and say what many looks do."""
    try:
        comparison.looks = record_look(look_at(comparison.verdicts, comparison.terms), folder)
    except (OSError, ValueError) as error:
        comparison.notes.append(f"This look at the runs is not recorded in {folder}: {error}.")
        return
    if len(comparison.looks) > 1:
        comparison.notes.append(f"This is look {len(comparison.looks)} at these runs. {looks_statement()}")


def print_escaped(line: str, file: TextIO | None = None) -> None:
    """Print a line on where something went: a path may hold any character."""
    print(escaped(line), file=file)


def _print_data(comparison: Comparison) -> None:
    print(_json(comparison.as_data()))


def print_table(comparison: Comparison) -> None:
    """Print the verdicts and what is to be read along."""
    from lightning_llm.base.terminal.console import new_console
    from lightning_llm.compare.table import print_comparison

    # What is printed comes from configs, where [brackets] are lists.
    console = new_console(markup=False) if sys.stdout.isatty() else new_console(markup=False, width=180, no_color=True)
    print_comparison(comparison, console)


def write_comparison(
    comparison: Comparison,
    folder: Path,
    *,
    log: bool,
    supplement: "Supplement | None" = None,
    place: str = "compare",
    lines: Mapping[str, str] | None = None,
) -> list[str]:
    """Write the report to `folder` and, with `log`, the verdicts to MLflow; return what to say of it.

    Where it cannot be written, that is one more of the comparison's problems. `supplement`: what stands in it beside
    the verdicts; `place`, `lines`: as `log_verdicts`.
    """
    from lightning_llm.compare.report.supplement import NOTHING
    from lightning_llm.compare.report.write import write_report
    from lightning_llm.compare.tracking import log_verdicts

    try:
        folder.mkdir(parents=True, exist_ok=True)
        data = comparison.as_data() | dict(supplement.data if supplement else {})
        (folder / "compare.json").write_text(_json(data) + "\n", encoding="utf-8")
        failed = write_report(comparison, folder, supplement or NOTHING)
    except OSError as error:
        text = f"the report cannot be written to {folder} ({error.strerror}). Name another folder."
        comparison.problems.append(Problem("--output", text))
        return []
    note = log_verdicts(comparison, folder, place, lines) if log else None
    said = [f"note   {each}" for each in failed]
    if (folder / "report.html").is_file():
        said.append(f"report {folder / 'report.html'}")
    return [*said, *([note] if note else [])]


def diff(arguments: argparse.Namespace) -> int:
    """Print what two runs' resolved configs, versions, device, code and data differ in; return 0 either way."""
    found: list[Found] = []
    problems: list[Problem] = []
    for word in (arguments.run, arguments.other):
        with gathered(problems):
            found.append(find_runs([word]))
            problems += found[-1].problems
    if len(found) < 2:
        raise ConfigError(problems)
    for word, each in zip((arguments.run, arguments.other), found, strict=True):
        if len(each.folders) > 1:
            text = f"holds {len(each.folders)} runs; name one of them, e.g. {each.folders[0]}."
            problems.append(Problem(word, text))
    runs, broken = read_all([folder for each in found for folder in each.folders[:1]])
    if problems or broken:
        raise ConfigError([*problems, *broken])
    differing = all_differences(*(runs if len(runs) == 2 else [runs[0], runs[0]]))
    differing = {key: values for key, values in differing.items() if arguments.all or not below(key, NOT_IDENTITY)}
    if arguments.json:
        print(_json({key: list(values) for key, values in differing.items()}))
        return 0
    if not differing:
        print("no difference in configs, versions, device, code and data")
        return 0
    width = max(map(len, differing))
    print(f"{'':<{width}}  {runs[0].name} | {runs[-1].name}")
    for key, (ours, theirs) in differing.items():
        print(f"{key:<{width}}  {_word(ours)} | {_word(theirs)}")
    return 0


def _json(value: Any) -> str:
    """Return `value` as JSON; what is no finite number is null, for which JSON has no other word."""
    return json.dumps(json_ready(value), indent=1, default=str, allow_nan=False)


def _word(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)
