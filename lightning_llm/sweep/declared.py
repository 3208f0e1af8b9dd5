"""The sweep of declared looks, as it is declared: which jobs they may need, and why some cannot be judged.

All that is wrong is said here, before anything runs.
"""

import json
import shlex
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from lightning_llm.base.errors import ConfigError, Problem
from lightning_llm.compare.runs.factor import choose_factor
from lightning_llm.compare.runs.losses import LOSS
from lightning_llm.compare.runs.pairing import Family, pair_runs
from lightning_llm.compare.sequential.design import Design, declare, read_design
from lightning_llm.compare.terms import Terms
from lightning_llm.compare.tokens.token_margin import NEEDS, Unplanned, unplanned
from lightning_llm.config.config_hash import flatten
from lightning_llm.config.schema import Config
from lightning_llm.config.schema.sweep import SweepConfig, read_margin
from lightning_llm.sweep.judged_metric import check_metric
from lightning_llm.tracking.reading import Run
from lightning_llm.tracking.sweep_definition import Sweep, Typed, define
from lightning_llm.tracking.sweep_file import DESIGN, FILE
from lightning_llm.tracking.sweep_jobs import kind_of

LENGTH = "trainer.max_steps"
Composed = tuple[list[tuple[list[str], Config]], str | None, Typed]
Definition = Callable[[], Sweep]


def declared_sweep(composed: Composed, keys: SweepConfig) -> tuple[Definition, Design]:
    """Return what defines the sweep of all jobs that its looks may need, seed by seed, and the design it is begun with.

    Raises:
        ConfigError: there is nothing to decide, a recipe lacks seeds, or the folder was begun with other looks.
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
    families: Sequence[Family],
    jobs: Sequence[tuple[list[str], Config]],
    seeds: Sequence[int],
) -> None:
    """Raise ConfigError where a margin in tokens will not be known, before anything is run for it."""
    found = unplanned(families, [_planned(config) for _, config in jobs], seeds, terms)
    words_of = {kind_of(config): words for words, config in jobs}
    problems = [
        Problem("sweep.margin", _what_to_plan(keys, each, words_of[str(each.baseline.folder)])) for each in found
    ]
    if terms.token_margin is not None and not keys.metric.startswith(LOSS):
        text = f"in tokens is one of a loss, and sweep.metric is {keys.metric}. Give it in its unit."
        problems = [Problem("sweep.margin", text)]
    if problems:
        raise ConfigError(problems)


def _what_to_plan(keys: SweepConfig, lacking: Unplanned, words: Sequence[str]) -> str:
    """Return which jobs a margin in tokens lacks, and how to give them. `words`: of a job of the baseline."""
    where = f" ({lacking.setting})" if lacking.setting else ""
    below, above = lacking.others
    own = [word for word in words if not word.startswith(("seed=", f"{LENGTH}="))]
    lines = [
        *keys.also,
        " ".join([*own, f"{LENGTH}={below},{above}"]),
    ]  # what is typed takes the place of all there were
    also = shlex.quote(f"sweep.also={json.dumps(lines, ensure_ascii=False)}")
    return (
        f"{keys.margin}{where} {NEEDS} at every seed of the looks, and these jobs have it at "
        f"{', '.join(map(str, lacking.there))} steps. Give {LENGTH}={below},{lacking.steps},{above} for all recipes, "
        f"or {also} for the baseline alone, or the margin in nats."
    )


def _planned(config: Config) -> Run:
    """Return the run of a job as it will be, with nothing but its config."""
    flat = flatten(config.model_dump(mode="json"))
    return Run(Path(kind_of(config)), flat, {"status": "finished"}, typed=config)


def planned_families(configs: Sequence[Config], seeds: Sequence[int], baseline: str | None) -> list[Family]:
    """Return how jobs of these configs will be judged together: as `compare` would pair those of the first seed.

    Raises:
        ConfigError: nothing would be held against a baseline, or a recipe or its baseline lacks one of `seeds`.
    """
    if len(trunks := {config.branch_from for config in configs}) > 1:
        text = f"has {len(trunks)} values, and seeds are added to one trunk. Give one trunk, or a sweep without looks."
        raise ConfigError(Problem("branch_from", text))
    seeds_of: dict[str, set[int]] = {}
    for config in configs:
        seeds_of.setdefault(kind_of(config), set()).add(config.seed)
    if len(seeds_of) == 1:
        name = configs[0].precision.name
        beside = f"precision=bf16,{name}" if name != "bf16" else "precision=bf16,mxfp8"
        text = f"has nothing to decide: all jobs are of one recipe, and a baseline is lacking beside it, say {beside}."
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
                text = f"has no job at seed {', '.join(map(str, lacking))}, which the looks need, or no baseline there."
                problems.append(Problem(label, text))
    if not families and not problems:
        problems.append(Problem("sweep.until", "has nothing to decide: no recipe has a baseline to be held against."))
    if problems:
        raise ConfigError(problems)
    return families


def _of_a_sweep(problem: Problem) -> Problem:
    """Return what is wrong with a comparison as what is wrong with the keys of the sweep that declares it."""
    if problem.key == "--baseline":
        return Problem("sweep.baseline", problem.text.replace("--baseline ", "sweep.baseline="))
    return Problem("sweep.until", f"has nothing to decide: {problem.text}")


def most_jobs(whole: Sweep, design: Design) -> tuple[int, int]:
    """Return the number of jobs of the first look, and of all looks if nothing is decided before the last."""
    first = design.seeds_at(design.looks[0])
    return sum(job.config.seed in first for job in whole.jobs), len(whole.jobs)
