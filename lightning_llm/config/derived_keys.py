"""Keys derived from other keys, which are filled in during composition, so that the config has only their values.

`model=from_weights` reads the model's shape and the tokenizer from weights, `data.epochs` sets `trainer.max_steps`, and
rules of `precision.modules.casts` copy slots from a named recipe. A selected cluster resets `hardware`.
"""

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from lightning_llm.base.errors import ConfigError, Problem, did_you_mean
from lightning_llm.config.recipes import option_files
from lightning_llm.config.schema.base import LARGEST_INT, MOST_TOKENS
from lightning_llm.config.schema.precision import SLOTS
from lightning_llm.config.weight_folders import (
    EXPECTED,
    INIT_FROM,
    NOT_SHAPE,
    end_of_document_of,
    shape_of,
    tokenizer_of,
    weights_path,
)
from lightning_llm.config.yaml_file import literal

FROM_WEIGHTS = "from_weights"
"""The file of the group `model` without a shape."""
EPOCHS, STEPS = "data.epochs", "trainer.max_steps"
LENGTH = ("data.max_tokens", "data.sequence_length", "data.global_batch_size")


def fill_from_weights(tree: DictConfig, typed: Collection[str] = ()) -> None:
    """If `model=from_weights`, copy the model's shape and the tokenizer from the given weights into `tree`, in place.

    Keys that are set stay (e.g. another `rope_theta`). The weights' tokenizer replaces one that would be trained on the
    data, unless one of the keys `typed` on the command line concerns tokenizers.

    Raises:
        ConfigError: there are no readable weights at `model.init_from`.
    """
    model = tree.get("model")
    if not isinstance(model, DictConfig) or model.get("name") != FROM_WEIGHTS:
        return
    if OmegaConf.is_missing(model, "init_from") or model.get("init_from") is None:
        raise ConfigError(Problem(INIT_FROM, f"a value must be given with model={FROM_WEIGHTS}: {EXPECTED}."))
    path = weights_path(str(model.init_from))
    shape = shape_of(path)
    with open_dict(tree):
        for key, value in shape.items():
            if key not in model and key not in NOT_SHAPE and value is not None:
                model[key] = literal(value)
        model.name = literal(str(shape.get("name") or path.name))
        tokenizer = tokenizer_of(path)
        trained = OmegaConf.select(tree, "data.tokenizer.kind") == "bpe"  # the default
        if tokenizer is not None and trained and not any(key.startswith("data.tokenizer") for key in typed):
            OmegaConf.update(tree, "data.tokenizer.kind", "file", force_add=True)
            OmegaConf.update(tree, "data.tokenizer.path", literal(str(tokenizer)), force_add=True)
            OmegaConf.update(tree, "data.tokenizer.vocab_size", None, force_add=True)
            if (end := end_of_document_of(path)) is not None:
                OmegaConf.update(tree, "data.tokenizer.end_of_document", literal(end), force_add=True)


def steps_of(epochs: float, max_tokens: int, sequence_length: int, global_batch_size: int) -> int:
    """Return the optimizer steps of `epochs` passes over the full sequences in `max_tokens`, rounded, at least 1."""
    return max(1, round(epochs * (max_tokens // sequence_length) / global_batch_size))


def fill_steps(tree: DictConfig, typed: Collection[str], *, of_file: bool = False) -> None:
    """Set `trainer.max_steps` in `tree` in place if `data.epochs` is set.

    `typed`: keys given on the command line. `of_file`: the tree is another run's config, with steps that were derived
    before.

    Raises:
        ConfigError: a file or an override gives another number of steps.
    """
    steps = _steps(tree)
    if steps is None:
        return
    given = OmegaConf.select(tree, STEPS)
    chosen = STEPS in typed or (not of_file and given != _default_steps())
    if chosen and given != steps:
        text = (
            f"is {given}, and {EPOCHS} makes it {steps}: "
            f"{', '.join(f'{key}={_value(tree, key)}' for key in (EPOCHS, *LENGTH))}. Omit it, or set {EPOCHS}=null."
        )
        raise ConfigError(Problem(STEPS, text))
    OmegaConf.update(tree, STEPS, steps, force_add=True)


def _steps(tree: DictConfig) -> int | None:
    """Return the steps of the given epochs; None if there are none, or if a key they depend on is invalid.

    Raises:
        ConfigError: there are more steps than a run can have.
    """
    epochs, *length = (_value(tree, key) for key in (EPOCHS, *LENGTH))
    sound = [_is_positive(value) for value in (epochs, *length)]
    if not all(sound) or not all(int(value) == value and value <= MOST_TOKENS for value in length):
        return None  # validated later with all other keys
    tokens, of_sequence, of_step = map(int, length)
    if epochs * tokens > float(LARGEST_INT) * of_sequence * of_step:
        text = f"is {epochs:g}, which makes more than {LARGEST_INT:,} steps of {LENGTH[0]}={tokens}. Lower it."
        raise ConfigError(Problem(EPOCHS, text))
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


def fill_named_casts(tree: DictConfig, recipe: Callable[[str], DictConfig], config_dir: Path | None) -> None:
    """Copy the slots of the recipe that a rule names into the rule, in place; slots given in the rule stay.

    Values that do not fit the schema are left for validation.

    Args:
        tree: a composed config.
        recipe: composes a precision recipe by name.
        config_dir: a folder of further recipes.

    Raises:
        ConfigError: rules name recipes that do not exist or cannot be used.
    """
    rules = OmegaConf.select(tree, "precision.modules.casts", throw_on_resolution_failure=False)
    problems = []
    for number, rule in enumerate(rules if isinstance(rules, ListConfig) else ()):
        if not isinstance(rule, DictConfig) or not isinstance(name := rule.get("recipe"), str):
            continue
        key = f"precision.modules.casts.{number}.recipe"
        if name not in (names := option_files("precision", config_dir)):
            problems.append(Problem(key, f"there is no '{name}'.{did_you_mean(name, names)}"))
            continue
        other: Any = OmegaConf.to_container(recipe(name), resolve=True)
        found = [Problem(key, text) for text in _not_to_take(other, tree.precision.get("compute_dtype"))]
        problems += found
        if not found:
            with open_dict(rule):
                _fill(rule, other)
    if problems:
        raise ConfigError(problems)


def _not_to_take(other: dict[str, Any], compute_dtype: object) -> Iterator[str]:
    """Yield why a rule cannot use the slots of the recipe `other`."""
    name, modules = other.get("name"), other.get("modules") or {}
    if other.get("compute_dtype") != compute_dtype:
        text = (
            "is '{}', which computes in {}, and this recipe in {}. Use one with the same compute_dtype, or write slots."
        )
        yield text.format(name, other.get("compute_dtype"), compute_dtype)
    if modules.get("casts") or other.get("phases"):
        yield f"is '{name}', which has different casts for layers or steps. Write the slots."


def _fill(rule: DictConfig, other: dict[str, Any]) -> None:
    for gemm, operand in SLOTS:
        own = rule.get(gemm)
        if own is None:
            rule[gemm] = own = {}
        if isinstance(own, DictConfig | dict) and rule[gemm].get(operand) is None:
            rule[gemm][operand] = (other.get(gemm) or {}).get(operand) or {}


def give_way_to_cluster(tree: DictConfig, typed: Collection[str]) -> None:
    """Reset `hardware` of a preset, in place, if the command line (`typed` keys) selects a cluster but no hardware."""
    cluster = tree.get("cluster")
    if "cluster" in typed and "hardware" not in typed and isinstance(cluster, DictConfig) and "hardware" in cluster:
        tree.hardware = None


def leave_out_observers(tree: DictConfig, parsed: Sequence[Override]) -> None:
    """Remove a preset's keys of default callbacks that were deselected (callbacks=none) from `tree`, in place.

    Keys of overrides stay, so that validation rejects them. So do keys of callbacks that are not default (profile),
    because the preset forgot to select these.
    """
    typed = {".".join(each.key_or_group.split(".")[:2]) for each in parsed}
    for name in list(tree.get("callbacks") or {}):
        node = tree.callbacks[name]
        without_class = isinstance(node, DictConfig) and "_target_" not in node
        if without_class and name in _default_observers() and f"callbacks.{name}" not in typed:
            del tree.callbacks[name]


@cache
def _default_observers() -> frozenset[str]:
    file = files("lightning_llm.conf") / "callbacks" / "default.yaml"
    return frozenset(yaml.safe_load(file.read_text(encoding="utf-8")))
