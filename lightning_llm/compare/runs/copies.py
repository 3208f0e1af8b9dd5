"""Runs that are copies of another under another seed or config, and would count as runs of their own."""

import math
from collections.abc import Callable, Hashable, Iterable, Sequence

from lightning_llm.base.errors import Problem
from lightning_llm.compare.runs.losses import LOSS
from lightning_llm.config.config_hash import frozen_values, may_move
from lightning_llm.tracking.reading import Run

REMEDY = "None of them is used: which is the original cannot be known. Remove the copy, or name the sound runs alone."


def without_copies(runs: Sequence[Run]) -> tuple[list[Run], list[Problem]]:
    """Return the runs without those that share an id or all losses with another that it cannot be, and why.

    A run id belongs to one run, so to one seed and one config as far as it may not change on resume. Runs of several
    seeds have other weights and other data, and never the same losses throughout. A copy that is the same in all of
    this is no problem: of equal runs the newest counts.
    """
    found: dict[int, Problem] = {}
    for one, other in _contradicting(runs, _run_id, _frozen):
        text = f"has the run id of {other.name} ({str(_run_id(one))[:8]}) and another seed or config. {REMEDY}"
        found.setdefault(id(one), Problem(str(one.folder), text))
    for one, other in _contradicting(runs, _curve, lambda run: str(run.seed)):
        text = f"has all losses of {other.name}, which ran at seed {other.seed} and not {one.seed}. {REMEDY}"
        found.setdefault(id(one), Problem(str(one.folder), text))
    return [run for run in runs if id(run) not in found], list(found.values())


def _contradicting(
    runs: Iterable[Run], shared: Callable[[Run], Hashable], own: Callable[[Run], str]
) -> Iterable[tuple[Run, Run]]:
    """Yield each run with another that has the same of what is `shared`, not None, and another value of `own`."""
    groups: dict[Hashable, list[Run]] = {}
    for run in runs:
        if (key := shared(run)) is not None:
            groups.setdefault(key, []).append(run)
    for group in groups.values():
        if len(group) < 2:
            continue
        values = [own(run) for run in group]
        for run, value in zip(group, values, strict=True):
            others = (other for other, its in zip(group, values, strict=True) if its != value)
            if (other := next(others, None)) is not None:
                yield run, other


def _run_id(run: Run) -> str | None:
    found = run.summary.get("run_id")
    return found if isinstance(found, str) else None


def _frozen(run: Run) -> str:
    return str(sorted((k, str(v)) for k, v in frozen_values(run.config).items() if not may_move(k)))


def _curve(run: Run) -> Hashable:
    losses = run.validations.get(LOSS, {})
    known = [*losses.values(), run.last_loss]
    return (tuple(sorted(losses.items())), run.last_loss) if losses and all(map(math.isfinite, known)) else None
