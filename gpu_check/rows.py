"""Findings of a check, and the time it has."""

import math
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal, ParamSpec

P = ParamSpec("P")
Status = Literal["ok", "off", "measured", "not available", "error", "cut off"]
"""ok, off: within its target, or not; measured: it has none; not available: why in `note`; error: the item broke; cut
off: the time was out before it was begun, or before it ended."""
OPEN = ("not available", "error", "cut off")
"""What is looked at again by a further call: it has no value, and may have one then."""


@dataclass(frozen=True)
class Row:
    """One finding. `value` is None where there is none to tell; `note` has the target, or why there is no value."""

    what: str
    value: float | None
    unit: str = ""
    status: Status = "measured"
    note: str = ""


@dataclass(frozen=True)
class Item:
    """A part of a check that is measured, or not, as a whole; `name` is its own within the check.

    It is not begun where less than `seconds` are left. `work` yields its rows.
    """

    name: str
    seconds: float
    work: Callable[[], Iterator[Row]]


def judged(what: str, value: float, unit: str, holds: bool, target: str) -> Row:
    """Return a row that is "ok" or "off" by `holds`; `target` says what was asked for."""
    return Row(what, value, unit, "ok" if holds else "off", target)


def missing(what: str, reason: str) -> Row:
    """Return a row of something that this machine does not have."""
    return Row(what, None, "", "not available", reason)


def cut_off(what: str, reason: str) -> Row:
    """Return a row of something that there was no time for."""
    return Row(what, None, "", "cut off", reason)


class Clock:
    """The time that a check has, or all of them."""

    def __init__(self, seconds: float, now: Callable[[], float] = time.monotonic):
        self.now, self._end = now, now() + seconds

    @property
    def left(self) -> float:
        """Seconds left, at least 0."""
        return max(0.0, self._end - self.now())

    def allows(self, seconds: float) -> bool:
        """Whether work of about `seconds` still fits."""
        return self.left >= seconds


class OutOfTimeError(Exception):
    """Work was begun and ended before it was done."""


def guarded(what: str, work: Callable[P, Iterator[Row]], *args: P.args, **kwargs: P.kwargs) -> Iterator[Row]:
    """Yield the rows of `work(...)`; where it raises, one that says so: what comes after it is still checked."""
    try:
        yield from work(*args, **kwargs)
    except OutOfTimeError as error:
        yield cut_off(what, str(error))
    except Exception as error:  # a report must survive whatever a device or a library does
        traceback.print_exc()  # to the log beside the rows
        text = " ".join(str(error).split())[:300]
        yield Row(what, None, "", "error", f"{type(error).__name__}: {text}")


def table(check: str, title: str, rows: list[Row]) -> str:
    """Return a check's rows as text."""
    lines = [f"{check}  {title}"]
    for row in rows:
        value = "" if row.value is None else f"{row.value:.4g} {row.unit}".strip()
        lines.append(f"  {row.status:<14}{row.what:<72}{value:>18}  {row.note}".rstrip())
    return "\n".join(lines)


def as_data(row: Row) -> dict[str, Any]:
    """Return a row for JSON, which has no NaN and no infinity: those become "nan", "inf" and "-inf"."""
    data = asdict(row)
    return data if row.value is None or math.isfinite(row.value) else {**data, "value": str(row.value)}


def of_data(data: dict[str, Any]) -> Row:
    """Return the row that `as_data` made the data of, among other keys."""
    value = None if data["value"] is None else float(data["value"])
    return Row(data["what"], value, data["unit"], data["status"], data["note"])
