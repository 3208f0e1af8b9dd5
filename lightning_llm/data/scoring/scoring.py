"""Scoring all documents of a mix by the scorers that are asked for: offline, into one table."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lightning_llm.base.errors import ConfigError, Problem
from lightning_llm.config.schema.data import DataConfig
from lightning_llm.config.schema.score import ScorerConfig, UnscorableError
from lightning_llm.data.scoring.table import write_scores
from lightning_llm.data.sources.source import Source


def score_documents(
    config: DataConfig, scorers: Mapping[str, ScorerConfig], file: Path, say: Callable[[str], None]
) -> dict[str, Any]:
    """Score the documents of all sources that are trained on together, and write the table `file`; return its columns.

    All texts are in memory at once. `scorers` by measure; one that nobody scores is 0 throughout. `config` has passed
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
        raise ConfigError(Problem("data.sources", "have no document with a text in it, so there is nothing to score."))
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
