"""Small corpora of local files, and configs over them."""

import json
from pathlib import Path
from typing import Any

from lightning_llm.config.schema.data import DataConfig


def words(seed: int, count: int) -> str:
    """Return `count` words that differ from document to document."""
    return " ".join(f"w{(seed * 7919 + i * i) % 997}" for i in range(count))


def data_config(cache_dir: Path, sources: dict[str, dict[str, Any]], **keys: Any) -> DataConfig:
    """Return a config over `sources` with plain bytes and small batches unless `keys` say otherwise."""
    defaults = {
        "name": "test",
        "sources": sources,
        "tokenizer": {"kind": "bytes"},
        "validation": {"fraction": 0.2, "sequences": 12},
        "sequence_length": 16,
        "micro_batch_size": 2,
        "global_batch_size": 8,
        "cache_dir": str(cache_dir),
    }
    return DataConfig.model_validate(defaults | keys)


def write_jsonl(file: Path, texts: list[str], column: str = "text") -> Path:
    """Write one record per text, each with other columns that vary from line to line."""
    lines = [json.dumps({column: text, f"extra{i % 3}": i}) for i, text in enumerate(texts)]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return file
