"""Recipes of a halving that are worse than the best at a rung, by the interval of their gaps at equal steps.

By rank alone a recipe that is as good as the best goes as often as noise has it. Here one is ended only where the
interval of its gap to the best so far is above the margin: paired by seed, variances pooled as for a verdict.

The interval is Dunnett's, with the best of the rung in the baseline's place, at 1 - (1 - confidence) / rungs. A recipe
whose true loss at the rung is within the margin of every other's is ended at a rung with a probability of at most half
of that error: only where it lies above one of the others by more, which is the event that Dunnett's critical value
bounds with the recipe itself as the control, whichever of the others then is the best.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

import numpy as np

from lightning_llm.compare.runs.losses import tail_of
from lightning_llm.compare.statistics.intervals import simultaneous_intervals
from lightning_llm.config.schema.sweep import SweepConfig
from lightning_llm.tracking.reading import Run


def losses_at(runs: Sequence[Sequence[Run | None]], step: int, keys: SweepConfig) -> np.ndarray:
    """Return the mean losses over the tail of the first `step` steps, [recipes, seeds], NaN where it is lost."""
    cut = [[None if run is None else _until(run, step, keys.metric) for run in each] for each in runs]
    sound = [run for each in cut for run in each if run is not None and run.validations.get(keys.metric)]
    sound = [run for run in sound if not run.lost_its_loss or run.last_step > step]
    tail = tail_of(sound, keys.metric, keys.tail)
    kept = {id(run) for run in sound}

    def loss(run: Run | None) -> float:
        return tail.of(run) if tail and run is not None and id(run) in kept else math.nan

    return np.array([[loss(run) for run in each] for each in cut])


def _until(run: Run, step: int, metric: str) -> Run:
    """Return the run as it was after `step` steps."""
    values = {at: value for at, value in run.validations.get(metric, {}).items() if at <= step}
    return replace(run, validations={metric: values})


def worse_than_best(losses: np.ndarray, keys: SweepConfig, rungs: int) -> dict[int, tuple[int, float, float, float]]:
    """Return {recipe: (the best, gap to it, low, high)} of those whose interval is above the margin, by their places.

    `losses`: [recipes, seeds], NaN where a run lost its loss; a recipe that lost all is ended, with an infinite gap.
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
