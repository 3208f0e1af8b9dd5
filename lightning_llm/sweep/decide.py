"""`sweep.until=decided`: seeds look by look, until each recipe's verdict is decided or the declared looks are spent.

Which jobs come next follows from the runs in the sweep's folder and the design in its `sweep.json` alone
(`compare.sequential.verdicts`). So the same command goes on after any end, repeats nothing, and no look is spent
twice.
"""

import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace

from lightning_llm.compare.comparison import Comparison
from lightning_llm.compare.judge import compare_runs
from lightning_llm.compare.sequential.design import Design
from lightning_llm.compare.verdict_text import line_of
from lightning_llm.config.schema.sweep import SweepConfig
from lightning_llm.run.launch.relay import signals_passed_on
from lightning_llm.sweep.declared import Composed, Definition, declared_sweep
from lightning_llm.sweep.elsewhere import await_elsewhere, runs_elsewhere
from lightning_llm.sweep.ending import close
from lightning_llm.sweep.job_locks import Outcome, one_at_a_time
from lightning_llm.sweep.run import left_to_do, opened, start
from lightning_llm.tracking.reading import read_run
from lightning_llm.tracking.run_state import SETTLED, state_of
from lightning_llm.tracking.sweep_definition import Job, Sweep, tracked, write_sweep
from lightning_llm.tracking.sweep_jobs import kind_of


@dataclass(frozen=True)
class Stage:
    """What a sequential sweep does next: `jobs`, none where it is at its end; what the last look found, if any yet."""

    jobs: tuple[Job, ...]
    comparison: Comparison | None = None


def run_until_decided(composed: Composed, keys: SweepConfig) -> int:
    """Run the jobs that each look needs, and look, until all is decided; return the exit code, as `sweep` does.

    Raises:
        ConfigError: the jobs or the folder do not fit the looks, before anything starts; or what a look cannot judge.
    """
    definition, design = declared_sweep(composed, keys)
    whole = definition()
    print(f"sweep  looks {design.words}; in {whole.folder}", flush=True)
    outcomes: list[Outcome] = []
    begun: tuple[Job, ...] = ()
    with signals_passed_on() as relay:
        while True:
            stage = next_stage(whole, design)
            _print_look(stage, design)
            if relay.received:  # as the last job that the look needed came to its end
                break
            todo = left_to_do(stage.jobs)
            if not todo and not await_elsewhere(stage.jobs, relay, "the next look needs it"):
                break
            if not todo:
                continue
            whole = _opened_for(definition, stage.jobs, whole.parent_run_id if outcomes else None)
            begun = _with_started(whole, stage.jobs)
            outcomes += start(_same(whole, todo), relay)
            if any(state_of(job.folder) not in SETTLED and not runs_elsewhere(job) for job in todo):
                break
    begun = begun or _with_started(whole, ())
    further = "another look" if stage.jobs else ""
    return close(replace(whole, jobs=begun), outcomes, relay.received, further=further)


def _opened_for(definition: Definition, jobs: Iterable[Job], parent_run_id: str | None) -> Sweep:
    """Return the sweep, its file written with the jobs that have begun and `jobs`; its parent run made if it has none.

    It is defined anew: another start of it may have given numbers by now.
    """
    if parent_run_id is None:
        parent_run_id = opened(lambda: _begun(definition(), jobs)).parent_run_id
        return tracked(definition(), parent_run_id)
    with one_at_a_time(definition().folder):
        whole = tracked(definition(), parent_run_id)
        write_sweep(_begun(whole, jobs))
    return whole


def _begun(whole: Sweep, further: Iterable[Job]) -> Sweep:
    return replace(whole, jobs=_with_started(whole, further))


def next_stage(whole: Sweep, design: Design) -> Stage:
    """Return the jobs that the next look needs and that are not settled, by all runs of the sweep that are."""
    first = design.seeds_at(design.looks[0])
    waiting = [job for job in whole.jobs if job.config.seed in first and state_of(job.folder) not in SETTLED]
    if waiting:
        return Stage(tuple(waiting))
    settled = [job for job in whole.jobs if state_of(job.folder) in SETTLED]
    comparison = compare_runs([read_run(job.folder) for job in settled], design.terms, design.baseline, design=design)
    kinds = {job.folder: kind_of(job.config) for job in whole.jobs}
    needed: dict[str, int] = {}
    paired: set[str] = set()
    for verdict in comparison.verdicts:
        for pair in verdict.family.recipes[verdict.name]:
            own = {kinds[pair.run.folder], kinds[pair.baseline.folder]}
            paired |= own
            if verdict.stage is not None and verdict.stage.coming is not None:
                needed |= {kind: max(needed.get(kind, 0), verdict.stage.coming.seeds) for kind in own}
    most = max(needed.values(), default=0)
    jobs = []
    for job in whole.jobs:
        kind = kinds[job.folder]
        count = needed.get(kind, 0) if kind in paired else most  # in no pair: A/A runs, which go on with the others
        if job.config.seed in design.seeds[:count] and state_of(job.folder) not in SETTLED:
            jobs.append(job)
    return Stage(tuple(jobs), comparison)


def _print_look(stage: Stage, design: Design) -> None:
    if stage.comparison is None:
        print(f"sweep  for look 1 of {len(design.looks)}, after {design.looks[0].seeds} seeds:", flush=True)
        return
    for verdict in stage.comparison.verdicts:
        print(f"look   {line_of(verdict)}", flush=True)
    for problem in stage.comparison.problems:
        print(f"note   {problem.key}: {problem.text}", file=sys.stderr)
    if not stage.jobs:
        decided = all(each.decision != "inconclusive" for each in stage.comparison.verdicts)
        text = "every verdict is decided" if decided else "no further look: some verdicts stay open"
        print(f"sweep  {text}", flush=True)


def _with_started(whole: Sweep, further: Iterable[Job]) -> tuple[Job, ...]:
    """Return the jobs that have begun, and `further` ones: a job that no look has asked for is not missing."""
    coming = {job.key for job in further}
    return tuple(job for job in whole.jobs if job.key in coming or state_of(job.folder) != "new")


def _same(whole: Sweep, jobs: Iterable[Job]) -> list[Job]:
    keys = {job.key for job in jobs}
    return [job for job in whole.jobs if job.key in keys]
