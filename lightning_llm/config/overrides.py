"""Parse command-line arguments as Hydra overrides, report problems, and list the values of sweep overrides."""

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
    "hydra.run": "run.dir=FOLDER, or its parts run.root=, run.experiment= and run.name=",
    "hydra.sweep": "run.root=, run.experiment= and run.name=: jobs are in run.root/run.experiment/run.name/N",
    "hydra.sweeper": "several values (seed=0,1) with -m; hydra.sweeper.params works in a preset's file",
    "hydra.launcher": "launcher=local, slurm or ray, and the keys launcher.*",
    "hydra.searchpath": "--config-dir DIR",
    "hydra.mode": "-m",
    "hydra.job.chdir": "absolute paths: no run depends on the working directory",
}
"""{Hydra setting: replacement here}."""

MOST_JOBS = 10_000
"""Maximum number of jobs of a sweep: composing more takes minutes, and is probably a mistake."""

SEVERAL_PATHS = "branch_from"
"""This key takes several unquoted paths (a/step=4,b/step=4), although Hydra's grammar requires quotes."""


def hydra_setting(key: str) -> str:
    """Return the message that `key`, a setting of Hydra itself, is not used here, with its replacement, if any."""
    dotted = key.replace("/", ".")
    instead = next((text for start, text in HERE_INSTEAD.items() if f"{dotted}.".startswith(f"{start}.")), None)
    return "is a setting of Hydra that is not used here. " + (f"Use {instead}." if instead else "Omit it.")


def parse_overrides(arguments: Sequence[str]) -> list[Override]:
    """Return the arguments parsed by Hydra's grammar. Raises ConfigError with all invalid ones."""
    parsed, problems = read_overrides(arguments)
    if problems:
        raise ConfigError(problems)
    return parsed


def override(key: str, value: str | int | None) -> str:
    """Return the override "key=value" with the value quoted for Hydra, whatever characters it has; None: null."""
    text = QuotedString(literal(value), Quote.single).with_quotes() if isinstance(value, str) else value
    return f"{key}={'null' if text is None else text}"


def read_overrides(arguments: Sequence[str]) -> tuple[list[Override], list[Problem]]:
    """Return (parsed overrides, problems of the arguments that are not valid overrides)."""
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
            problems.append(Problem(word, "has no key before '='. Write key=value, ~key, or group=name."))
        elif each.package is not None:
            text = f"moves the group to {each.package}, which is not used. Write {each.key_or_group}=NAME."
            problems.append(Problem(word, text))
        elif odd := _look_alikes(each.key_or_group):
            problems.append(Problem(word, f"has {odd} in its key. Use ASCII letters."))
        else:
            parsed.append(each)
    return parsed, problems


def _joined(arguments: Sequence[str]) -> tuple[list[str], list[Problem]]:
    """Return `arguments` without each `key = value` and `key: value`, which a shell splits, and their problems."""
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
    """Return the override. Values that the grammar rejects, and numbers for text keys, are read as text.

    `path=~/my.jsonl` and `resume=a/step=4` need quotes in Hydra's grammar, which a shell removes; `run.name=007` is the
    name 007, not the number 7.
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
        return f"is not an override. Did you mean {' or '.join(f'{group}={word}' for group in groups)}?"
    if word in group_names():
        return f"is a config group and needs a value. `lightning-llm config --group {word}` lists them: {word}=NAME."
    if odd := _look_alikes(key):
        return f"is not an override: it has {odd}. Keys have ASCII letters, options begin with '-'."
    why = str(error).splitlines()[0]
    quote = f""" Quote a value with such characters: '{key}="..."'.""" if equals and not set(key) & set(" \t\n") else ""
    return f"is not an override ({why}). Write key=value without spaces, ~key, or group=name.{quote}"


def _look_alikes(key: str) -> str:
    """Return the non-ASCII characters of `key` with their names; "" if there are none."""
    odd = dict.fromkeys(each for each in key if not each.isascii())
    return ", ".join(f"{each!r} ({unicodedata.name(each, 'no letter')})" for each in odd)


def typed_value(overrides: Sequence[str], key: str) -> str | None:
    """Return the value to which the overrides set `key`, as text; None if they do not set it, or sweep over it."""
    found = [each for each in parse_overrides(overrides) if each.key_or_group == key and not each.is_sweep_override()]
    return str(found[-1].value()) if found else None


def choices_of(parsed: Override, options: Sequence[str]) -> list[str]:
    """Return a sweep override as single ones: `a=1,2` as ["a=1", "a=2"]; any other override as one item.

    A glob selects among `options`. At most `MOST_JOBS` + 1 values are returned, enough to detect too many.

    Raises:
        ConfigError: the override is an interval, or has no values.
    """
    key, value = parsed.key_or_group, parsed.value()
    if not parsed.is_sweep_override():
        return [parsed.input_line or ""]
    if isinstance(value, Glob):
        names = value.filter(list(options))
    elif parsed.is_discrete_sweep():
        names = values_of(parsed, MOST_JOBS + 1)
    else:
        raise ConfigError(
            Problem(key, "is an interval, which cannot be enumerated. Write the values: a=1,2 or range(1,9).")
        )
    if not names:
        given = (parsed.input_line or "").partition("=")[2]
        raise ConfigError(Problem(key, f"{given} has no value.{did_you_mean(given, options)}"))
    return [f"{parsed.get_key_element()}={name}" for name in names]


def values_of(parsed: Override, most: int) -> list[str]:
    """Return the values of `a=1,2` or `a=range(1,9)`, at most `most`.

    A longer range is returned in order even if it should be shuffled: Hydra would first make a list of all values, too
    large for range(0, 1e12).

    Raises:
        ConfigError: the values cannot be listed.
    """
    value = parsed.value()
    if isinstance(value, ChoiceSweep) and any(isinstance(each, Sweep) for each in value.list):
        text = "has a range among several values. Give one range, or the values: a=0,1,2,7."
        raise ConfigError(Problem(parsed.key_or_group, text))
    in_order = replace(parsed, _value=replace(value, shuffle=False)) if isinstance(value, RangeSweep) else parsed
    try:
        found = list(islice(in_order.sweep_string_iterator(), most))
        return found if len(found) == most else list(parsed.sweep_string_iterator())
    except ValueError as error:  # a range with step 0
        given = (parsed.input_line or "").partition("=")[2]
        raise ConfigError(Problem(parsed.key_or_group, f"{given} cannot be listed: {error}.")) from error
