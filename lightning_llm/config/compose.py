"""Command-line arguments and YAML files -> one checked `Config`, or every problem at once. Imports no torch.

Hydra composes; pydantic checks what came out. An override is forced into the composition (`a.b=1` as `++a.b=1`), so a
typo on the command line, behind `+` or inside a file arrives at the same check and gets the same answer.
"""

from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig

from lightning_llm.base.errors import ConfigError, Problem
from lightning_llm.config.composed_tree import compose_tree_of, not_composed
from lightning_llm.config.composition import COMPOSITION_ERRORS
from lightning_llm.config.one_run import compose_one, open_composer
from lightning_llm.config.overrides import parse_overrides, read_overrides, unknown_option
from lightning_llm.config.schema import Config
from lightning_llm.config.schema.strict import Reading
from lightning_llm.config.sweep_space import recipe_sweep
from lightning_llm.config.weight_folders import with_shape_of_weights


def compose_config(overrides: Sequence[str], config_dir: Path | None = None) -> Config:
    """Return the checked config of one run.

    Args:
        overrides: Hydra overrides as typed (`precision=bf16`, `trainer.max_steps=10`, `~callbacks.sample`).
        config_dir: a folder of further config groups (`DIR/recipe/mine.yaml`), searched behind the shipped ones.

    Raises:
        ConfigError: with every problem found: unknown groups' values, keys, types, unresolvable interpolations.
    """
    return read_composed(overrides, config_dir).checked()


def read_composed(overrides: Sequence[str], config_dir: Path | None = None) -> Reading:
    """Return what `compose_config` does, with the sound part beside the problems for the rules to go on with.

    Raises:
        ConfigError: where nothing is left to go on with.
    """
    with open_composer(config_dir) as composer:
        parsed, problems = read_overrides(overrides)
        if any(recipe_sweep(parsed, composer)):
            text = "this recipe is a sweep of several runs. Add -m: train -m runs it, plan -m lists it, "
            text += "config -m prints it."
            raise ConfigError([*problems, Problem("recipe", text)])
        if of_sweeps := [each.key_or_group for each in parsed if each.key_or_group.startswith("sweep.")]:
            text = "is of a sweep, and nothing in one run reads it. Add -m, or leave it out."
            raise ConfigError([*problems, *(Problem(key, text) for key in of_sweeps)])
        if several := [each.key_or_group for each in parsed if each.is_sweep_override()]:
            text = "has several values, which makes a sweep. Add -m, or give one (text with a comma: in quotes)."
            raise ConfigError([*problems, *(Problem(key, text) for key in several)])
        return compose_one(parsed, composer, problems)


def compose_tree(overrides: Sequence[str], config_dir: Path | None = None) -> tuple[DictConfig, dict[str, str]]:
    """Return what the overrides compose to, nothing resolved or checked, and the file chosen for each group.

    Raises:
        ConfigError: they do not compose.
    """
    with open_composer(config_dir) as composer:
        parsed = parse_overrides(overrides)
        if problems := [problem for each in parsed if (problem := unknown_option(each, composer.search))]:
            raise ConfigError(problems)
        try:
            return compose_tree_of(with_shape_of_weights(parsed), composer)
        except COMPOSITION_ERRORS as error:
            raise not_composed(error) from error


def typed_value(overrides: Sequence[str], key: str) -> str | None:
    """Return the one value that the overrides set `key` to, None where they do not, or to several."""
    found = [each for each in parse_overrides(overrides) if each.key_or_group == key and not each.is_sweep_override()]
    return str(found[-1].value()) if found else None
