"""Columns of a table of scores that anyone may have written: brought to their types, or what is wrong with them."""

from collections.abc import Iterator
from typing import Any

import numpy as np

SCORES = ("quality", "diversity")
NAMED = {"string": "text", "uint64": "whole numbers from 0 on", "int64": "whole numbers", "int32": "whole numbers",
         "float64": "numbers"}  # fmt: skip
"""Types of `table.COLUMNS` as people call them."""


def typed_column(column: Any, kind: str) -> np.ndarray:
    """Return a pyarrow column [rows] without nulls as values of `kind`, a type of `table.COLUMNS`.

    Raises:
        ValueError: what is wrong, as words that follow the column's name.
    """
    import pyarrow as pa

    if column.null_count:
        first = int(np.flatnonzero(column.is_null().to_numpy())[0])
        raise ValueError(f"is null in {_of(column.null_count, len(column))}, first in row {first}")
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if (kind == "string") != _is_text(column.type) or not (kind == "string" or _is_number(column.type)):
        raise ValueError(f"holds {column.type}, and has to hold {NAMED[kind]} ({kind})")
    try:
        return np.asarray(column.cast(getattr(pa, kind)()).to_numpy())
    except pa.ArrowInvalid as error:  # a fraction, a negative one, one that is too large
        raise ValueError(f"has to hold {NAMED[kind]} ({kind}): {str(error).splitlines()[0]}") from error


def _is_text(kind: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _is_number(kind: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind))


def wrong_values(columns: dict[str, np.ndarray]) -> Iterator[str]:
    """Yield what is wrong with sound columns' values: scores outside [0, 1], two scores of one document."""
    for name in SCORES:
        values = columns[name]
        for how, wrong in (
            ("not a finite number", ~np.isfinite(values)),
            ("outside [0, 1]", np.isfinite(values) & ((values < 0) | (values > 1))),
        ):
            if wrong.any():
                first = int(np.flatnonzero(wrong)[0])
                count = _of(int(wrong.sum()), len(values))
                yield f"column {name} is {how} in {count}, first in row {first} ({values[first]:g})"
    if twice := _scored_twice(columns):
        first, second, documents = twice
        rows = "1 document has" if documents == 1 else f"{documents:,} documents have"
        yield f"{rows} two rows (one source and key) that differ, first rows {first} and {second}"


def _scored_twice(columns: dict[str, np.ndarray]) -> tuple[int, int, int] | None:
    """Return the first two rows of one source and key whose values differ, and of how many documents there are such.

    Equal texts have one key, and a source may hold one twice: rows that agree are no mistake.
    """
    _, source = np.unique(columns["source"].astype(str), return_inverse=True)
    order = np.lexsort((columns["key"], source))
    at, after = order[:-1], order[1:]
    same = (source[at] == source[after]) & (columns["key"][at] == columns["key"][after])
    told_apart = [columns[name][at] != columns[name][after] for name in columns if name not in ("source", "key")]
    unlike = np.flatnonzero(same & np.logical_or.reduce(told_apart))
    if not len(unlike):
        return None
    documents = {(int(source[at[each]]), int(columns["key"][at[each]])) for each in unlike}
    first, second = min(tuple(sorted((int(at[each]), int(after[each])))) for each in unlike)
    return first, second, len(documents)


def _of(count: int, rows: int) -> str:
    return f"{count:,} of {rows:,} rows"
