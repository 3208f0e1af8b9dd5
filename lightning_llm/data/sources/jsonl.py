"""loader=jsonl: parsed line by line, since `datasets`' builder wants one schema for all files, and we take one key."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lightning_llm.config.schema.data import TextSourceConfig
from lightning_llm.data.sources.records import text_of
from lightning_llm.data.sources.text_files import opened_as_text


class JsonlReader:
    """A `DocumentReader` of JSON lines."""

    def __init__(self, config: TextSourceConfig, key: str, files: Sequence[Path]):
        self.config, self.key, self.files = config, key, files

    def documents(self) -> Iterator[str | None]:
        """Yield each record's text. Raises ValueError for a line that is no JSON object."""
        for file in self.files:
            with opened_as_text(file) as lines:
                for number, line in enumerate(lines, 1):
                    if not line.isspace():
                        where = f"line {number} of {file}"
                        yield text_of(_record(line, where), self.config.text_key, self.key, where)


def _record(line: str, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is no JSON ({error}): {line.strip()[:80]!r}") from error
    if not isinstance(record, dict):
        raise ValueError(f"{where} is no JSON object: {line.strip()[:80]!r}")
    return record
