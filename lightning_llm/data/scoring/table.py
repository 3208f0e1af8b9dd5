"""The table of scores: a Parquet file with a row per training document and source.

Columns: `source`, `key` (uint64, `Document.key`), `text_bytes`, `quality` and `diversity` (float64 in [0, 1]), and
`cluster` (int32, -1 where nothing was clustered).
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from lightning_llm.base.errors import ConfigError, Problem
from lightning_llm.base.integrity import digest_of_file

COLUMNS = {
    "source": "string",
    "key": "uint64",
    "text_bytes": "int64",
    "quality": "float64",
    "diversity": "float64",
    "cluster": "int32",
}
SCORERS = b"scorers"
KEY = "data.mixture.scores"
SCORES = ("quality", "diversity")
NAMED = {"string": "text", "uint64": "whole numbers from 0 on", "int64": "whole numbers", "int32": "whole numbers",
         "float64": "numbers"}  # fmt: skip
"""Types of `COLUMNS` as people call them."""


@dataclass(frozen=True)
class Scores:
    """The rows of one source: `key`, `text_bytes`, `quality`, `diversity`, `cluster`, each [documents]."""

    columns: dict[str, np.ndarray]

    def of_keys(self, keys: np.ndarray, names: tuple[str, ...]) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Return the columns `names` of the documents of uint64 `keys` [documents], and which documents have no row."""
        order = np.argsort(self.columns["key"], kind="stable")
        known = self.columns["key"][order]
        at = np.searchsorted(known, keys)
        found = (at < len(known)) & (known[np.minimum(at, len(known) - 1)] == keys) if len(known) else keys != keys
        rows = order[at[found]]
        return {name: self.columns[name][rows] for name in names}, np.flatnonzero(~found)


def write_scores(file: Path, columns: Mapping[str, Any], scorers: Mapping[str, Any]) -> None:
    """Write `columns` of `COLUMNS` to `file` in one move; `scorers`: the scorers' settings, as JSON data."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pa.schema([(name, getattr(pa, kind)()) for name, kind in COLUMNS.items()])
    table = pa.table({name: pa.array(columns[name], schema.field(name).type) for name in COLUMNS}, schema=schema)
    table = table.replace_schema_metadata({SCORERS: json.dumps(scorers, sort_keys=True)})
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f"{file.name}.partial")
    pq.write_table(table, partial)
    partial.replace(file)


def read_scores(file: Path, key: str) -> dict[str, Scores]:
    """Return the scores in `file` by source.

    Raises:
        ConfigError: with `key`, the file is no such table: each problem, its number of rows, and the first row.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(file)
    except (OSError, pa.ArrowException) as error:
        raise ConfigError(Problem(key, f"{file} cannot be read: {str(error).splitlines()[0].rstrip('.')}.")) from error
    if missing := [name for name in COLUMNS if name not in table.column_names]:
        text = f"{file} has no column {', '.join(missing)}. Make it by: lightning-llm prepare --score ..."
        raise ConfigError(Problem(key, text))
    columns: dict[str, np.ndarray] = {}
    wrong = []
    for name, kind in COLUMNS.items():
        try:
            columns[name] = typed_column(table.column(name), kind)
        except ValueError as error:
            wrong.append(f"column {name} {error}")
    if wrong := wrong or list(wrong_values(columns)):
        raise ConfigError([Problem(key, f"{file}: {each}. Repair the table, or score again.") for each in wrong])
    sources = columns.pop("source")
    return {
        str(name): Scores({column: values[sources == name] for column, values in columns.items()})
        for name in dict.fromkeys(sources)
    }


def scores_of(file: Path, keys: Mapping[str, np.ndarray], columns: tuple[str, ...]) -> dict[str, dict[str, np.ndarray]]:
    """Return `columns` of the documents of `keys`, uint64 [documents] by source, each [documents].

    Raises:
        ConfigError: some have no scores in `file`.
    """
    known, problems = read_scores(file, KEY), []
    found: dict[str, dict[str, np.ndarray]] = {}
    for name, its in keys.items():
        if name not in known:
            text = f"{file} has no scores of source {name!r}; it has {_sources(known)}. Score this data."
            problems.append(Problem(KEY, text))
            continue
        found[name], lacking = known[name].of_keys(its, columns)
        if len(lacking):
            text = (
                f"{file} has no scores of {len(lacking):,} of {len(its):,} documents of source {name!r}, first of "
                f"training document {lacking[0]} (key {its[lacking[0]]}): they have changed since. Score this data "
                "again: lightning-llm prepare ... --score ..."
            )
            problems.append(Problem(KEY, text))
    if problems:
        raise ConfigError(problems)
    return found


def _sources(known: Mapping[str, Scores]) -> str:
    return f"those of {', '.join(known)}" if known else "no rows at all"


def scores_problems(key: str, file: Path) -> Iterator[Problem]:
    """Yield the reasons, under the config's `key`, why `file` cannot be read as a table of scores.

    The result is cached until the file changes, so checks of many configs read it once.
    """
    if not file.is_file():
        yield Problem(
            key, f"{file} does not exist. Create it from the same data: lightning-llm prepare ... --score ..."
        )
        return
    stat = file.stat()
    yield from _problems(key, file, stat.st_size, stat.st_mtime_ns)


@lru_cache(maxsize=64)
def _problems(key: str, file: Path, size: int, time: int) -> tuple[Problem, ...]:
    try:
        read_scores(file, key)
    except ConfigError as error:
        return tuple(error.problems)
    return ()


def scores_digest(file: str) -> str | None:
    """Return the digest of the content of `file`, None if it does not exist; cached until the file changes."""
    try:
        stat = Path(file).stat()
    except OSError:
        return None
    return _digest(file, stat.st_size, stat.st_mtime_ns)


@lru_cache(maxsize=64)
def _digest(file: str, size: int, time: int) -> str:
    return digest_of_file(Path(file))


def typed_column(column: Any, kind: str) -> np.ndarray:
    """Return a pyarrow column [rows] without nulls as values of `kind`, a type of `COLUMNS`.

    Raises:
        ValueError: the problem, as text that follows the column's name.
    """
    import pyarrow as pa

    if column.null_count:
        first = int(np.flatnonzero(column.is_null().to_numpy())[0])
        raise ValueError(f"is null in {_of(column.null_count, len(column))}, first in row {first}")
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if (kind == "string") != _is_text(column.type) or not (kind == "string" or _is_number(column.type)):
        raise ValueError(f"contains {column.type}: must contain {NAMED[kind]} ({kind})")
    try:
        return np.asarray(column.cast(getattr(pa, kind)()).to_numpy())
    except pa.ArrowInvalid as error:  # a fraction, a negative one, one that is too large
        raise ValueError(f"must contain {NAMED[kind]} ({kind}): {str(error).splitlines()[0]}") from error


def _is_text(kind: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _is_number(kind: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind))


def wrong_values(columns: dict[str, np.ndarray]) -> Iterator[str]:
    """Yield problems of values in well-typed columns: scores outside [0, 1], two scores of one document."""
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
    """Return the first two rows of one document that differ, and the number of documents with such rows.

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
