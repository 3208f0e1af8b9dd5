"""What the tests of the data path share."""

from pathlib import Path
from typing import Any

import pytest
from corpus_files import words, write_jsonl


@pytest.fixture
def two_files(tmp_path: Path) -> dict[str, dict[str, Any]]:
    """Two jsonl sources, weights 3 and 1, of 40 and 25 documents."""
    a = write_jsonl(tmp_path / "a.jsonl", [words(i, 12 + i % 9) for i in range(40)])
    b = write_jsonl(tmp_path / "b.jsonl", [words(1000 + i, 9 + i % 5) for i in range(25)])
    return {
        "a": {"loader": "jsonl", "path": str(a), "weight": 3.0},
        "b": {"loader": "jsonl", "path": str(b), "weight": 1.0},
    }
