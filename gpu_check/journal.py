"""Rows on disk: one JSON object per line, written and flushed as each is found, so that a call that is cut off loses
none of them and the next one goes on behind them."""

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

from gpu_check.machine import Machine
from gpu_check.rows import OPEN, Row, as_data, of_data


class Attempt:
    """One time that an item's turn came: its rows, whether it was begun, and whether it came to its end."""

    def __init__(self, begun: bool = True):
        self.rows: list[Row] = []
        self.begun, self.ended = begun, not begun

    @property
    def stands(self) -> bool:
        """Whether this is a result that needs no further look."""
        return self.ended and bool(self.rows) and not any(row.status in OPEN for row in self.rows)


class Journal:
    """The rows of one machine in one file. Lines of other machines, or torn ones, are passed over."""

    def __init__(self, file: Path, machine: Machine, commit: str | None = None):
        self.file, self.machine, self.commit = file, machine, commit

    def plan(self, check: str, items: list[str], to_measure: list[str]) -> None:
        """Note the items that a check has, and which of them this call is to measure."""
        self._append({"check": check, "event": "planned", "items": items, "to_measure": to_measure})

    def plans(self, check: str) -> int:
        """Return how often a check has been planned."""
        return sum(line.get("event") == "planned" for line in self._lines(check))

    def begin(self, check: str, item: str) -> None:
        """Note that an item is begun: what it had before is replaced, once it comes to its end."""
        self._append({"check": check, "item": item, "event": "began"})

    def add(self, check: str, item: str, row: Row) -> None:
        """Write a row of the item that was begun last."""
        self._append({"check": check, "item": item, **as_data(row)})

    def end(self, check: str, item: str, seconds: float) -> None:
        """Note that the item has all its rows."""
        self._append({"check": check, "item": item, "event": "ended", "seconds": round(seconds, 1)})

    def leave_out(self, check: str, item: str, row: Row) -> None:
        """Write why an item is not begun."""
        self._append({"check": check, "item": item, "event": "left out", **as_data(row)})

    def attempts(self, check: str) -> dict[str, list[Attempt]]:
        """Return the attempts at each item of a check, in the order in which it has them now."""
        found: dict[str, list[Attempt]] = {}
        for line in self._lines(check):
            event = line.get("event")
            if event == "planned":  # items that a check had once, or that stood for it as it could not be begun, go
                found = {item: found.get(item, []) for item in line["items"]}
                continue
            made = found.setdefault(line["item"], [])
            if event in ("began", "left out") or not made:
                made.append(Attempt(event != "left out"))
            if event == "ended":
                made[-1].ended = True
            elif event != "began":
                made[-1].rows.append(of_data(line))
        return found

    @property
    def lines(self) -> int:
        """Lines of this machine that the file has."""
        return sum(1 for _ in self._lines())

    def begun(self, check: str, behind: int) -> set[str]:
        """Return the items of a check that were begun behind so many `lines`."""
        later = list(self._lines())[behind:]
        return {line["item"] for line in later if line["check"] == check and line.get("event") == "began"}

    def unfinished(self, check: str) -> dict[str, bool]:
        """Return the items that the newest plan of a check is to measure and no line behind it ends: are they begun?"""
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
        """Return the rows of each item: of the last attempt that stands, else of the last there was."""
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
    """Return the journal to go on with: the newest in `folder` with rows of this machine, else in `earlier` (which is
    copied), else today's of the device, DATE-DEVICE.jsonl."""
    folder.mkdir(parents=True, exist_ok=True)
    for place in dict.fromkeys((folder, earlier)):
        for file in sorted(place.glob(f"*-{machine.file_part}.jsonl"), reverse=True):
            found = Journal(file, machine, commit)
            if any(True for _ in found._lines()):
                return found if place == folder else _copied(found, folder, commit)
    return Journal(folder / f"{date.today()}-{machine.file_part}.jsonl", machine, commit)


def _copied(found: Journal, folder: Path, commit: str | None) -> Journal:
    return Journal(Path(shutil.copy(found.file, folder)), found.machine, commit)
