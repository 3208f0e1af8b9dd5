"""Readers of JSON: rows in one document (W&B's `run.history()`), JSON Lines, Hugging Face's `trainer_state.json`."""

import json
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from lightning_llm.compare.curves.readers.attempts import Attempts, columns_by_step
from lightning_llm.compare.curves.table import LoggedTable, LogSource, Reader, columns_of, number, open_text
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
    """Return all numeric columns of a JSON document; names of nested values are joined with dots.

    Raises:
        ValueError: it is not JSON, or its rows are not objects.
    """
    with open_text(source.file) as file:
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
        names, rows = document["columns"], document["data"]
        lists = isinstance(names, list) and isinstance(rows, list) and all(isinstance(row, list) for row in rows)
        if not lists or any(len(row) != len(names) for row in rows):
            raise ValueError('"data" must be rows with one value for each of "columns"')
        return [dict(zip(names, row, strict=True)) for row in rows]
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
    """Return whether the first line of `source` is a JSON object."""
    line = source.first_line.strip()
    return line.startswith("{") and line.endswith("}") and _object(line) is not None


def read_jsonl(source: LogSource) -> LoggedTable:
    """Return the table of a JSON Lines file; names of nested values are joined with dots.

    An incomplete last line is left out.

    Raises:
        ValueError: a line is not a JSON object.
    """
    notes: tuple[str, ...] = ()
    rows: list[tuple[int, dict[str, Any]]] = []
    with open_text(source.file) as file:
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


TRAINER_STATE = "trainer_state.json"
SPEEDS = ("_runtime", "_per_second", "total_flos")
FILTER = (
    "The Trainer replaces losses that are not finite by the mean of the others, unless logging_nan_inf_filter is false."
)


def recognizes_trainer_state(source: LogSource) -> bool:
    """Return whether `source` is a `trainer_state.json`, or a checkpoint or output folder of the Trainer."""
    if source.is_folder and source.path is not None:
        return bool(_files(source.path))
    return (
        source.first_line.strip().startswith("{") and '"log_history"' in source.head and '"global_step"' in source.head
    )


def read_trainer_state(source: LogSource) -> LoggedTable:
    """Return all numbers in the `log_history` of a `trainer_state.json`; of an output folder, the last checkpoint's.

    Raises:
        ValueError: no such file, or it has no history.
    """
    if source.path is None:
        raise ValueError("it is not a file")
    files = _files(source.path) if source.is_folder else [source.path]
    states = [_state(file) for file in files]
    state = max(states, key=lambda each: each.get("global_step") or 0)
    log = Attempts()
    for at, entry in enumerate(state["log_history"], 1):
        step = entry.get("step") if isinstance(entry, dict) else None
        if not isinstance(step, int) or isinstance(step, bool):
            raise ValueError(f"entry {at} of log_history has no whole-numbered 'step'")
        if "train_loss" in entry and "loss" not in entry:  # summary of `train`, with the mean loss of all its steps
            continue
        values = {name: number(value) for name, value in entry.items() if name != "step" and not name.endswith(SPEEDS)}
        log.add(f"entry {at}", step, {name: value for name, value in values.items() if value is not None})
    if not log.rows:
        raise ValueError("its log_history is empty. Train with logging_steps=1, so that each step is logged.")
    settings, notes = {}, list(log.notes())
    for key, name in (("max_steps", "total_steps"), ("logging_steps", "logging_steps")):
        if isinstance(state.get(key), int | float):
            settings[name] = state[key]
    if settings.get("logging_steps", 1) != 1:
        notes.append(f"Each training loss is the mean over the last {settings['logging_steps']} steps (logging_steps).")
    return LoggedTable("trainer_state", source.address, columns_by_step(log.rows), settings, (*notes, FILTER))


def _files(folder: Path) -> list[Path]:
    own = folder / TRAINER_STATE
    return [own] if own.is_file() else sorted(folder.glob(f"checkpoint-*/{TRAINER_STATE}"))


def _state(file: Path) -> dict[str, Any]:
    with open_text(file) as opened:
        state = json.load(opened)
    if not isinstance(state, dict) or not isinstance(state.get("log_history"), list):
        raise ValueError(f"{file} has no list log_history")
    return state


TRAINER_STATE_READER = Reader("trainer_state", recognizes_trainer_state, read_trainer_state)
