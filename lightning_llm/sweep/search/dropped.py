"""Recipes that a halving has ended, and why: kept in its `search.json`, so that no later start begins them again."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_llm.tracking.sweep_definition import Job
from lightning_llm.tracking.sweep_file import ENDED_AT, SEARCH_FILE, read_trials


@dataclass(frozen=True)
class Dropped:
    """A recipe that was ended at `step`: its gap to the best there, the best's name, and the interval."""

    name: str
    step: int
    best: str
    gap: float
    low: float
    high: float

    @property
    def words(self) -> str:
        """Why, in a line."""
        if not math.isfinite(self.gap):
            return f"{self.name}: all its runs diverged by step {self.step}"
        interval = f"[{self.low:+.4f}, {self.high:+.4f}]"
        return f"{self.name}: {self.gap:+.4f} {interval} above {self.best} at step {self.step}"

    def as_data(self) -> dict[str, Any]:
        """Return what `search.json` has of it; null for what is no finite number."""
        numbers = {"gap": self.gap, "low": self.low, "high": self.high}
        finite = {key: value if math.isfinite(value) else None for key, value in numbers.items()}
        return {"step": self.step, "best": self.best, **finite}


def dropped_before(folder: Path, recipes: Mapping[str, Sequence[Job]]) -> dict[str, Dropped]:
    """Return {name: why} of those of `recipes` that an earlier start of the halving in `folder` has ended.

    They are known by their jobs: a sweep that grows may give them longer names. Empty where there was none, or it was
    of a version that did not note it.

    Raises:
        ValueError: its record cannot be read.
    """
    named = {job.number: name for name, jobs in recipes.items() for job in jobs}
    found: dict[str, Dropped] = {}
    for row in read_trials(folder):
        about = row.get(ENDED_AT)
        name = next((named[number] for number in row.get("jobs", ()) if number in named), None)
        if about is None or name is None:
            continue
        try:
            gap, low, high = (math.inf if about[key] is None else float(about[key]) for key in ("gap", "low", "high"))
            found[name] = Dropped(name, int(about["step"]), str(about["best"]), gap, low, high)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{folder / SEARCH_FILE} is damaged: {error}") from error
    return found
