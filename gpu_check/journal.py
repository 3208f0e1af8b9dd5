"""Rows (results) of checks, the clock of a check, and the rows on disk.

On disk a row is one JSON object per line, written and flushed immediately: a call that is cut off loses none, and the
next one continues.
"""

import json
import math
import os
import shutil
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any, Literal, ParamSpec

from gpu_check.machine import Machine

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


class Attempt:
    """One attempt at an item: its rows, whether it was started, and whether it finished."""

    def __init__(self, begun: bool = True):
        self.rows: list[Row] = []
        self.begun, self.ended = begun, not begun

    @property
    def stands(self) -> bool:
        """Whether this result is final."""
        return self.ended and bool(self.rows) and not any(row.status in OPEN for row in self.rows)


class Journal:
    """The rows of one machine in one file. Lines of other machines and incomplete lines are skipped."""

    def __init__(self, file: Path, machine: Machine, commit: str | None = None):
        self.file, self.machine, self.commit = file, machine, commit

    def plan(self, check: str, items: list[str], to_measure: list[str]) -> None:
        """Record the items of a check and those to be measured by this call."""
        self._append({"check": check, "event": "planned", "items": items, "to_measure": to_measure})

    def plans(self, check: str) -> int:
        """Return the number of plans of a check."""
        return sum(line.get("event") == "planned" for line in self._lines(check))

    def begin(self, check: str, item: str) -> None:
        """Record the start of an item; its earlier rows are replaced once it finishes."""
        self._append({"check": check, "item": item, "event": "began"})

    def add(self, check: str, item: str, row: Row) -> None:
        """Write a row of the last started item."""
        self._append({"check": check, "item": item, **as_data(row)})

    def end(self, check: str, item: str, seconds: float) -> None:
        """Record that the item has all its rows."""
        self._append({"check": check, "item": item, "event": "ended", "seconds": round(seconds, 1)})

    def leave_out(self, check: str, item: str, row: Row) -> None:
        """Write the reason why an item is not started."""
        self._append({"check": check, "item": item, "event": "left out", **as_data(row)})

    def attempts(self, check: str) -> dict[str, list[Attempt]]:
        """Return the attempts at each item of a check, in the current order of its items."""
        found: dict[str, list[Attempt]] = {}
        for line in self._lines(check):
            event = line.get("event")
            if event == "planned":  # drops items that the check no longer has, and the placeholder for unknown items
                found = {item: found.get(item, []) for item in line["items"]}
                continue
            made = found.setdefault(line["item"], [])
            if event in ("began", "left out") or not made:
                made.append(Attempt(event != "left out"))
            if event == "ended":
                made[-1].ended = True
            elif event != "began":
                made[-1].rows.append(from_data(line))
        return found

    @property
    def lines(self) -> int:
        """Number of lines of this machine in the file."""
        return sum(1 for _ in self._lines())

    def begun(self, check: str, behind: int) -> set[str]:
        """Return the items of a check that were started after line number `lines`."""
        later = list(self._lines())[behind:]
        return {line["item"] for line in later if line["check"] == check and line.get("event") == "began"}

    def unfinished(self, check: str) -> dict[str, bool]:
        """Return {item: whether it was started} for the items of a check's newest plan that have not ended."""
        found: dict[str, bool] = {}
        for line in self._lines(check):
            event = line.get("event")
            if event == "planned":
                found = dict.fromkeys(line["to_measure"], False)
            elif event in ("ended", "left out"):
                found.pop(line["item"], None)
            elif line["item"] in found:
                found[line["item"]] = True
        return found

    def results(self, check: str) -> dict[str, list[Row]]:
        """Return the rows of each item: of the last final attempt, else of the last attempt."""
        return {
            item: next((each for each in reversed(made) if each.stands), made[-1]).rows
            for item, made in self.attempts(check).items()
            if made
        }

    def value(self, check: str, what: str) -> float | None:
        """Return the value of the row of that name; None without one."""
        rows = [row for rows in self.results(check).values() for row in rows]
        return next((row.value for row in rows if row.what == what), None)

    def _append(self, data: dict[str, Any]) -> None:
        now = datetime.now(UTC).isoformat(timespec="seconds")
        line = {**data, **asdict(self.machine), "commit": self.commit, "time": now}
        with self.file.open("a+b") as lines:
            if lines.tell() and self._torn(lines):
                lines.write(b"\n")
            lines.write(json.dumps(line, allow_nan=False).encode() + b"\n")
            lines.flush()
            os.fsync(lines.fileno())

    @staticmethod
    def _torn(lines: Any) -> bool:
        lines.seek(-1, os.SEEK_END)
        return bool(lines.read(1) != b"\n")

    def _lines(self, check: str | None = None) -> Iterator[dict[str, Any]]:
        if not self.file.exists():
            return
        for text in self.file.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                line = json.loads(text)
                ours = all(line[key] == value for key, value in asdict(self.machine).items())
            except (json.JSONDecodeError, KeyError, TypeError):
                continue
            if ours and check in (None, line.get("check")):
                yield line


def journal_for(machine: Machine, folder: Path, earlier: Path, commit: str | None) -> Journal:
    """Return the journal to continue: the newest one in `folder` with rows of this machine, else a copy of one in
    `earlier`, else a new one of today for this device, DATE-DEVICE.jsonl."""
    folder.mkdir(parents=True, exist_ok=True)
    for place in dict.fromkeys((folder, earlier)):
        for file in sorted(place.glob(f"*-{machine.file_part}.jsonl"), reverse=True):
            found = Journal(file, machine, commit)
            if any(True for _ in found._lines()):
                return found if place == folder else _copied(found, folder, commit)
    return Journal(folder / f"{date.today()}-{machine.file_part}.jsonl", machine, commit)


def _copied(found: Journal, folder: Path, commit: str | None) -> Journal:
    return Journal(Path(shutil.copy(found.file, folder)), found.machine, commit)
