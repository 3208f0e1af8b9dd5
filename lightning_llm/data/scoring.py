"""Scores of documents: computing them offline (`prepare --score`), built-in scorers, and the table that stores them.

The built-in scorers need no model. The table is a Parquet file with one row per training document and source. Columns:
`source`, `key` (uint64, `Document.key`), `text_bytes`, `quality` and `diversity` (float64 in [0, 1]), and `cluster`
(int32, -1 without clusters).
"""

import importlib.util
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from lightning_llm.base.errors import ConfigError, Problem
from lightning_llm.base.integrity import digest_of_file
from lightning_llm.config.schema.base import NonNegativeInt, PositiveInt
from lightning_llm.config.schema.data import SCORERS, DataConfig, Measure, ScorerConfig, UnscorableError
from lightning_llm.data.sources.source import Source

COLUMNS = {
    "source": "string",
    "key": "uint64",
    "text_bytes": "int64",
    "quality": "float64",
    "diversity": "float64",
    "cluster": "int32",
}
SETTINGS = b"scorers"
KEY = "data.mixture.scores"
SCORES = ("quality", "diversity")
NAMED = {"string": "text", "uint64": "whole numbers from 0 on", "int64": "whole numbers", "int32": "whole numbers",
         "float64": "numbers"}  # fmt: skip
"""{type of `COLUMNS`: its name in messages}."""
CHARACTERS = 20_000
"""Characters read from the beginning of each document: enough to determine its subject."""


def score_documents(
    config: DataConfig, scorers: Mapping[str, ScorerConfig], file: Path, say: Callable[[str], None]
) -> dict[str, Any]:
    """Score the training documents of all sources together, write the table `file`, and return its columns.

    All texts are in memory at once.

    Args:
        config: the sources, checked by `check_data`.
        scorers: {measure: its scorer}; a measure without a scorer is 0.
        file: the Parquet file to write.
        say: called with a line before each scorer runs.

    Raises:
        ConfigError: a source cannot be read, has no text, or cannot be scored.
    """
    names: list[str] = []
    keys, texts, sizes = [], [], []
    for name, source in config.sources.items():
        if source.role is None:
            for document in Source(name, source).documents():
                names.append(name)
                keys.append(document.key)
                texts.append(document.text)
                sizes.append(document.text_bytes)
    if not texts:
        raise ConfigError(Problem("data.sources", "contain only documents without text, so there is nothing to score."))
    columns: dict[str, Any] = {
        "source": names,
        "key": np.array(keys, np.uint64),
        "text_bytes": np.array(sizes, np.int64),
        "quality": np.zeros(len(texts)),
        "diversity": np.zeros(len(texts)),
        "cluster": np.full(len(texts), -1, np.int32),
    }
    for measure, scorer in scorers.items():
        say(f"{measure} of {len(texts):,} documents by {scorer.kind}")
        try:
            values, clusters = scorer.score(texts)
        except UnscorableError as error:
            text = f"cannot score these {len(texts):,} documents: {str(error).rstrip('.')}."
            raise ConfigError(Problem(f"--score {measure}={scorer.kind}", text)) from error
        columns[measure] = np.asarray(values, np.float64)
        if clusters is not None:
            columns["cluster"] = np.asarray(clusters, np.int32)
    write_scores(file, columns, {measure: scorer.model_dump() for measure, scorer in scorers.items()})
    return columns


@SCORERS.register
class LengthEntropy(ScorerConfig):
    """Quality score without a model: long documents that use many different bytes score high.

    The score is the mean of a document's log length and of the entropy of its bytes, each rescaled to [0, 1] over all
    documents.
    """

    measures: ClassVar[Measure] = "quality"

    kind: Literal["length_entropy"] = "length_entropy"

    def score(self, texts: Sequence[str]) -> tuple[Any, Any]:
        lengths, entropies = np.zeros(len(texts)), np.zeros(len(texts))
        for index, text in enumerate(texts):
            counts = np.bincount(np.frombuffer(text.encode(), np.uint8), minlength=256)
            shares = counts[counts > 0] / counts.sum()
            lengths[index], entropies[index] = np.log(counts.sum()), -(shares * np.log2(shares)).sum()
        return (to_unit(lengths) + to_unit(entropies)) / 2, None


@SCORERS.register
class TfidfKMeans(ScorerConfig):
    """Diversity score without embeddings: compactness times separation of a document's cluster (arXiv 2503.01506).

    Clusters are by k-means on TF-IDF. Compactness is the mean distance of a cluster's documents from its centroid,
    separation the mean distance of its centroid from the others. The product is rescaled to [0, 1] over all documents.
    """

    measures: ClassVar[Measure] = "diversity"

    kind: Literal["tfidf_kmeans"] = "tfidf_kmeans"
    clusters: PositiveInt = Field(16, description="k of k-means; at most one per document")
    features: PositiveInt = Field(4096, description="number of words that are counted, the most frequent ones")
    seed: NonNegativeInt = Field(0, description="seed of the first centroids")

    def problems(self, key: str) -> Iterator[Problem]:
        if importlib.util.find_spec("sklearn") is None:
            yield Problem(key, "needs scikit-learn, which is not installed: pip install 'lightning-llm[score]'")

    def score(self, texts: Sequence[str]) -> tuple[Any, Any]:
        from sklearn.cluster import KMeans
        from sklearn.feature_extraction.text import TfidfVectorizer

        words = TfidfVectorizer(max_features=self.features, sublinear_tf=True, token_pattern=r"\w+")
        try:
            counts = words.fit_transform(text[:CHARACTERS] for text in texts)  # [documents, features], sparse
        except ValueError as error:  # there is no word in them
            raise UnscorableError(str(error)) from error
        count = min(self.clusters, len(texts))
        fitted = KMeans(count, random_state=self.seed, n_init=4).fit(counts)
        labels, centroids = fitted.labels_, fitted.cluster_centers_
        squares = np.asarray(counts.multiply(counts).sum(1)).ravel()
        compactness, separation = np.zeros(count), np.zeros(count)
        for each in range(count):  # |x - c|^2 = |x|^2 - 2 x.c + |c|^2: rows stay sparse, cluster by cluster
            centroid, members = centroids[each], np.flatnonzero(labels == each)
            squared = squares[members] - 2 * (counts[members] @ centroid) + centroid @ centroid
            compactness[each] = np.sqrt(np.maximum(0, squared)).mean() if len(members) else 0
            separation[each] = np.linalg.norm(centroids - centroid, axis=1).sum() / max(1, count - 1)
        return to_unit((compactness * separation)[labels]), labels.astype(np.int32)


def to_unit(values: np.ndarray) -> np.ndarray:
    """Return float64 `values` rescaled linearly to [0, 1]; all 1 if they are equal."""
    span = np.ptp(values)
    return (values - values.min()) / span if span > 0 else np.ones_like(values)


@dataclass(frozen=True)
class Scores:
    """Scores of one source's documents: {column: values [documents]} for all `COLUMNS` except `source`."""

    columns: dict[str, np.ndarray]

    def of_keys(self, keys: np.ndarray, names: tuple[str, ...]) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Return ({name: column for the documents with these `keys`}, indices of documents without a row).

        `keys`: uint64 [documents]. Columns contain only the documents with a row, in the order of `keys`.
        """
        order = np.argsort(self.columns["key"], kind="stable")
        known = self.columns["key"][order]
        at = np.searchsorted(known, keys)
        found = (at < len(known)) & (known[np.minimum(at, len(known) - 1)] == keys) if len(known) else keys != keys
        rows = order[at[found]]
        return {name: self.columns[name][rows] for name in names}, np.flatnonzero(~found)


def write_scores(file: Path, columns: Mapping[str, Any], scorers: Mapping[str, Any]) -> None:
    """Write the table `file` atomically; `columns` are those of `COLUMNS`, `scorers` the scorers' settings (JSON)."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pa.schema([(name, getattr(pa, kind)()) for name, kind in COLUMNS.items()])
    table = pa.table({name: pa.array(columns[name], schema.field(name).type) for name in COLUMNS}, schema=schema)
    table = table.replace_schema_metadata({SETTINGS: json.dumps(scorers, sort_keys=True)})
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f"{file.name}.partial")
    pq.write_table(table, partial)
    partial.replace(file)


def read_scores(file: Path, key: str) -> dict[str, Scores]:
    """Return {source: its scores} of the table `file`.

    Raises:
        ConfigError: the file is not such a table; `key` is the key of its problems, which name rows and their number.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(file)
    except (OSError, pa.ArrowException) as error:
        raise ConfigError(Problem(key, f"{file} cannot be read: {str(error).splitlines()[0].rstrip('.')}.")) from error
    if missing := [name for name in COLUMNS if name not in table.column_names]:
        text = f"{file} has no column {', '.join(missing)}. Create the table with: lightning-llm prepare --score ..."
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
    """Return {source: {column: values [documents]}} of the table `file`, for given documents.

    Args:
        file: the table.
        keys: {source: `Document.key` of its documents, uint64 [documents]}.
        columns: names of the columns to return.

    Raises:
        ConfigError: the table cannot be read, or has no scores of some of the documents.
    """
    known, problems = read_scores(file, KEY), []
    found: dict[str, dict[str, np.ndarray]] = {}
    for name, its in keys.items():
        if name not in known:
            text = (
                f"{file} has no scores of source {name!r}; it has {_sources(known)}. Score this data: lightning-llm "
                "prepare ... --score ..."
            )
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
    """Yield the problems of the table `file`, reported with the config's `key`; none if it can be read.

    The result is cached until the file changes, so that checks of many configs read it once.
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
    """Return the digest of the content of `file`; None if it does not exist. Cached until the file changes."""
    try:
        stat = Path(file).stat()
    except OSError:
        return None
    return _digest(file, stat.st_size, stat.st_mtime_ns)


@lru_cache(maxsize=64)
def _digest(file: str, size: int, time: int) -> str:
    return digest_of_file(Path(file))


def typed_column(column: Any, kind: str) -> np.ndarray:
    """Return a pyarrow column as a NumPy array [rows] of type `kind`, a type of `COLUMNS`.

    Raises:
        ValueError: it has nulls or other values; the message continues a sentence that begins with the column's name.
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
    """Yield problems of the values: scores that are not in [0, 1], and documents with two rows that differ."""
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

    Equal texts have equal keys, and a source may contain one twice, so equal rows are correct.
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
