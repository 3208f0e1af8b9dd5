"""Read a precision recipe given as a name, a file, a mapping or a config object, outside of a composed config."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from lightning_llm.base.errors import ConfigError, Problem, did_you_mean
from lightning_llm.config.derived_keys import fill_named_casts
from lightning_llm.config.recipes import ENDING, OTHER_ENDING, option_files
from lightning_llm.config.schema.precision import PrecisionConfig
from lightning_llm.config.schema.validation import problem_of
from lightning_llm.config.yaml_file import read_mapping
from lightning_llm.precision.recipe.lint import lint

RecipeSource = str | os.PathLike[str] | Mapping[str, Any] | PrecisionConfig
"""Name of a shipped recipe, path of a YAML file, keys of a recipe, or a recipe."""
KEY = "recipe"


def read_recipe(source: RecipeSource) -> PrecisionConfig:
    """Return the checked recipe of `source`.

    Raises:
        ConfigError: there is no such recipe or file, or all problems of its keys, lint rules included.
    """
    recipe = source if isinstance(source, PrecisionConfig) else _validated(*_values(source))
    if problems := lint(recipe):
        raise ConfigError(problems)
    return recipe


def _values(source: Any) -> tuple[dict[str, Any], str]:
    """Return the keys that `source` has, and the recipe's name if they have none."""
    if isinstance(source, Mapping):
        return dict(OmegaConf.to_container(source)) if isinstance(source, DictConfig) else dict(source), "mapping"  # type: ignore[arg-type]
    if not isinstance(source, str | os.PathLike):
        text = f"is a {type(source).__name__}. Give a recipe's name, a YAML file, a mapping or a PrecisionConfig."
        raise ConfigError(Problem(KEY, text))
    name, shipped = os.fspath(source), option_files("precision")
    if name in shipped:
        return _resolved(read_mapping(Path(str(shipped[name])), KEY)), name
    if not name.endswith((ENDING, OTHER_ENDING)) and os.sep not in name:
        text = f"there is no such precision recipe.{did_you_mean(name, shipped)} Or give the path of a YAML file."
        raise ConfigError(Problem(KEY, text, name))
    return _resolved(read_mapping(Path(name).expanduser(), KEY)), Path(name).stem


def _resolved(tree: DictConfig) -> dict[str, Any]:
    try:
        values: Any = OmegaConf.to_container(tree, resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(Problem(KEY, f"{str(error).splitlines()[0]}.")) from error
    return dict(values)


def _validated(values: dict[str, Any], name: str) -> PrecisionConfig:
    values = {"name": name, **values}
    try:
        return PrecisionConfig.model_validate(_with_named_casts(values))
    except ValidationError as error:
        found = [problem_of(details | {"loc": ("precision", *details["loc"])}) for details in error.errors()]
        raise ConfigError(found) from error


def _with_named_casts(values: dict[str, Any]) -> dict[str, Any]:
    """Return `values` with the slots of the recipes that rules of `modules.casts` name."""
    modules = values.get("modules")
    if not isinstance(modules, Mapping) or not modules.get("casts"):
        return values
    tree = OmegaConf.create({"precision": values})
    fill_named_casts(tree, lambda name: OmegaConf.create(_values(name)[0]), None)
    return dict(OmegaConf.to_container(tree.precision))  # type: ignore[arg-type]
