"""The loader of plain text."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from lightning_llm.base.errors import Problem
from lightning_llm.config.schema.data import LOADERS, TextSourceConfig
from lightning_llm.data.sources.files import LocalFiles, file_problems
from lightning_llm.data.sources.text_files import with_compressed


@LOADERS.register
class TextSource(LocalFiles, TextSourceConfig):
    """Plain text, UTF-8, plain or compressed: a file, a paragraph or a line is a document."""

    suffixes: ClassVar[tuple[str, ...]] = with_compressed(".txt", ".md")

    loader: Literal["text"] = "text"

    def problems(self, key: str) -> Iterable[Problem]:
        json_files = with_compressed(".json")  # text to some
        return file_problems(key, self, lambda file: file.name.lower().endswith(json_files))

    def build(self, key: str, files: Sequence[Path]) -> Any:
        from lightning_llm.data.sources.text import TextReader

        return TextReader(self.sample_by, files)
