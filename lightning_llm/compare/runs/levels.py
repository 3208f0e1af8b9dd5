"""Levels of a factor: the values of its keys as they tell runs apart, and what each level is called."""

import json
from collections.abc import Sequence
from typing import Any

from lightning_llm.config.config_hash import below
from lightning_llm.tracking.reading import Run

Level = tuple[str, ...]

WITHOUT = "no"
"""Before a group's name: runs that have nothing of it, the usual baseline of those that do."""


def level_of(run: Run, keys: tuple[str, ...]) -> Level:
    """Return the run's values of `keys`, as text."""
    return tuple(as_text(run.config.get(key)) for key in keys)


def as_text(value: Any) -> str:
    """Return a value of a config as JSON, by which values are told apart."""
    return json.dumps(value, sort_keys=True, default=str)


def labels_of(runs: Sequence[Run], name: str, keys: tuple[str, ...], levels: list[Level]) -> dict[Level, str]:
    """Return a name for each level: the group's `name`, with the keys that tell it from others of that name.

    Of a group without names that not all runs have (`distil`): "no distil", and the others by what tells them apart.
    """
    named = {level_of(run, keys): str(run.config.get(f"{name}.name") or "") for run in reversed(runs)}
    without = [] if len(keys) < 2 else [level_of(run, keys) for run in runs if _lacks(run, name)][:1]
    labels = {}
    for level in levels:
        if level in without:
            labels[level] = f"{WITHOUT} {name}"
            continue
        alike = [other for other in levels if named[other] == named[level] and other not in without]
        apart = [i for i in range(len(keys)) if len({other[i] for other in alike}) > 1]
        pairs = ", ".join(f"{keys[i].removeprefix(f'{name}.')}={as_word(level[i])}" for i in apart)
        if not named[level] or len(alike) == len(levels):
            labels[level] = pairs or name
        else:
            labels[level] = f"{named[level]} ({pairs})" if pairs else named[level]
    return labels


def _lacks(run: Run, group: str) -> bool:
    """Return whether the run's config has nothing of the group, whatever keys of it vary."""
    return not any(value not in (None, {}) for key, value in run.config.items() if below(key, (f"{group}.",)))


def parsed(word: str) -> Any:
    """Return a value as typed on the command line: a number, true, null or text. (2e-3 is text to YAML alone.)"""
    try:
        return json.loads(word)
    except ValueError:
        return word


def same_value(one: Any, other: Any) -> bool:
    """Whether two values of a config are one: 0 and 0.0 are, 0 and false are not."""
    return bool(one == other) and isinstance(one, bool) == isinstance(other, bool)


def as_word(value: str) -> str:
    """Return such text as it is typed: text without quotes."""
    loaded = json.loads(value)
    return loaded if isinstance(loaded, str) else value
