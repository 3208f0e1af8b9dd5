"""Reader of JSON Lines: one object with the values of one step per line."""

import json
from typing import Any

from lightning_llm.compare.curves.readers.cells import columns_of
from lightning_llm.compare.curves.readers.text import open_text
from lightning_llm.compare.curves.table import LoggedTable, LogSource, Reader
from lightning_llm.config.config_hash import flatten


def recognizes(source: LogSource) -> bool:
    """Return whether the first line is a JSON object."""
    line = source.first_line.strip()
    return line.startswith("{") and line.endswith("}") and _object(line) is not None


def read(source: LogSource) -> LoggedTable:
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


READER = Reader("jsonl", recognizes, read)
