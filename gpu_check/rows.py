"""Rows (results) of a check, and its clock."""

import math
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal, ParamSpec

P = ParamSpec("P")
Status = Literal["ok", "off", "measured", "not available", "error", "cut off"]
"""ok, off: within its target or not; measured: without a target; not available: reason in `note`; error: the item
failed; cut off: not enough time to start or to finish it."""
OPEN = ("not available", "error", "cut off")
"""Statuses without a value, which a further call measures again."""


@dataclass(frozen=True)
class Row:
    """One result. `value` is None if there is none; `note` has the target, or the reason for a missing value."""

    what: str
    value: float | None
    unit: str = ""
    status: Status = "measured"
    note: str = ""


@dataclass(frozen=True)
class Item:
    """A part of a check that is measured as a whole; `name` is unique within the check.

    It is not started if less than `seconds` are left. `work` yields its rows.
    """

    name: str
    seconds: float
    work: Callable[[], Iterator[Row]]


def judged(what: str, value: float, unit: str, holds: bool, target: str) -> Row:
    """Return a row that is "ok" or "off" by `holds`; `target`: text of the requirement."""
    return Row(what, value, unit, "ok" if holds else "off", target)


def missing(what: str, reason: str) -> Row:
    """Return a row for something that this machine does not have."""
    return Row(what, None, "", "not available", reason)


def cut_off(what: str, reason: str) -> Row:
    """Return a row for something that there was no time for."""
    return Row(what, None, "", "cut off", reason)


class Clock:
    """The remaining time of a check or of a call."""

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
    """Work was stopped before it was done."""


def guarded(what: str, work: Callable[P, Iterator[Row]], *args: P.args, **kwargs: P.kwargs) -> Iterator[Row]:
    """Yield the rows of `work(...)`; if it raises, an error row, so that the following items are still measured."""
    try:
        yield from work(*args, **kwargs)
    except OutOfTimeError as error:
        yield cut_off(what, str(error))
    except Exception as error:  # the report must survive any failure of a device or library
        traceback.print_exc()  # to the log file next to the rows
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


def from_data(data: dict[str, Any]) -> Row:
    """Return the row from the result of `as_data`, ignoring other keys."""
    value = None if data["value"] is None else float(data["value"])
    return Row(data["what"], value, data["unit"], data["status"], data["note"])
