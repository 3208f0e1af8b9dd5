"""Compare logs that arguments name, or curves given in Python: read, check, judge and report them. Imports no torch."""

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lightning_llm.base.errors import ConfigError, Problem, gathered
from lightning_llm.compare.command import note_look, write_comparison
from lightning_llm.compare.comparison import Comparison, IncompleteComparisonError
from lightning_llm.compare.curves import LogOptions, compare_curves, curve_terms, curves_of, read_logs
from lightning_llm.compare.curves.named import NamedLog, is_uri, named_logs, real_path
from lightning_llm.compare.curves.table import SETTINGS, LoggedTable, columns_of
from lightning_llm.compare.error_budget import judged_at_look
from lightning_llm.compare.requirement import Gate
from lightning_llm.compare.terms import RequestedTerms, Terms

ALLOWED = "Allowed: a DataFrame, a dict of arrays, or a list of (step, loss) pairs"


def compare_named_logs(
    arguments: Sequence[str],
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
    """Compare the logs that the arguments of --from name, show the verdicts, write the report, return the comparison.

    Args:
        arguments: `ARM/SEED=PATH`, or paths that `pattern` (--pattern) describes.
        asked: the requested terms.
        baseline: name of the baseline's arm.
        options: how logs are read.
        output: folder for the report; None: compare/ in the nearest common folder of the logs.
        show: prints the verdicts.
        say: prints a line: how each log was read, and the location of the report.
        gate: the required verdict (--require) and the series of looks.

    Raises:
        ConfigError: a log or an option is wrong; nothing is judged then.
    """
    logs = named_logs(arguments, pattern)
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
    """Compare logs that were read already, in the same way as `compare_named_logs`; `output` None: write no report."""
    curves = curves_of(tables, asked, options)
    for curve in curves:
        say(f"log    {curve.audit}")

    def judge(terms: Terms) -> Comparison:
        return compare_curves(curves, terms, baseline)

    terms = curve_terms(asked)
    comparison = judge(terms) if gate is None else judged_at_look(judge, terms, gate, output)
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
    """Return the nearest common folder of the logs; the working folder if one of them is a URI."""
    if any(is_uri(log.address) for log in logs):
        return Path.cwd()
    return Path(os.path.commonpath([Path(real_path(log.address)).parent for log in logs]))


def tables_of(curves: Mapping[str, Any]) -> list[tuple[NamedLog, LoggedTable]]:
    """Return (name, table) of each curve in {arm: {seed: frame}}, or {arm: frame} or {arm: [frame, ...]} without seeds.

    An arm is one side of the comparison, such as "bf16".

    Raises:
        ConfigError: with every value that is no curve.
    """
    if not isinstance(curves, Mapping) or not curves:
        text = "must be {arm: {seed: frame}}, such as {'bf16': {0: frame, 1: frame}, 'nvfp4': {0: frame, 1: frame}}."
        raise ConfigError(Problem("curves", text))
    problems: list[Problem] = []
    tables: list[tuple[NamedLog, LoggedTable]] = []
    for arm, frames in curves.items():
        if wrong := _why_no_seeds(frames):
            problems.append(Problem(f"curves[{str(arm)!r}]", wrong))
            continue
        for at, (seed, frame) in enumerate(_by_seed(frames)):
            log = NamedLog(str(arm), seed, f"curves[{str(arm)!r}]{'' if seed is None else f'[{seed}]'}")
            if seed is None and isinstance(frames, Sequence) and not _is_pairs(frames):
                log = NamedLog(log.arm, None, f"{log.address}[{at}]")
            with gathered(problems):
                tables.append((log, table_of(frame, log.address)))
    if problems:
        raise ConfigError(problems)
    return tables


def compare_frames(
    curves: Mapping[str, Any],
    asked: RequestedTerms,
    baseline: str | None,
    x: str | None,
    tokens_per_step: float | None,
    until: float | None,
    output: Path | None,
    *,
    show: Callable[[Comparison], None],
    say: Callable[[str], None],
    gate: Gate | None = None,
) -> Comparison:
    """Compare curves in memory, show the verdicts, and return the comparison.

    `curves`: as for `tables_of`; `x`, `tokens_per_step`, `until`: as in `LogOptions`; `output`: folder of the report,
    None to write none.

    Raises:
        ConfigError: a curve or an option is wrong.
    """
    options = LogOptions(x, None, tokens_per_step, until)
    options.check()
    return compare_tables(tables_of(curves), asked, baseline, options, output, show=show, say=say, gate=gate)


def _why_no_seeds(frames: Any) -> str:
    """Return the problem of an arm without a curve, or with other seeds than integers; "" for none."""
    if isinstance(frames, Mapping | Sequence) and not len(frames):
        return "has no curve. Give {seed: frame}, or leave the arm out."
    if isinstance(frames, Mapping) and any(
        isinstance(each, Mapping) or hasattr(each, "columns") for each in frames.values()
    ):
        others = [key for key in frames if not isinstance(key, int | np.integer)]
        return f"has the seed {others[0]!r}. Seeds are integers: {{0: frame, 1: frame}}." if others else ""
    return ""


def _by_seed(frames: Any) -> Iterable[tuple[int | None, Any]]:
    if isinstance(frames, Mapping) and all(isinstance(key, int | np.integer) for key in frames):
        return [(int(seed), frame) for seed, frame in frames.items()]
    if isinstance(frames, Sequence) and not isinstance(frames, str) and not _is_pairs(frames):
        return [(None, frame) for frame in frames]
    return [(None, frames)]


def _is_pairs(frame: Any) -> bool:
    """Return whether `frame` is a sequence of pairs of numbers."""
    if isinstance(frame, np.ndarray):
        return frame.ndim == 2 and frame.shape[1] == 2
    return (
        isinstance(frame, Sequence)
        and not isinstance(frame, str)
        and len(frame) > 0
        and all(isinstance(each, Sequence | np.ndarray) and len(each) == 2 for each in frame)
        and all(isinstance(value, int | float | np.number) for each in frame for value in each)
    )


def table_of(frame: Any, address: str) -> LoggedTable:
    """Return the table of one frame: a DataFrame, a dict of arrays or (step, loss) pairs.

    NaN is a missing value in a column, and a diverged loss in a pair. `address`: name of the frame, for messages.

    Raises:
        ConfigError: it is no frame, or its columns have unlike lengths.
    """
    if _is_pairs(frame):
        pairs = np.asarray(frame, dtype=np.float64)
        losses = np.where(np.isfinite(pairs[:, 1]), pairs[:, 1], math.inf)
        return LoggedTable("pairs", address, {"step": pairs[:, 0], "loss": losses})
    if hasattr(frame, "columns") and hasattr(frame, "to_dict") and hasattr(frame, "reset_index"):
        frame = frame if frame.index.name is None else frame.reset_index()
        if len(set(frame.columns)) < len(frame.columns):
            raise ConfigError(Problem(address, "has two columns of one name. Rename or remove one."))
        return _table("frame", address, {str(name): _values(frame[name]) for name in frame.columns})
    if isinstance(frame, Mapping) and frame and not any(isinstance(each, str) for each in frame.values()):
        try:
            return _table("arrays", address, {str(name): _values(values) for name, values in frame.items()})
        except TypeError as error:
            raise ConfigError(Problem(address, f"has a value that is no array. {ALLOWED}.")) from error
    raise ConfigError(Problem(address, f"is of type {type(frame).__name__}. {ALLOWED}."))


def _table(format: str, address: str, values: Mapping[str, Sequence[Any] | np.ndarray]) -> LoggedTable:
    lengths = {name: len(each) for name, each in values.items()}
    if len(set(lengths.values())) > 1:
        text = f"has columns of unlike lengths: {', '.join(f'{name} {size}' for name, size in lengths.items())}."
        raise ConfigError(Problem(address, f"{text} Give all one value per row, NaN where it is missing."))
    if not set(SETTINGS) & set(values) and all(isinstance(each, np.ndarray) for each in values.values()):
        found = {name: np.asarray(each, dtype=np.float64) for name, each in values.items()}
        known = {name: np.where(np.isinf(each), math.inf, each) for name, each in found.items()}
        empty = {name: "NaN in every row" for name, each in known.items() if len(each) and np.isnan(each).all()}
        columns = {name: each for name, each in known.items() if not np.isnan(each).all()}
        return LoggedTable(format, address, columns, mixed=empty)
    rows = zip(*([_plain(value) for value in each] for each in values.values()), strict=True)
    numbered = ((at, dict(zip(values, row, strict=True))) for at, row in enumerate(rows, 1))
    columns, mixed, settings = columns_of(numbered)
    return LoggedTable(format, address, columns, settings, mixed=mixed)


def _values(column: Any) -> Sequence[Any] | np.ndarray:
    """Return the values of a column: an array if all are numbers, so that millions of points take no time."""
    if isinstance(column, np.ma.MaskedArray) and column.dtype.kind in "iuf":
        column = np.ma.filled(column.astype(np.float64), math.nan)
    if hasattr(column, "detach"):  # a tensor, which may need a gradient or have a dtype that numpy lacks
        column = column.detach().double().cpu().numpy()
    found = np.asarray(column) if hasattr(column, "dtype") else None
    return found if found is not None and found.dtype.kind in "iuf" and found.ndim == 1 else list(column)


def _plain(value: Any) -> Any:
    """Return a value as Python's own type, None for a missing one."""
    value = value.item() if hasattr(value, "item") and getattr(value, "ndim", 1) == 0 else value  # numpy or torch
    return None if value is None or (isinstance(value, float) and math.isnan(value)) else value
