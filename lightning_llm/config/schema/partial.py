"""A config without its wrong keys, so that rules which do not read these can be checked in the same go."""

from collections.abc import Callable, Collection, Iterable, Mapping
from types import NoneType
from typing import Any, TypeVar, cast, get_args

from pydantic import ValidationError, create_model
from pydantic.fields import FieldInfo

from lightning_llm.base.errors import Problem
from lightning_llm.base.registry import Registry
from lightning_llm.config.schema import Config
from lightning_llm.config.schema.base import BrokenKeyError, Group

AnyGroup = TypeVar("AnyGroup", bound=Group)


def sound_part(values: Mapping[str, Any], broken: Collection[tuple[str, ...]]) -> Config | None:
    """Return `values` as a `Config` that lacks the fields at the paths in `broken`: reading one is `BrokenKeyError`.

    Of a path the first two keys count: a wrong `data.sources.code.weight` leaves the config without `data.sources`.
    Unknown keys must have been taken out. None where the rest does not stand by itself.
    """
    groups: dict[str, Any] = {}
    whole = {path[0] for path in broken if len(path) == 1}
    try:
        for name, field in Config.model_fields.items():
            inner = {path[1] for path in broken if len(path) > 1 and path[0] == name}
            group = _group_of(field, values.get(name))
            if inner and name not in whole and isinstance(group, type) and issubclass(group, Group):
                groups[name] = _without(group, values.get(name) or {}, inner)
            elif inner:
                whole.add(name)
        rest = {name: value for name, value in values.items() if name not in groups}
        read = _without(Config, rest, whole | groups.keys())
    except (ValidationError, AttributeError, TypeError):  # a value in the wrong place altogether, which was reported
        return None
    read.__dict__.update(groups)
    return read


def _group_of(field: FieldInfo, values: Any) -> Any:
    """Return the class of what `field` holds: of a registry's kinds the one that `values` name, if they do."""
    registry = next((each for each in field.metadata if isinstance(each, Registry)), None)
    name = values.get(registry.key) if registry is not None and isinstance(values, Mapping) else None
    if registry is not None and isinstance(name, str) and name in registry:
        return registry[name]
    optional = [each for each in get_args(field.annotation) if each is not NoneType]  # of "X | None", X
    return optional[0] if values and len(optional) == 1 else field.annotation


def _without(group: type[AnyGroup], values: Mapping[str, Any], left_out: Collection[str]) -> AnyGroup:
    """Return a `group` of `values` whose fields `left_out` are not there; rules between fields are not checked."""
    kept = {name: (field.annotation, field) for name, field in group.model_fields.items() if name not in left_out}
    reader: Any = create_model(group.__name__, __base__=Group, **kept)  # type: ignore[call-overload]
    read = reader.model_validate({name: value for name, value in values.items() if name in kept})
    made: Any = group.model_construct(**read.__dict__)
    for name in left_out:
        made.__dict__.pop(name, None)
    return cast("AnyGroup", made)


Rule = Callable[[], Iterable[Problem]]


def gather(rules: Iterable[Rule]) -> list[Problem]:
    """Return what all rules have to say, each problem once; one that reads a broken key has nothing to add."""
    found: dict[Problem, None] = {}
    for rule in rules:
        try:
            for problem in rule():
                found[problem] = None
        except BrokenKeyError:
            continue
    return list(found)
