"""Reader of tables: comma-, semicolon- or tab-separated, with a line of names first."""

import csv
from collections import Counter
from collections.abc import Iterable, Sequence

from lightning_llm.compare.curves.readers.cells import columns_of, number
from lightning_llm.compare.curves.readers.text import open_text
from lightning_llm.compare.curves.table import LoggedTable, LogSource, Reader

DELIMITERS = ",\t;"
EXAMPLE = "step,loss"


def recognizes(source: LogSource) -> bool:
    """Return whether the first two lines have separated fields, or are a name and a number."""
    lines = [line for _, line in _content(source.head.splitlines())][:2]
    if not lines or "\0" in source.head or lines[0].lstrip().startswith(("{", "[")):
        return False
    delimiter = delimiter_of(lines[0])
    one_column = len(lines) == 2 and number(lines[0]) is None and number(lines[1]) is not None
    return one_column or (lines[0].count(delimiter) > 0 and all(line.count(delimiter) for line in lines))


def delimiter_of(line: str) -> str:
    """Return the separator of a line of names: the one that it has most often."""
    return max(DELIMITERS, key=line.count)


def read(source: LogSource) -> LoggedTable:
    """Return the table.

    Raises:
        ValueError: no line of names, a name twice, a row with another number of fields, or two tables in one file.
    """
    if source.path is None or source.is_folder:
        raise ValueError("it is not a file")
    with open_text(source.path, newline="") as file:
        numbered = _content(file)
    if not numbered:
        raise ValueError("it is empty")
    delimiter = delimiter_of(numbered[0][1])
    text = [line if at else line.removeprefix("#") for at, (_, line) in enumerate(numbered)]
    try:
        rows = list(csv.reader(text, delimiter=delimiter))
    except csv.Error as error:
        raise ValueError(f"it is no table ({error})") from error
    lines = [at for at, _ in numbered] if len(rows) == len(numbered) else list(range(1, len(rows) + 1))
    names = [name.strip() or f"column {at}" for at, name in enumerate(rows[0], 1)]
    if all(number(name) is not None for name in rows[0]):
        raise ValueError(f"its first line has numbers, not names of columns. Add a line with names, such as {EXAMPLE}.")
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise ValueError(f"it has the column '{twice[0]}' twice. Rename or remove one.")
    body = list(zip(lines[1:], rows[1:], strict=True))
    notes: tuple[str, ...] = ()
    if not text[-1].endswith(("\n", "\r")) and _is_incomplete(body):
        notes = (f"The last line, {body.pop()[0]}, is incomplete and left out.",)
    for line, row in body:
        if row == rows[0]:
            raise ValueError(f"line {line} repeats the names of the columns: it has two tables. Split the file.")
        if len(row) != len(names):
            raise ValueError(
                f"line {line} has {len(row)} fields instead of {len(names)}: it is cut off or has text with "
                f"'{delimiter}'. Repair or remove that line."
            )
    columns, mixed, settings = columns_of((line, dict(zip(names, row, strict=True))) for line, row in body)
    return LoggedTable("csv", source.address, columns, settings, notes, mixed)


def _content(lines: Iterable[str]) -> list[tuple[int, str]]:
    """Return (number, line) of the lines that are neither blank nor comments; "#step,loss" can be the first of them."""
    found: list[tuple[int, str]] = []
    for at, line in enumerate(lines, 1):
        is_comment = line.startswith("#") and (found or not line.count(delimiter_of(line)))
        if line.strip() and not is_comment:
            found.append((at, line))
    return found


def _is_incomplete(body: Sequence[tuple[int, Sequence[str]]]) -> bool:
    """Return whether the last row, which has no line end, has fewer fields or a shorter last field than all others."""
    *others, last = [row for _, row in body] or [[]]
    if not others:
        return False
    fields = min(map(len, others))
    return len(last) < fields or len(last[-1]) < min(len(row[-1]) for row in others)


READER = Reader("csv", recognizes, read)
