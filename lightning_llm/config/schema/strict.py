"""A plain mapping -> `Config`, or everything that is wrong with it in the terms of whoever wrote it."""

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import reduce
from types import MappingProxyType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from lightning_llm.config.schema import Config
from lightning_llm.config.schema.aliases import known_elsewhere
from lightning_llm.config.schema.lightning_keys import TRAINER_KEYS
from lightning_llm.config.schema.partial import sound_part
from lightning_llm.config.schema.targets import check_target
from lightning_llm.errors import ConfigError, Problem, did_you_mean
from lightning_llm.registry import NameIn, Registry

AnyMark = TypeVar("AnyMark")


@dataclass(frozen=True)
class Reading:
    """What came of words or a file: a whole `config`, or `problems` and the part of it that they leave, if any."""

    config: Config | None
    problems: tuple[Problem, ...] = ()

    def checked(self) -> Config:
        """Return the config. Raises ConfigError with all problems."""
        if self.problems or self.config is None:
            raise ConfigError(self.problems)
        return self.config


def read_config(
    values: Mapping[str, Any],
    broken: Mapping[tuple[str, ...], Problem | None] = MappingProxyType({}),
    stand_ins: Iterable[str] = (),
    *,
    to_build: bool = True,
) -> Reading:
    """Return `values` as a `Config`, or what is wrong with them and what is sound.

    Wrong is every unknown key (reported with the nearest known one), type, and value out of range, and every argument
    that a callback's class does not take.

    Args:
        values: groups and keys, resolved.
        broken: what is known to be wrong, by its path; None where that needs no words.
        stand_ins: groups whose chosen file is not there, in whose place the default is.
        to_build: whether the callbacks' classes must be there and take their arguments.
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
        details = {**details, "loc": _keys_of(details["loc"]), "group": _group_at(details["loc"][:-1])}
        location = tuple(str(part) for part in details["loc"])
        if any(location[: len(path)] == path for path in broken):
            continue
        if details["type"] == "too_short" and any(path[: len(location)] == location for path in paths):
            continue  # pydantic counts the sound items alone
        if not (to_build and location[0] == "callbacks" and len(location) > 1):  # which are checked below
            problems.append(_problem(details))
        if details["type"] == "extra_forbidden":
            _take_out(rest, details["loc"])
        else:
            paths.add(location)
    callbacks = values.get("callbacks")
    callbacks = callbacks if to_build and isinstance(callbacks, dict) else {}
    for name, node in callbacks.items():
        others = [other for other, each in callbacks.items() if isinstance(each, dict) and "_target_" in each]
        problems += check_target(f"callbacks.{name}", node, others)
    return Reading(sound_part(rest, paths) if config is None or paths else config, tuple(problems))


def _take_out(values: Any, location: Sequence[Any]) -> None:
    for part in location[:-1]:
        values = values[part]
    values.pop(location[-1], None)


A_MAPPING = "a mapping"
_SHAPES = {
    **dict.fromkeys(("model_type", "dict_type"), A_MAPPING),
    **dict.fromkeys(("tuple_type", "list_type"), "a list"),
}
"""pydantic's types of error whose text names classes of Python: what must be there, in the words of YAML."""


HOW_MADE = {
    "data.mixture.scores": (
        " Scores are made by lightning-llm prepare data=python --score quality=length_entropy diversity=tfidf_kmeans, "
        "say, which writes scores.parquet; give that file (docs/data_recipes.md)."
    ),
    "distil.teachers": (
        " Teachers are runs that have finished, distil.teachers=[RUN,RUN]: train some first, say lightning-llm train "
        "-m recipe=quickstart seed=0,1,2 (docs/data_recipes.md)."
    ),
}
"""Of values that are made beforehand: by what."""


def _problem(details: Any) -> Problem:
    """Return one of pydantic's errors in words; `loc` are keys as they are written, `group` what the key stands in."""
    location = [str(part) for part in details["loc"]]
    key = ".".join(location)
    if details["type"] == "extra_forbidden":
        if location[0] == "trainer" and (ours := TRAINER_KEYS.get(location[-1])):
            return Problem(key, f"is an argument of Lightning's Trainer; here {ours} does it.")
        if alias := known_elsewhere(location[-1]):
            return Problem(key, f"unknown key.{alias}")
        siblings = list(details["group"].model_fields) if details["group"] else []
        hint = did_you_mean(location[-1], siblings)
        elsewhere = [each for each in _all_keys(Config) if each.rpartition(".")[2] == location[-1]]
        if elsewhere and "Did you mean" not in hint:
            hint = f" Did you mean {' or '.join(repr(each) for each in elsewhere[:3])}?"
        return Problem(key, f"unknown key.{hint}")
    if details["type"] == "missing":
        choices = choices_at(key)
        which = f": {', '.join(choices)}" if choices else ""
        return Problem(key, f"a value must be given{which}.{HOW_MADE.get(key, '')}")
    if details["type"] in ("union_tag_invalid", "union_tag_not_found", "model_attributes_type"):
        return _no_kind(location, details)
    if details["type"] == "value_error":  # a rule of ours, which says all there is to report
        text = details["msg"].removeprefix("Value error, ")
        return Problem(key, text if text.endswith((".", "?")) else f"{text}.")
    given = details["input"]
    if details["type"] in ("too_short", "too_long"):
        word, limit = ("least", "min_length") if details["type"] == "too_short" else ("most", "max_length")
        count = details["ctx"][limit]
        return Problem(key, f"must hold at {word} {count} item{'s' if count > 1 else ''}.")
    what = _SHAPES.get(details["type"]) or details["msg"].removeprefix("Input should be ")
    if what == A_MAPPING and (keys := fields_at(location)):
        what += f" with keys of these: {', '.join(keys)}"
    if isinstance(given, dict | list):
        return Problem(key, f"must be {what}, and is a {'mapping' if isinstance(given, dict) else 'list'}.")
    if details["type"].startswith("int") and isinstance(given, float) and given.is_integer():
        return Problem(key, f"is {given!r}, must be {what}. Write {int(given)}.")
    if details["type"] == "tuple_type":
        holds = " of mappings" if _groups_of(_item_of(_annotation_at(location))) else f": {key}=[{given}]"
        return Problem(key, f"is {given!r}, must be a list{holds}.")
    quotes = " Write it in quotes." if details["type"] == "string_type" and isinstance(given, int | float) else ""
    return Problem(key, f"is {'null' if given is None else repr(given)}, must be {what}.{quotes}")


def _no_kind(location: list[str], details: Any) -> Problem:
    """Return the problem of a value at `location` that should be one of a registry's kinds, and names none of them."""
    registry = _registry_in(_annotation_at(location))
    if registry is None:  # pydantic said that there is one
        raise TypeError(f"{'.'.join(location)} has no registry")
    if details["type"] == "model_attributes_type":
        known = ", ".join(registry)
        return Problem(".".join(location), f"is {details['input']!r}, must be a mapping with {registry.key}: {known}.")
    key = ".".join([*location, registry.key])
    if details["type"] == "union_tag_not_found":
        return Problem(key, f"a value must be given. Known here: {', '.join(registry)}.")
    return Problem(key, registry.unknown(details["ctx"]["tag"]))


def takes_text(key: str) -> bool:
    """Return whether the value at the dotted `key` is text of any kind: a name, a path, an address, a tag."""
    return str in map(_plain, _alternatives(_annotation_at(key.split("."))))


def fields_at(location: list[str]) -> dict[str, bool]:
    """Return the keys of the group at `location`, and whether something lies below each."""
    groups = _groups_of(_annotation_at(location))
    return {name: _has_keys(declared) for group in groups for name, declared in _declared(group).items()}


def choices_at(key: str) -> list[str]:
    """Return what can stand at the dotted `key`, where that is a choice."""
    options = _alternatives(_annotation_at(key.split(".")))
    found = [value for each in options if get_origin(each) is Literal for value in get_args(each)]
    found += [value for each in options if each is bool for value in ("true", "false")]
    found += [name for each in options for mark in _marks(each, NameIn) for name in mark.registry]
    return [*map(str, found), *(["null"] if found and type(None) in options else [])]


def _declared(group: type[BaseModel]) -> dict[str, Any]:
    """Return the declared type of each key of `group`, with what pydantic keeps of it beside the field's annotation."""
    return {
        name: Annotated[(field.annotation, *field.metadata)] if field.metadata else field.annotation
        for name, field in group.model_fields.items()
    }


def _alternatives(annotation: Any) -> tuple[Any, ...]:
    """Return the types that "X" or "X | None" is made of; what marks "X | None" as a whole, marks X."""
    if get_origin(annotation) is Annotated:
        inner, *marks = get_args(annotation)
        return tuple(Annotated[(each, *marks)] for each in _alternatives(inner)) if _is_union(inner) else (annotation,)
    return get_args(annotation) if _is_union(annotation) else (annotation,)


def _is_union(annotation: Any) -> bool:
    return get_origin(annotation) in (Union, UnionType)


def _plain(annotation: Any) -> Any:
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation


def _marks(annotation: Any, kind: type[AnyMark]) -> list[AnyMark]:
    """Return what `Annotated` adds to the type, of class `kind`."""
    added = get_args(annotation)[1:] if get_origin(annotation) is Annotated else ()
    return [each for each in added if isinstance(each, kind)]


def _registry_in(annotation: Any) -> Registry[Any] | None:
    return next((mark for each in _alternatives(annotation) for mark in _marks(each, Registry)), None)


def _has_keys(annotation: Any) -> bool:
    return bool(_groups_of(annotation)) or get_origin(annotation) is dict


def _keys_of(location: Sequence[Any]) -> tuple[Any, ...]:
    """Return pydantic's `location` less the names of kinds in it, which stand behind the keys that hold them."""
    return _walk(location)[0]


def _group_at(location: Sequence[Any]) -> type[BaseModel] | None:
    """Return the schema class at pydantic's `location`, that of a kind where one is named."""
    return next(iter(_groups_of(_walk(location)[1])), None)


def _walk(location: Sequence[Any]) -> tuple[tuple[Any, ...], Any]:
    keys: list[Any] = []
    annotation: Any = Config
    for part in location:
        registry = _registry_in(annotation)
        if registry is not None and part in registry:
            annotation = registry[part]
            continue
        keys.append(part)
        annotation = _below(annotation, str(part))
    return tuple(keys), annotation


def _annotation_at(location: list[str]) -> Any:
    """Return the declared type of what lies at the keys `location`, None where nothing can lie there."""
    annotation: Any = Config
    for part in location:
        annotation = _below(annotation, part)
    return annotation


def _below(annotation: Any, part: str) -> Any:
    """Return the declared type of what lies at the key or index `part` of a value of type `annotation`, or None."""
    declared = [fields[part] for group in _groups_of(annotation) if part in (fields := _declared(group))]
    if declared:
        return reduce(operator.or_, declared)  # of several kinds each may have the key
    mapping = next((each for each in map(_plain, _alternatives(annotation)) if get_origin(each) is dict), None)
    if mapping is not None:
        return get_args(mapping)[1]
    return _item_of(annotation) if part.isdigit() else None


def _item_of(annotation: Any) -> Any:
    """Return what a list in `annotation` ("tuple[X, ...]", also Annotated, also "or None") holds, if there is one."""
    if get_origin(annotation) is tuple:
        return get_args(annotation)[0]
    if get_origin(annotation) in (Annotated, Union, UnionType):
        return next((item for each in get_args(annotation) if (item := _item_of(each)) is not None), None)
    return None


def _groups_of(annotation: Any) -> list[type[BaseModel]]:
    """Return the schema classes in `annotation`: that of "X" or "X | None", all kinds' of a registry."""
    registry = _registry_in(annotation)
    if registry is not None:
        return [registry[name] for name in registry]
    plain = map(_plain, _alternatives(annotation))
    return [each for each in plain if isinstance(each, type) and issubclass(each, BaseModel)]


def _all_keys(group: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, declared in _declared(group).items():
        yield prefix + name
        for child in _groups_of(declared):
            yield from _all_keys(child, f"{prefix}{name}.")
