"""What Optuna, `search.json` and the reader are told of a search's trials."""

import math
from statistics import fmean
from typing import TYPE_CHECKING, Any

from lightning_llm.sweep.search.curves import tail_gap
from lightning_llm.sweep.search.space import words_of
from lightning_llm.sweep.search.trials import Search
from lightning_llm.tracking.reading import read_run
from lightning_llm.tracking.sweep_file import ENDED_AT, write_results

if TYPE_CHECKING:
    from optuna import Study


def tell(study: "Study", search: Search, number: int, pruned: tuple[int, float] | None) -> None:
    """Tell Optuna the mean gap of a trial, or that it was pruned, with the paired curve as intermediate values."""
    from optuna.trial import Trial, TrialState

    frozen = study.trials[number]
    trial = Trial(study, frozen._trial_id)
    for step, gap in search.curve(search.trials[number], len(search.baseline)).items():
        if pruned is None:
            trial.report(gap, step)
    if pruned is not None:
        trial.report(pruned[1], pruned[0])
        study.tell(number, state=TrialState.PRUNED)
        search.pruned[number] = pruned
        print(
            f"trial  {number} {' '.join(words_of(frozen.params))}: pruned at step {pruned[0]}, gap {pruned[1]:+.4f}",
            flush=True,
        )
        return
    pairs = zip(search.jobs_of(search.trials[number]), search.jobs_of(search.baseline), strict=True)
    keys = search.keys
    gaps = [tail_gap(read_run(own.folder), read_run(base.folder), keys.metric, keys.tail) for own, base in pairs]
    study.tell(number, fmean(gaps))
    print(f"trial  {number} {' '.join(words_of(frozen.params))}: gap {fmean(gaps):+.4f}", flush=True)


def write_trials(study: "Study", search: Search) -> None:
    """Write what became of the trials to the sweep's folder, for `compare`."""
    rows = [
        {"trial": each.number, "state": each.state.name.lower(), "values": each.params, "gap": each.value,
         "jobs": [job.number for job in search.jobs_of(search.trials.get(each.number, []))],
         ENDED_AT: _ended_at(search.pruned.get(each.number))}
        for each in study.trials
    ]  # fmt: skip
    write_results(search.first.folder, rows, search.not_judged)


def _ended_at(pruned: tuple[int, float] | None) -> dict[str, Any] | None:
    """Return where a pruned trial's gap was taken; of any other, it was over the tail."""
    if pruned is None:
        return None
    step, gap = pruned
    return {"step": step, "gap": gap if math.isfinite(gap) else None}


def print_best(study: "Study") -> None:
    """Print the three trials of the least gap."""
    whole_trials = sorted(
        (each for each in study.trials if each.state.name == "COMPLETE"), key=lambda each: each.value or 0.0
    )
    for each in whole_trials[:3]:
        print(f"best   trial {each.number}: gap {each.value:+.4f} to the baseline, {' '.join(words_of(each.params))}")
