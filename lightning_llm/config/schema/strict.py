"""A plain mapping -> `Config`, or everything that is wrong with it in the terms of whoever wrote it."""

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
        details = {**details, "loc": keys_of(details["loc"]), "group": group_at(details["loc"][:-1])}
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
        if of_kinds := _key_of_kinds(location, details["group"]):
            return Problem(key, of_kinds)
        siblings = list(details["group"].model_fields) if details["group"] else []
        hint = did_you_mean(location[-1], siblings)
        # Once each: every kind of optimizer has the learning rate.
        elsewhere = [each for each in dict.fromkeys(all_keys(Config)) if each.rpartition(".")[2] == location[-1]]
        if elsewhere and location[-1] not in NAMES_OF_KINDS and "Did you mean" not in hint:
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
        holds = " of mappings" if groups_of(item_of(annotation_at(location))) else f": {key}=[{given}]"
        return Problem(key, f"is {given!r}, must be a list{holds}.")
    if details["type"] == "literal_error" and "null" in choices_at(key):
        what += " or null"
    quotes = " Write it in quotes." if details["type"] == "string_type" and isinstance(given, int | float) else ""
    return Problem(key, f"is {'null' if given is None else repr(given)}, must be {what}.{quotes}")


NAMES_OF_KINDS = ("kind", "type", "name", "class", "_target_")
"""Keys by which people name one of several kinds; each registry takes one of them."""


def _key_of_kinds(location: list[str], kind: type[BaseModel] | None) -> str:
    """Return the problem of an unknown key in a group of a registry, if its other kinds or its own key explain it.

    `kind`: the class that does not take the key.
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
    return f"unknown key of the {registry.noun} {own}. It is a key of {where}. Set that, or drop it."


def _no_kind(location: list[str], details: Any) -> Problem:
    """Return the problem of a value at `location` that should be one of a registry's kinds, and names none of them."""
    registry = registry_in(annotation_at(location))
    if registry is None:  # pydantic said that there is one
        raise TypeError(f"{'.'.join(location)} has no registry")
    if details["type"] == "model_attributes_type":
        known = ", ".join(registry)
        return Problem(".".join(location), f"is {details['input']!r}, must be a mapping with {registry.key}: {known}.")
    key = ".".join([*location, registry.key])
    if details["type"] == "union_tag_not_found":
        return Problem(key, f"a value must be given. Known here: {', '.join(registry)}.")
    return Problem(key, registry.unknown(details["ctx"]["tag"]))
