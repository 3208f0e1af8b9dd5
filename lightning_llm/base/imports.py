"""Faster imports of torch, Lightning and MLflow, which take seconds.

`slow_imports` keeps the garbage collector out of them: it would take a quarter of the time.

`defer_torchmetrics` runs torchmetrics only when a metric is asked for. Lightning imports `Metric` and
`MetricCollection` to recognize them. Python runs a package's `__init__` before any module in it, and that of
torchmetrics imports every metric: language models for BERTScore, signal processing for audio, 2.8 of 7.4 CPU seconds of
every start of a command and of a rank.
"""

import gc
import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

_own_process = False
_depth = 0


def take_process() -> None:
    """Mark this process as running one command and nothing else: what it imports, it keeps to its end."""
    global _own_process
    _own_process = True


def is_importing() -> bool:
    """Return whether this process, of a command alone, is within `slow_imports`."""
    return _depth > 0


@contextmanager
def slow_imports() -> Iterator[None]:
    """Import without looking for garbage, among half a million objects that are none, and not among them later.

    In the process of a command alone (`take_process`). Another's, a notebook's say, has objects of its own, which
    would never be collected either.
    """
    if not _own_process:
        yield
        return
    global _depth
    _depth += 1
    gc.disable()
    try:
        yield
    finally:
        _depth -= 1
        gc.freeze()
        gc.enable()


_NAME = "torchmetrics"
_HOMES = {"__version__": f"{_NAME}.__about__", "Metric": f"{_NAME}.metric", "MetricCollection": f"{_NAME}.collections"}
"""What Lightning asks of the package, and the modules that have it."""


class _UnrunPackage(ModuleType):
    """The package before its `__init__` ran: asked for more than Lightning does, it becomes itself."""

    __loader__: Loader

    def __getattr__(self, name: str) -> Any:
        if name == "_logger":  # what the base classes' own modules ask of the package
            return logging.getLogger(_NAME)
        if name in _HOMES:
            try:
                if name != "__version__":
                    import_module(f"{_NAME}.utilities")  # before `metric`, with which it imports in a circle
                return getattr(import_module(_HOMES[name]), name)
            except ImportError:  # a version whose modules ask for more of the package
                for module in [module for module in sys.modules if module.startswith(f"{_NAME}.")]:
                    del sys.modules[module]
        elif name.startswith("__"):  # Python's own questions
            raise AttributeError(f"module {_NAME!r} has no attribute {name!r}")
        self.__class__ = ModuleType  # type: ignore[assignment]  # what it is from now on
        self.__loader__.exec_module(self)
        return getattr(self, name)


class _UnrunLoader(Loader):
    """Loads the package unrun, and leaves it its own loader."""

    def __init__(self, spec: ModuleSpec, loader: Loader):
        self._spec, self._loader = spec, loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._spec.loader = module.__loader__ = self._loader
        module.__class__ = _UnrunPackage


class _Finder(MetaPathFinder):
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != _NAME:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _UnrunLoader(spec, spec.loader)
        return spec


def defer_torchmetrics() -> None:
    """Let the next import of torchmetrics run its `__init__` only when more than a base class is asked of it.

    Whatever is asked of it later is there, as ever. Where it has been imported already, nothing changes.
    """
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
