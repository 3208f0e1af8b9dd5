"""Reader of tables: comma-, semicolon- or tab-separated, with a line of names first."""

import csv
from collections import Counter

from lightning_llm.compare.curves.readers.cells import columns_of, number
from lightning_llm.compare.curves.readers.text import open_text
from lightning_llm.compare.curves.table import LoggedTable, LogSource, Reader

DELIMITERS = ",\t;"
EXAMPLE = "step,loss"


def recognizes(source: LogSource) -> bool:
    """Return whether the first line has separated fields, and the second line as many."""
    lines = [line for line in source.head.splitlines() if line.strip()][:2]
    if not lines or "\0" in source.head or lines[0].lstrip().startswith(("{", "[")):
        return False
    delimiter = delimiter_of(lines[0])
    return lines[0].count(delimiter) > 0 and all(line.count(delimiter) for line in lines)


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
        numbered = [(at, line) for at, line in enumerate(file, 1) if line.strip()]
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
    body = [(line, row) for line, row in zip(lines[1:], rows[1:], strict=True) if not row[0].startswith("#")]
    for line, row in body:
        if row == rows[0]:
            raise ValueError(f"line {line} repeats the names of the columns: it has two tables. Split the file.")
        if len(row) != len(names):
            raise ValueError(
                f"line {line} has {len(row)} fields instead of {len(names)}: it is cut off or has text with "
                f"'{delimiter}'. Repair or remove that line."
            )
    columns, mixed, settings = columns_of((line, dict(zip(names, row, strict=True))) for line, row in body)
    return LoggedTable("csv", source.address, columns, settings, mixed=mixed)


READER = Reader("csv", recognizes, read)
