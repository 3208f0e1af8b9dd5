"""One source of a mix: its documents in a fixed order, which can be read any number of times, with any loader.

`text_of` and `raised_in_a_line` are shared by readers of records (JSON lines, Parquet, datasets).
"""

import logging
import pickle
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any, NoReturn, Protocol

from lightning_llm.base.errors import ConfigError, Problem
from lightning_llm.base.integrity import file_mark, unpickling_problem
from lightning_llm.config.schema.data import SourceConfig
from lightning_llm.data.sources.files import DAMAGED, first_that_is_no_text


@dataclass(frozen=True)
class Document:
    """One document: its text, its UTF-8 size, and the 64-bit key that decides whether it is held out."""

    text: str
    key: int
    text_bytes: int


def document(text: str, family: str | None = None) -> Document:
    """Return the document with this `text`. Its key is the content key of `family`, by default of the text.

    Lone surrogates, which JSON can contain, are replaced by "?".
    """
    try:
        content = text.encode()
    except UnicodeEncodeError:
        content = text.encode("utf-8", "replace")
        text = content.decode()
    return Document(text, content_key(text if family is None else family), len(content))


def content_key(text: str) -> int:
    """Return 64 bits of the text's BLAKE2b hash: equal texts have equal keys, on every machine and for every seed."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


class DocumentReader(Protocol):
    """Interface of a text source's reader, which `SourceConfig.build` returns.

    A reader may have an attribute `skipped`: {path: reason} of files that turned out not to be data while reading.
    """

    def documents(self) -> Iterator["Document | str | None"]:
        """Yield the documents, always in the same order: each as its text, or None for a record without text.

        A loader that sets keys itself, so that several documents are held out together, yields a `Document`. Raises
        ConfigError for problems that the user can fix, and ValueError, OSError, EOFError or KeyError that names the
        place for unreadable files.
        """


class Source:
    """A source: an entry of `data.sources`, with its files and documents.

    Its methods and properties raise ConfigError for problems that the user can fix. `left_out`: number of blank
    documents in the last reading.
    """

    def __init__(self, name: str, config: SourceConfig):
        self.name = name
        self.config = config
        self.left_out = 0
        self.key = f"data.sources.{name}"

    @cached_property
    def files(self) -> list[Path]:
        """The local files that are read, sorted; [] for a dataset of the hub."""
        found = self.config.files()
        if not found and self.config.suffixes:
            raise ConfigError(Problem(f"{self.key}.path", f"{getattr(self.config, 'path', None)!r} matches no file."))
        return found

    @cached_property
    def _marks(self) -> dict[Path, list[int]]:
        """The files as they were before any was read."""
        return {file: file_mark(file) for file in self.files}

    @cached_property
    def skipped_files(self) -> dict[str, str]:
        """{path: reason} of files that match its path but are not read."""
        return self.config.skipped_files()

    @cached_property
    def reader(self) -> Any:
        """The loader's `DocumentReader` or `TokenReader`."""
        return self.config.build(self.key, self.files)

    @property
    def where(self) -> str:
        """Name of the source's files in messages: the only file, or its path with their number."""
        return these_files(getattr(self.config, "path", None), self.files)

    def identity(self) -> dict[str, Any]:
        """Return JSON data that identifies the documents without reading them: keys, and the files' sizes and times."""
        return self._identity

    @cached_property
    def _identity(self) -> dict[str, Any]:
        if "_marks" in self.__dict__:
            self.check_unchanged()
        else:
            _ = self._marks  # before the loader looks at the files
        return self.config.identity(self.files)

    def check_unchanged(self) -> None:
        """Raise ConfigError if a file has changed since this source was opened."""
        for file, before in self._marks.items():
            try:
                after = file_mark(file)
            except OSError as error:
                self._refuse_changed(f"{file} is gone ({error.strerror})")
            if after != before:
                sizes = f"{before[0]:,} bytes, then {after[0]:,}" if after[0] != before[0] else f"{after[0]:,} bytes"
                self._refuse_changed(f"{file} changed while it was read ({sizes})")

    def _refuse_changed(self, what: str) -> NoReturn:
        text = f"{what}. Start again when nothing writes to it, or train on a copy."
        raise ConfigError(Problem(f"{self.key}.path", text))

    def documents(self) -> Iterator[Document]:
        """Yield the documents that are not blank, always in the same order; `left_out` counts the others.

        Raises ConfigError if a file cannot be read, or has changed since this source was opened.
        """
        self.check_unchanged()
        yield from self._documents()
        self.check_unchanged()

    def _documents(self) -> Iterator[Document]:
        self.left_out = 0
        documents = self._read()
        while True:
            try:
                found = next(documents)
            except StopIteration:
                return
            except UnicodeDecodeError as error:
                self.check_unchanged()
                where = first_that_is_no_text(self.files) or self.where
                raise ConfigError(Problem(f"{self.key}.path", f"{where} is not UTF-8 text: {error.reason}.")) from error
            except DAMAGED as error:
                self.check_unchanged()
                raise ConfigError(Problem(f"{self.key}.path", f"{self.where} cannot be read: {error}")) from error
            if isinstance(found, Document):
                yield found
            elif found and not found.isspace():
                yield document(found)
            else:
                self.left_out += 1

    def _read(self) -> Iterator["Document | str | None"]:
        reader: DocumentReader = self.reader
        yield from reader.documents()  # within the first `next`, since a reader need not be a generator


def these_files(path: str | None, files: Sequence[Path]) -> str:
    """Return the name of these files for messages: the only file, or `path` with the number of `files`."""
    return str(files[0]) if len(files) == 1 else f"{path!r} ({len(files)} files)"


def text_of(record: Mapping[str, Any], column: str, key: str, where: str) -> str | None:
    """Return the text in `column` of a record; None if it is null.

    `key`: config key of the source, and `where`: place of the record, for messages.

    Raises:
        ConfigError: there is no such column, or its value is not text.
    """
    if column not in record:
        text = (
            f"{where} has no column {column!r}; it has {', '.join(map(repr, record)) or 'none'}. "
            "Name the column of the text, or choose a path without such records."
        )
        raise ConfigError(Problem(f"{key}.text_key", text))
    value = record[column]
    if value is not None and not isinstance(value, str):
        text = f"column {column!r} of {where} contains {type(value).__name__}, not text. Name the column of the text."
        raise ConfigError(Problem(f"{key}.text_key", text))
    return value


@contextmanager
def raised_in_a_line() -> Iterator[None]:
    """Context that turns exceptions of `datasets` and pyarrow into a ValueError with a message of one line.

    Tracebacks that `datasets` logs are suppressed.
    """
    logging.getLogger("datasets.packaged_modules").setLevel(logging.CRITICAL)
    try:
        yield
    except (ConfigError, ValueError, OSError, EOFError, KeyError):  # a source reports these in a line
        raise
    except pickle.UnpicklingError as error:
        raise ValueError(f"a sample {unpickling_problem(error)}") from error
    except Exception as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(f"{first} (code next to data is never run)") from error
