"""Files of UTF-8 text, plain or compressed, opened by their literal names: no library sees a path."""

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO, Any

ENCODING = "utf-8-sig"
"""UTF-8, with or without the byte order mark that some editors write."""

DAMAGED = (ValueError, OSError, EOFError, KeyError, zlib.error, lzma.LZMAError)
"""Errors of a file that cannot be read; pyarrow's and datasets' are among these."""


def _by_arrow(codec: str) -> Callable[[Path], Any]:
    def open_file(file: Path) -> Any:
        import pyarrow  # imported only where such a file is read

        return pyarrow.CompressedInputStream(file.open("rb"), codec)

    return open_file


OPENERS: dict[str, Callable[[Path], Any]] = {
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
    ".zst": _by_arrow("zstd"),
    ".lz4": _by_arrow("lz4"),
}


def with_compressed(*endings: str) -> tuple[str, ...]:
    """Return `endings`, and each of them followed by that of a compression."""
    return endings + tuple(ending + compression for compression in OPENERS for ending in endings)


def opened(file: Path) -> IO[bytes]:
    """Open a file to read bytes, decompressed if its name has the ending of a compression."""
    found: IO[bytes] = OPENERS.get(file.suffix.lower(), lambda each: each.open("rb"))(file)
    return found


def opened_as_text(file: Path, encoding: str = ENCODING) -> IO[str]:
    """Open a file of text, decompressed if its name has the ending of a compression."""
    return io.TextIOWrapper(opened(file), encoding=encoding)


def first_that_is_no_text(files: Iterable[Path]) -> str | None:
    """Return the place of the first line that cannot be decoded, and its first bad byte."""
    for file in files:
        with opened(file) as content:
            for number, line in enumerate(io.BufferedReader(content), 1):  # type: ignore[type-var]
                try:
                    line.decode()
                except UnicodeDecodeError as error:
                    return f"line {number} of {file}, byte 0x{line[error.start]:02x},"
    return None
