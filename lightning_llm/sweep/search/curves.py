"""Curves of a search's runs while they run, paired with the baseline's of the same seed; and ending runs by them."""

import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean, median

from lightning_llm.base.errors import ConfigError
from lightning_llm.compare.runs.losses import tail_of
from lightning_llm.run.launch.relay import Relay
from lightning_llm.tracking.reading import Run, read_run
from lightning_llm.tracking.sweep_definition import Job


def run_in(folder: Path) -> Run | None:
    """Return the run in `folder` as far as it has come, None where it has not begun, or its files are half written."""
    if not (folder / "config.yaml").is_file():
        return None
    try:
        return read_run(folder)
    except ConfigError:  # a line that is being written; the next look reads it
        return None


def curve_of(folder: Path, metric: str) -> dict[int, float]:
    """Return {step: loss} of the validations of the run in `folder` so far."""
    run = run_in(folder)
    return dict(run.validations.get(metric, {})) if run is not None else {}


def paired_curve(runs: Sequence[Path], baselines: Sequence[Path], metric: str) -> dict[int, float]:
    """Return {step: mean over the pairs of the gap to the baseline} where all of `runs` have a validation.

    A step at which one is not finite, or the baseline has none, is an infinite gap, or left out.
    """
    pairs = [(curve_of(run, metric), curve_of(base, metric)) for run, base in zip(runs, baselines, strict=True)]
    if not pairs:
        return {}
    common = set.intersection(*(set(own) & set(base) for own, base in pairs))
    gaps = {step: fmean(own[step] - base[step] for own, base in pairs) for step in sorted(common)}
    return {step: gap if math.isfinite(gap) else math.inf for step, gap in gaps.items()}


def tail_gap(run: Run, baseline: Run, metric: str, share: float) -> float:
    """Return the gap of a pair over the tail, as `compare` takes it; infinite where the run lost its loss."""
    if run.diverged or baseline.diverged:
        return math.inf
    tail = tail_of([run, baseline], metric, share)
    gap = tail.of(run) - tail.of(baseline) if tail else math.inf
    return gap if math.isfinite(gap) else math.inf


def pruned_at(
    curve: Mapping[int, float], others: Sequence[Mapping[int, float]], first_step: int, startup: int
) -> tuple[int, float] | None:
    """Return (step, the gap there) of the first validation at which a trial is to be ended, None where it goes on.

    By the median rule (D. Golovin et al., "Google Vizier", KDD 2017, section 3.2.2) on paired gaps: it ends where its
    gap is above the median of those that whole trials, `others`, had at the same step. Not before `first_step`, and
    not by fewer than `startup` of them.
    """
    for step, gap in sorted(curve.items()):
        known = [other[step] for other in others if step in other]
        if step >= first_step and len(known) >= startup and gap > median(known):
            return step, gap
    return None


SECONDS = 0.5
"""Between two looks."""


@contextmanager
def watched(jobs: Sequence[Job], is_over: Callable[[Job], bool], relay: Relay) -> Iterator[None]:
    """Stop each of `jobs` that is running once `is_over` says so, while the context lasts; raise what that raises."""
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
