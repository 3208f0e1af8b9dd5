"""The composed jobs of a sweep: the product of the values of all keys with several values, and further lines."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain, product
from pathlib import Path

from hydra.core.override_parser.types import Override

from lightning_llm.base.errors import ConfigError, Problem
from lightning_llm.base.terminal import Waiting
from lightning_llm.config.compose import COMPOSITION_ERRORS, Composer, compose_one, open_composer, recipe_sweep
from lightning_llm.config.overrides import MOST_JOBS, parse_overrides, read_overrides, values_of
from lightning_llm.config.redact import redact_uri
from lightning_llm.config.schema import Config
from lightning_llm.config.schema.sweep import SweepConfig
from lightning_llm.config.schema.validation import ParsedConfig


def compose_sweep(overrides: Sequence[str], config_dir: Path | None = None) -> list[tuple[list[str], Config]]:
    """Return (overrides that distinguish the job, its config) for every job of a sweep, in run order.

    Jobs are the product of all `a=1,2`, including the preset's `hydra.sweeper.params`, followed by the product of each
    line of its `sweep.also`. Overrides replace the preset's values of the same key in both.

    Raises:
        ConfigError: with the problems of all jobs, without duplicates.
    """
    read = read_sweep(overrides, config_dir)
    if problems := dict.fromkeys(problem for _, reading in read for problem in reading.problems):
        raise ConfigError(problems)
    return [(arguments, reading.checked()) for arguments, reading in read]


def read_sweep(overrides: Sequence[str], config_dir: Path | None = None) -> list[tuple[list[str], ParsedConfig]]:
    """Return the jobs as `compose_sweep`, but each with its problems instead of raising them.

    Raises:
        ConfigError: no part of a job is valid, or there are too many jobs.
    """
    with open_composer(config_dir) as composer:
        typed, problems = read_overrides(overrides)
        keys = _sweep_keys(typed, composer)
        groups = _of_search(_with_seeds(_groups(typed, composer), typed, keys), keys)
        jobs: list[tuple[list[str], ParsedConfig]] = []
        with Waiting("composing the sweep's jobs") as waiting:
            for arguments in chain.from_iterable(product(*each) for each in _choices(groups, composer)):
                waiting.tell(len(jobs))
                chosen = [redact_uri(word) for word in arguments if word not in overrides]
                jobs.append((chosen, compose_one(parse_overrides(arguments), composer, problems)))
        return jobs


def read_sweep_keys(overrides: Sequence[str], config_dir: Path | None = None) -> SweepConfig:
    """Return the `sweep` keys of the preset and the overrides. Raises ConfigError with all problems."""
    with open_composer(config_dir) as composer:
        return _sweep_keys(parse_overrides(overrides), composer)


def read_space(overrides: Sequence[str], config_dir: Path | None = None) -> dict[str, Override]:
    """Return {key: override with several values}, from preset and overrides: the space of a search.

    Raises:
        ConfigError: an argument is not an override.
    """
    with open_composer(config_dir) as composer:
        typed = parse_overrides(overrides)
        params, _ = recipe_sweep(typed, composer)
        return {each.key_or_group: each for each in [*parse_overrides(params), *typed] if each.is_sweep_override()}


def _sweep_keys(typed: Sequence[Override], composer: Composer) -> SweepConfig:
    """Return the keys below `sweep` of the tree composed from `typed`. Raises ConfigError.

    If it does not compose, return the defaults; each job then reports the reason.
    """
    try:
        return composer.compose([each for each in typed if not each.is_sweep_override()]).sweep_keys()
    except COMPOSITION_ERRORS:
        return SweepConfig()


def _groups(typed: Sequence[Override], composer: Composer) -> list[list[Override]]:
    """Return the overrides of each product of a sweep: the main one, and one per line of `sweep.also`.

    Other overrides replace values in lines of a preset, but not in lines that are given as an override.
    """
    params, also = recipe_sweep(typed, composer)
    plain = [each for each in typed if not each.is_sweep_override()]
    over = [] if any(each.key_or_group == "sweep.also" for each in typed) else typed
    lines = [[*plain, *_typed_first(parse_overrides(line.split()), over)] for line in also]
    return [[*parse_overrides(params), *typed], *lines]


def _typed_first(line: list[Override], typed: Sequence[Override]) -> list[Override]:
    """Return `line` with overrides in place of its sweeps over the same key; its single values stay."""
    choices = {each.key_or_group: each for each in typed}
    return [choices.get(each.key_or_group, each) if each.is_sweep_override() else each for each in line]


def _with_seeds(groups: list[list[Override]], typed: Sequence[Override], keys: SweepConfig) -> list[list[Override]]:
    """Return the products of a sweep with the number of seeds of the last declared look, if there are looks.

    Given seeds are used in order; otherwise they count from the given one, or from 0, regardless of the preset. Lines
    of `sweep.also` keep their own seeds, since A/A runs may be fewer.

    Raises:
        ConfigError: fewer seeds are given, or the looks need more jobs than a sweep may have.
    """
    if keys.until is None:
        return groups
    needed = keys.looks_within_budget[-1]
    if needed > MOST_JOBS:
        text = f"has its last look at {needed:,} seeds, and a sweep has at most {MOST_JOBS:,} jobs. Give fewer."
        raise ConfigError(Problem("sweep.max_seeds" if keys.max_seeds else "sweep.looks", text))
    are_typed = any(each.key_or_group == "seed" and each.is_sweep_override() for each in typed)
    return [_group_with_seeds(group, needed, are_typed, is_line=place > 0) for place, group in enumerate(groups)]


def _group_with_seeds(group: list[Override], needed: int, are_typed: bool, *, is_line: bool) -> list[Override]:
    given = [each for each in group if each.key_or_group == "seed"]
    several = [each for each in given if each.is_sweep_override()]
    if several and is_line:
        return group
    if several and are_typed:
        count = len(values_of(several[-1], needed)) if several[-1].is_discrete_sweep() else 0
        if count < needed:
            text = (
                f"has {count} values, and the last declared look is at {needed} seeds. Omit seed (0, 1, "
                f"2, ...), give that many, or use fewer looks (sweep.max_seeds={max(count, 2)})."
            )
            raise ConfigError(Problem("seed", text))
        return group
    first = given[-1].value() if given and not several else 0
    if not isinstance(first, int):
        return group  # each job reports this
    seeds = parse_overrides([f"seed={','.join(str(first + n) for n in range(needed))}"])
    return [*(each for each in group if each.key_or_group != "seed"), *seeds]


def _of_search(groups: list[list[Override]], keys: SweepConfig) -> list[list[Override]]:
    """Return the products of a sweep; for a search by Optuna only the product of its seeds, with fixed values.

    Raises:
        ConfigError: the search has `sweep.also`.
    """
    if keys.search != "optuna":
        return groups
    if len(groups) > 1:
        raise ConfigError(Problem("sweep.also", "has further jobs, and a search chooses its own. Omit it."))
    return [[each for each in groups[0] if each.key_or_group == "seed" or not each.is_sweep_override()]]


def _choices(groups: list[list[Override]], composer: Composer) -> list[list[list[str]]]:
    """Return the values of each override of each product.

    Raises:
        ConfigError: a value is given twice, or there are more jobs than `MOST_JOBS`.
    """
    choices = [[composer.choices(each) for each in group] for group in groups]
    if twice := dict.fromkeys(_twice(groups, choices)):
        raise ConfigError(twice)
    jobs = sum(math.prod(map(len, each)) for each in choices)
    if jobs <= MOST_JOBS:
        return choices
    several = {
        parsed.key_or_group: len(values)
        for group, each in zip(groups, choices, strict=True)
        for parsed, values in zip(group, each, strict=True)
        if len(values) > 1
    }
    most = f"more than {MOST_JOBS:,}"
    counts = ", ".join(f"{key} {most if count > MOST_JOBS else f'{count:,}'}" for key, count in several.items())
    text = f"would have {most} jobs (values: {counts}). Give fewer, or split it into several sweeps."
    raise ConfigError(Problem("sweep", text))


def _twice(groups: list[list[Override]], choices: list[list[list[str]]]) -> Iterator[Problem]:
    for group, each in zip(groups, choices, strict=True):
        for parsed, values in zip(group, each, strict=True):
            for word in (word for word, count in Counter(values).items() if count > 1):
                value = word.partition("=")[2]
                text = f"has {value} more than once, which would repeat the same job. Give it once."
                yield Problem(parsed.key_or_group, text)
