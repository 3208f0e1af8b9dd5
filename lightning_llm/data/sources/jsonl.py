"""loader=jsonl: parsed line by line, since `datasets`' builder wants one schema for all files, and we take one key."""

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from lightning_llm.base.errors import Problem
from lightning_llm.config.schema.data import LOADERS, TextSourceConfig
from lightning_llm.data.sources.files import LocalFiles, beginning, file_problems, opened_as_text, with_compressed
from lightning_llm.data.sources.source import text_of


@LOADERS.register
class JsonlSource(LocalFiles, TextSourceConfig):
    """One JSON object per line, plain or compressed; its `text_key` is the document."""

    suffixes: ClassVar[tuple[str, ...]] = with_compressed(".jsonl", ".ndjson", ".json")

    loader: Literal["jsonl"] = "jsonl"

    def problems(self, key: str) -> Iterable[Problem]:
        return file_problems(key, self, lambda file: beginning(file).startswith(b"{"))

    def build(self, key: str, files: Sequence[Path]) -> Any:
        return JsonlReader(self.text_key, key, files)


class JsonlReader:
    """A `DocumentReader` of JSON lines."""

    def __init__(self, text_key: str, key: str, files: Sequence[Path]):
        self.text_key, self.key, self.files = text_key, key, files

    def documents(self) -> Iterator[str | None]:
        """Yield each record's text. Raises ValueError for a line that is no JSON object."""
        for file in self.files:
            with opened_as_text(file) as lines:
                for number, line in enumerate(lines, 1):
                    if not line.isspace():
                        where = f"line {number} of {file}"
                        yield text_of(_record(line, where), self.text_key, self.key, where)


def _record(line: str, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not JSON ({error}): {line.strip()[:80]!r}") from error
    if not isinstance(record, dict):
        raise ValueError(f"{where} is not a JSON object: {line.strip()[:80]!r}")
    return record
