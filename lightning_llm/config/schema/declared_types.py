"""Declared types, choices and subkeys of a config key, read from pydantic's fields."""

import operator
from collections.abc import Iterator, Sequence
from functools import reduce
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel

from lightning_llm.base.registry import NameIn, Names, Registry
from lightning_llm.config.schema import Config

AnyMark = TypeVar("AnyMark")


def takes_text(key: str) -> bool:
    """Return whether the value of the dotted `key` may be text: a name, a path, an address, a tag."""
    return str in map(_plain, _alternatives(annotation_at(key.split("."))))


def fields_at(location: list[str]) -> dict[str, bool]:
    """Return {key: whether it has subkeys} for the keys below `location`, e.g. ["data", "tokenizer"]."""
    groups = groups_of(annotation_at(location))
    return {name: _has_keys(declared) for group in groups for name, declared in _declared(group).items()}


def choices_at(key: str) -> list[str]:
    """Return the allowed values of the dotted `key` as texts; [] if it is not a choice."""
    options = _alternatives(annotation_at(key.split(".")))
    found = [value for each in options if get_origin(each) is Literal for value in get_args(each)]
    found += [value for each in options if each is bool for value in ("true", "false")]
    found += [name for each in options for mark in _marks(each, NameIn) for name in mark.registry]
    found += [name for each in options for mark in _marks(each, Names) for name in mark.names]
    return [*map(str, found), *(["null"] if found and type(None) in options else [])]


def _declared(group: type[BaseModel]) -> dict[str, Any]:
    """Return {key: declared type} of `group`, including metadata that pydantic stores outside the annotation."""
    return {
        name: Annotated[(field.annotation, *field.metadata)] if field.metadata else field.annotation
        for name, field in group.model_fields.items()
    }


def _alternatives(annotation: Any) -> tuple[Any, ...]:
    """Return the types in "X" or "X | None"; metadata of the union applies to each of them."""
    if get_origin(annotation) is Annotated:
        inner, *marks = get_args(annotation)
        return tuple(Annotated[(each, *marks)] for each in _alternatives(inner)) if _is_union(inner) else (annotation,)
    return get_args(annotation) if _is_union(annotation) else (annotation,)


def _is_union(annotation: Any) -> bool:
    return get_origin(annotation) in (Union, UnionType)


def _plain(annotation: Any) -> Any:
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation


def _marks(annotation: Any, kind: type[AnyMark]) -> list[AnyMark]:
    """Return the metadata of class `kind` that `Annotated` adds to the type."""
    added = get_args(annotation)[1:] if get_origin(annotation) is Annotated else ()
    return [each for each in added if isinstance(each, kind)]


def registry_in(annotation: Any) -> Registry[Any] | None:
    """Return the registry of kinds that a value of type `annotation` may be; None if it is not such a type."""
    return next((mark for each in _alternatives(annotation) for mark in _marks(each, Registry)), None)


def _has_keys(annotation: Any) -> bool:
    return bool(groups_of(annotation)) or get_origin(annotation) is dict


def keys_of(location: Sequence[Any]) -> tuple[Any, ...]:
    """Return the config keys in the location of a pydantic error, which also has the names of kinds."""
    return _walk(location)[0]


def group_at(location: Sequence[Any]) -> type[BaseModel] | None:
    """Return the schema class at the location of a pydantic error: that of the kind, if the location names one."""
    return next(iter(groups_of(_walk(location)[1])), None)


def _walk(location: Sequence[Any]) -> tuple[tuple[Any, ...], Any]:
    keys: list[Any] = []
    annotation: Any = Config
    for part in location:
        registry = registry_in(annotation)
        if registry is not None and part in registry:
            annotation = registry[part]
            continue
        keys.append(part)
        annotation = _below(annotation, str(part))
    return tuple(keys), annotation


def annotation_at(location: list[str]) -> Any:
    """Return the declared type at the keys `location`; None if there is no such key."""
    annotation: Any = Config
    for part in location:
        annotation = _below(annotation, part)
    return annotation


def _below(annotation: Any, part: str) -> Any:
    """Return the declared type at the key or index `part` of a value of type `annotation`, or None."""
    declared = [fields[part] for group in groups_of(annotation) if part in (fields := _declared(group))]
    if declared:
        return reduce(operator.or_, declared)  # several kinds may have the key
    mapping = next((each for each in map(_plain, _alternatives(annotation)) if get_origin(each) is dict), None)
    if mapping is not None:
        return get_args(mapping)[1]
    return item_of(annotation) if part.isdigit() else None


def item_of(annotation: Any) -> Any:
    """Return the item type of a list in `annotation` ("tuple[X, ...]", also Annotated, also "| None"), if any."""
    if get_origin(annotation) is tuple:
        return get_args(annotation)[0]
    if get_origin(annotation) in (Annotated, Union, UnionType):
        return next((item for each in get_args(annotation) if (item := item_of(each)) is not None), None)
    return None


def groups_of(annotation: Any) -> list[type[BaseModel]]:
    """Return the schema classes that a value of type `annotation` may have: X of "X | None", or all kinds."""
    registry = registry_in(annotation)
    if registry is not None:
        return [registry[name] for name in registry]
    plain = map(_plain, _alternatives(annotation))
    return [each for each in plain if isinstance(each, type) and issubclass(each, BaseModel)]


def all_keys(group: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield the dotted keys in and below the schema class `group`, each with `prefix` in front."""
    for name, declared in _declared(group).items():
        yield prefix + name
        for child in groups_of(declared):
            yield from all_keys(child, f"{prefix}{name}.")
