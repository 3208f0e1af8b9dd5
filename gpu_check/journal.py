"""Rows on disk: one JSON object per line, written and flushed immediately, so that a call that is cut off loses none
and the next one continues."""

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

from gpu_check.machine import Machine
from gpu_check.rows import OPEN, Row, as_data, from_data


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
