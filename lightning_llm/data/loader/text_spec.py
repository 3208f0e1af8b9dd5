"""The loader of plain text."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from lightning_llm.config.schema.data import LOADERS, TextSourceConfig
from lightning_llm.data.loader.files import file_problems, matching_files
from lightning_llm.errors import Problem


@LOADERS.register
class TextSource(TextSourceConfig):
    """Plain text, UTF-8, also gzipped: a file, a paragraph or a line is a document."""

    suffixes: ClassVar[tuple[str, ...]] = (".txt", ".md", ".txt.gz", ".md.gz")

    loader: Literal["text"] = "text"

    def problems(self, key: str) -> Iterable[Problem]:
        return file_problems(key, self, lambda file: file.name.lower().endswith((".json", ".json.gz")))  # text to some

    def files(self) -> list[Path]:
        return matching_files(self.path or "", self.suffixes)

    def build(self, key: str, files: Sequence[Path]) -> Any:
        from lightning_llm.data.loader.text import TextReader

        return TextReader(self.sample_by, files)
