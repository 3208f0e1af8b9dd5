"""loader=text: the documents of `datasets`' text builder, read here since that takes a path as a pattern."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, ClassVar, Literal

from lightning_llm.base.errors import Problem
from lightning_llm.config.schema.data import LOADERS, TextSourceConfig
from lightning_llm.data.sources.files import LocalFiles, file_problems, opened_as_text, with_compressed

READ_CHARACTERS = 10 << 20


@LOADERS.register
class TextSource(LocalFiles, TextSourceConfig):
    """Plain text, UTF-8, plain or compressed: a file, a paragraph or a line is a document."""

    suffixes: ClassVar[tuple[str, ...]] = with_compressed(".txt", ".md")

    loader: Literal["text"] = "text"

    def problems(self, key: str) -> Iterable[Problem]:
        json_files = with_compressed(".json")  # text to some
        return file_problems(key, self, lambda file: file.name.lower().endswith(json_files))

    def build(self, key: str, files: Sequence[Path]) -> Any:
        return TextReader(self.sample_by, files)


class TextReader:
    """A `DocumentReader` of files, paragraphs or lines."""

    def __init__(self, sample_by: str, files: Sequence[Path]):
        self.sample_by, self.files = sample_by, files

    def documents(self) -> Iterator[str]:
        """Yield the documents; blank text only separates them."""
        for file in self.files:
            with opened_as_text(file, "utf-8") as lines:
                for text in self._pieces(lines):
                    text = text.removeprefix("\ufeff")  # of each line, too: files may have been joined
                    if text and not text.isspace():
                        yield text

    def _pieces(self, lines: IO[str]) -> Iterator[str]:
        if self.sample_by == "document":
            yield lines.read()
        elif self.sample_by == "line":
            yield from (line.removesuffix("\n") for line in lines)
        else:
            rest = ""
            while read := lines.read(READ_CHARACTERS):
                *paragraphs, rest = (rest + read).split("\n\n")
                yield from paragraphs
            yield rest
