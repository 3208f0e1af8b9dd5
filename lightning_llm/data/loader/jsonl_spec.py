"""The loader of JSON lines."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from lightning_llm.config.schema.data import LOADERS, TextSourceConfig
from lightning_llm.data.loader.files import beginning, file_problems, matching_files
from lightning_llm.errors import Problem


@LOADERS.register
class JsonlSource(TextSourceConfig):
    """One JSON object per line, plain or gzipped; its `text_key` is the document."""

    suffixes: ClassVar[tuple[str, ...]] = (".jsonl", ".ndjson", ".json", ".jsonl.gz", ".ndjson.gz", ".json.gz")

    loader: Literal["jsonl"] = "jsonl"

    def problems(self, key: str) -> Iterable[Problem]:
        return file_problems(key, self, lambda file: beginning(file).startswith(b"{"))

    def files(self) -> list[Path]:
        return matching_files(self.path or "", self.suffixes)

    def build(self, key: str, files: Sequence[Path]) -> Any:
        from lightning_llm.data.loader.jsonl import JsonlReader

        return JsonlReader(self, key, files)
