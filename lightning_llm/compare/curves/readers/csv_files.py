"""Readers of CSV files: tables with a first line of names, and downloads of W&B's charts with a column per run."""

import csv
import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from lightning_llm.compare.curves.table import Column, LoggedTable, LogSource, Reader, columns_of, number, open_text

DELIMITERS = ",\t;"
EXAMPLE = "step,loss"
NAME = re.compile(r"^(?P<run>.+) - (?P<metric>.+?)(?P<bound>__MIN|__MAX)?$")
GROUP = "Group: "


def recognizes_csv(source: LogSource) -> bool:
    """Return whether the first two lines of `source` have separated fields, or are a name and a number."""
    lines = [line for _, line in _content(source.head.splitlines())][:2]
    if not lines or "\0" in source.head or lines[0].lstrip().startswith(("{", "[")):
        return False
    delimiter = delimiter_of(lines[0])
    one_column = len(lines) == 2 and number(lines[0]) is None and number(lines[1]) is not None
    return one_column or (lines[0].count(delimiter) > 0 and all(line.count(delimiter) for line in lines))


def delimiter_of(line: str) -> str:
    """Return the separator of a line of names: of comma, tab and semicolon the most frequent one."""
    return max(DELIMITERS, key=line.count)


def read_csv(source: LogSource) -> LoggedTable:
    """Return the table in a CSV file.

    Raises:
        ValueError: no line of names, a name twice, a row with another number of fields, or two tables in one file.
    """
    with open_text(source.file, newline="") as file:
        numbered = _content(file)
    if not numbered:
        raise ValueError("it is empty")
    delimiter = delimiter_of(numbered[0][1])
    text = [line if at else line.removeprefix("#") for at, (_, line) in enumerate(numbered)]
    try:
        rows = list(csv.reader(text, delimiter=delimiter))
    except csv.Error as error:
        raise ValueError(f"it is no table ({error})") from error
    lines = [at for at, _ in numbered] if len(rows) == len(numbered) else list(range(1, len(rows) + 1))
    names = [name.strip() or f"column {at}" for at, name in enumerate(rows[0], 1)]
    if all(number(name) is not None for name in rows[0]):
        raise ValueError(f"its first line has numbers, not names of columns. Add a line with names, such as {EXAMPLE}.")
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise ValueError(f"it has the column '{twice[0]}' twice. Rename or remove one.")
    body = list(zip(lines[1:], rows[1:], strict=True))
    notes: tuple[str, ...] = ()
    if not text[-1].endswith(("\n", "\r")) and _is_incomplete(body):
        notes = (f"The last line, {body.pop()[0]}, is incomplete and left out.",)
    for line, row in body:
        if row == rows[0]:
            raise ValueError(f"line {line} repeats the names of the columns: it has two tables. Split the file.")
        if len(row) != len(names):
            raise ValueError(
                f"line {line} has {len(row)} fields instead of {len(names)}: it is cut off or has text with "
                f"'{delimiter}'. Repair or remove that line."
            )
    columns, mixed, settings = columns_of((line, dict(zip(names, row, strict=True))) for line, row in body)
    return LoggedTable("csv", source.address, columns, settings, notes, mixed)


def _content(lines: Iterable[str]) -> list[tuple[int, str]]:
    """Return (number, line) of the lines that are neither blank nor comments; "#step,loss" can be the first of them."""
    found: list[tuple[int, str]] = []
    for at, line in enumerate(lines, 1):
        is_comment = line.startswith("#") and (found or not line.count(delimiter_of(line)))
        if line.strip() and not is_comment:
            found.append((at, line))
    return found


def _is_incomplete(body: Sequence[tuple[int, Sequence[str]]]) -> bool:
    """Return whether the last row, which has no line end, has fewer fields or a shorter last field than all others."""
    *others, last = [row for _, row in body] or [[]]
    if not others:
        return False
    fields = min(map(len, others))
    return len(last) < fields or len(last[-1]) < min(len(row[-1]) for row in others)


CSV_READER = Reader("csv", recognizes_csv, read_csv)


@dataclass
class Header:
    """The columns of a W&B download: the name of the `axis`, and {run: {metric: {"", "__MIN" or "__MAX": index}}}."""

    axis: str
    columns: dict[str, dict[str, dict[str, int]]]


def recognizes_wandb(source: LogSource) -> bool:
    """Return whether the first line names an axis, and then "RUN - METRIC" columns with their bounds."""
    try:
        header = _header(next(csv.reader([source.first_line]), []))
    except csv.Error:
        return False
    return header is not None and any("__MIN" in bounds for run in header.columns.values() for bounds in run.values())


def _header(names: list[str]) -> Header | None:
    if not names:
        return None
    found: dict[str, dict[str, dict[str, int]]] = {}
    for at, name in enumerate(names[1:], 1):
        parts = NAME.match(name.strip())
        if parts is None:
            return None
        found.setdefault(parts["run"], {}).setdefault(parts["metric"], {})[parts["bound"] or ""] = at
    return Header(names[0].strip(), found) if found else None


def read_wandb(source: LogSource) -> LoggedTable:
    """Return the metrics of the run that `#RUN` after the path names, or of the only run in the file.

    Raises:
        ValueError: several runs, a group of runs, or a row with another number of fields.
    """
    try:
        with open_text(source.file, newline="") as file:
            names, *rows = [row for row in csv.reader(file) if row]
    except csv.Error as error:
        raise ValueError(f"it is no table ({error})") from error
    header = _header(names)
    if header is None:
        raise ValueError('its columns are not "RUN - METRIC"')
    run = _run(header, source.part)
    for at, row in enumerate(rows, 2):
        if len(row) != len(names):
            raise ValueError(f"row {at} has {len(row)} fields instead of {len(names)}: the file is cut off")
    metrics = header.columns[run]
    values = {
        metric + bound: _column(rows, index, metric) for metric, at in metrics.items() for bound, index in at.items()
    }
    filled = np.any([~np.isnan(values[metric]) for metric, at in metrics.items() if "" in at], axis=0)
    step = "step" if header.axis in ("Step", "_step") else header.axis
    columns = {step: _column(rows, 0, step)[filled]}
    columns |= {metric: values[metric][filled] for metric, at in metrics.items() if "" in at and metric != step}
    smoothed = {
        metric: "mean of each of the chart's intervals, since a chart shows at most 1,500 points"
        for metric, at in metrics.items()
        if {"", "__MIN", "__MAX"} <= set(at)
        and not metric.startswith("_")
        and _is_averaged(values[metric], values[f"{metric}__MIN"], values[f"{metric}__MAX"])
    }
    notes = (f"Run '{run}' of {len(header.columns)} in the file." if len(header.columns) > 1 else f"Run '{run}'.",)
    return LoggedTable("wandb-csv", source.address, columns, {"run": run}, notes, smoothed=smoothed)


def _run(header: Header, asked: str) -> str:
    """Return the run to read."""
    runs = list(header.columns)
    shown = ", ".join(runs[:8]) + (", ..." if len(runs) > 8 else "")
    if asked and asked not in runs:
        raise ValueError(f"it has no run '{asked}'. Its runs: {shown}.")
    if not asked and len(runs) > 1:
        raise ValueError(f"it has {len(runs)} runs: {shown}. Name one after the path: FILE.csv#{runs[0]}")
    run = asked or runs[0]
    if run.startswith(GROUP):
        raise ValueError(
            f"'{run}' is the mean of a group of runs. Switch off grouping in the chart and download again."
        )
    return run


def _column(rows: list[list[str]], index: int, name: str) -> Column:
    values = np.full(len(rows), math.nan)
    for at, row in enumerate(rows):
        if row[index].strip():
            found = number(row[index])
            if found is None:
                raise ValueError(f"'{name}' in row {at + 2} is not a number: {row[index][:40]!r}")
            values[at] = found
    return values


def _is_averaged(values: Column, low: Column, high: Column) -> bool:
    """Return whether any point is the mean of several: its bounds differ."""
    known = ~np.isnan(values) & ~np.isnan(low) & ~np.isnan(high)
    return bool(np.any(low[known] != high[known]))


WANDB_READER = Reader("wandb-csv", recognizes_wandb, read_wandb)
