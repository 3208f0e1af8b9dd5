"""Compare logs of other trainers: print the audit and the verdicts, and write the report. Imports no torch."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from lightning_llm.compare.command import note_look, write_comparison
from lightning_llm.compare.comparison import Comparison, IncompleteComparisonError
from lightning_llm.compare.curves.compare_curves import LogOptions, compare_curves, curve_terms, curves_of, read_logs
from lightning_llm.compare.curves.named import NamedLog, named_logs
from lightning_llm.compare.curves.table import LoggedTable
from lightning_llm.compare.gate import Gate, judged_at_look
from lightning_llm.compare.terms import RequestedTerms, Terms


def compare_named_logs(
    words: Sequence[str],
    pattern: str | None,
    asked: RequestedTerms,
    baseline: str | None,
    options: LogOptions,
    output: Path | None,
    *,
    show: Callable[[Comparison], None],
    say: Callable[[str], None],
    gate: Gate | None = None,
) -> Comparison:
    """Return the verdicts over the logs that the arguments of --from name, after showing them and writing the report.

    Args:
        words: `ARM/SEED=PATH`, or paths that `pattern` describes.
        output: folder for the report; None: compare/ in the nearest common folder of the logs.
        show: prints the verdicts.
        say: prints a line: the audit of each log, and the location of the report.
        gate: the required verdict (--require) and the series of looks.

    Raises:
        ConfigError: a log or an option is wrong; nothing is judged then.
    """
    logs = named_logs(words, pattern)
    folder = output or home_of(logs) / "compare"
    return compare_tables(read_logs(logs, options), asked, baseline, options, folder, show=show, say=say, gate=gate)


def compare_tables(
    tables: Sequence[tuple[NamedLog, LoggedTable]],
    asked: RequestedTerms,
    baseline: str | None,
    options: LogOptions,
    output: Path | None,
    *,
    show: Callable[[Comparison], None],
    say: Callable[[str], None],
    gate: Gate | None = None,
) -> Comparison:
    """Return the verdicts over tables, as `compare_named_logs`; `output` None: write no report."""
    curves = curves_of(tables, asked, options)
    for curve in curves:
        say(f"log    {curve.audit}")

    def judge(terms: Terms) -> Comparison:
        return compare_curves(curves, terms, baseline)

    terms = curve_terms(asked)
    comparison = judge(terms) if gate is None else judged_at_look(judge, terms, gate, output or Path("compare"))
    if gate is not None:
        comparison.required = gate.required
    elif output is not None:
        note_look(comparison, output)
    show(comparison)
    for line in write_comparison(comparison, output, log=False) if output is not None else ():
        say(line)
    if comparison.problems:
        raise IncompleteComparisonError(comparison)
    if comparison.requirement is not None:
        say(f"require {comparison.requirement.text}")
    return comparison


def home_of(logs: Sequence[NamedLog]) -> Path:
    """Return the nearest common folder of the logs, the working folder if one of them is a URI."""
    if any("://" in log.address for log in logs):
        return Path.cwd()
    return Path(os.path.commonpath([Path(log.address).expanduser().resolve().parent for log in logs]))
