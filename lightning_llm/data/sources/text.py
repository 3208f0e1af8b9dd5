"""loader=text: the documents of `datasets`' text builder, read here since that takes a path as a pattern."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from lightning_llm.data.sources.text_files import opened_as_text

READ_CHARACTERS = 10 << 20


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
