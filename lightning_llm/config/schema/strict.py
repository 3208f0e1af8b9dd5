"""Validate a mapping: a `Config`, or all problems and the valid part, on which further rules can run."""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from types import MappingProxyType, NoneType
from typing import Any, TypeVar, cast, get_args

from pydantic import ValidationError, create_model
from pydantic.fields import FieldInfo

from lightning_llm.base.errors import ConfigError, Problem
from lightning_llm.base.registry import Registry
from lightning_llm.config.schema import Config
from lightning_llm.config.schema.base import BrokenKeyError, Group
from lightning_llm.config.schema.callbacks import check_target
from lightning_llm.config.schema.declared_types import keys_of
from lightning_llm.config.schema.messages import problem_of

AnyGroup = TypeVar("AnyGroup", bound=Group)
Rule = Callable[[], Iterable[Problem]]


@dataclass(frozen=True)
class ParsedConfig:
    """Result of parsing: a complete `config`, or `problems` and the valid part of the config (None if too little)."""

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
    """Return the problems of all rules without duplicates; a rule that reads an invalid key is skipped."""
    found: dict[Problem, None] = {}
    for rule in rules:
        try:
            for problem in rule():
                found[problem] = None
        except BrokenKeyError:
            continue
    return list(found)


def sound_part(values: Mapping[str, Any], broken: Collection[tuple[str, ...]]) -> Config | None:
    """Return `values` as a `Config` without the fields at the paths in `broken`: reading one raises BrokenKeyError.

    Only the first two keys of a path count: an invalid `data.sources.code.weight` removes `data.sources`. Unknown keys
    must have been removed before. Returns None if the rest is not a valid config.
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
