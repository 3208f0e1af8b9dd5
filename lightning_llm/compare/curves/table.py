"""The table of one log and its parts: its text, its lines, its numbers; and the class of readers. Imports no torch."""

import gzip
import io
import math
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Column = NDArray[np.float64]


@dataclass(frozen=True)
class LoggedTable:
    """All numeric columns of one log.

    A general table (CSV, JSON) has its rows in the order of the file, unsorted and unrepaired. The log of a known
    program has ascending steps, one row each: where it resumed, the abandoned steps are left out, which a note reports.

    `format`: name of the reader; `source`: path or URI, as given. `columns`: {name: float64, [rows]}, all of one
    length. NaN marks a row that has no value of the column; a NaN that was logged (the run diverged) is stored as
    infinity. `mixed`: {column with some values that are no numbers: the first of them and its line}.

    `settings`: facts that the log itself states, and only those. Standard keys, where the log has them: `seed`,
    `total_steps`, `global_batch_size` (sequences), `sequence_length` (tokens), `tokens_per_step`, `tokenizer`,
    `vocab_size`, `loss_unit` ("nats", "bits"), `world_size`, `bytes_per_token`; all others keep their own name,
    nested ones with dots.
    `smoothed`: {column that the program smooths before it logs it: how}. `notes`: sentences on how the log was read.
    """

    format: str
    source: str
    columns: dict[str, Column]
    settings: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    mixed: Mapping[str, str] = field(default_factory=dict)
    smoothed: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class LogSource:
    """A log to read, at `address`. `path`: its file or folder, None for a URI; `head`: the start of a file as text.

    `part`: which of several runs in a file to read, from an address such as "chart.csv#RUN"; else "".
    """

    address: str
    path: Path | None
    head: str = ""
    part: str = ""

    @property
    def is_folder(self) -> bool:
        """Whether the log is a folder."""
        return self.path is not None and self.path.is_dir()

    @property
    def file(self) -> Path:
        """The path of a log that is a file. Raises ValueError for a folder or a URI."""
        if self.path is None or self.is_folder:
            raise ValueError("it is not a file")
        return self.path

    @property
    def first_line(self) -> str:
        """The first line of the file that is not blank; "" without one."""
        return next((line for line in self.head.splitlines() if line.strip()), "")


@dataclass(frozen=True)
class Reader:
    """Reader of one format of logs, called `format`.

    `recognizes`: function that tells whether a source has this format, by its content, never by its name alone.
    `read`: function that returns the table. It raises ValueError or OSError for a damaged log, whose text is reported
    as "cannot be read as FORMAT: text".
    """

    format: str
    recognizes: Callable[[LogSource], bool]
    read: Callable[[LogSource], LoggedTable]


SETTINGS = (
    "seed", "total_steps", "global_batch_size", "sequence_length", "tokens_per_step", "tokenizer", "vocab_size",
    "loss_unit", "world_size", "bytes_per_token",
)  # fmt: skip
"""Facts that a log may repeat in each row, as a constant column."""
SEPARATED = re.compile(r"[-+]?\d[\d.,_' ]*\d(?:[eE][-+]?\d+)?")
"""Numbers with a decimal comma, or with separators of thousands."""
NON_FINITE = {"nan", "inf", "+inf", "-inf", "infinity", "+infinity", "-infinity"}
GZIP = b"\x1f\x8b"
BYTE_ORDER_MARKS = {b"\xff\xfe": "utf-16", b"\xfe\xff": "utf-16"}
"""UTF-16 is the encoding of `>` in PowerShell. Other files are UTF-8; bytes that are not are replaced."""
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
RANK = re.compile(r"^\s*(?:\[(?:rank|default)?(?P<a>\d+)\]:|\[\d+,(?P<b>\d+)\]<std\w+>:|(?P<c>\d+):\s)\s?")
"""Prefixes of torchrun, `torchrun --tee` ("[default0]:"), mpirun ("[1,0]<stdout>:") and `srun --label` ("0: ")."""
NUMBER = r"[-+]?(?:\d[\d,]*\.?\d*(?:[eE][-+]?\d+)?|\.\d+(?:[eE][-+]?\d+)?|nan|inf)"
"""Regular expression of a number in a log, with commas between thousands allowed; use it with `re.IGNORECASE`."""


def number(value: Any) -> float | None:
    """Return a logged value as a float, infinity for NaN; None if it is not a number.

    A number as text counts, because several loggers write numbers in quotation marks, but not with underscores (1_000).
    """
    if isinstance(value, bool):
        return None
    if isinstance(value, str):
        text = value.strip().lower()
        if text in NON_FINITE:
            return math.inf
        if "_" in text:
            return None
        try:
            value = float(text)
        except ValueError:
            return None
    if not isinstance(value, int | float):
        return None
    try:
        found = float(value)
    except OverflowError:
        return math.inf
    return found if math.isfinite(found) else math.inf


def integer_or_text(text: str) -> int | str:
    """Return a setting that a log states as text: an int if it is one, else the text."""
    return int(text) if re.fullmatch(r"-?\d{1,18}", text) else text


def columns_of(
    rows: Iterable[tuple[int, Mapping[str, Any]]],
) -> tuple[dict[str, Column], dict[str, str], dict[str, Any]]:
    """Return ({column: numbers}, {column with text: its first text}, {setting: value}) of a table's rows.

    Text counts where it begins with a digit or is among numbers: a number that cannot be read.
    `rows`: (line number, {column: cell}). None and blank text count as missing. A column called like one of `SETTINGS`
    with one value throughout is a setting.
    """
    rows = list(rows)
    names = list(dict.fromkeys(name for _, row in rows for name in row))
    columns: dict[str, Column] = {}
    mixed: dict[str, str] = {}
    settings: dict[str, Any] = {}
    for name in names:
        values = np.full(len(rows), math.nan)
        texts: list[tuple[int, str]] = []
        for at, (line, row) in enumerate(rows):
            value = row.get(name)
            if value is None or (isinstance(value, str) and not value.strip()):
                continue
            found = number(value)
            if found is None:
                texts.append((line, str(value).strip()))
            else:
                values[at] = found
        has_numbers = bool(np.isfinite(values).any() or np.isinf(values).any())
        separated = bool(texts) and SEPARATED.fullmatch(texts[0][1]) is not None
        if texts and (has_numbers or separated or texts[0][1][0].isdecimal()):
            allowed = " (numbers have a decimal point and no other separator)" if separated else ""
            mixed[name] = f"{texts[0][1][:40]!r} in line {texts[0][0]}{allowed}"
        elif has_numbers:
            columns[name] = values
        distinct = {text for _, text in texts} or set(values[~np.isnan(values)].tolist())
        if name in SETTINGS and len(distinct) == 1:
            (only,) = distinct
            settings[name] = int(only) if isinstance(only, float) and only.is_integer() else only
    return columns, mixed, settings


@dataclass(frozen=True)
class Line:
    """One line of a log. `rank`: the rank that a launcher's prefix names, else ""; the prefix is not in `text`."""

    number: int
    text: str
    rank: str = ""


def head_of(path: Path, most_bytes: int) -> str:
    """Return the text in the first `most_bytes` bytes of a file; a gzip file is unpacked."""
    start = b""
    with _binary(path) as file, suppress(EOFError, zlib.error):  # the reader reports a damaged stream
        while len(start) < most_bytes and (more := file.read1(min(1 << 16, most_bytes - len(start)))):
            start += more
    text = start.decode(_encoding(start), errors="replace")
    return text.removeprefix("\ufeff")


def open_text(path: Path, newline: str | None = None) -> io.TextIOWrapper:
    """Open a file as text; a gzip file is unpacked. `newline`: as for `open`; None also splits at a lone \\r."""
    with _binary(path) as file:
        encoding = _encoding(file.read(2))
    return io.TextIOWrapper(_binary(path), encoding=encoding, errors="replace", newline=newline)


def lines_of(path: Path) -> Iterator[Line]:
    """Yield the lines of a log without terminal colors and prefixes of ranks.

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
