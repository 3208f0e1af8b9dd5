"""lightning-llm: compare LLM pre-training recipes; see README.md and docs/howto/python.md (use from Python)."""

import lightning_llm.base.at_start  # noqa: F401  (before all that takes time)

# isort: split
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from lightning_llm.base import moved
from lightning_llm.base.imports import defer_torchmetrics
from lightning_llm.base.version import __version__ as __version__

if TYPE_CHECKING:
    from inspect import Signature

    from lightning_llm.api import TrainResult, compare, compose, evaluate, load, train
    from lightning_llm.base.errors import ConfigError, Problem, RanksFailedError, RunFailedError
    from lightning_llm.compare.comparison import Comparison, IncompleteComparisonError
    from lightning_llm.config.schema import Config
    from lightning_llm.evaluate.evaluation import Evaluation

__all__ = [
    "Comparison",
    "Config",
    "ConfigError",
    "Evaluation",
    "IncompleteComparisonError",
    "Problem",
    "RanksFailedError",
    "RunFailedError",
    "TrainResult",
    "compare",
    "compose",
    "evaluate",
    "load",
    "train",
]

defer_torchmetrics()
moved.install()

# A bare checkout keeps callbacks/, conf/ and recipes/ at its top; both kinds of installation map them into the package.
_checkout = Path(__file__).resolve().parent.parent
if (_checkout / "pyproject.toml").is_file() and (_checkout / "recipes").is_dir():
    __path__.append(str(_checkout))

_API = "lightning_llm.api"
_HOMES = {
    "TrainResult": _API,
    "compose": _API,
    "load": _API,
    "Comparison": "lightning_llm.compare.comparison",
    "IncompleteComparisonError": "lightning_llm.compare.comparison",
    "Config": "lightning_llm.config.schema",
    "ConfigError": "lightning_llm.base.errors",
    "Evaluation": "lightning_llm.evaluate.evaluation",
    "Problem": "lightning_llm.base.errors",
    "RanksFailedError": "lightning_llm.base.errors",
    "RunFailedError": "lightning_llm.base.errors",
}
"""Public names, and the modules that they are imported from when they are asked for: torch costs seconds."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _CallablePackage(ModuleType):
    """A package whose name is a function of the API, too: `lightning_llm.train.step` is in it, and it can be called.

    Importing any module of a package makes the package an attribute here, where a function of its name would be lost.
    """

    @property
    def _function(self) -> Any:
        return getattr(import_module(_API), self.__name__.rpartition(".")[2])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    @property
    def __signature__(self) -> "Signature":
        from inspect import signature

        return signature(self._function)

    @property
    def __doc__(self) -> str | None:  # type: ignore[override]
        return self._function.__doc__


for _name in ("compare", "evaluate", "train"):
    import_module(f"{__name__}.{_name}").__class__ = _CallablePackage
