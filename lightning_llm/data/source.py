"""One source of a mix: which files it is made of, and its documents in a fixed order, read as often as asked."""

import gzip
import json
import os
import platform
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from glob import glob, has_magic
from hashlib import blake2b
from pathlib import Path
from typing import IO, Any

from lightning_llm.config.schema.data import SUFFIXES, SourceConfig
from lightning_llm.data import python_library
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


def matching_files(loader: str, path: str) -> list[Path]:
    """Return the files that `path` (a file, a folder or a glob) names for `loader`, absolute and sorted."""
    expanded = Path(path).expanduser().absolute()
    if os.path.isfile(expanded):  # Path's own raise for names that are too long
        return [expanded]
    if os.path.isdir(expanded):
        found: Iterable[Path] = (f for f in expanded.rglob("*") if f.name.lower().endswith(SUFFIXES[loader]))
    elif has_magic(path):
        found = map(Path, glob(str(expanded), recursive=True))
    else:
        return []
    return sorted(f for f in found if f.is_file())


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
        if self.config.loader == "python":
            return list(python_library.library_files())
        path = self.config.path or ""
        if self.config.loader == "huggingface":
            local = Path(path).expanduser().absolute()
            return sorted(f for f in local.rglob("*") if f.is_file()) if os.path.isdir(local) else []
        found = matching_files(self.config.loader, path)
        if not found:
            raise ConfigError(Problem(f"{self.key}.path", f"{path!r} matches no file."))
        return found

    @cached_property
    def is_hub(self) -> bool:
        """Whether the documents come from a hub dataset rather than from local files."""
        return self.config.loader == "huggingface" and not os.path.exists(Path(self.config.path or "").expanduser())

    def identity(self) -> dict[str, Any]:
        """Return what decides the documents, as JSON data, cheaply: the loader's keys and the files' size and time.

        The Python library's files go without the time: they depend on the Python version alone. A hub dataset without
        `revision` is known by its name alone: a newer version there is not noticed.
        """
        keys = self.config.model_dump(exclude={"weight"})
        if self.config.loader == "python":
            version = f"{platform.python_implementation()} {platform.python_version()}"
            return keys | {"python": version, "files": [[f.name, f.stat().st_size] for f in self.files]}
        stats = [(f, f.stat()) for f in self.files]
        return keys | {"files": [[str(f), s.st_size, s.st_mtime_ns] for f, s in stats]}

    def documents(self) -> Iterator[Document]:
        """Yield the documents that are not blank, always in the same order; `left_out` counts the others."""
        self.left_out = 0
        if self.config.loader == "python":
            yield from self._python_documents
            return
        texts = {"text": self._texts_of_lines, "jsonl": self._texts_of_json}.get(self.config.loader, self._column)
        iterator = texts()
        while True:
            try:
                text = next(iterator)
            except StopIteration:
                return
            except UnicodeDecodeError as error:
                where = _first_that_is_no_text(self.files) or self._where()
                raise ConfigError(Problem(f"{self.key}.path", f"{where} is no UTF-8 text: {error.reason}.")) from error
            except (ValueError, OSError, EOFError, KeyError) as error:  # pyarrow's and datasets' errors are of these
                raise ConfigError(Problem(f"{self.key}.path", f"{self._where()} cannot be read: {error}")) from error
            if text and not text.isspace():
                yield document(text)
            elif self.config.loader != "text":  # where blank lines are what lies between documents
                self.left_out += 1

    @cached_property
    def _python_documents(self) -> list[Document]:
        part = self.config.part or "code"
        return [document(text, family) for text, family in python_library.documents(part)]

    def _where(self) -> str:
        files = [] if self.is_hub else self.files
        return str(files[0]) if len(files) == 1 else f"{self.config.path!r} ({len(files)} files)"

    def _load(self, builder: str, **options: Any) -> Any:
        import datasets  # imported only where a token cache is built; streaming leaves no second copy on the disk

        files = [str(f) for f in self.files]
        return datasets.load_dataset(builder, data_files=files, split="train", streaming=True, **options)

    def _texts_of_lines(self) -> Iterator[str]:
        for row in self._load("text", sample_by=self.config.sample_by):
            yield row["text"].removeprefix("\ufeff")  # `datasets` passes its encoding on for plain files alone

    def _texts_of_json(self) -> Iterator[str | None]:
        """Parse line by line: `datasets`' json builder wants one schema for all files, and text is all we take."""
        for file in self.files:
            with _opened(file) as lines:
                for number, line in enumerate(lines, 1):
                    if not line.isspace():
                        yield self._text_in(_record(line, f"line {number} of {file}"))

    def _text_in(self, record: dict[str, Any]) -> str | None:
        column = self.config.text_key
        if column not in record:
            text = f"{self._where()} has no column {column!r}; it has {', '.join(map(repr, record))}."
            raise ConfigError(Problem(f"{self.key}.text_key", text))
        value = record[column]
        if value is not None and not isinstance(value, str):
            text = f"column {column!r} of {self._where()} holds {type(value).__name__}, not text."
            raise ConfigError(Problem(f"{self.key}.text_key", text))
        return value

    def _column(self) -> Iterator[str | None]:
        if self.config.loader == "parquet":
            rows = self._load("parquet")
        else:
            from lightning_llm.data import huggingface

            rows = huggingface.load(self.key, self.config)
        column = self.config.text_key
        if column in (rows.column_names or ()):  # read that column alone; a missing one is reported from the first row
            rows = rows.select_columns([column])
        for record in rows:
            yield self._text_in(record)


def _opened(file: Path) -> IO[str]:
    return gzip.open(file, "rt", encoding=ENCODING) if file.name.endswith(".gz") else file.open(encoding=ENCODING)


def _record(line: str, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is no JSON ({error}): {line.strip()[:80]!r}") from error
    if not isinstance(record, dict):
        raise ValueError(f"{where} is no JSON object: {line.strip()[:80]!r}")
    return record


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
