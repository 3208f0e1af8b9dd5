"""Which of the runs that were read a comparison can use: with an end, in one metric, and the newest of the same."""

import json
from collections.abc import Sequence

from lightning_llm.base.errors import Problem
from lightning_llm.config.config_hash import NOT_IDENTITY, below
from lightning_llm.tracking.reading import Run, facts


def why_incomparable(usable: Sequence[Run], metric: str) -> Problem | None:
    """Return why finished runs cannot be held against each other by `metric` at all, None where they can."""
    if len(usable) < 2:
        text = f"{len(usable)} finished run{'' if len(usable) == 1 else 's'}: a verdict needs a baseline and another."
        return Problem("RUN", text)
    measured = [run for run in usable if metric in run.validations]
    if not measured:
        known = ", ".join(sorted({key for run in usable for key in run.validations})) or "none at all"
        return Problem("--metric", f"no run has a validation of '{metric}'. These runs' validations have: {known}.")
    measured_on = {run.evaluated_on.get(metric, "") for run in measured}
    if len(measured_on) > 1:
        text = f"'{metric}' was not measured on the same in all runs: {'; '.join(sorted(measured_on))}. Evaluate "
        return Problem("--metric", f"{text}them alike, with one --limit and one --data.")
    return None


def split_usable(runs: Sequence[Run]) -> tuple[list[Run], list[Run]]:
    """Return the runs that reached their end, or lost their loss on the way, which is a result, too; and the others."""
    usable = [run for run in runs if run.finished or run.lost_its_loss]
    return usable, [run for run in runs if not (run.finished or run.lost_its_loss)]


def newest_of_same(runs: list[Run]) -> tuple[list[Run], list[str]]:
    """Return the runs without those made again in the same way to the same end, of which the newest counts.

    Made again in the same way to other losses (kernels whose sums depend on timing), both stay: an A/A pair.
    """
    newest: dict[str, Run] = {}
    for run in sorted(runs, key=lambda run: run.started_at):
        config = {key: value for key, value in run.config.items() if not below(key, NOT_IDENTITY)}
        same = (config, dict(facts(run)), not run.lost_its_loss and run.validations)
        newest[json.dumps(same, sort_keys=True, default=str)] = run
    kept = {id(run) for run in newest.values()}
    dropped = [run.name for run in runs if id(run) not in kept]
    notes = [f"Made again later to the same losses, so left out: {', '.join(dropped)}."] if dropped else []
    return [run for run in runs if id(run) in kept], notes
