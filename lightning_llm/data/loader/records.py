"""The text of one record, as the loaders of records find it."""

from collections.abc import Iterator, Mapping
from typing import Any

from lightning_llm.errors import ConfigError, Problem


def text_of(record: Mapping[str, Any], column: str, key: str, where: str) -> str | None:
    """Return the text in `column`, None where it is null; `where` names the files of the source at `key`.

    Raises:
        ConfigError: there is no such column, or it holds something else.
    """
    if column not in record:
        text = f"{where} has no column {column!r}; it has {', '.join(map(repr, record))}."
        raise ConfigError(Problem(f"{key}.text_key", text))
    value = record[column]
    if value is not None and not isinstance(value, str):
        text = f"column {column!r} of {where} holds {type(value).__name__}, not text."
        raise ConfigError(Problem(f"{key}.text_key", text))
    return value


def column_of(rows: Any, column: str, key: str, where: str) -> Iterator[str | None]:
    """Yield `text_of` each row of a dataset of `datasets`, reading that column alone."""
    if column in (rows.column_names or ()):  # a missing one is reported from the first row
        rows = rows.select_columns([column])
    for record in rows:
        yield text_of(record, column, key, where)
