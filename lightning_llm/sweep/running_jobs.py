"""Losses of a search's jobs while they run, the rules that decide which jobs to stop, and stopping them.

A search by Optuna stops trials by the median rule (`pruned_at`), on gaps to the baseline of the same seed.

A halving stops recipes at rungs (`worse_than_best`). By rank alone, noise would decide how often a recipe as good as
the best is dropped. Here a recipe is stopped only if the interval of its gap to the current best is above the margin:
paired by seed, variances pooled as for a verdict. The interval is Dunnett's, with the best of the rung as the baseline,
at 1 - (1 - confidence) / rungs. A recipe with a true loss at the rung within the margin of every other's is stopped at
a rung with a probability of at most half of that error: only if its estimate exceeds one of the others by more than the
margin. Dunnett's critical value bounds this event with the recipe itself as the control, whichever of the others is
then the best.
"""

import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median

import numpy as np

from lightning_llm.base.errors import ConfigError
from lightning_llm.base.signals import Relay
from lightning_llm.compare.runs.losses import tail_of
from lightning_llm.compare.statistics.intervals import simultaneous_intervals
from lightning_llm.config.schema.sweep import SweepConfig
from lightning_llm.tracking.reading import Run, read_run
from lightning_llm.tracking.sweep_definition import Job


def run_in(folder: Path) -> Run | None:
    """Return the run in `folder` with its step metrics so far; None if it has not begun or a file is being written."""
    if not (folder / "config.yaml").is_file():
        return None
    try:
        return read_run(folder)
    except ConfigError:  # a line is being written; read it at the next poll
        return None


def curve_of(folder: Path, metric: str) -> dict[int, float]:
    """Return {step: value of `metric`} of the validations so far of the run in `folder`; {} if it has not begun."""
    run = run_in(folder)
    return dict(run.validations.get(metric, {})) if run is not None else {}


def paired_curve(runs: Sequence[Path], baselines: Sequence[Path], metric: str) -> dict[int, float]:
    """Return {step: mean gap of `runs` to their `baselines`} at the steps that all of them have validated.

    Both are folders of runs, in pairs of the same seed. The gap is infinite at a step with a non-finite loss.
    """
    pairs = [(curve_of(run, metric), curve_of(base, metric)) for run, base in zip(runs, baselines, strict=True)]
    if not pairs:
        return {}
    common = set.intersection(*(set(own) & set(base) for own, base in pairs))
    gaps = {step: fmean(own[step] - base[step] for own, base in pairs) for step in sorted(common)}
    return {step: gap if math.isfinite(gap) else math.inf for step, gap in gaps.items()}


def tail_gap(run: Run, baseline: Run, metric: str, share: float) -> float:
    """Return the gap in `metric` of a finished run to its baseline, averaged over the final `share` of the steps.

    As in `compare`. Infinite if a run diverged.
    """
    if run.diverged or baseline.diverged:
        return math.inf
    tail = tail_of([run, baseline], metric, share)
    gap = tail.of(run) - tail.of(baseline) if tail else math.inf
    return gap if math.isfinite(gap) else math.inf


def pruned_at(
    curve: Mapping[int, float], others: Sequence[Mapping[int, float]], first_step: int, startup: int
) -> tuple[int, float] | None:
    """Return (step, gap) of the first validation at which a trial should be stopped; None if it should continue.

    By the median rule (D. Golovin et al., "Google Vizier", KDD 2017, section 3.2.2) on paired gaps: a trial stops if
    its gap is above the median gap of the completed trials at the same step.

    Args:
        curve: {step: gap} of the trial.
        others: the curves of completed trials.
        first_step: first step at which the rule applies.
        startup: number of completed trials that the rule needs.
    """
    for step, gap in sorted(curve.items()):
        known = [other[step] for other in others if step in other]
        if step >= first_step and len(known) >= startup and gap > median(known):
            return step, gap
    return None


SECONDS = 0.5
"""Interval between two polls."""


@contextmanager
def watched(jobs: Sequence[Job], is_over: Callable[[Job], bool], relay: Relay) -> Iterator[None]:
    """Context in which each running job of `jobs` is stopped as soon as `is_over(job)` is true.

    A thread polls. An exception of `is_over` is raised when the context ends.
    """
    end = threading.Event()
    errors: list[BaseException] = []

    def look() -> None:
        over: set[int] = set()
        try:
            while not end.wait(SECONDS):
                for job in jobs:
                    if job.number not in over and relay.runs(job.number) and is_over(job):
                        over.add(job.number)
                        relay.stop(job.number)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=look, name="search", daemon=True)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()
    if errors:
        raise errors[0]


def losses_at(runs: Sequence[Sequence[Run | None]], step: int, keys: SweepConfig) -> np.ndarray:
    """Return the losses as of `step`, averaged over the tail of the first `step` steps: [recipes, seeds].

    NaN for a run that is None or has diverged. `runs`: for each recipe its runs by seed.
    """
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
    """Return the recipes to stop at a rung: {index: (index of the best, gap to it, low and high end of its interval)}.

    A recipe is stopped if its interval is above the margin, or if all its runs diverged (then its gap is infinite).

    Args:
        losses: result of `losses_at`, [recipes, seeds].
        keys: the `sweep` keys with margin and confidence.
        rungs: number of rungs, which share the error.
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
