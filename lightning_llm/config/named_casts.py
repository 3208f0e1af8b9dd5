"""The slots that a rule of `precision.modules.casts` takes from another recipe, filled in while a config is composed.

What a config holds is then whole: its file and its hash do not depend on what that recipe becomes later.
"""

from collections.abc import Iterator
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict

from lightning_llm.base.errors import ConfigError, Problem, did_you_mean
from lightning_llm.config.composition import Composer
from lightning_llm.config.overrides import group_options, parse_overrides
from lightning_llm.config.schema.precision import SLOTS

Node = dict[str, Any]


def fill_named_casts(tree: DictConfig, composer: Composer) -> None:
    """Write out the slots of every rule that names a recipe; those that stand beside the name stay.

    `composer` composes the recipes that are named. Whatever is not of the schema's shape is left for its check. Raises
    ConfigError with every recipe that is none, or cannot be taken from.
    """
    rules = OmegaConf.select(tree, "precision.modules.casts", throw_on_resolution_failure=False)
    problems = []
    for number, rule in enumerate(rules if isinstance(rules, ListConfig) else ()):
        if not isinstance(rule, DictConfig) or not isinstance(name := rule.get("recipe"), str):
            continue
        key = f"precision.modules.casts.{number}.recipe"
        if name not in (options := group_options("precision", composer.search)):
            problems.append(Problem(key, f"there is no '{name}'.{did_you_mean(name, options)}"))
            continue
        recipe = composer.compose(parse_overrides([f"precision={name}"])).tree
        other: Any = OmegaConf.to_container(recipe.precision, resolve=True)
        found = [Problem(key, text) for text in _not_to_take(other, tree.precision.get("compute_dtype"))]
        problems += found
        if not found:
            with open_dict(rule):
                _fill(rule, other)
    if problems:
        raise ConfigError(problems)


def _not_to_take(other: Node, compute_dtype: object) -> Iterator[str]:
    """Yield what keeps a rule from taking the slots of the recipe `other`."""
    name, modules = other.get("name"), other.get("modules") or {}
    if other.get("compute_dtype") != compute_dtype:
        text = (
            "is '{}', which computes in {}, and this recipe in {}. Take one of the same compute_dtype, or write slots."
        )
        yield text.format(name, other.get("compute_dtype"), compute_dtype)
    if modules.get("casts") or other.get("phases"):
        yield f"is '{name}', whose layers or steps have different casts themselves. Write the slots."


def _fill(rule: DictConfig, other: Node) -> None:
    for gemm, operand in SLOTS:
        own = rule.get(gemm)
        if own is None:
            rule[gemm] = own = {}
        if isinstance(own, DictConfig | dict) and rule[gemm].get(operand) is None:
            rule[gemm][operand] = (other.get(gemm) or {}).get(operand) or {}
