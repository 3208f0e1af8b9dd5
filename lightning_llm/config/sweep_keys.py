"""`sweep`, as it is composed: its keys, checked, and the seeds that declared looks need."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf
from pydantic import ValidationError

from lightning_llm.base.errors import ConfigError, Problem, did_you_mean
from lightning_llm.config.composition import COMPOSITION_ERRORS, Composer
from lightning_llm.config.overrides import MOST_JOBS, choices_of, parse_overrides, values_of
from lightning_llm.config.schema.sweep import READ_BY, SweepConfig


def sweep_keys(typed: Sequence[Override], composer: Composer) -> SweepConfig:
    """Return the keys below `sweep` of what `typed` composes to. Raises ConfigError with all that is wrong with them.

    Of several recipes none may be a sweep; and what does not compose is said of each job.
    """
    try:
        return sweep_config(composer.compose([each for each in typed if not each.is_sweep_override()]).tree)
    except COMPOSITION_ERRORS:
        return SweepConfig()


def sweep_config(tree: DictConfig) -> SweepConfig:
    """Return the node `sweep` of a composed tree, checked. Raises ConfigError."""
    node = tree.get("sweep")
    values: Any = {} if node is None else node
    if isinstance(node, DictConfig):
        values = OmegaConf.to_container(node, resolve=True)
    try:
        keys = SweepConfig.model_validate(values)
    except ValidationError as error:
        details = error.errors()
        wrong = {each["loc"][0] for each in details if len(each["loc"]) > 1}  # pydantic counts the sound items alone
        told = [each for each in details if each["type"] != "too_short" or each["loc"][0] not in wrong]
        raise ConfigError([_problem(each) for each in told]) from error
    if problems := [*_unread(keys), *_never_pruned(keys)]:
        raise ConfigError(problems)
    return keys


def _unread(keys: SweepConfig) -> Iterator[Problem]:
    """Yield each key that is given, in a recipe's file or typed, and that this kind of sweep does nothing with."""
    for key, kinds in READ_BY.items():
        if key not in keys.model_fields_set or getattr(keys, key) is None or keys.kind in kinds:
            continue
        here = f"with {keys.kind} nothing reads it" if keys.kind else "this sweep has neither looks nor a search"
        yield Problem(f"sweep.{key}", f"is of {' and '.join(kinds)}, and {here}. Leave it out.")


def _never_pruned(keys: SweepConfig) -> Iterator[Problem]:
    """Yield a number of whole trials, given and no usual one, that leaves none of a search to be pruned."""
    if keys.search != "optuna" or keys.pruning == "none" or keys.startup_trials < keys.trials:
        return
    if "startup_trials" not in keys.model_fields_set:  # a first look by few trials, which more of them may follow
        return
    text = (
        f"is {keys.startup_trials}, and of sweep.trials={keys.trials} none would be left to prune. Give fewer, more "
        "trials, or sweep.pruning=none."
    )
    yield Problem("sweep.startup_trials", text)


def _problem(details: Any) -> Problem:
    location = [str(part) for part in details["loc"]]
    key = ".".join(["sweep", *location])
    if details["type"] == "extra_forbidden":
        return Problem(key, f"unknown key.{did_you_mean(location[-1], list(SweepConfig.model_fields))}")
    if details["type"] == "value_error":
        return Problem(key, f"{details['msg'].removeprefix('Value error, ')}.")
    if details["type"] == "too_short":
        return Problem(key, "is empty. Give one value at least, or leave it out.")
    if details["type"] in ("tuple_type", "model_type") or "also" in location:
        example = "[0.25, 0.5]" if "rungs" in location else "[3, 4, 5]"
        shape = "a list of lines like 'precision=bf16 seed=0,1'" if "also" in location else f"a list: {example}"
        return Problem(key, f"must be {shape if location else 'a mapping of keys'}.")
    return Problem(key, f"is {details['input']!r}, must be {details['msg'].removeprefix('Input should be ')}.")


def with_seeds(groups: list[list[Override]], typed: Sequence[Override], keys: SweepConfig) -> list[list[Override]]:
    """Return the products of a sweep with as many seeds as the last of its declared looks has, if any are declared.

    Seeds that are typed are taken in their order; else they count from the one given, or from 0, whatever the recipe's
    file says. Lines of `sweep.also` keep their own: A/A runs may be fewer.

    Raises:
        ConfigError: fewer are typed than that, or the looks need more than one sweep may have jobs.
    """
    if keys.until is None:
        return groups
    needed = keys.looks_within_budget[-1]
    if needed > MOST_JOBS:
        text = f"the last look is after {needed:,} seeds, and one sweep has {MOST_JOBS:,} jobs at most. Give fewer."
        raise ConfigError(Problem("sweep.max_seeds" if keys.max_seeds else "sweep.looks", text))
    are_typed = any(each.key_or_group == "seed" and each.is_sweep_override() for each in typed)
    return [_with_seeds(group, needed, are_typed, is_line=place > 0) for place, group in enumerate(groups)]


def _with_seeds(group: list[Override], needed: int, are_typed: bool, *, is_line: bool) -> list[Override]:
    given = [each for each in group if each.key_or_group == "seed"]
    several = [each for each in given if each.is_sweep_override()]
    if several and is_line:
        return group
    if several and are_typed:
        count = len(values_of(several[-1], needed)) if several[-1].is_discrete_sweep() else 0
        if count < needed:
            text = (
                f"has {count} values, and the last declared look is after {needed} seeds. Leave seed out (0, 1, "
                f"2, ...), give as many, or fewer looks (sweep.max_seeds={max(count, 2)})."
            )
            raise ConfigError(Problem("seed", text))
        return group
    first = given[-1].value() if given and not several else 0
    if not isinstance(first, int):
        return group  # which is said of each job
    seeds = parse_overrides([f"seed={','.join(str(first + n) for n in range(needed))}"])
    return [*(each for each in group if each.key_or_group != "seed"), *seeds]


def of_search(groups: list[list[Override]], keys: SweepConfig) -> list[list[Override]]:
    """Return the products of a sweep; of a search by Optuna the one of its seeds, at what is given and not searched.

    Raises:
        ConfigError: it has further lines.
    """
    if keys.search != "optuna":
        return groups
    if len(groups) > 1:
        raise ConfigError(Problem("sweep.also", "has further jobs, and a search chooses its own. Leave it out."))
    return [[each for each in groups[0] if each.key_or_group == "seed" or not each.is_sweep_override()]]


def choices_of_products(groups: list[list[Override]], search: list[str]) -> list[list[list[str]]]:
    """Return the choices of each override of each product.

    Raises:
        ConfigError: one is there twice, or they make more jobs than `MOST_JOBS`: composing them would take minutes, and
            their start more.
    """
    choices = [[choices_of(each, search) for each in group] for group in groups]
    if twice := dict.fromkeys(_twice(groups, choices)):
        raise ConfigError(twice)
    jobs = sum(math.prod(map(len, each)) for each in choices)
    if jobs <= MOST_JOBS:
        return choices
    several = {
        parsed.key_or_group: len(words)
        for group, each in zip(groups, choices, strict=True)
        for parsed, words in zip(group, each, strict=True)
        if len(words) > 1
    }
    most = f"more than {MOST_JOBS:,}"
    counts = ", ".join(f"{key} {most if count > MOST_JOBS else f'{count:,}'}" for key, count in several.items())
    text = f"would have {most} jobs, and no sweep has as many (values: {counts}). Give fewer, or several sweeps."
    raise ConfigError(Problem("sweep", text))


def _twice(groups: list[list[Override]], choices: list[list[list[str]]]) -> Iterator[Problem]:
    for group, each in zip(groups, choices, strict=True):
        for parsed, words in zip(group, each, strict=True):
            for word in (word for word, count in Counter(words).items() if count > 1):
                value = word.partition("=")[2]
                text = f"has {value} more than once, and the same job would be run again. Give it once."
                yield Problem(parsed.key_or_group, text)
