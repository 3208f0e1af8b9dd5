"""Words -> the jobs of a sweep: the product of all that has several values, typed or of the recipe, each composed."""

from collections.abc import Sequence
from itertools import product
from pathlib import Path

from hydra.core.override_parser.types import Override

from lightning_llm.base.errors import ConfigError, Problem
from lightning_llm.base.terminal import Waiting
from lightning_llm.config.composition import COMPOSITION_ERRORS, Composer
from lightning_llm.config.one_run import compose_one, open_composer
from lightning_llm.config.overrides import choices_of, parse_overrides, read_overrides
from lightning_llm.config.redact import redact_uri
from lightning_llm.config.schema import Config
from lightning_llm.config.schema.strict import Reading
from lightning_llm.config.schema.sweep import SweepConfig
from lightning_llm.config.sweep_keys import choices_of_products, of_search, sweep_config, sweep_keys, with_seeds


def compose_sweep(overrides: Sequence[str], config_dir: Path | None = None) -> list[tuple[list[str], Config]]:
    """Return (what tells it from the others, config) of every job of a sweep, in the order they are to run.

    Jobs are the product of all `a=1,2`, those of the recipe's `hydra.sweeper.params` included, and then of each line of
    its `sweep.also`. What is typed takes the place of the recipe's choices for the same key, in both.

    Raises:
        ConfigError: with the problems of all jobs, each reported once.
    """
    read = read_sweep(overrides, config_dir)
    if problems := dict.fromkeys(problem for _, reading in read for problem in reading.problems):
        raise ConfigError(problems)
    return [(arguments, reading.checked()) for arguments, reading in read]


def read_sweep(overrides: Sequence[str], config_dir: Path | None = None) -> list[tuple[list[str], Reading]]:
    """Return what `compose_sweep` does, with the sound part of each job beside its problems.

    Raises:
        ConfigError: where nothing is left to go on with, or they are too many.
    """
    with open_composer(config_dir) as composer:
        typed, problems = read_overrides(overrides)
        groups = of_search(with_seeds(_groups(typed, composer), typed, keys := sweep_keys(typed, composer)), keys)
        jobs: list[tuple[list[str], Reading]] = []
        choices = (product(*each) for each in choices_of_products(groups, composer.search))
        with Waiting("composing the sweep's jobs") as waiting:
            for arguments in (arguments for product_of_one in choices for arguments in product_of_one):
                waiting.tell(len(jobs))
                chosen = [redact_uri(word) for word in arguments if word not in overrides]
                jobs.append((chosen, compose_one(parse_overrides(arguments), composer, problems)))
        return jobs


def read_sweep_keys(overrides: Sequence[str], config_dir: Path | None = None) -> SweepConfig:
    """Return the keys below `sweep`, of the recipe or typed. Raises ConfigError with all that is wrong with them."""
    with open_composer(config_dir) as composer:
        return sweep_keys(parse_overrides(overrides), composer)


def read_space(overrides: Sequence[str], config_dir: Path | None = None) -> dict[str, Override]:
    """Return the choices of a search by key, typed or of the recipe: what a sweep would take the product of.

    Raises:
        ConfigError: arguments that are no overrides.
    """
    with open_composer(config_dir) as composer:
        typed = parse_overrides(overrides)
        params, _ = recipe_sweep(typed, composer)
        return {each.key_or_group: each for each in [*parse_overrides(params), *typed] if each.is_sweep_override()}


def recipe_sweep(typed: Sequence[Override], composer: Composer) -> tuple[list[str], list[str]]:
    """Return the chosen recipe's `hydra.sweeper.params`, less those typed on the command line, and its `sweep.also`.

    Raises:
        ConfigError: several recipes are chosen, and one of them is a sweep.
    """
    chosen = [each for each in typed if each.key_or_group == "recipe"]
    if not chosen:
        return [], []
    for word in choices_of(chosen[-1], composer.search) if chosen[-1].is_sweep_override() else []:
        if any(recipe_sweep(parse_overrides([word]), composer)):
            text = (
                f"has several values, and {word} is a sweep itself, whose choices would be left out. Give that alone."
            )
            raise ConfigError(Problem("recipe", text))
    try:
        composed = composer.compose([each for each in typed if not each.is_sweep_override()])
    except COMPOSITION_ERRORS:
        return [], []  # the same composition follows for each job, and says there what is wrong
    keys = {each.key_or_group for each in typed}
    params = [f"{key}={value}" for key, value in composed.sweep_params.items() if key not in keys]
    return params, list(sweep_config(composed.tree).also)


def _groups(typed: Sequence[Override], composer: Composer) -> list[list[Override]]:
    """Return the overrides of each product that a sweep is made of: the first, and one per line of `sweep.also`.

    Lines that are typed are as they are; of those of a recipe what else is typed takes the place of their choices.
    """
    params, also = recipe_sweep(typed, composer)
    plain = [each for each in typed if not each.is_sweep_override()]
    over = [] if any(each.key_or_group == "sweep.also" for each in typed) else typed
    lines = [[*plain, *_typed_first(parse_overrides(line.split()), over)] for line in also]
    return [[*parse_overrides(params), *typed], *lines]


def _typed_first(line: list[Override], typed: Sequence[Override]) -> list[Override]:
    """Return `line` with typed choices in place of its own for the same key; what it sets to one value stays."""
    choices = {each.key_or_group: each for each in typed}
    return [choices.get(each.key_or_group, each) if each.is_sweep_override() else each for each in line]
