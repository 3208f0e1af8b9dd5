"""Scoring the documents of a mix, offline and into one table, and the built-in scorers, which need no model."""

import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from lightning_llm.base.errors import ConfigError, Problem
from lightning_llm.config.schema.base import NonNegativeInt, PositiveInt
from lightning_llm.config.schema.data import SCORERS, DataConfig, Measure, ScorerConfig, UnscorableError
from lightning_llm.data.scoring.table import write_scores
from lightning_llm.data.sources.source import Source

CHARACTERS = 20_000
"""Characters read from the beginning of each document: enough to determine its subject."""


def score_documents(
    config: DataConfig, scorers: Mapping[str, ScorerConfig], file: Path, say: Callable[[str], None]
) -> dict[str, Any]:
    """Score the documents of all trained sources together, and write the table `file`; return its columns.

    All texts are in memory at once. `scorers` by measure; a measure without a scorer is 0. `config` has passed
    `check_data`. Raises ConfigError for what cannot be read or scored.
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
    """A stand-in for a judge of quality: long documents with an even use of bytes are good ones.

    The score is the mean of a document's log length and of its bytes' entropy, each brought to [0, 1] over all
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
    """A stand-in for clusters of embeddings: compactness times separation of a document's cluster (arXiv 2503.01506).

    Compactness is the mean distance of a cluster's documents from its centroid, separation the mean distance of that
    from the other centroids; the product is brought to [0, 1] over all documents.
    """

    measures: ClassVar[Measure] = "diversity"

    kind: Literal["tfidf_kmeans"] = "tfidf_kmeans"
    clusters: PositiveInt = Field(16, description="k of k-means; at most one per document")
    features: PositiveInt = Field(4096, description="words that are counted, the most frequent ones")
    seed: NonNegativeInt = Field(0, description="of the first centroids")

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
