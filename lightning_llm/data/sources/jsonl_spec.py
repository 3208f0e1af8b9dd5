"""The loader of JSON lines."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from lightning_llm.base.errors import Problem
from lightning_llm.config.schema.data import LOADERS, TextSourceConfig
from lightning_llm.data.sources.files import LocalFiles, beginning, file_problems
from lightning_llm.data.sources.text_files import with_compressed


@LOADERS.register
class JsonlSource(LocalFiles, TextSourceConfig):
    """One JSON object per line, plain or compressed; its `text_key` is the document."""

    suffixes: ClassVar[tuple[str, ...]] = with_compressed(".jsonl", ".ndjson", ".json")

    loader: Literal["jsonl"] = "jsonl"

    def problems(self, key: str) -> Iterable[Problem]:
        return file_problems(key, self, lambda file: beginning(file).startswith(b"{"))

    def build(self, key: str, files: Sequence[Path]) -> Any:
        from lightning_llm.data.sources.jsonl import JsonlReader

        return JsonlReader(self, key, files)
