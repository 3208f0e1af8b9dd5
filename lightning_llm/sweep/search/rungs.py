"""Recipes of a halving that are worse than the best at a rung, by the interval of their gaps at equal steps.

By rank alone, noise decides how often a recipe as good as the best is dropped. Here a recipe is stopped only if the
interval of its gap to the current best is above the margin: paired by seed, variances pooled as for a verdict.

The interval is Dunnett's, with the best of the rung as the baseline, at 1 - (1 - confidence) / rungs. A recipe with a
true loss at the rung within the margin of every other's is stopped at a rung with a probability of at most half of that
error: only if its estimate exceeds one of the others by more than the margin. Dunnett's critical value bounds this
event with the recipe itself as the control, whichever of the others is then the best.

Stopped recipes are recorded in `search.json` (`Dropped`), so that no later start resumes them.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from lightning_llm.compare.runs.losses import tail_of
from lightning_llm.compare.statistics.intervals import simultaneous_intervals
from lightning_llm.config.schema.sweep import SweepConfig
from lightning_llm.tracking.reading import Run
from lightning_llm.tracking.sweep_definition import Job
from lightning_llm.tracking.sweep_file import ENDED_AT, SEARCH_FILE, read_trials


def losses_at(runs: Sequence[Sequence[Run | None]], step: int, keys: SweepConfig) -> np.ndarray:
    """Return the mean losses over the tail of the first `step` steps, [recipes, seeds], NaN if a run diverged."""
    cut = [[None if run is None else _until(run, step, keys.metric) for run in each] for each in runs]
    sound = [run for each in cut for run in each if run is not None and run.validations.get(keys.metric)]
    sound = [run for run in sound if not run.diverged or run.last_step > step]
    tail = tail_of(sound, keys.metric, keys.tail)
    kept = {id(run) for run in sound}

    def loss(run: Run | None) -> float:
        return tail.of(run) if tail and run is not None and id(run) in kept else math.nan

    return np.array([[loss(run) for run in each] for each in cut])


def _until(run: Run, step: int, metric: str) -> Run:
    """Return the run as of `step` steps."""
    values = {at: value for at, value in run.validations.get(metric, {}).items() if at <= step}
    return replace(run, validations={metric: values})


def worse_than_best(losses: np.ndarray, keys: SweepConfig, rungs: int) -> dict[int, tuple[int, float, float, float]]:
    """Return {recipe: (the best, gap to it, low, high)} of recipes with an interval above the margin, by index.

    `losses`: [recipes, seeds], NaN if a run diverged; a recipe of which all runs diverged is dropped, with an infinite
    gap.
    """
    means = [fmean(row[np.isfinite(row)]) if np.isfinite(row).any() else math.inf for row in losses]
    best = int(np.argmin(means))
    others = [place for place in range(len(losses)) if place != best]
    gone = {place: (best, math.inf, math.inf, math.inf) for place in others if math.isinf(means[place])}
    judged = [place for place in others if place not in gone]
    if math.isinf(means[best]) or not judged:
        return gone if not math.isinf(means[best]) else {}
    confidence = 1 - (1 - keys.confidence) / rungs
    found = simultaneous_intervals(losses[judged] - losses[best], confidence)
    for row, place in enumerate(judged):
        if found.low[row] > keys.margin_nats:
            gone[place] = (best, float(found.gap[row]), float(found.low[row]), float(found.high[row]))
    return gone


@dataclass(frozen=True)
class Dropped:
    """A recipe that was stopped at `step`: its gap to the best there, the best's name, and the interval."""

    name: str
    step: int
    best: str
    gap: float
    low: float
    high: float

    @property
    def words(self) -> str:
        """The reason, in a line."""
        if not math.isfinite(self.gap):
            return f"{self.name}: all its runs diverged by step {self.step}"
        interval = f"[{self.low:+.4f}, {self.high:+.4f}]"
        return f"{self.name}: {self.gap:+.4f} {interval} above {self.best} at step {self.step}"

    def as_data(self) -> dict[str, Any]:
        """Return its entry in `search.json`; null for numbers that are not finite."""
        numbers = {"gap": self.gap, "low": self.low, "high": self.high}
        finite = {key: value if math.isfinite(value) else None for key, value in numbers.items()}
        return {"step": self.step, "best": self.best, **finite}


def dropped_before(folder: Path, recipes: Mapping[str, Sequence[Job]]) -> dict[str, Dropped]:
    """Return {name: reason} of those of `recipes` that an earlier start of the halving in `folder` has stopped.

    They are identified by their jobs, because names may grow with the sweep. Empty without an earlier start, or if its
    version did not record them.

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
