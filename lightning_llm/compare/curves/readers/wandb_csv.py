"""Reader of the CSV that the charts of Weights & Biases offer as a download: one column per run and metric."""

import csv
import math
import re
from dataclasses import dataclass

import numpy as np

from lightning_llm.compare.curves.readers.cells import number
from lightning_llm.compare.curves.readers.text import open_text
from lightning_llm.compare.curves.table import Column, LoggedTable, LogSource, Reader

NAME = re.compile(r"^(?P<run>.+) - (?P<metric>.+?)(?P<bound>__MIN|__MAX)?$")
GROUP = "Group: "


@dataclass
class Header:
    """The columns of the file. `columns`: {run: {metric: {"" or "__MIN" or "__MAX": index}}}."""

    axis: str
    columns: dict[str, dict[str, dict[str, int]]]


def recognizes(source: LogSource) -> bool:
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


def read(source: LogSource) -> LoggedTable:
    """Return the metrics of the run that `#RUN` after the path names, or of the only one.

    Raises:
        ValueError: several runs, a group of runs, or a row with another number of fields.
    """
    if source.path is None or source.is_folder:
        raise ValueError("it is not a file")
    try:
        with open_text(source.path, newline="") as file:
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


READER = Reader("wandb-csv", recognizes, read)
