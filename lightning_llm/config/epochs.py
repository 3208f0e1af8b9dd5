"""`data.epochs` of `data.max_tokens` -> `trainer.max_steps`, while a config is composed."""

import math
from collections.abc import Collection
from functools import cache
from importlib.resources import files
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lightning_llm.base.errors import ConfigError, Problem
from lightning_llm.config.schema.base import LARGEST_INT, MOST_TOKENS

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
