"""Registries: the kinds of each extension point by name. Imports no torch.

A kind (a mixer, an optimizer, ...) is a config class. Its fields are the keys that YAML may set; one of them is a
`Literal` with the kind's name. Its methods return sizes and costs to the planner without torch. The torch class is
named by a string, such as `module: ClassVar[str] = "lightning_llm.model.norm:RMSNorm"`, and imported only by `build`.

Classes register when their module is imported. Each registry lists the modules of the built-in kinds; an installed
package lists its own with entry points of the group `lightning_llm.components`. A config chooses among registered
kinds and never causes other imports.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, Generic, Literal, TypeVar, get_args, get_origin

from pydantic import BaseModel, GetCoreSchemaHandler, ValidationError
from pydantic_core import CoreSchema, core_schema

from lightning_llm.base.errors import ConfigError, Problem, did_you_mean

ENTRY_POINTS = "lightning_llm.components"
"""Group of entry points with which an installed package adds kinds."""

Kind = TypeVar("Kind", bound=BaseModel)
Registered = TypeVar("Registered", bound=BaseModel)


class Registry(Generic[Kind]):
    """Registry of one extension point: name -> class. `Annotated[Base, registry]` is the type of a config key.

    The config schema is built when the first config is read; no kinds can be added later.
    """

    def __init__(self, noun: str, *modules: str, key: str = "kind"):
        """`noun`: a kind in messages; `modules`: torch-free modules of built-in kinds; `key`: field with the name.

        The modules are given by dotted name and imported on first use, because they import this registry.
        """
        self.noun, self.modules, self.key = noun, modules, key
        self._kinds: dict[str, type[Kind]] = {}
        self._instances: dict[str, Kind] = {}
        self._loaded = self._in_use = False

    def register(self, kind: type[Registered]) -> type[Registered]:
        """Decorator: add the class `kind` under the name in its field `key`.

        Raises:
            TypeError: the field is missing or not a `Literal` of one name.
            ValueError: another class has that name.
            RuntimeError: configs have already been read.
        """
        field = kind.model_fields.get(self.key)
        names = get_args(field.annotation) if field and get_origin(field.annotation) is Literal else ()
        if len(names) != 1:
            raise TypeError(f'{kind.__qualname__} needs a field {self.key}: Literal["NAME"] = "NAME"')
        known = self._kinds.get(names[0])
        if known is not None:
            raise ValueError(f"{self.noun} '{names[0]}' is already {known.__module__}.{known.__qualname__}")
        if self._in_use:
            raise RuntimeError(
                f"{self.noun} '{names[0]}' was registered after the first config was read: use an entry point"
            )
        added: Any = kind
        self._kinds[names[0]] = added
        return kind

    def __getitem__(self, name: str) -> type[Kind]:
        """Return the class with that `name`. Raises KeyError."""
        return self._all()[name]

    def __iter__(self) -> Iterator[str]:
        """Yield the names, in alphabetical order."""
        return iter(sorted(self._all()))

    def __contains__(self, name: object) -> bool:
        return name in self._all()

    def __len__(self) -> int:
        return len(self._all())

    def default(self, name: str) -> Kind:
        """Return the kind with that `name` and default values. Raises ValueError if a key has no default."""
        if name not in self:
            raise ValueError(self.unknown(name))
        try:
            return self[name]()
        except ValidationError as error:
            keys = ", ".join(".".join(map(str, each["loc"])) for each in error.errors())
            raise ValueError(f"{self.noun} '{name}' cannot be given by name alone: no default for {keys}") from error

    def instance(self, name: str) -> Kind:
        """Return the kind with that `name` and default values, the same object at each call; see `default`.

        The first call creates those of all kinds with defaults, because Dynamo cannot trace their creation.
        """
        if name not in self._instances:
            for each, kind in self._all().items():
                if each not in self._instances and not any(field.is_required() for field in kind.model_fields.values()):
                    self._instances[each] = kind()
        return self._instances[name] if name in self._instances else self.default(name)

    def unknown(self, name: object) -> str:
        """Return the message that there is no kind `name`, with the closest or all names."""
        return f"there is no {self.noun} {name!r}.{did_you_mean(str(name), self)}"

    def _all(self) -> dict[str, type[Kind]]:
        if not self._loaded:
            self._loaded = True
            for name in self.modules:
                import_module(name)
            load_installed()
        return self._kinds

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        kinds, self._in_use = self._all(), True
        return core_schema.tagged_union_schema(
            {name: handler.generate_schema(kind) for name, kind in kinds.items()}, discriminator=self.key
        )


@dataclass(frozen=True)
class NameIn:
    """Type of a config key that takes the name of a kind of `registry`: `Annotated[str, NameIn(registry)]`.

    The kind is used with its default values.
    """

    registry: Registry[Any]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def _check(self, name: str) -> str:
        self.registry.default(name)
        return name


@dataclass(frozen=True)
class Names:
    """Known values of a config key that also takes others: `Annotated[str, ..., Names(names)]`.

    Shell completion and the generated docs list them.
    """

    names: tuple[str, ...]


@cache
def load_installed() -> None:
    """Import the modules of installed packages in the group `lightning_llm.components`, once.

    Raises:
        ConfigError: one cannot be imported, or registers an existing name.
    """
    for point in entry_points(group=ENTRY_POINTS):
        try:
            point.load()
        except Exception as error:  # third-party code may raise anything
            package = point.dist.name if point.dist else "a package"
            text = (
                f"importing '{point.name}' of {package} ({point.value}) failed: {type(error).__name__}: {error}. "
                "Upgrade or uninstall that package."
            )
            raise ConfigError(Problem(f"entry point {ENTRY_POINTS}", text)) from error
