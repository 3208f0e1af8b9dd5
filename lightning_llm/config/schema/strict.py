"""A plain mapping -> `Config`, or everything that is wrong with it in the words of the one who wrote it."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from types import MappingProxyType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from lightning_llm.config.schema import Config
from lightning_llm.config.schema.aliases import known_elsewhere
from lightning_llm.config.schema.lightning_words import TRAINER_KEYS
from lightning_llm.config.schema.partial import sound_part
from lightning_llm.config.schema.targets import check_target
from lightning_llm.errors import ConfigError, Problem, did_you_mean


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

    Wrong is every unknown key (said with the nearest known one), type, and value out of range, and every argument that
    a callback's class does not take.

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
        location = tuple(str(part) for part in details["loc"])
        if any(location[: len(path)] == path for path in broken):
            continue
        if not (to_build and location[0] == "callbacks" and len(location) > 1):  # of which more is said below
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


def _problem(details: Any) -> Problem:
    location = [str(part) for part in details["loc"]]
    key = ".".join(location)
    if details["type"] == "extra_forbidden":
        if location[0] == "trainer" and (ours := TRAINER_KEYS.get(location[-1])):
            return Problem(key, f"is an argument of Lightning's Trainer; here {ours} does it.")
        if alias := known_elsewhere(location[-1]):
            return Problem(key, f"unknown key.{alias}")
        siblings = _keys_at(location[:-1])
        hint = did_you_mean(location[-1], siblings)
        elsewhere = [each for each in _all_keys(Config) if each.rpartition(".")[2] == location[-1]]
        if elsewhere and "Did you mean" not in hint:
            hint = f" Did you mean {' or '.join(repr(each) for each in elsewhere[:3])}?"
        return Problem(key, f"unknown key.{hint}")
    if details["type"] == "missing":
        choices = choices_at(key)
        which = f": {', '.join(choices)}" if choices else ""
        return Problem(key, f"a value must be given{which}.")
    if details["type"] == "value_error":  # a rule of ours, which says all that is to be said
        return Problem(key, details["msg"].removeprefix("Value error, ") + ".")
    what = details["msg"].removeprefix("Input should be ")
    given = details["input"]
    if isinstance(given, dict | list):
        return Problem(key, f"must be {what}, and is a {'mapping' if isinstance(given, dict) else 'list'}.")
    if details["type"].startswith("int") and isinstance(given, float) and given.is_integer():
        return Problem(key, f"is {given!r}, must be {what}. Write {int(given)}.")
    if details["type"] == "tuple_type":
        return Problem(key, f"is {given!r}, must be a list: {key}=[{given}].")
    quotes = " Write it in quotes." if details["type"] == "string_type" and isinstance(given, int | float) else ""
    return Problem(key, f"is {given!r}, must be {what}.{quotes}")


def takes_text(key: str) -> bool:
    """Return whether the value at the dotted `key` is text of any kind: a name, a path, an address, a tag."""
    return str in _alternatives(_annotation_at(key.split(".")))


def fields_at(location: list[str]) -> dict[str, bool]:
    """Return the keys of the group at `location`, and whether something lies below each."""
    group = _group_of(_annotation_at(location))
    fields = group.model_fields if group else {}
    return {name: _has_keys(field.annotation) for name, field in fields.items()}


def choices_at(key: str) -> list[str]:
    """Return what can stand at the dotted `key`, where that is a choice."""
    options = _alternatives(_annotation_at(key.split(".")))
    found = [value for each in options if get_origin(each) is Literal for value in get_args(each)]
    found += [value for each in options if each is bool for value in ("true", "false")]
    return [*map(str, found), *(["null"] if found and type(None) in options else [])]


def _alternatives(annotation: Any) -> tuple[Any, ...]:
    """Return the types that "X" or "X | None" is made of."""
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)


def _has_keys(annotation: Any) -> bool:
    return _group_of(annotation) is not None or get_origin(annotation) is dict


def _keys_at(location: list[str]) -> list[str]:
    group = _group_of(_annotation_at(location))
    return list(group.model_fields) if group else []


def _annotation_at(location: list[str]) -> Any:
    """Return the declared type of what lies at `location`, None where nothing can lie there."""
    annotation: Any = Config
    for part in location:
        group = _group_of(annotation)
        if group is not None and part in group.model_fields:
            annotation = group.model_fields[part].annotation
        elif get_origin(annotation) is dict:
            annotation = get_args(annotation)[1]
        elif part.isdigit() and (item := _item_of(annotation)) is not None:
            annotation = item
        else:
            return None
    return annotation


def _item_of(annotation: Any) -> Any:
    """Return what a list in `annotation` ("tuple[X, ...]", also Annotated, also "or None") holds, if there is one."""
    if get_origin(annotation) is tuple:
        return get_args(annotation)[0]
    if get_origin(annotation) in (Annotated, Union, UnionType):
        return next((item for each in get_args(annotation) if (item := _item_of(each)) is not None), None)
    return None


def _group_of(annotation: Any) -> type[BaseModel] | None:
    """Return the schema class in `annotation` ("X" or "X | None"), if there is one."""
    return next(
        (each for each in _alternatives(annotation) if isinstance(each, type) and issubclass(each, BaseModel)), None
    )


def _all_keys(group: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in group.model_fields.items():
        yield prefix + name
        if child := _group_of(field.annotation):
            yield from _all_keys(child, f"{prefix}{name}.")
