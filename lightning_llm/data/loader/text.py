"""loader=text, by the text builder of `datasets`."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from lightning_llm.data.source import streamed


class TextReader:
    """A `DocumentReader` of files, paragraphs or lines."""

    def __init__(self, sample_by: str, files: Sequence[Path]):
        self.sample_by, self.files = sample_by, files

    def documents(self) -> Iterator[str]:
        """Yield the documents; what is blank lies between them, and is none."""
        for row in streamed("text", self.files, sample_by=self.sample_by):
            text: str = row["text"].removeprefix("\ufeff")  # `datasets` passes its encoding on for plain files alone
            if text and not text.isspace():
                yield text
