"""Curves of a search's running jobs, paired with the baseline's of the same seed, and stopping jobs by them."""

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
    """Return the run in `folder` as far as it has come, None if it has not begun or its files are incomplete."""
    if not (folder / "config.yaml").is_file():
        return None
    try:
        return read_run(folder)
    except ConfigError:  # a line is being written; read it at the next poll
        return None


def curve_of(folder: Path, metric: str) -> dict[int, float]:
    """Return {step: loss} of the validations of the run in `folder` so far."""
    run = run_in(folder)
    return dict(run.validations.get(metric, {})) if run is not None else {}


def paired_curve(runs: Sequence[Path], baselines: Sequence[Path], metric: str) -> dict[int, float]:
    """Return {step: mean gap over the pairs to the baseline} at steps at which all of `runs` have a validation.

    The gap is infinite at a step with a non-finite loss; steps without a baseline validation are left out.
    """
    pairs = [(curve_of(run, metric), curve_of(base, metric)) for run, base in zip(runs, baselines, strict=True)]
    if not pairs:
        return {}
    common = set.intersection(*(set(own) & set(base) for own, base in pairs))
    gaps = {step: fmean(own[step] - base[step] for own, base in pairs) for step in sorted(common)}
    return {step: gap if math.isfinite(gap) else math.inf for step, gap in gaps.items()}


def tail_gap(run: Run, baseline: Run, metric: str, share: float) -> float:
    """Return the gap of a pair over the tail, as in `compare`; infinite if a run diverged."""
    if run.diverged or baseline.diverged:
        return math.inf
    tail = tail_of([run, baseline], metric, share)
    gap = tail.of(run) - tail.of(baseline) if tail else math.inf
    return gap if math.isfinite(gap) else math.inf


def pruned_at(
    curve: Mapping[int, float], others: Sequence[Mapping[int, float]], first_step: int, startup: int
) -> tuple[int, float] | None:
    """Return (step, gap) of the first validation at which a trial should be stopped, None if it continues.

    By the median rule (D. Golovin et al., "Google Vizier", KDD 2017, section 3.2.2) on paired gaps: it stops if its gap
    is above the median of those of completed trials, `others`, at the same step. Not before `first_step`, and not with
    fewer than `startup` of them.
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
    """Stop each running job of `jobs` once `is_over` is true, while the context lasts; reraises its exceptions."""
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
