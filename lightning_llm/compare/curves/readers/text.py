"""Text of a log: encodings, gzip, terminal colors, prefixes of ranks and an incomplete last line."""

import gzip
import io
import re
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

GZIP = b"\x1f\x8b"
BYTE_ORDER_MARKS = {b"\xff\xfe": "utf-16", b"\xfe\xff": "utf-16"}
"""UTF-16 is the encoding of `>` in PowerShell. Other files are UTF-8; bytes that are not are replaced."""
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
RANK = re.compile(r"^\s*(?:\[(?:rank|default)?(?P<a>\d+)\]:|\[\d+,(?P<b>\d+)\]<std\w+>:|(?P<c>\d+):\s)\s?")
"""Prefixes of torchrun, `torchrun --tee` ("[default0]:"), mpirun ("[1,0]<stdout>:") and `srun --label` ("0: ")."""
NUMBER = r"[-+]?(?:\d[\d,]*\.?\d*(?:[eE][-+]?\d+)?|\.\d+(?:[eE][-+]?\d+)?|nan|inf)"
"""Regular expression of a number in a log, with commas between thousands allowed; use it with `re.IGNORECASE`."""


@dataclass(frozen=True)
class Line:
    """One line of a log. `rank`: the rank that a launcher's prefix names, else ""; the prefix is not in `text`."""

    number: int
    text: str
    rank: str = ""


def head_of(path: Path, most_bytes: int) -> str:
    """Return the text in the first `most_bytes` bytes of a file, unpacked if it is gzip."""
    start = b""
    with _binary(path) as file, suppress(EOFError, zlib.error):  # the reader reports a damaged stream
        while len(start) < most_bytes and (more := file.read1(min(1 << 16, most_bytes - len(start)))):
            start += more
    text = start.decode(_encoding(start), errors="replace")
    return text.removeprefix("\ufeff")


def open_text(path: Path, newline: str | None = None) -> io.TextIOWrapper:
    """Open a file as text, unpacked if it is gzip. `newline`: as for `open`; None also splits at a lone \\r."""
    with _binary(path) as file:
        encoding = _encoding(file.read(2))
    return io.TextIOWrapper(_binary(path), encoding=encoding, errors="replace", newline=newline)


def lines_of(path: Path) -> Iterator[Line]:
    """Yield the lines without terminal colors and prefixes of ranks.

    If the last line has no end, its last word is left out, since the word may be incomplete.

    Raises:
        ValueError: the gzip stream is damaged.
    """
    with open_text(path) as file:
        try:
            for number, line in enumerate(file, 1):
                text = ESCAPES.sub("", line)
                if not text.endswith("\n"):
                    text = text[: text.rfind(" ") + 1]
                prefix = RANK.match(text)
                if prefix is None:
                    yield Line(number, text.rstrip("\n"))
                else:
                    yield Line(number, text[prefix.end() :].rstrip("\n"), prefix["a"] or prefix["b"] or prefix["c"])
        except (EOFError, zlib.error) as error:
            raise ValueError(f"its gzip stream is damaged ({error}). Copy the file again.") from error


def _binary(path: Path) -> gzip.GzipFile | io.BufferedReader:
    with path.open("rb") as file:
        packed = file.read(2) == GZIP
    return gzip.open(path) if packed else path.open("rb")


def _encoding(start: bytes) -> str:
    return BYTE_ORDER_MARKS.get(start[:2], "utf-8-sig")
