"""Results of a check, row by row: written as it is found, so that a check that is stopped keeps what it had."""

import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, ParamSpec

P = ParamSpec("P")
Status = Literal["ok", "off", "measured", "not available", "error"]
"""ok, off: within its target, or not; measured: it has none; not available: why in `note`; error: the check broke."""


@dataclass(frozen=True)
class Row:
    """One finding. `value` is None where there is none to tell; `note` has the target, or why there is no value."""

    what: str
    value: float | None
    unit: str = ""
    status: Status = "measured"
    note: str = ""


def judged(what: str, value: float, unit: str, holds: bool, target: str) -> Row:
    """Return a row that is "ok" or "off" by `holds`; `target` says what was asked for."""
    return Row(what, value, unit, "ok" if holds else "off", target)


def missing(what: str, reason: str) -> Row:
    """Return a row of something that this machine does not have."""
    return Row(what, None, "", "not available", reason)


class Clock:
    """The time one check has. Work that would not fit is left out, and said to be."""

    def __init__(self, seconds: float, now: Callable[[], float] = time.monotonic):
        self._now, self._end = now, now() + seconds

    @property
    def left(self) -> float:
        """Seconds left, at least 0."""
        return max(0.0, self._end - self._now())

    def allows(self, seconds: float) -> bool:
        """Whether work of about `seconds` still fits."""
        return self.left >= seconds


def guarded(what: str, work: Callable[P, Iterator[Row]], *args: P.args, **kwargs: P.kwargs) -> Iterator[Row]:
    """Yield the rows of `work(...)`; where it raises, one that says so: what comes after it is still checked."""
    try:
        yield from work(*args, **kwargs)
    except Exception as error:  # a report must survive whatever a device or a library does
        text = " ".join(str(error).split())[:300]
        yield Row(what, None, "", "error", f"{type(error).__name__}: {text}")


def append(file: Path, row: Row) -> None:
    """Add a row to a file of one JSON object per line."""
    with file.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(as_data(row), allow_nan=False) + "\n")


def read(file: Path) -> list[Row]:
    """Return the rows of a file that `append` wrote, none where there is no such file; a torn last line is dropped."""
    if not file.exists():
        return []
    found = []
    for line in file.read_text(encoding="utf-8").splitlines():
        try:
            data = json.loads(line)
        except json.JSONDecodeError:
            continue
        found.append(Row(**{**data, "value": None if data["value"] is None else float(data["value"])}))
    return found


def table(check: str, title: str, rows: list[Row]) -> str:
    """Return a check's rows as text."""
    lines = [f"{check}  {title}"]
    for row in rows:
        value = "" if row.value is None else f"{row.value:.4g} {row.unit}".strip()
        lines.append(f"  {row.status:<14}{row.what:<66}{value:>18}  {row.note}".rstrip())
    return "\n".join(lines)


def as_data(row: Row) -> dict[str, Any]:
    """Return a row for JSON, which has no NaN and no infinity: those become "nan", "inf" and "-inf"."""
    data = asdict(row)
    return data if row.value is None or math.isfinite(row.value) else {**data, "value": str(row.value)}
