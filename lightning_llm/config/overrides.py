"""Command-line arguments as Hydra overrides, or what is wrong with each; the values of one with several."""

import unicodedata
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import islice

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import (
    ChoiceSweep,
    Glob,
    Override,
    Quote,
    QuotedString,
    RangeSweep,
    Sweep,
)
from hydra.errors import HydraException

from lightning_llm.base.errors import ConfigError, Problem, did_you_mean
from lightning_llm.config.recipes import group_names, option_files
from lightning_llm.config.schema.aliases import KEY
from lightning_llm.config.schema.declared_types import takes_text
from lightning_llm.config.yaml_file import literal

HERE_INSTEAD = {
    "hydra.run": "run.dir=FOLDER, or run.root=, run.experiment= and run.name=, which it is made of",
    "hydra.sweep": "run.root=, run.experiment= and run.name=: a sweep's jobs lie in run.root/run.experiment/run.name/N",
    "hydra.sweeper": "several values (seed=0,1) with -m; hydra.sweeper.params is read in a recipe's file",
    "hydra.launcher": "launcher=local, slurm or ray, and their keys launcher.*",
    "hydra.searchpath": "--config-dir DIR",
    "hydra.mode": "-m",
    "hydra.job.chdir": "absolute paths: no run depends on the working directory",
}
"""What does here what a setting of Hydra's does elsewhere."""

MOST_JOBS = 10_000
"""Of one sweep: composing them takes a minute or more, and nobody means as many."""

SEVERAL_PATHS = "branch_from"
"""The key whose paths (a/step=4,b/step=4) are several values, though Hydra's grammar wants each in quotes."""


def hydra_setting(key: str) -> str:
    """Return what to say of `key`, a setting or group of Hydra's own: Hydra only composes here, so nothing reads it."""
    dotted = key.replace("/", ".")
    instead = next((text for start, text in HERE_INSTEAD.items() if f"{dotted}.".startswith(f"{start}.")), None)
    return "is Hydra's own, and nothing here reads it. " + (f"Use {instead}." if instead else "Leave it out.")


def parse_overrides(arguments: Sequence[str]) -> list[Override]:
    """Return the arguments as Hydra's grammar reads them. Raises ConfigError with all that are no overrides."""
    parsed, problems = read_overrides(arguments)
    if problems:
        raise ConfigError(problems)
    return parsed


def override(key: str, value: str | int | None) -> str:
    """Return the argument that sets `key` to `value`, whatever characters a text has."""
    text = QuotedString(literal(value), Quote.single).with_quotes() if isinstance(value, str) else value
    return f"{key}={'null' if text is None else text}"


def read_overrides(arguments: Sequence[str]) -> tuple[list[Override], list[Problem]]:
    """Return the arguments that are overrides, as Hydra's grammar reads them, and what is wrong with the others."""
    parsed = []
    arguments, problems = _joined(arguments)
    for word in arguments:
        try:
            each = _read(word)
        except HydraException as error:
            problems.append(Problem(word if word.strip() else repr(word), _no_override(word, error)))
            continue
        if each.is_hydra_override() or each.key_or_group == "hydra":
            problems.append(Problem(each.key_or_group, hydra_setting(each.key_or_group)))
        elif not each.key_or_group:
            problems.append(Problem(word, "there is no key before '='. Write key=value, ~key, or group=name."))
        elif each.package is not None:
            text = f"moves the group to {each.package}, where nothing reads it. Write {each.key_or_group}=NAME."
            problems.append(Problem(word, text))
        elif odd := _look_alikes(each.key_or_group):
            problems.append(Problem(word, f"the key has {odd}. Keys are written in ASCII letters."))
        else:
            parsed.append(each)
    return parsed, problems


def _joined(arguments: Sequence[str]) -> tuple[list[str], list[Problem]]:
    """Return `arguments` less each `key = value` and `key: value`, which a shell splits, and a problem for each."""
    rest: list[str] = list(arguments)
    problems: list[Problem] = []
    for index in reversed(range(len(arguments) - 1)):
        equals = rest[index + 1 : index + 2] == ["="]
        spaced = rest[index : index + (3 if equals else 2)]
        key, value = spaced[0].removesuffix(":"), spaced[-1]
        if not (equals or spaced[0].endswith(":")) or not KEY.fullmatch(key) or not value or "=" in value:
            continue
        problems.insert(0, Problem(" ".join(spaced), f"has spaces. Write {key}={value}."))
        del rest[index : index + len(spaced)]
    return rest, problems


@lru_cache(maxsize=65536)  # the jobs of a sweep share most of their arguments
def _read(word: str) -> Override:
    """Return the override. A value that the grammar cannot take is text, and so is all that is typed for a text key.

    `path=~/my.jsonl` and `resume=a/step=4` want quotes in Hydra's grammar, which a shell takes away; `run.name=007` is
    the name 007, not the number 7.
    """
    parser = OverridesParser.create()
    key, _, value = word.partition("=")
    quoted = f"{key}={QuotedString(value.strip(), Quote.single).with_quotes()}"
    text = takes_text(key.lstrip("+"))
    try:
        parsed = parser.parse_override(word)
    except HydraException:
        if not value or not (text or not set(value) & set("'\"[]{}()$,")):
            raise
        if key.lstrip("+") == SEVERAL_PATHS and "," in value and not set(value) & set("'\""):
            paths = [QuotedString(each.strip(), Quote.single).with_quotes() for each in value.split(",")]
            return parser.parse_override(f"{key}={','.join(paths)}")
        return parser.parse_override(quoted)
    if text and isinstance(parsed.value(), int | float) and not parsed.is_sweep_override():
        return parser.parse_override(quoted)
    return parsed


def _no_override(word: str, error: HydraException) -> str:
    key, equals, _ = word.partition("=")
    groups = [group for group in group_names() if word in option_files(group)]
    if groups:
        return f"this is no override. Did you mean {' or '.join(f'{group}={word}' for group in groups)}?"
    if odd := _look_alikes(key):
        return f"this is no override: it has {odd}. Keys are written in ASCII letters, options begin with '-'."
    why = str(error).splitlines()[0]
    quote = f""" Quote a value with such characters: '{key}="..."'.""" if equals and not set(key) & set(" \t\n") else ""
    return f"this is no override ({why}). Write key=value without spaces, ~key, or group=name.{quote}"


def _look_alikes(key: str) -> str:
    """Return the characters of `key` that only look like those of a key, with their names; "" where all are ASCII."""
    odd = dict.fromkeys(each for each in key if not each.isascii())
    return ", ".join(f"{each!r} ({unicodedata.name(each, 'no letter')})" for each in odd)


def typed_value(overrides: Sequence[str], key: str) -> str | None:
    """Return the one value that the overrides set `key` to, None where they do not, or to several."""
    found = [each for each in parse_overrides(overrides) if each.key_or_group == key and not each.is_sweep_override()]
    return str(found[-1].value()) if found else None


def choices_of(parsed: Override, options: Sequence[str]) -> list[str]:
    """Return `a=1,2` as ["a=1", "a=2"], any other override alone; a glob chooses among `options`, a group's names.

    Of more than `MOST_JOBS` values one more than that, which is one too many.

    Raises:
        ConfigError: an interval, or values that turn out to be none.
    """
    key, value = parsed.key_or_group, parsed.value()
    if not parsed.is_sweep_override():
        return [parsed.input_line or ""]
    if isinstance(value, Glob):
        names = value.filter(list(options))
    elif parsed.is_discrete_sweep():
        names = values_of(parsed, MOST_JOBS + 1)
    else:
        raise ConfigError(Problem(key, "an interval cannot be enumerated. Write the values: a=1,2 or range(1,9)."))
    if not names:
        given = (parsed.input_line or "").partition("=")[2]
        raise ConfigError(Problem(key, f"{given} has no value.{did_you_mean(given, options)}"))
    return [f"{parsed.get_key_element()}={name}" for name in names]


def values_of(parsed: Override, most: int) -> list[str]:
    """Return the values of `a=1,2` or `a=range(1,9)`, not more than `most` of them.

    Those of a longer range stand in order, shuffled or not: Hydra makes a list of all of it to shuffle it, which of
    range(0, 1e12) no memory holds.

    Raises:
        ConfigError: it has none that can be listed.
    """
    value = parsed.value()
    if isinstance(value, ChoiceSweep) and any(isinstance(each, Sweep) for each in value.list):
        text = "has a range among several values. Give one range, or the values: a=0,1,2,7."
        raise ConfigError(Problem(parsed.key_or_group, text))
    in_order = replace(parsed, _value=replace(value, shuffle=False)) if isinstance(value, RangeSweep) else parsed
    try:
        found = list(islice(in_order.sweep_string_iterator(), most))
        return found if len(found) == most else list(parsed.sweep_string_iterator())
    except ValueError as error:  # of a range with a step of 0
        given = (parsed.input_line or "").partition("=")[2]
        raise ConfigError(Problem(parsed.key_or_group, f"{given} cannot be listed: {error}.")) from error
