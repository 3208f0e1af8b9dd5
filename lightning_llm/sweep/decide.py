"""`sweep.until=decided`: run seeds look by look, until each verdict is decided or the declared looks are used up.

The next jobs only depend on the runs in the sweep's folder and the design in its `sweep.json`
(`compare.sequential_verdicts`). So the same command continues after any interruption, repeats nothing, and no look is
spent twice. `declared_sweep` reports all problems of the declaration before anything runs.
"""

import json
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from lightning_llm.base.errors import ConfigError, Problem, did_you_mean
from lightning_llm.base.signals import signals_passed_on
from lightning_llm.compare.comparison import Comparison
from lightning_llm.compare.judge import compare_runs
from lightning_llm.compare.looks import Design, declare, read_design
from lightning_llm.compare.runs.factor import choose_factor
from lightning_llm.compare.runs.losses import LOSS
from lightning_llm.compare.runs.pairing import ComparisonGroup, pair_runs
from lightning_llm.compare.terms import Terms
from lightning_llm.compare.token_margin import NEEDS, Unplanned, unplanned
from lightning_llm.compare.verdict_text import line_of
from lightning_llm.config.config_hash import flatten
from lightning_llm.config.schema import Config
from lightning_llm.config.schema.sweep import SweepConfig, read_margin
from lightning_llm.sweep.ending import close
from lightning_llm.sweep.jobs import left_to_do, opened, start
from lightning_llm.sweep.progress import Outcome, await_elsewhere, one_at_a_time, runs_elsewhere
from lightning_llm.tracking.reading import Run, read_run
from lightning_llm.tracking.run_state import SETTLED, state_of
from lightning_llm.tracking.sweep_definition import Job, Sweep, SweepSource, define, tracked, write_sweep
from lightning_llm.tracking.sweep_file import DESIGN, FILE, kind_of

HIGH_PRECISION = "val_loss_high_precision"
LENGTH = "trainer.max_steps"
Composed = tuple[list[tuple[list[str], Config]], str | None, SweepSource]
Definition = Callable[[], Sweep]


@dataclass(frozen=True)
class NextJobs:
    """The jobs that a sequential sweep needs next, () at its end, and the result of its last look, None before it."""

    jobs: tuple[Job, ...]
    comparison: Comparison | None = None


def run_until_decided(composed: Composed, keys: SweepConfig) -> int:
    """Run the jobs of each look and judge them, until every verdict is decided; return the exit code, as `train` does.

    Raises:
        ConfigError: the jobs or the folder do not match the looks (before anything starts), or a look cannot be judged.
    """
    definition, design = declared_sweep(composed, keys)
    whole = definition()
    print(f"sweep  looks {design.text}; in {whole.folder}", flush=True)
    outcomes: list[Outcome] = []
    begun: tuple[Job, ...] = ()
    with signals_passed_on() as relay:
        while True:
            coming = next_jobs(whole, design)
            _print_look(coming, design)
            if relay.received:  # the signal may come with the end of the last job
                break
            todo = left_to_do(coming.jobs)
            if not todo and not await_elsewhere(coming.jobs, relay, "the next look needs it"):
                break
            if not todo:
                continue
            whole = _opened_for(definition, coming.jobs, whole.parent_run_id if outcomes else None)
            begun = _with_started(whole, coming.jobs)
            outcomes += start(_same(whole, todo), relay)
            if any(state_of(job.folder) not in SETTLED and not runs_elsewhere(job) for job in todo):
                break
    begun = begun or _with_started(whole, ())
    further = "another look" if coming.jobs else ""
    return close(replace(whole, jobs=begun), outcomes, relay.received, further=further)


def next_jobs(whole: Sweep, design: Design) -> NextJobs:
    """Return the jobs that the next look needs and that have not finished or diverged."""
    first = design.seeds_at(design.looks[0])
    waiting = [job for job in whole.jobs if job.config.seed in first and state_of(job.folder) not in SETTLED]
    if waiting:
        return NextJobs(tuple(waiting))
    settled = [job for job in whole.jobs if state_of(job.folder) in SETTLED]
    comparison = compare_runs([read_run(job.folder) for job in settled], design.terms, design.baseline, design=design)
    kinds = {job.folder: kind_of(job.config) for job in whole.jobs}
    needed: dict[str, int] = {}
    paired: set[str] = set()
    for verdict in comparison.verdicts:
        for pair in verdict.family.recipes[verdict.name]:
            own = {kinds[pair.run.folder], kinds[pair.baseline.folder]}
            paired |= own
            if verdict.sequential is not None and verdict.sequential.coming is not None:
                needed |= {kind: max(needed.get(kind, 0), verdict.sequential.coming.seeds) for kind in own}
    most = max(needed.values(), default=0)
    jobs = []
    for job in whole.jobs:
        kind = kinds[job.folder]
        count = needed.get(kind, 0) if kind in paired else most  # not in a pair: A/A runs
        if job.config.seed in design.seeds[:count] and state_of(job.folder) not in SETTLED:
            jobs.append(job)
    return NextJobs(tuple(jobs), comparison)


def _opened_for(definition: Definition, jobs: Iterable[Job], parent_run_id: str | None) -> Sweep:
    """Return the sweep after writing its file with `jobs` and those that have begun; creates a missing parent run.

    The sweep is defined again, because another start of it may have assigned numbers meanwhile.
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


def _with_started(whole: Sweep, further: Iterable[Job]) -> tuple[Job, ...]:
    """Return the jobs that have begun and `further` ones: a job that no look requested is not missing."""
    coming = {job.key for job in further}
    return tuple(job for job in whole.jobs if job.key in coming or state_of(job.folder) != "new")


def _same(whole: Sweep, jobs: Iterable[Job]) -> list[Job]:
    keys = {job.key for job in jobs}
    return [job for job in whole.jobs if job.key in keys]


def _print_look(coming: NextJobs, design: Design) -> None:
    if coming.comparison is None:
        print(f"sweep  for look 1 of {len(design.looks)}, after {design.looks[0].seeds} seeds:", flush=True)
        return
    for verdict in coming.comparison.verdicts:
        print(f"look   {line_of(verdict)}", flush=True)
    for problem in coming.comparison.problems:
        print(f"note   {problem.key}: {problem.text}", file=sys.stderr)
    if not coming.jobs:
        decided = all(each.decision != "inconclusive" for each in coming.comparison.verdicts)
        text = "every verdict is decided" if decided else "no further look: some verdicts stay open"
        print(f"sweep  {text}", flush=True)


def declared_sweep(composed: Composed, keys: SweepConfig) -> tuple[Definition, Design]:
    """Return (function that defines the sweep, design of its looks).

    The sweep has all jobs that the looks may need, seed by seed. The design is the one recorded in the sweep's folder,
    if there is one.

    Raises:
        ConfigError: there is nothing to decide, a recipe lacks seeds, or the folder has other looks.
    """
    jobs, name, typed = composed
    check_metric(keys.metric, [config for _, config in jobs])
    looks = keys.looks_within_budget
    nats, share = read_margin(keys.margin)
    terms = Terms(nats, keys.confidence, keys.metric, keys.tail, token_margin=share)
    seeds = tuple(dict.fromkeys(config.seed for _, config in jobs))[: looks[-1]]
    order = {seed: place for place, seed in enumerate(seeds)}
    jobs = sorted((job for job in jobs if job[1].seed in order), key=lambda job: order[job[1].seed])
    families = planned_families([config for _, config in jobs], seeds, keys.baseline)
    _check_margin(keys, terms, families, jobs, seeds)
    recipes = max(len(family.recipes) for family in families)
    design = declare(looks, seeds, terms, keys.spending, recipes, keys.baseline)
    definition = partial(define, jobs, name, typed, {DESIGN: design.as_data()})
    whole = definition()
    return definition, read_design(whole.declared, str(whole.folder / FILE)) or design


def _check_margin(
    keys: SweepConfig,
    terms: Terms,
    families: Sequence[ComparisonGroup],
    jobs: Sequence[tuple[list[str], Config]],
    seeds: Sequence[int],
) -> None:
    """Raise ConfigError if a margin in tokens cannot be determined, before its jobs are run."""
    found = unplanned(families, [_planned(config) for _, config in jobs], seeds, terms)
    overrides_of = {kind_of(config): own for own, config in jobs}
    problems = [
        Problem("sweep.margin", _what_to_plan(keys, each, overrides_of[str(each.baseline.folder)])) for each in found
    ]
    if terms.token_margin is not None and not keys.metric.startswith(LOSS):
        text = f"in tokens requires a loss as metric, but sweep.metric is {keys.metric}. Give the margin in its unit."
        problems = [Problem("sweep.margin", text)]
    if problems:
        raise ConfigError(problems)


def _what_to_plan(keys: SweepConfig, lacking: Unplanned, overrides: Sequence[str]) -> str:
    """Return the jobs that a margin in tokens lacks, and how to add them. `overrides`: those of a baseline job."""
    where = f" ({lacking.setting})" if lacking.setting else ""
    below, above = lacking.others
    own = [each for each in overrides if not each.startswith(("seed=", f"{LENGTH}="))]
    lines = [
        *keys.also,
        " ".join([*own, f"{LENGTH}={below},{above}"]),
    ]  # a typed value replaces all previous ones
    also = shlex.quote(f"sweep.also={json.dumps(lines, ensure_ascii=False)}")
    return (
        f"{keys.margin}{where} {NEEDS} at every seed of the looks, and these jobs have it at "
        f"{', '.join(map(str, lacking.there))} steps. Give {LENGTH}={below},{lacking.steps},{above} for all recipes, "
        f"or {also} for the baseline alone, or the margin in nats."
    )


def _planned(config: Config) -> Run:
    """Return the run of a job before it has run, with only its config."""
    flat = flatten(config.model_dump(mode="json"))
    return Run(Path(kind_of(config)), flat, {"status": "finished"}, typed=config)


def planned_families(configs: Sequence[Config], seeds: Sequence[int], baseline: str | None) -> list[ComparisonGroup]:
    """Return the comparison groups of the jobs with these `configs`, paired as `compare` does, for the first seed.

    Raises:
        ConfigError: there is no baseline, or a recipe or its baseline lacks one of `seeds`.
    """
    if len(parents := {config.branch_from for config in configs}) > 1:
        text = f"has {len(parents)} values, but seeds are added to one. Give one parent run, or remove sweep.until."
        raise ConfigError(Problem("branch_from", text))
    seeds_of: dict[str, set[int]] = {}
    for config in configs:
        seeds_of.setdefault(kind_of(config), set()).add(config.seed)
    if len(seeds_of) == 1:
        name = configs[0].precision.name
        example = f"precision=bf16,{name}" if name != "bf16" else "precision=bf16,mxfp8"
        text = f"has nothing to decide: all jobs have the same recipe. Add a baseline, for example {example}."
        raise ConfigError(Problem("sweep.until", text))
    first = [config for config in configs if config.seed == seeds[0]]
    runs = [_planned(config) for config in first]
    try:
        families, problems = pair_runs(runs, choose_factor(runs, baseline))
    except ConfigError as error:
        raise ConfigError(map(_of_a_sweep, error.problems)) from error
    for family in families:
        for label, (pair,) in family.recipes.items():
            both = seeds_of[str(pair.run.folder)] & seeds_of[str(pair.baseline.folder)]
            if lacking := sorted(set(seeds) - both):
                text = f"has no job, or no baseline, at seed {', '.join(map(str, lacking))}, which the looks need."
                problems.append(Problem(label, text))
    if not families and not problems:
        problems.append(Problem("sweep.until", "has nothing to decide: no recipe has a baseline."))
    if problems:
        raise ConfigError(problems)
    return families


def _of_a_sweep(problem: Problem) -> Problem:
    """Translate a problem of a comparison to the keys of the sweep that declares it."""
    if problem.key == "--baseline":
        return Problem("sweep.baseline", problem.text.replace("--baseline ", "sweep.baseline="))
    return Problem("sweep.until", f"has nothing to decide: {problem.text}")


def most_jobs(whole: Sweep, design: Design) -> tuple[int, int]:
    """Return the numbers of jobs of the first look, and of all looks if nothing is decided before the last."""
    first = design.seeds_at(design.looks[0])
    return sum(job.config.seed in first for job in whole.jobs), len(whole.jobs)


def check_metric(metric: str, configs: Iterable[Config]) -> None:
    """Raise ConfigError unless the validations of all jobs record `metric`."""
    known = set.intersection(*(set(_recorded(config)) for config in configs))
    if metric not in known:
        text = f"is '{metric}', which these jobs' validations do not record.{did_you_mean(metric, known)}"
        raise ConfigError(Problem("sweep.metric", f"{text} Available: {', '.join(sorted(known))}."))


def _recorded(config: Config) -> list[str]:
    return [LOSS, HIGH_PRECISION, *(f"{LOSS}/{name}" for name in config.data.sources)]
