"""One source of a mix: its documents in a fixed order, read as often as asked, whatever loads them."""

import gzip
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import IO, Any, Protocol

from lightning_llm.config.schema.data import SourceConfig
from lightning_llm.errors import ConfigError, Problem

ENCODING = "utf-8-sig"
"""UTF-8, with or without the byte order mark that some editors write."""


@dataclass(frozen=True)
class Document:
    """A text, the 64-bit key that says whether it is held out for validation, and its size as UTF-8."""

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
    """Return 64 bits of the text's BLAKE2b: equal texts have equal keys, on every machine, whatever the seed."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


class DocumentReader(Protocol):
    """What a loader of text builds."""

    def documents(self) -> Iterator["Document | str | None"]:
        """Yield each document, always in the same order: its text, or None for a record that has none.

        A `Document` where the loader itself says which are held out together. Raises ConfigError for what the user can
        fix, and ValueError, OSError, EOFError or KeyError for what cannot be read, with the place in its text.
        """


class Source:
    """A named entry of `data.sources`. Every method raises `ConfigError` for what the user can fix."""

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
    def reader(self) -> Any:
        """What the loader builds."""
        return self.config.build(self.key, self.files)

    @property
    def where(self) -> str:
        """What messages call the source's files."""
        return these_files(getattr(self.config, "path", None), self.files)

    def identity(self) -> dict[str, Any]:
        """Return what decides the documents, as JSON data, cheaply: the loader's keys and the files' size and time."""
        return self.config.identity(self.files)

    def documents(self) -> Iterator[Document]:
        """Yield the documents that are not blank, always in the same order; `left_out` counts the others."""
        self.left_out = 0
        documents = self._read()
        while True:
            try:
                found = next(documents)
            except StopIteration:
                return
            except UnicodeDecodeError as error:
                where = _first_that_is_no_text(self.files) or self.where
                raise ConfigError(Problem(f"{self.key}.path", f"{where} is no UTF-8 text: {error.reason}.")) from error
            except (ValueError, OSError, EOFError, KeyError) as error:  # pyarrow's and datasets' errors are of these
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
    """Return what messages call the `files` of a source at `path`."""
    return str(files[0]) if len(files) == 1 else f"{path!r} ({len(files)} files)"


def streamed(builder: str, files: Sequence[Path], **options: Any) -> Any:
    """Return the dataset that a builder of `datasets` makes of `files`; streaming leaves no second copy on the disk."""
    import datasets  # imported only where a token cache is built

    paths = [str(file) for file in files]
    return datasets.load_dataset(builder, data_files=paths, split="train", streaming=True, **options)


def opened_as_text(file: Path) -> IO[str]:
    """Open a file of UTF-8, which is gzipped if its name says so."""
    return gzip.open(file, "rt", encoding=ENCODING) if file.name.endswith(".gz") else file.open(encoding=ENCODING)


def _first_that_is_no_text(files: Iterable[Path]) -> str | None:
    """Return where the first line is that cannot be decoded, and its first bad byte."""
    for file in files:
        with gzip.open(file) if file.name.endswith(".gz") else file.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                try:
                    line.decode()
                except UnicodeDecodeError as error:
                    return f"line {number} of {file}, byte 0x{line[error.start]:02x},"
    return None
