"""`data.epochs` of `data.max_tokens` -> `trainer.max_steps`, while a config is composed."""

import math
from collections.abc import Collection, Iterator
from functools import cache
from importlib.resources import files
from typing import Any

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from lightning_llm.base.errors import ConfigError, Problem, did_you_mean
from lightning_llm.config.composition import Composer
from lightning_llm.config.overrides import group_options, parse_overrides
from lightning_llm.config.schema.base import LARGEST_INT, MOST_TOKENS
from lightning_llm.config.schema.precision import SLOTS

KEY, STEPS = "data.epochs", "trainer.max_steps"
LENGTH = ("data.max_tokens", "data.sequence_length", "data.global_batch_size")


def steps_of(epochs: float, max_tokens: int, sequence_length: int, global_batch_size: int) -> int:
    """Return the optimizer steps of `epochs` passes over the whole sequences in `max_tokens`, rounded, at least 1."""
    return max(1, round(epochs * (max_tokens // sequence_length) / global_batch_size))


def fill_steps(tree: DictConfig, typed: Collection[str], *, of_file: bool = False) -> None:
    """Set `trainer.max_steps` in `tree` in place where `data.epochs` says how long a run is.

    `typed`: the keys of the command line. `of_file`: the rest is another run's config, whose steps follow from what it
    was composed of.

    Raises:
        ConfigError: a file or a word gives another number of steps.
    """
    steps = _steps(tree)
    if steps is None:
        return
    given = OmegaConf.select(tree, STEPS)
    chosen = STEPS in typed or (not of_file and given != _default_steps())
    if chosen and given != steps:
        text = (
            f"is {given}, and {KEY} makes it {steps}: "
            f"{', '.join(f'{key}={_value(tree, key)}' for key in (KEY, *LENGTH))}. Leave it out, or {KEY} (null)."
        )
        raise ConfigError(Problem(STEPS, text))
    OmegaConf.update(tree, STEPS, steps, force_add=True)


def _steps(tree: DictConfig) -> int | None:
    """Return the steps that the epochs make; None where none are given, or what they are of is no number.

    Raises:
        ConfigError: there would be more than a run can count.
    """
    epochs, *length = (_value(tree, key) for key in (KEY, *LENGTH))
    sound = [_is_positive(value) for value in (epochs, *length)]
    if not all(sound) or not all(int(value) == value and value <= MOST_TOKENS for value in length):
        return None  # checked with all other keys
    tokens, of_sequence, of_step = map(int, length)
    if epochs * tokens > float(LARGEST_INT) * of_sequence * of_step:
        text = f"is {epochs:g}, which makes more than {LARGEST_INT:,} steps of {LENGTH[0]}={tokens}. Lower it."
        raise ConfigError(Problem(KEY, text))
    return steps_of(epochs, tokens, of_sequence, of_step)


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def _value(tree: DictConfig, key: str) -> Any:
    try:
        return OmegaConf.select(tree, key, throw_on_missing=False)
    except OmegaConfBaseException:
        return None


@cache
def _default_steps() -> int:
    file = files("lightning_llm.conf") / "trainer" / "default.yaml"
    return int(yaml.safe_load(file.read_text(encoding="utf-8"))["max_steps"])


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
