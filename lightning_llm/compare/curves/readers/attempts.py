"""Values that count in a log with resumed runs: steps logged again replace the abandoned ones."""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from lightning_llm.compare.curves.table import Column

Rows = dict[int, dict[str, float]]
SPEEDS = re.compile(r"time|per_second|tok/sec|throughput|tps|flops|mfu|memory", re.IGNORECASE)
"""Columns that differ between ranks and repeated evaluations of one run, and so indicate no new attempt."""


@dataclass
class Attempts:
    """Values of one rank by step (`rows`), added in the order in which they were logged.

    A step that is logged again with another value marks a resume: all values from that step on, of all columns, belong
    to an abandoned attempt and are dropped. Equal values count once. After a call of `starts`, other steps than before
    may be logged. Without it, all steps of the abandoned attempt must be logged again; otherwise the lines come from
    several ranks or runs.

    `resumed_at`: steps at which the run resumed; `left_out`: number of dropped steps.
    """

    rows: Rows = field(default_factory=dict)
    resumed_at: list[int] = field(default_factory=list)
    left_out: int = 0
    _last: dict[str, int] = field(default_factory=dict)
    _abandoned: dict[str, list[int]] = field(default_factory=dict)
    _announced: bool = False
    _repeated: tuple[str, int] | None = None
    _current: tuple[int, dict[str, float]] = (-1, {})
    """The latest step, and all values that were added to it since the step changed."""

    def starts(self) -> None:
        """Record that the program starts or resumes here."""
        self._announced = True
        self._current = -1, {}

    def add(self, place: str, step: int, values: Mapping[str, float]) -> None:
        """Add the values of one step, {column: value}. `place`: where they are, for messages, such as "line 7".

        Raises:
            ValueError: the values cannot be those of one run.
        """
        logged = self.rows.get(step, {})
        new = {name: value for name, value in values.items() if name not in logged or not same(logged[name], value)}
        if not new:
            return
        if self._current[0] != step:
            self._current = step, {}
        again = [name for name in new if step <= self._last.get(name, -1) and not SPEEDS.search(name)]
        if again:
            self._resume(place, step, again)
            new = dict(values)  # also those that are equal to the abandoned ones
        elif not self._announced:
            for name in new:
                if any(each < step for each in self._abandoned.get(name, ())) and not SPEEDS.search(name):
                    raise ValueError(self._mixed(place, name, step))
        for name in new:
            self._abandoned[name] = [each for each in self._abandoned.get(name, ()) if each > step]
            self._last[name] = step
        self._current[1].update(new)
        self.rows.setdefault(step, {}).update(self._current[1])
        self._announced = False

    def _resume(self, place: str, step: int, again: list[str]) -> None:
        """Drop all values from `step` on, except those that the current attempt has already added."""
        name, announced = again[0], self._announced
        if not announced and step == self._last[name]:
            if self._repeated and self._repeated[0] == name and not self._between(name, self._repeated[1], step):
                raise ValueError(self._mixed(place, name, step))
            self._repeated = (name, step)
        gone = sorted(each for each in self.rows if each >= step)
        for column in {column for each in gone for column in self.rows[each]}:
            self._abandoned[column] = [] if announced else [each for each in gone if column in self.rows[each]]
        for each in gone:
            del self.rows[each]
        if any(column in self._current[1] for column in again):  # they were of the abandoned attempt
            self._current = step, {}
        for column, last in self._last.items():
            if column not in self._current[1]:
                self._last[column] = min(last, step - 1)
        self.left_out += len(gone)
        self.resumed_at.append(step)

    def _between(self, name: str, first: int, last: int) -> bool:
        return any(first < each < last and name in row for each, row in self.rows.items())

    def _mixed(self, place: str, name: str, step: int) -> str:
        return (
            f"{place} has a value of '{name}' out of order, at step {step}: the values of several ranks or runs are "
            "mixed. Keep those of one."
        )

    def notes(self) -> tuple[str, ...]:
        """Return a sentence on the steps that were left out, () if there are none."""
        if not self.resumed_at:
            return ()
        points, times = self.left_out, len(self.resumed_at)
        at = ", ".join(map(str, self.resumed_at[:5])) + (", ..." if times > 5 else "")
        return (
            f"It resumed {'once' if times == 1 else f'{times} times'}, at step {at}: {points} "
            f"point{'s' if points != 1 else ''} of abandoned attempts {'are' if points != 1 else 'is'} left out.",
        )


def same(one: float, other: float) -> bool:
    """Return whether two logged values are equal; NaN equals NaN."""
    return one == other or (math.isnan(one) and math.isnan(other))


def is_result(name: str) -> bool:
    """Return whether a column must be equal on all ranks: a loss, not a speed or a memory size."""
    return any(word in name.lower() for word in ("loss", "bpb", "perplexity", "ppl"))


def merged(writers: Mapping[str, Attempts], noun: str = "rank") -> tuple[Rows, tuple[str, ...]]:
    """Return ({step: {column: value}} of all writers together, notes).

    A writer is a rank, or an event file (`noun`). Where speeds or sizes differ, those of the first writer count.

    Raises:
        ValueError: two writers have different losses at a step.
    """
    rows: Rows = {}
    owner: dict[tuple[int, str], str] = {}
    order = sorted(writers, key=lambda each: (not each.isdigit(), int(each) if each.isdigit() else 0, each))
    for writer in order:
        for step, values in writers[writer].rows.items():
            row = rows.setdefault(step, {})
            for name, value in values.items():
                first = owner.setdefault((step, name), writer)
                if not same(row.setdefault(name, value), value) and is_result(name):
                    raise ValueError(
                        f"{noun}s {first} and {writer} have different values of '{name}' at step {step}: "
                        f"{row[name]:g} and {value:g}. Keep those of one {noun}."
                    )
    notes = list(dict.fromkeys(note for each in order for note in writers[each].notes()))
    return rows, tuple(notes)


def columns_by_step(rows: Rows, names: Iterable[str] = ()) -> dict[str, Column]:
    """Return {"step": ascending steps, column: values, NaN where absent}. `names`: columns that come first."""
    steps = sorted(rows)
    found = list(dict.fromkeys([*names, *(name for step in steps for name in rows[step])]))
    columns = {"step": np.array(steps, dtype=np.float64)}
    for name in found:
        values = np.array([rows[step].get(name, math.nan) for step in steps], dtype=np.float64)
        if name != "step" and not np.isnan(values).all():
            columns[name] = values
    return columns
