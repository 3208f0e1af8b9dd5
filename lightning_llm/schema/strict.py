"""A plain mapping -> `Config`, or everything that is wrong with it in the words of the one who wrote it."""

from collections.abc import Iterator, Mapping
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from lightning_llm.errors import ConfigError, Problem, did_you_mean
from lightning_llm.schema import Config
from lightning_llm.schema.targets import check_target


def parse_config(values: Mapping[str, Any]) -> Config:
    """Return `values` as a `Config`.

    Raises:
        ConfigError: naming every unknown key (with the nearest known one), wrong type, value out of range, and every
            argument that a callback's class does not take.
    """
    problems: list[Problem] = []
    config = None
    try:
        config = Config.model_validate(values)
    except ValidationError as error:
        problems = [_problem(details) for details in error.errors()]
    callbacks = values.get("callbacks")
    for name, node in (callbacks if isinstance(callbacks, dict) else {}).items():
        problems += check_target(f"callbacks.{name}", node)
    if config is None or problems:
        raise ConfigError(problems)
    return config


def _problem(details: Any) -> Problem:
    location = [str(part) for part in details["loc"]]
    key = ".".join(location)
    if details["type"] == "extra_forbidden":
        siblings = _keys_at(location[:-1])
        hint = did_you_mean(location[-1], siblings)
        elsewhere = [each for each in _all_keys(Config) if each.rpartition(".")[2] == location[-1]]
        if elsewhere and "Did you mean" not in hint:
            hint = f" Did you mean {' or '.join(repr(each) for each in elsewhere[:3])}?"
        return Problem(key, f"unknown key.{hint}")
    if details["type"] == "missing":
        return Problem(key, "a value must be given.")
    if details["type"] == "value_error":  # a rule of ours, which says all that is to be said
        return Problem(key, details["msg"].removeprefix("Value error, ") + ".")
    what = details["msg"].removeprefix("Input should be ")
    given = details["input"]
    if isinstance(given, dict | list):
        return Problem(key, f"must be {what}, and is a {'mapping' if isinstance(given, dict) else 'list'}.")
    return Problem(key, f"is {given!r}, must be {what}.")


def _keys_at(location: list[str]) -> list[str]:
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
            return []
    group = _group_of(annotation)
    return list(group.model_fields) if group else []


def _item_of(annotation: Any) -> Any:
    """Return what a list in `annotation` ("tuple[X, ...]", also Annotated, also "or None") holds, if there is one."""
    if get_origin(annotation) is tuple:
        return get_args(annotation)[0]
    if get_origin(annotation) in (Annotated, Union, UnionType):
        return next((item for each in get_args(annotation) if (item := _item_of(each)) is not None), None)
    return None


def _group_of(annotation: Any) -> type[BaseModel] | None:
    """Return the schema class in `annotation` ("X" or "X | None"), if there is one."""
    options = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    return next((each for each in options if isinstance(each, type) and issubclass(each, BaseModel)), None)


def _all_keys(group: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in group.model_fields.items():
        yield prefix + name
        if child := _group_of(field.annotation):
            yield from _all_keys(child, f"{prefix}{name}.")
