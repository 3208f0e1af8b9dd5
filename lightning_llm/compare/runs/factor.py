"""The factor by which runs are compared, its levels and their names, and the baseline level."""

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lightning_llm.base.errors import ConfigError, Problem, did_you_mean
from lightning_llm.compare.runs.differences import FREE, LAYOUT, ROUNDING, equivalent_starts
from lightning_llm.config.config_hash import below
from lightning_llm.tracking.reading import Run

GROUPS = ("precision", "optim", "schedule", "model", "data", "parallel", "trainer")
"""Config groups in the order in which they become the factor if several vary and none is requested."""
NOT_THE_RECIPE = ("precision.backend",)
"""Keys of a group that tell where casts run, not which casts: a difference in them is a confounder."""
USUAL_BASELINES = {"precision": ("bf16", "fp32"), "parallel": ("single",)}
ITSELF, SEVERAL = "rounding", "configuration"
"""Names of factors over several keys: `ITSELF` if all of them only change the order of sums, `SEVERAL` if they are of
several groups."""
NOT_COMPARED = (*(key for key in FREE if key not in NOT_THE_RECIPE), "seed")
Level = tuple[str, ...]
WITHOUT = "no"
"""Prefix of the label of runs without anything in a group ("no distil"), the default baseline of runs with it."""


@dataclass(frozen=True)
class Factor:
    """The config group or key by which runs are compared, with one level per recipe, one of them the baseline.

    `name`: a config group, one dotted key, or "rounding"; `keys`: the keys of it that vary; `labels`: {level (values of
    the keys): its name}; `note`: on how the factor or baseline was chosen. `chosen`: one of the keys, tuned per recipe
    (--best-of), which does not distinguish levels.
    """

    name: str
    keys: tuple[str, ...]
    labels: dict[Level, str]
    baseline: Level
    note: str = ""
    chosen: str | None = None

    def level(self, run: Run) -> Level:
        """Return the run's level: its values of the keys that distinguish levels."""
        return level_of(run, self._distinguishing)

    @property
    def _distinguishing(self) -> tuple[str, ...]:
        return tuple(key for key in self.keys if key != self.chosen)

    def label(self, run: Run) -> str:
        """Return the name of the run's level: "mxfp8", "learning_rate=0.002"."""
        return self.labels[self.level(run)]

    def in_words(self, run: Run) -> str:
        """Return the run's level as its keys and their values: "optim.learning_rate=0.002"."""
        pairs = zip(self._distinguishing, self.level(run), strict=True)
        return ", ".join(f"{key}={as_word(value)}" for key, value in pairs)

    @property
    def baseline_label(self) -> str:
        """The name of the baseline's level."""
        return self.labels[self.baseline]


def choose_factor(runs: Sequence[Run], asked: str | None = None, chosen: str | None = None) -> Factor:
    """Return the factor by which to compare `runs`, and its baseline.

    `asked`: the requested baseline, as "group=level", "dotted.key=value" or a level alone; None for the default.
    `chosen`: a key that is tuned per recipe, which then is part of the factor, whichever group it is in.

    Raises:
        ConfigError: the runs do not differ, or no run has the baseline's level.
    """
    name, equals, wanted = (asked or "").partition("=")  # the first one: the name of a level may contain others
    if not equals:
        name, wanted = "", name
    found = varying_keys(runs)
    varying = [key for key in found if key != chosen] or found
    note = ""
    if not name:
        name, note = _most_likely(varying)
    if name in (ITSELF, SEVERAL):
        return _itself(name, runs, tuple(varying), wanted, note)
    groups = {key.partition(".")[0] for run in runs for key in run.config}
    single = "." in name
    if name == "seed" or (name not in groups and not any(name in run.config for run in runs)):
        text = f"there is no group or key '{name}' to compare by.{did_you_mean(name, groups - {'seed', 'run'})}"
        raise ConfigError(Problem("--baseline", text))
    keys = (
        (name,) if single else tuple(key for key in varying if key.startswith(f"{name}.") and key not in NOT_THE_RECIPE)
    )
    own = str(chosen) if not single and chosen in found and keys and keys != (chosen,) else None
    keys = tuple(key for key in keys if key != own)
    levels = list(dict.fromkeys(level_of(run, keys) for run in runs))
    if len(levels) < 2:
        same = name if asked or varying else "config except for the seed"
        text = f"all {len(runs)} runs have the same {same}. A verdict needs a baseline and a run that differs from it."
        raise ConfigError(Problem("RUN", text))
    labels = labels_of(runs, name, keys, levels)
    baseline, reason = _baseline(name, labels, wanted, runs, keys)
    return Factor(name, (*keys, *([own] if own else [])), labels, baseline, " ".join(filter(None, (note, reason))), own)


def varying_keys(runs: Sequence[Run]) -> list[str]:
    """Return the config keys that differ between any two runs and can change training, without the seed."""
    keys = sorted({key for run in runs for key in run.config})
    found = [
        key for key in keys if len({as_text(run.config.get(key)) for run in runs}) > 1 and not below(key, NOT_COMPARED)
    ]
    same_start = equivalent_starts(runs)
    found = [key for key in found if key not in same_start]
    if all(run.bitwise_layout for run in runs):  # layouts count only as the factor itself
        return [key for key in found if not below(key, LAYOUT) or key.startswith("parallel.")]
    return found


def _most_likely(varying: list[str]) -> tuple[str, str]:
    """Return the factor to use if none was requested, and a note on the choice."""
    relevant = [key for key in varying if key not in NOT_THE_RECIPE and not below(key, ROUNDING)]
    candidates = [group for group in GROUPS if group in {key.partition(".")[0] for key in relevant} - {"parallel"}]
    if candidates:
        several = f"{', '.join(candidates)} vary; compared by {candidates[0]}. To choose: --baseline GROUP=LEVEL."
        return candidates[0], several if len(candidates) > 1 else ""
    same = varying and all(below(key, ROUNDING) for key in varying)
    note = "All runs have the same recipe, so no gap here is real." if same else ""
    beside = {key for key in varying if not key.startswith("parallel.")} - {"trainer.devices", "world"}
    if not beside:
        return "parallel", note
    if len(varying) == 1:
        return varying[0], note
    groups = {key.partition(".")[0] for key in varying}
    if not same and len(groups) == 1:
        return groups.pop(), note
    return ITSELF if same else SEVERAL, note


def _itself(name: str, runs: Sequence[Run], keys: tuple[str, ...], wanted: str, note: str) -> Factor:
    """Return the factor over runs of one recipe: each way to run it is a level, named by its differences to the first.

    Raises:
        ConfigError: a level was requested: such runs have the first as their baseline.
    """
    if wanted:
        text = f"'{wanted}' is not KEY=VALUE, and the runs differ in {', '.join(keys)}. Use one of these keys."
        raise ConfigError(Problem("--baseline", text))
    levels = list(dict.fromkeys(level_of(run, keys) for run in runs))
    first = levels[0]
    labels = {first: str(runs[0].config.get("precision.name") or "the first run")}
    for level in levels[1:]:
        labels[level] = ", ".join(
            f"{k}={as_word(v)}" for k, v, base in zip(keys, level, first, strict=True) if v != base
        )
    return Factor(name, keys, labels, first, note)


def _baseline(
    name: str, labels: dict[Level, str], wanted: str, runs: Sequence[Run], keys: tuple[str, ...]
) -> tuple[Level, str]:
    """Return the baseline's level and a note on the choice."""
    by_name: dict[str, list[Level]] = {}
    for run in runs:
        level = level_of(run, keys)
        for word in {labels[level], str(run.config.get(f"{name}.name") or labels[level])}:
            if level not in by_name.setdefault(word, []):
                by_name[word].append(level)
    if wanted:
        if len(keys) == 1:
            same = [level for level in labels if same_value(json.loads(level[0]), parsed(wanted))]
            if len(same) == 1:
                return same[0], ""
        found = by_name.get(wanted, [])
        if len(found) == 1:
            return found[0], ""
        hint = did_you_mean(wanted, labels.values())
        text = f"'{wanted}' is {'several levels' if found else 'the level of no run'}.{hint}"
        raise ConfigError(Problem("--baseline", text))
    return _usual_baseline(name, labels, by_name)


def _usual_baseline(name: str, labels: dict[Level, str], by_name: dict[str, list[Level]]) -> tuple[Level, str]:
    """Return the default baseline level and a note on the choice."""
    several = ""
    for usual in USUAL_BASELINES.get(name, ()):
        found = by_name.get(usual, [])
        if len(found) == 1:
            reason = f"The baseline is {usual}, because {several}. Choose one of them with --baseline {name}=LEVEL."
            return found[0], reason if several else ""
        if found and not several:
            several = f"{len(found)} levels are called {usual} ({' and '.join(labels[level] for level in found)})"
    if name == "precision":
        known = list(labels.values())
        text = f"{several or 'none of the runs is bf16 or fp32'}. Choose a baseline: --baseline precision=NAME, one of "
        text += f"{', '.join(known)}. For example {shlex.join(['--baseline', f'precision={known[0]}'])}."
        raise ConfigError(Problem("--baseline", text))
    without = [level for level, label in labels.items() if label == f"{WITHOUT} {name}"]
    first, why = (without[0], f"the runs without {name}") if without else (next(iter(labels)), "from the first run")
    other = next(label for level, label in labels.items() if level != first)
    word = other if other.startswith(f"{name}=") else f"{name}={other}"
    return first, f"The baseline is {labels[first]}, {why}. Choose another with {shlex.join(['--baseline', word])}."


def level_of(run: Run, keys: tuple[str, ...]) -> Level:
    """Return the run's values of `keys`, as text."""
    return tuple(as_text(run.config.get(key)) for key in keys)


def as_text(value: Any) -> str:
    """Return a value of a config as JSON, for comparison with others."""
    return json.dumps(value, sort_keys=True, default=str)


def labels_of(runs: Sequence[Run], name: str, keys: tuple[str, ...], levels: list[Level]) -> dict[Level, str]:
    """Return {level: label}: the name that runs of the level have in the group `name`, such as "mxfp8".

    Keys are added that distinguish it from other levels of that name. For a group without names that not all runs have
    (`distil`), the labels are "no distil" and the differing keys.
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
    """Return whether the run's config has nothing in the group."""
    return not any(value not in (None, {}) for key, value in run.config.items() if below(key, (f"{group}.",)))


def parsed(word: str) -> Any:
    """Return the value that a word of the command line means: a number, true, false, null or text."""
    try:
        return json.loads(word)
    except ValueError:
        return word


def same_value(one: Any, other: Any) -> bool:
    """Return whether two config values are equal; 0 equals 0.0, but not false."""
    return bool(one == other) and isinstance(one, bool) == isinstance(other, bool)


def as_word(value: str) -> str:
    """Return a value that `as_text` wrote as it is typed on the command line: strings without quotes."""
    loaded = json.loads(value)
    return loaded if isinstance(loaded, str) else value
