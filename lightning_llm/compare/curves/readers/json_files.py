"""Readers of JSON: rows in one document, as of W&B's `run.history()` or `scan_history()`, and JSON Lines."""

import json
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from lightning_llm.compare.curves.readers.cells import columns_of, open_text
from lightning_llm.compare.curves.table import LoggedTable, LogSource, Reader
from lightning_llm.config.config_hash import flatten

SAMPLED = 500
"""Rows that `run.history()` returns if it is not asked for more."""


def recognizes_json(source: LogSource) -> bool:
    """Return whether `source` begins like a JSON array of objects, or an object of columns as pandas writes it."""
    start = source.head.lstrip()[:200]
    if start.startswith("["):
        return start[1:].lstrip().startswith("{")
    if not start.startswith("{"):
        return False
    _, _, value = start.partition(":")
    return value.lstrip().startswith(("{", "[")) and '"log_history"' not in source.head and not _is_lines(source.head)


def _is_lines(head: str) -> bool:
    """Return whether the first line is an object and another one follows: JSON Lines."""
    lines = [line for line in head.splitlines() if line.strip()][:2]
    return len(lines) == 2 and all(line.lstrip().startswith("{") for line in lines) and lines[0].rstrip().endswith("}")


def read_json(source: LogSource) -> LoggedTable:
    """Return all numeric columns; names of nested values are joined with dots.

    Raises:
        ValueError: it is not JSON, or its rows are not objects.
    """
    if source.path is None or source.is_folder:
        raise ValueError("it is not a file")
    with open_text(source.path) as file:
        document = json.load(file)
    rows = document if isinstance(document, list) else _transposed(document)
    for at, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise ValueError(f'row {at} is not an object such as {{"_step": 1, "loss": 2.5}}')
    flat = [flatten(row) for row in rows]
    _clear_absent(flat)
    columns, mixed, settings = columns_of(enumerate(flat, 1))
    notes: tuple[str, ...] = ()
    if "_step" in columns and len(rows) == SAMPLED:
        notes = (f"It has {SAMPLED} rows: run.history() returns a sample. Use scan_history() for all rows.",)
    return LoggedTable("json", source.address, columns, settings, notes, mixed)


def _clear_absent(rows: list[dict[str, Any]]) -> None:
    """Remove the NaNs that stand for absent values in tables of pandas, and leave those of a run that diverged.

    A run does not recover from a NaN, so a NaN before a number is an absent value. NaNs after the last number are
    absent values if the column has as many in a row before.
    """
    for name in {name for row in rows for name, value in row.items() if value != value}:
        known = [at for at, row in enumerate(rows) if row.get(name) is not None and row[name] == row[name]]
        last = known[-1] if known else -1
        longest = max((later - earlier - 1 for earlier, later in pairwise([-1, *known])), default=0)
        is_absent = known and len(rows) - 1 - last <= longest
        for row in rows[: None if is_absent else last]:
            if row.get(name) != row.get(name):
                row[name] = None


def _transposed(document: Any) -> list[dict[str, Any]]:
    """Return the rows of {column: {row: value}} (pandas' default) or {column: [values]}."""
    if not isinstance(document, Mapping) or not document:
        raise ValueError('it is neither an array of rows nor {"column": values}')
    if {"columns", "data"} <= set(document):  # pandas' orient="split"
        return [dict(zip(document["columns"], row, strict=True)) for row in document["data"]]
    columns = {
        name: dict(enumerate(values)) if isinstance(values, list) else values for name, values in document.items()
    }
    if bad := [name for name, values in columns.items() if not isinstance(values, dict)]:
        raise ValueError(f"'{bad[0]}' is not a column of values")
    keys = list(dict.fromkeys(str(key) for values in columns.values() for key in values))
    by_text = {name: {str(key): value for key, value in values.items()} for name, values in columns.items()}
    return [{name: values.get(key) for name, values in by_text.items()} for key in keys]


JSON_READER = Reader("json", recognizes_json, read_json)


def recognizes_jsonl(source: LogSource) -> bool:
    """Return whether the first line is a JSON object."""
    line = source.first_line.strip()
    return line.startswith("{") and line.endswith("}") and _object(line) is not None


def read_jsonl(source: LogSource) -> LoggedTable:
    """Return the table; names of nested values are joined with dots. A last line without its end is left out.

    Raises:
        ValueError: a line is not a JSON object.
    """
    if source.path is None or source.is_folder:
        raise ValueError("it is not a file")
    notes: tuple[str, ...] = ()
    rows: list[tuple[int, dict[str, Any]]] = []
    with open_text(source.path) as file:
        text = file.read()
    lines = [(at, line) for at, line in enumerate(text.split("\n"), 1) if line.strip()]
    for at, line in lines:
        found = _object(line)
        if found is not None:
            rows.append((at, flatten(found)))
        elif at == lines[-1][0] and not text.endswith("\n"):
            notes = (f"The last line, {at}, is incomplete and left out.",)
        else:
            raise ValueError(f'line {at} is not a JSON object. Each line must be one: {{"step": 1, "loss": 2.5}}.')
    columns, mixed, settings = columns_of(rows)
    return LoggedTable("jsonl", source.address, columns, settings, notes, mixed)


def _object(line: str) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


JSONL_READER = Reader("jsonl", recognizes_jsonl, read_jsonl)
