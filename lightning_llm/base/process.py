"""Start of this program's Python processes: their interpreters, and faster imports of torch, Lightning and MLflow.

Every Python process is started with `python_module`. A user's `random.py` or `json.py` in the working directory must
not replace a library: `-P` (safe path) keeps the directory off the module path of a process, PYTHONSAFEPATH off those
of its children.

`slow_imports` disables the garbage collector during imports, which would take a quarter of the time.

`defer_torchmetrics` loads torchmetrics only when a metric is used. Lightning imports `Metric` and `MetricCollection` to
recognize them. That runs the package's `__init__`, which imports every metric (language models for BERTScore, signal
processing for audio): 2.8 of 7.4 CPU seconds at every start of a command and of a rank.

Standard library only.
"""

import gc
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

SAFE_PATH = "PYTHONSAFEPATH"
UTF8 = "PYTHONUTF8"
RANKS = ("RANK", "LOCAL_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK")
"""Variables that Lightning parses as integers when it is imported."""
ROOT = Path(__file__).resolve().parents[2]
"""The folder that contains this package: a checkout or site-packages."""


def python_module(module: str, *arguments: str) -> list[str]:
    """Return the command that runs `module` in a new interpreter; use it with `python_environment()`."""
    return [sys.executable, *module_arguments(module, *arguments)]


def module_arguments(module: str, *arguments: str) -> list[str]:
    """Return the arguments with which an interpreter runs `module`, without the interpreter itself."""
    return ["-P", "-m", module, *arguments]


def python_environment() -> dict[str, str]:
    """Return the environment variables that a new interpreter needs in addition to those of this process.

    A checkout that is not installed is found only through the module path, often as the working directory.
    """
    found = {SAFE_PATH: "1"}
    if (ROOT / "pyproject.toml").is_file() and any(Path(each or os.curdir).resolve() == ROOT for each in sys.path):
        known = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]
        found["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([str(ROOT), *known]))
    return found


def use_utf8() -> None:
    """If the locale is ASCII, restart this command in Python's UTF-8 mode, which its children inherit.

    Otherwise arguments, file names and files that libraries open without an encoding would be limited to ASCII. Python
    uses that mode by default in the locale C, unless PYTHONUTF8=0 forbids it.
    """
    if sys.getfilesystemencoding() == "ascii" and os.environ.get(UTF8) != "1":
        os.environ[UTF8] = "1"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def has_working_folder() -> bool:
    """Return whether the working directory still exists; it may have been deleted."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return False
    return True


def leave_working_folder() -> None:
    """Remove the working directory, which `python -m` adds, from the module path of this process and its children.

    For the process of a command. PYTHONPATH and installed packages are kept.
    """
    os.environ.update(python_environment())
    first = Path(sys.path[0] or os.curdir).resolve()
    if not sys.flags.safe_path and first == Path.cwd() != ROOT:
        del sys.path[0]


def unset_empty_ranks() -> None:
    """Remove empty rank variables, which job templates may set and which make Lightning's import fail."""
    for name in RANKS:
        if not os.environ.get(name, "0").strip():
            del os.environ[name]


_own_process = False
_depth = 0


def take_process() -> None:
    """Declare that this process only runs one command of ours, so that `slow_imports` may freeze objects for good."""
    global _own_process
    _own_process = True


def is_importing() -> bool:
    """Return whether this process, if it only runs a command, is importing modules within `slow_imports` now."""
    return _depth > 0


@contextmanager
def slow_imports() -> Iterator[None]:
    """Context for imports, without garbage collection: they create half a million permanent objects, which it freezes.

    It has an effect only in the process of a command (`take_process`). Elsewhere, as in a notebook, freezing would also
    keep other objects forever.
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
"""Names that Lightning imports from the package, and the modules that define them."""


class _UnrunPackage(ModuleType):
    """Package that runs its `__init__` on access to an attribute other than those that Lightning imports."""

    __loader__: Loader

    def __getattr__(self, name: str) -> Any:
        if name == "_logger":  # used by the modules of the base classes
            return logging.getLogger(_NAME)
        if name in _HOMES:
            try:
                if name != "__version__":
                    import_module(f"{_NAME}.utilities")  # first, because it has an import cycle with `metric`
                return getattr(import_module(_HOMES[name]), name)
            except ImportError:  # a version with modules that use more of the package
                for module in [module for module in sys.modules if module.startswith(f"{_NAME}.")]:
                    del sys.modules[module]
        elif name.startswith("__"):  # special attributes of Python
            raise AttributeError(f"module {_NAME!r} has no attribute {name!r}")
        self.__class__ = ModuleType  # type: ignore[assignment]  # from now on a normal module
        self.__loader__.exec_module(self)
        return getattr(self, name)


class _UnrunLoader(Loader):
    """Loader that creates the package without running it and keeps its original loader."""

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
    """Let the next import of torchmetrics run its `__init__` only when more than a base class is used.

    All attributes remain available. Does nothing if torchmetrics is already imported.
    """
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
