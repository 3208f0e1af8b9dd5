"""Values and settings from the lines that a training program prints."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from lightning_llm.compare.curves.readers.attempts import Attempts, columns_by_step, merged
from lightning_llm.compare.curves.readers.cells import Line, lines_of
from lightning_llm.compare.curves.table import LoggedTable, LogSource


@dataclass
class Found:
    """Contents of one line: the values of a step, a start of the program, and settings."""

    step: int | None = None
    values: Mapping[str, float] = field(default_factory=dict)
    starts: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class ProgramLog:
    """All contents of a log, one writer per rank. `settings`: of the last session; `changed`: that it changed."""

    source: LogSource
    writers: dict[str, Attempts] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    changed: list[str] = field(default_factory=list)
    shown: str = ""

    def table(self, format: str, notes: tuple[str, ...] = (), smoothed: Mapping[str, str] | None = None) -> LoggedTable:
        """Return the table. Raises ValueError without a value, or if ranks contradict each other."""
        rows, resumed = merged(self.writers)
        if not rows:
            raise ValueError(f"it has no line such as `{self.shown}`. Name the log of the rank that prints the loss.")
        said = list(notes)
        if self.changed:
            said.append(f"Settings changed within the log: {', '.join(sorted(set(self.changed)))}.")
        columns = columns_by_step(rows)
        return LoggedTable(
            format, self.source.address, columns, self.settings, (*resumed, *said), smoothed=smoothed or {}
        )

    def rows(self) -> dict[int, dict[str, float]]:
        """Return the rows of all ranks, as `table`."""
        return merged(self.writers)[0]


def read_program_log(source: LogSource, parse: Callable[[Line], Found | None], shown: str) -> ProgramLog:
    """Return the contents of a log. `parse`: those of one line, None for other lines; `shown`: an example line.

    Raises:
        ValueError: it is not a file, or has lines of several ranks or runs.
    """
    log = ProgramLog(source, shown=shown)
    for line in _lines(source):
        found = parse(line)
        if found is None:
            continue
        writer = log.writers.setdefault(line.rank, Attempts())
        if found.starts:
            writer.starts()
        for key, value in found.settings.items():
            if log.settings.setdefault(key, value) != value:
                log.changed.append(key)
            log.settings[key] = value
        if found.step is not None and found.values:
            writer.add(f"line {line.number}", found.step, found.values)
    return log


def _lines(source: LogSource) -> Iterator[Line]:
    if source.path is None or source.is_folder:
        raise ValueError("it is not a file")
    return lines_of(source.path)
