"""Registries: the kinds of each extension point by name. Imports no torch.

A kind (a mixer, an optimizer, ...) is a config class. Its fields are the keys that YAML may set; one of them, the key,
is a `Literal` with the kind's name. Its methods tell the planner sizes and costs without torch. What trains is named
by a string, such as `module: ClassVar[str] = "lightning_llm.model.norm:RMSNorm"`, and imported by `build` alone.

The classes register when their module is imported: each registry names the modules of the built-in kinds, and an
installed package names its own by entry points of the group `lightning_llm.components`. A config chooses among
registered kinds; nothing that it contains is ever imported.
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
"""The group of entry points by which an installed package adds kinds."""

Kind = TypeVar("Kind", bound=BaseModel)
Registered = TypeVar("Registered", bound=BaseModel)


class Registry(Generic[Kind]):
    """Registry of one extension point: name -> class. `Annotated[Base, registry]` types a key that holds one of them.

    The config schema takes the kinds when the first config is read; later none can be added.
    """

    def __init__(self, noun: str, *modules: str, key: str = "kind"):
        """`noun`: what messages call a kind; `modules`: torch-free, register the built-in ones; `key`: names the kind.

        The modules are given by dotted name and imported on first use, for they import this registry.
        """
        self.noun, self.modules, self.key = noun, modules, key
        self._kinds: dict[str, type[Kind]] = {}
        self._loaded = self._in_use = False

    def register(self, kind: type[Registered]) -> type[Registered]:
        """Add the class `kind`, as a decorator, under the name that its field `key` declares.

        Raises:
            TypeError: the field is missing or no `Literal` of one name.
            ValueError: another class has that name.
            RuntimeError: configs were read already.
        """
        field = kind.model_fields.get(self.key)
        names = get_args(field.annotation) if field and get_origin(field.annotation) is Literal else ()
        if len(names) != 1:
            raise TypeError(f'{kind.__qualname__} needs a field {self.key}: Literal["NAME"] = "NAME"')
        known = self._kinds.get(names[0])
        if known is not None:
            raise ValueError(f"{self.noun} '{names[0]}' is {known.__module__}.{known.__qualname__} already")
        if self._in_use:
            raise RuntimeError(f"{self.noun} '{names[0]}' comes after the first config was read: use an entry point")
        added: Any = kind
        self._kinds[names[0]] = added
        return kind

    def __getitem__(self, name: str) -> type[Kind]:
        """Return the class called `name`. Raises KeyError."""
        return self._all()[name]

    def __iter__(self) -> Iterator[str]:
        """Yield the names, in alphabetical order."""
        return iter(sorted(self._all()))

    def __contains__(self, name: object) -> bool:
        return name in self._all()

    def __len__(self) -> int:
        return len(self._all())

    def default(self, name: str) -> Kind:
        """Return the kind called `name` with its defaults. Raises ValueError, in words, where that cannot be."""
        if name not in self:
            raise ValueError(self.unknown(name))
        try:
            return self[name]()
        except ValidationError as error:
            keys = ", ".join(".".join(map(str, each["loc"])) for each in error.errors())
            raise ValueError(
                f"{self.noun} '{name}' has no default for {keys}, and its name alone stands here"
            ) from error

    def unknown(self, name: object) -> str:
        """Return the sentence that says that no kind is called `name`, with the nearest or with all names."""
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
    """`Annotated[str, NameIn(registry)]`: the type of a key that names a kind, which then has its defaults."""

    registry: Registry[Any]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def _check(self, name: str) -> str:
        self.registry.default(name)
        return name


@cache
def load_installed() -> None:
    """Import the modules that installed packages name in the group `lightning_llm.components`, once.

    Raises:
        ConfigError: one cannot be imported, or registers what is there already.
    """
    for point in entry_points(group=ENTRY_POINTS):
        try:
            point.load()
        except Exception as error:  # the code of others, which may raise anything
            package = point.dist.name if point.dist else "a package"
            text = (
                f"'{point.name}' of {package} ({point.value}) fails: {type(error).__name__}: {error}. Upgrade that "
                "package, or uninstall it."
            )
            raise ConfigError(Problem(f"entry point {ENTRY_POINTS}", text)) from error
