"""One source of a mix: its documents in a fixed order, readable any number of times, with any loader.

Readers of records share `text_of` and `raised_in_a_line`.
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
    """A text, its size as UTF-8, and the 64-bit key that decides whether it is held out for validation."""

    text: str
    key: int
    text_bytes: int


def document(text: str, family: str | None = None) -> Document:
    """Return `text` with the key of `family`, by default its own; lone surrogates (JSON can carry them) become "?"."""
    try:
        content = text.encode()
    except UnicodeEncodeError:
        content = text.encode("utf-8", "replace")
        text = content.decode()
    return Document(text, content_key(text if family is None else family), len(content))


def content_key(text: str) -> int:
    """Return 64 bits of the text's BLAKE2b: equal texts have equal keys, on every machine and for every seed."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


class DocumentReader(Protocol):
    """Reader that a loader of text builds.

    `skipped`, if the reader has it: files found not to be data while reading, path -> reason.
    """

    def documents(self) -> Iterator["Document | str | None"]:
        """Yield each document, always in the same order: its text, or None for a record that has none.

        A `Document` if the loader itself decides which are held out together. Raises ConfigError for problems that the
        user can fix, and ValueError, OSError, EOFError or KeyError for unreadable files, with the place in its text.
        """


class Source:
    """A named entry of `data.sources`. Every method raises `ConfigError` for problems that the user can fix."""

    def __init__(self, name: str, config: SourceConfig):
        self.name = name
        self.config = config
        self.left_out = 0
        self.key = f"data.sources.{name}"

    @cached_property
    def files(self) -> list[Path]:
        """The local files read, sorted; empty for a hub dataset."""
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
        """The files that its path names and that are not read: path -> reason."""
        return self.config.skipped_files()

    @cached_property
    def reader(self) -> Any:
        """The loader's `DocumentReader` or `TokenReader`."""
        return self.config.build(self.key, self.files)

    @property
    def where(self) -> str:
        """Name of the source's files for messages."""
        return these_files(getattr(self.config, "path", None), self.files)

    def identity(self) -> dict[str, Any]:
        """Return the identity of the documents as JSON data, cheaply: the loader's keys, and files' sizes and times."""
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

        Raises ConfigError, too, where a file has changed since this source was first looked at.
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
    """Return how messages name a source: its only file, or its `path` with the number of `files`."""
    return str(files[0]) if len(files) == 1 else f"{path!r} ({len(files)} files)"


def text_of(record: Mapping[str, Any], column: str, key: str, where: str) -> str | None:
    """Return the text in `column`, None where it is null; `where` names the place in the source at `key`.

    Raises:
        ConfigError: there is no such column, or it holds something else.
    """
    if column not in record:
        text = (
            f"{where} has no column {column!r}; it has {', '.join(map(repr, record)) or 'none'}. "
            "Name the column of the text, or choose a path without such records."
        )
        raise ConfigError(Problem(f"{key}.text_key", text))
    value = record[column]
    if value is not None and not isinstance(value, str):
        text = f"column {column!r} of {where} holds {type(value).__name__}, not text."
        raise ConfigError(Problem(f"{key}.text_key", text))
    return value


@contextmanager
def raised_in_a_line() -> Iterator[None]:
    """Turn errors that `datasets` and pyarrow raise in the block into a ValueError of one line.

    The readers of `datasets` also log tracebacks; those are suppressed.
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
