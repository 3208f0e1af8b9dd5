"""Words of the command line as Hydra overrides, and what Hydra would take for them. Imports no torch."""

from collections.abc import Sequence
from functools import cache, lru_cache

from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from lightning_llm.errors import ConfigError, Problem, did_you_mean


def parse_overrides(overrides: Sequence[str]) -> list[Override]:
    """Return the words as Hydra's grammar reads them. Raises ConfigError with all that are no overrides."""
    parsed, problems = [], []
    for word in overrides:
        try:
            parsed.append(_parsed(word))
        except HydraException as error:
            why = str(error).splitlines()[0]
            problems.append(Problem(word, f"this is no override ({why}). Write key=value, ~key, or group=name."))
    if problems:
        raise ConfigError(problems)
    return parsed


@lru_cache(maxsize=65536)  # the jobs of a sweep share most of their words
def _parsed(word: str) -> Override:
    return OverridesParser.create().parse_override(_quoted(word))


def _quoted(word: str) -> str:
    """Return `resume=a/step=4` as `resume='a/step=4'`: the grammar wants quotes around a value with an equals sign."""
    key, _, value = word.partition("=")
    return f"{key}='{value}'" if "=" in value and not set(value) & set("'\"[]{}()$,") else word


def group_options(group: str, search: list[str]) -> list[str]:
    """Return the names that `group=` takes, recipes in subfolders as "sub/name"; empty where there is no such group."""
    # Hydra copies all it knows for each question, which takes longer than composing; no group has a dot in its name
    return [] if "." in group else _options_behind(group, tuple(search))


@cache
def _options_behind(group: str, search: tuple[str, ...]) -> list[str]:
    loader = GlobalHydra.instance().config_loader()
    options = list(loader.get_group_options(group, overrides=list(search)))
    for child in loader.list_groups(group):
        names = loader.get_group_options(f"{group}/{child}", overrides=list(search))
        options += [f"{child}/{name}" for name in names]
    return options


def forget_options() -> None:
    """Ask Hydra anew from now on: a folder of further groups may have changed."""
    _options_behind.cache_clear()


def unknown_option(parsed: Override, search: list[str]) -> Problem | None:
    """Return what is wrong with a group's chosen name, None where it is one of the group's or no group is meant."""
    options = group_options(parsed.key_or_group, search)
    if parsed.is_delete() or parsed.is_sweep_override() or not options:
        return None
    value = parsed.value()
    if value is None or value in options or isinstance(value, list):
        return None
    return Problem(parsed.key_or_group, f"there is no '{value}'.{did_you_mean(str(value), options)}")


def forced(parsed: Override, search: list[str]) -> str:
    """Return the override so that Hydra takes it even for an unknown key, which the strict check then names."""
    word = parsed.input_line or ""
    if parsed.is_delete() or group_options(parsed.key_or_group, search) or parsed.key_or_group.startswith("hydra"):
        return word
    return "++" + word.lstrip("+")


def choices_of(parsed: Override) -> list[str]:
    """Return `a=1,2` as ["a=1", "a=2"], any other override alone. Raises ConfigError for an interval."""
    if not parsed.is_sweep_override():
        return [parsed.input_line or ""]
    if not parsed.is_discrete_sweep():
        raise ConfigError(
            Problem(parsed.key_or_group, "an interval cannot be enumerated. Write the values: a=1,2 or range(1,9).")
        )
    return [f"{parsed.get_key_element()}={value}" for value in parsed.sweep_string_iterator()]
