"""Shared fixtures of the data tests."""

from pathlib import Path
from typing import Any

import pytest

from tests.data.corpus_files import words, write_jsonl


@pytest.fixture(scope="session")
def two_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Two jsonl sources, weights 3 and 1, of 40 and 25 documents. Read only."""
    folder = tmp_path_factory.mktemp("documents")
    a = write_jsonl(folder / "a.jsonl", [words(i, 12 + i % 9) for i in range(40)])
    b = write_jsonl(folder / "b.jsonl", [words(1000 + i, 9 + i % 5) for i in range(25)])
    return {
        "a": {"loader": "jsonl", "path": str(a), "weight": 3.0},
        "b": {"loader": "jsonl", "path": str(b), "weight": 1.0},
    }


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A token cache shared by the tests that do not look at how it is built."""
    return tmp_path_factory.mktemp("cache")
