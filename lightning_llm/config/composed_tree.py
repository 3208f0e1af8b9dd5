"""What Hydra composes of overrides, as this package reads it, and why it cannot be composed. Imports no torch."""

from collections.abc import Sequence
from functools import cache
from importlib.resources import files

import yaml
from hydra.core.override_parser.types import Override
from hydra.errors import MissingConfigException
from omegaconf import DictConfig, open_dict
from omegaconf.errors import OmegaConfBaseException

from lightning_llm.base.errors import ConfigError, Problem, did_you_mean
from lightning_llm.config.cluster_choice import give_way_to_cluster
from lightning_llm.config.composition import Composer
from lightning_llm.config.derived_keys import fill_named_casts
from lightning_llm.config.recipes import group_names
from lightning_llm.config.resolve import first_line

CONFIG_MODULE = "lightning_llm.conf"


def compose_tree_of(parsed: Sequence[Override], composer: Composer) -> tuple[DictConfig, dict[str, str]]:
    """Return what Hydra composes, less its own node, and the file chosen for each group."""
    tree, choices, _ = composer.compose(parsed)
    with open_dict(tree):
        tree.pop("sweep", None)  # read by compose_sweep
        _leave_out_observers(tree, parsed)
        give_way_to_cluster(tree, {each.key_or_group for each in parsed})
    fill_named_casts(tree, composer)
    return tree, choices


def not_composed(error: Exception) -> ConfigError:
    """Return what to raise where Hydra's composition fails with `error`, in words."""
    return ConfigError(Problem(getattr(error, "full_key", None) or "composition", _why_not_composed(error)))


def _why_not_composed(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "files of the defaults lists name each other in a circle."
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, name = str(error.missing_cfg_file).rpartition("/")
        if (meant := group.rpartition("/")[2]) != group and meant in group_names():
            return f"a defaults list has `{meant}: {name}`. From a recipe, write `- override /{meant}: {name}`."
        return f"a defaults list names {group}={name}; there is no '{name}'.{did_you_mean(name, error.options or ())}"
    if isinstance(error, OmegaConfBaseException):
        return f"{first_line(error)}."
    return " ".join(str(error or error.__cause__).split())


def _leave_out_observers(tree: DictConfig, parsed: Sequence[Override]) -> None:
    """Drop what a recipe's file sets of a default observer where the chosen callbacks have none (callbacks=none).

    What was typed stays, for the check to refuse: it would not be done. So do arguments of observers that have to be
    chosen (profile), which a file that sets them forgot to do.
    """
    typed = {".".join(each.key_or_group.split(".")[:2]) for each in parsed}
    for name in list(tree.get("callbacks") or {}):
        node = tree.callbacks[name]
        without_class = isinstance(node, DictConfig) and "_target_" not in node
        if without_class and name in _default_observers() and f"callbacks.{name}" not in typed:
            del tree.callbacks[name]


@cache
def _default_observers() -> frozenset[str]:
    file = files(CONFIG_MODULE) / "callbacks" / "default.yaml"
    return frozenset(yaml.safe_load(file.read_text(encoding="utf-8")))
