"""Loaders of local text files: `text`, `jsonl` and `parquet`.

They do not use `datasets`: its text builder takes a path for a pattern, its JSON builder requires one schema for all
files. Here only the column with the text is read; other columns and encodings may differ between files.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, ClassVar, Literal

from lightning_llm.base.errors import Problem
from lightning_llm.config.schema.data import LOADERS, TextSourceConfig
from lightning_llm.data.sources.files import LocalFiles, beginning, file_problems, opened_as_text, with_compressed
from lightning_llm.data.sources.source import raised_in_a_line, text_of

READ_CHARACTERS = 10 << 20
COMPRESSION = 3  # typical ratio of text to its size within a Parquet file
READ_ROWS = 4096


@LOADERS.register
class TextSource(LocalFiles, TextSourceConfig):
    """loader=text: UTF-8 text, plain or compressed; each file, paragraph or line is a document (`sample_by`)."""

    suffixes: ClassVar[tuple[str, ...]] = with_compressed(".txt", ".md")

    loader: Literal["text"] = "text"

    def problems(self, key: str) -> Iterable[Problem]:
        json_files = with_compressed(".json")  # text to some
        return file_problems(key, self, lambda file: file.name.lower().endswith(json_files))

    def build(self, key: str, files: Sequence[Path]) -> Any:
        return TextReader(self.sample_by, files)


class TextReader:
    """`DocumentReader` of text files: yields whole files, paragraphs or lines."""

    def __init__(self, sample_by: str, files: Sequence[Path]):
        self.sample_by, self.files = sample_by, files

    def documents(self) -> Iterator[str]:
        """Yield each document's text; blank pieces are omitted."""
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


@LOADERS.register
class JsonlSource(LocalFiles, TextSourceConfig):
    """loader=jsonl: one JSON object per line, plain or compressed; its value at `text_key` is the document."""

    suffixes: ClassVar[tuple[str, ...]] = with_compressed(".jsonl", ".ndjson", ".json")

    loader: Literal["jsonl"] = "jsonl"

    def problems(self, key: str) -> Iterable[Problem]:
        return file_problems(key, self, lambda file: beginning(file).startswith(b"{"))

    def build(self, key: str, files: Sequence[Path]) -> Any:
        return JsonlReader(self.text_key, key, files)


class JsonlReader:
    """`DocumentReader` of files with a JSON object per line."""

    def __init__(self, text_key: str, key: str, files: Sequence[Path]):
        self.text_key, self.key, self.files = text_key, key, files

    def documents(self) -> Iterator[str | None]:
        """Yield each record's text, None if it is null. Raises ValueError for a line that is not a JSON object."""
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


@LOADERS.register
class ParquetSource(LocalFiles, TextSourceConfig):
    """loader=parquet: Parquet files; only the column `text_key` is read, and each row is a document."""

    suffixes: ClassVar[tuple[str, ...]] = (".parquet",)

    loader: Literal["parquet"] = "parquet"

    def problems(self, key: str) -> Iterable[Problem]:
        return file_problems(key, self)

    def cached_bytes(self, files: Sequence[Path]) -> int:
        return COMPRESSION * super().cached_bytes(files)

    def build(self, key: str, files: Sequence[Path]) -> Any:
        return ParquetReader(self.text_key, key, files)


class ParquetReader:
    """`DocumentReader` of the rows of Parquet files."""

    def __init__(self, text_key: str, key: str, files: Sequence[Path]):
        self.text_key, self.key, self.files = text_key, key, files

    def documents(self) -> Iterator[str | None]:
        """Yield each row's text, None if it is null. Raises ValueError that names a file that cannot be read."""
        for file in self.files:
            try:
                with raised_in_a_line(), file.open("rb") as opened:  # pyarrow would take some names for URLs
                    yield from self._column(opened, str(file))
            except (ValueError, OSError) as error:
                raise ValueError(f"{file}: {error}" if len(self.files) > 1 else str(error)) from error

    def _column(self, opened: Any, where: str) -> Iterator[str | None]:
        import pyarrow.parquet  # imported only where a token cache is built

        column, content = self.text_key, pyarrow.parquet.ParquetFile(opened)
        names = content.schema_arrow.names
        if column not in names:
            text_of(dict.fromkeys(names), column, self.key, where)
        for batch in content.iter_batches(READ_ROWS, columns=[column]):
            for value in batch.column(column).to_pylist():
                yield text_of({column: value}, column, self.key, where)
