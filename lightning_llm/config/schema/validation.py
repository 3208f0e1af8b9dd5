"""Validation of a mapping: a `Config`, or all problems and the valid part, on which further rules can run.

`problem_of` words pydantic's errors for users: key, value, allowed values and remedy.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from types import MappingProxyType, NoneType
from typing import Any, TypeVar, cast, get_args

from pydantic import BaseModel, ValidationError, create_model
from pydantic.fields import FieldInfo

from lightning_llm.base.errors import ConfigError, Problem, did_you_mean
from lightning_llm.base.registry import Registry
from lightning_llm.config.schema import Config
from lightning_llm.config.schema.aliases import TRAINER_KEYS, known_elsewhere
from lightning_llm.config.schema.base import BrokenKeyError, Group
from lightning_llm.config.schema.callbacks import check_target
from lightning_llm.config.schema.declared_types import (
    all_keys,
    annotation_at,
    choices_at,
    fields_at,
    group_at,
    groups_of,
    item_of,
    keys_of,
    registry_in,
)

AnyGroup = TypeVar("AnyGroup", bound=Group)
Rule = Callable[[], Iterable[Problem]]

NAMES_OF_KINDS = ("kind", "type", "name", "class", "_target_")
"""Keys that users may try for choosing a kind; each registry accepts one of them."""
A_MAPPING = "a mapping"
_SHAPES = {
    **dict.fromkeys(("model_type", "dict_type"), A_MAPPING),
    **dict.fromkeys(("tuple_type", "list_type"), "a list"),
}
"""pydantic's error types with Python class names in their text -> the required YAML type."""
HOW_MADE = {
    "data.mixture.scores": (
        " lightning-llm prepare data=python --score quality=length_entropy diversity=tfidf_kmeans, "
        "for example, writes scores.parquet; give that file (docs/howto/data_recipes.md)."
    ),
    "distil.teachers": (
        " Give finished runs, distil.teachers=[RUN,RUN]; train some first, e.g. lightning-llm train "
        "-m recipe=quickstart seed=0,1,2 (docs/howto/data_recipes.md)."
    ),
}
"""{key of files or runs that must exist: how to make them}."""


@dataclass(frozen=True)
class ParsedConfig:
    """Result of parsing: a complete `config`, or `problems` and the valid part of the config (None if too little)."""

    config: Config | None
    problems: tuple[Problem, ...] = ()

    def checked(self) -> Config:
        """Return the config if it has no problem. Raises ConfigError with all problems."""
        if self.problems or self.config is None:
            raise ConfigError(self.problems)
        return self.config


def read_config(
    values: Mapping[str, Any],
    broken: Mapping[tuple[str, ...], Problem | None] = MappingProxyType({}),
    stand_ins: Iterable[str] = (),
    *,
    to_build: bool = True,
) -> ParsedConfig:
    """Return `values` as a `Config`, or their problems and the valid part.

    Problems are unknown keys (reported with the nearest known one), wrong types, values out of range, and arguments
    that a callback's class does not take.

    Args:
        values: groups and keys, resolved.
        broken: {path: known problem}; None if it is reported already.
        stand_ins: groups that were replaced by their default because the chosen file does not exist.
        to_build: whether the callbacks' classes must exist and accept their arguments.
    """
    problems = [problem for problem in broken.values() if problem]
    try:
        config: Config | None = Config.model_validate(values)
        errors: list[Any] = []
    except ValidationError as error:
        config, errors = None, list(error.errors())
    paths = {*broken, *((group,) for group in stand_ins)}
    rest = deepcopy(dict(values))
    for details in errors:
        keys = keys_of(details["loc"])
        location = tuple(map(str, keys))
        if any(location[: len(path)] == path for path in broken):
            continue
        if details["type"] == "too_short" and any(path[: len(location)] == location for path in paths):
            continue  # pydantic counts only the valid items
        if not (to_build and location[0] == "callbacks" and len(location) > 1):  # checked below
            problems.append(problem_of(details))
        if details["type"] == "extra_forbidden":
            _remove(rest, keys)
        else:
            paths.add(location)
    callbacks = values.get("callbacks")
    callbacks = callbacks if to_build and isinstance(callbacks, dict) else {}
    for name, node in callbacks.items():
        others = [other for other, each in callbacks.items() if isinstance(each, dict) and "_target_" in each]
        problems += check_target(f"callbacks.{name}", node, others)
    return ParsedConfig(sound_part(rest, paths) if config is None or paths else config, tuple(problems))


def gather(rules: Iterable[Rule]) -> list[Problem]:
    """Run all rules and return their problems without duplicates; a rule that reads an invalid key is skipped."""
    found: dict[Problem, None] = {}
    for rule in rules:
        try:
            for problem in rule():
                found[problem] = None
        except BrokenKeyError:
            continue
    return list(found)


def sound_part(values: Mapping[str, Any], broken: Collection[tuple[str, ...]]) -> Config | None:
    """Return the valid part of a config: `values` without the keys in `broken`; None if the rest is not valid.

    Reading a removed key raises BrokenKeyError. Only the first two keys of a path count: an invalid
    `data.sources.code.weight` removes `data.sources`. `values` must not have unknown keys.
    """
    whole = {path[0] for path in broken if len(path) == 1}
    inner: dict[str, set[str]] = defaultdict(set)
    for path in broken:
        if len(path) > 1 and path[0] in Config.model_fields:
            inner[path[0]].add(path[1])
    groups: dict[str, Any] = {}
    try:
        for name, keys in inner.items():
            group = _class_of(Config.model_fields[name], values.get(name))
            if name not in whole and isinstance(group, type) and issubclass(group, Group):
                groups[name] = _without(group, values.get(name) or {}, keys)
            else:
                whole.add(name)
        rest = {name: value for name, value in values.items() if name not in groups}
        read = _without(Config, rest, whole | groups.keys())
    except (ValidationError, AttributeError, TypeError):  # a value in a wrong place, reported already
        return None
    read.__dict__.update(groups)
    return read


def _class_of(field: FieldInfo, values: Any) -> Any:
    """Return the class of a group; for a registry, the kind that `values` name, if any."""
    registry = next((each for each in field.metadata if isinstance(each, Registry)), None)
    name = values.get(registry.key) if registry is not None and isinstance(values, Mapping) else None
    if registry is not None and isinstance(name, str) and name in registry:
        return registry[name]
    optional = [each for each in get_args(field.annotation) if each is not NoneType]  # of "X | None", X
    return optional[0] if values and len(optional) == 1 else field.annotation


def _without(group: type[AnyGroup], values: Mapping[str, Any], left_out: Collection[str]) -> AnyGroup:
    """Return a `group` of `values` without the fields `left_out`; rules between fields are not checked."""
    kept = {name: (field.annotation, field) for name, field in group.model_fields.items() if name not in left_out}
    reader: Any = create_model(group.__name__, __base__=Group, **kept)  # type: ignore[call-overload]
    read = reader.model_validate({name: value for name, value in values.items() if name in kept})
    made: Any = group.model_construct(**read.__dict__)
    for name in left_out:
        made.__dict__.pop(name, None)
    return cast("AnyGroup", made)


def _remove(values: Any, location: Sequence[Any]) -> None:
    for part in location[:-1]:
        values = values[part]
    values.pop(location[-1], None)


def problem_of(details: Any) -> Problem:
    """Return a pydantic error (`ErrorDetails`) as a problem for users, with the key, the value and a remedy."""
    location = [str(part) for part in keys_of(details["loc"])]
    key, kind = ".".join(location), details["type"]
    if kind == "extra_forbidden":
        return Problem(key, _unknown_key(location, group_at(details["loc"][:-1])))
    if kind == "missing":
        choices = choices_at(key)
        which = f": {', '.join(choices)}" if choices else ""
        return Problem(key, f"a value must be given{which}.{HOW_MADE.get(key, '')}")
    if kind in ("union_tag_invalid", "union_tag_not_found", "model_attributes_type"):
        return _no_kind(location, details)
    if kind == "value_error":  # raised by a validator of the schema, with the complete message
        text = details["msg"].removeprefix("Value error, ")
        value = repr(details["input"]) if text.startswith("must ") and not isinstance(details["input"], dict) else None
        return Problem(key, text if text.endswith((".", "?")) else f"{text}.", value)
    if kind in ("too_short", "too_long"):
        word, limit = ("least", "min_length") if kind == "too_short" else ("most", "max_length")
        count = details["ctx"][limit]
        return Problem(key, f"must have at {word} {count} item{'s' if count > 1 else ''}.")
    return _wrong_value(location, details)


def _unknown_key(location: list[str], group: type[BaseModel] | None) -> str:
    """Return the message for an unknown key of `group`: its counterpart if it is another trainer's, or a near key."""
    name = location[-1]
    if location[0] == "trainer" and (ours := TRAINER_KEYS.get(name)):
        return f"is an argument of Lightning's Trainer. Use {ours} instead."
    if alias := known_elsewhere(name):
        return f"unknown key.{alias}"
    if of_kinds := _key_of_kinds(location, group):
        return of_kinds
    hint = did_you_mean(name, group.model_fields if group else ())
    # Without duplicates: every optimizer has a learning rate.
    elsewhere = [each for each in dict.fromkeys(all_keys(Config)) if each.rpartition(".")[2] == name]
    if elsewhere and name not in NAMES_OF_KINDS and "Did you mean" not in hint:
        hint = f" Did you mean {' or '.join(repr(each) for each in elsewhere[:3])}?"
    return f"unknown key.{hint}"


def _wrong_value(location: list[str], details: Any) -> Problem:
    """Return the problem of a value of the wrong type or out of range."""
    key, kind, given = ".".join(location), details["type"], details["input"]
    what = _SHAPES.get(kind) or details["msg"].removeprefix("Input should be ")
    if what == A_MAPPING and (keys := fields_at(location)):
        what += f" with keys of these: {', '.join(keys)}"
    if isinstance(given, dict | list):
        return Problem(key, f"must be {what}, and is a {'mapping' if isinstance(given, dict) else 'list'}.")
    if kind.startswith("int") and isinstance(given, float) and given.is_integer():
        return Problem(key, f"must be {what}. Use {int(given)}.", given)
    if kind == "tuple_type":
        holds = " of mappings" if groups_of(item_of(annotation_at(location))) else f": {key}=[{given}]"
        return Problem(key, f"must be a list{holds}.", repr(given))
    if kind == "literal_error" and "null" in choices_at(key):
        what += " or null"
    quotes = " Write it in quotes." if kind == "string_type" and isinstance(given, int | float) else ""
    return Problem(key, f"must be {what}.{quotes}", "null" if given is None else repr(given))


def _key_of_kinds(location: list[str], kind: type[BaseModel] | None) -> str:
    """Return the message for an unknown key of a registered kind if other kinds or the choice key explain it; else "".

    `kind`: the class that lacks the key.
    """
    registry = registry_in(annotation_at(location[:-1]))
    if registry is None:
        return ""
    group, key = ".".join(location[:-1]), location[-1]
    if key in NAMES_OF_KINDS and key != registry.key:
        return f"unknown key. The {registry.noun} is {group}.{registry.key}: {', '.join(registry)}."
    others = [name for name in registry if key in registry[name].model_fields]
    if not others:
        return ""
    own = next((f"'{name}'" for name in registry if registry[name] is kind), "this one")
    owners = " or ".join(f"'{name}'" for name in others)
    where = f"{group}.{registry.key}={owners}"
    drop = f"remove the key (~{group}.{key} if a file sets it)"
    return f"unknown key of the {registry.noun} {own}. It is a key of {where}. Set that, or {drop}."


def _no_kind(location: list[str], details: Any) -> Problem:
    """Return the problem of a value at `location` that names none of its registry's kinds."""
    registry = registry_in(annotation_at(location))
    if registry is None:  # pydantic reports this error only for registries
        raise TypeError(f"{'.'.join(location)} has no registry")
    if details["type"] == "model_attributes_type":
        known = ", ".join(registry)
        return Problem(".".join(location), f"must be a mapping with {registry.key}: {known}.", repr(details["input"]))
    key = ".".join([*location, registry.key])
    if details["type"] == "union_tag_not_found":
        return Problem(key, f"a value must be given. Known here: {', '.join(registry)}.")
    return Problem(key, registry.unknown(details["ctx"]["tag"]))
