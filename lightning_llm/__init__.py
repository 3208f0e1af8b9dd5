"""lightning-llm: train and compare LLM pre-training recipes. See README.md, and docs/howto/python.md for Python."""

import lightning_llm.base.at_start  # noqa: F401  (before slow imports)

# isort: split
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from lightning_llm.base import __version__ as __version__
from lightning_llm.base import moved
from lightning_llm.base.process import defer_torchmetrics

if TYPE_CHECKING:
    from inspect import Signature

    from lightning_llm.api import TrainResult, compare, compose, evaluate, load, probe, train
    from lightning_llm.base.errors import ConfigError, Problem, RanksFailedError, RunFailedError
    from lightning_llm.compare.comparison import Comparison, IncompleteComparisonError
    from lightning_llm.config.schema import Config
    from lightning_llm.evaluate.evaluation import Evaluation
    from lightning_llm.precision.any_module.quantize import dequantize, quantize
    from lightning_llm.precision.any_module.quantize import quantize as quantise
    from lightning_llm.precision.any_module.report import QuantizeReport

__all__ = [
    "Comparison",
    "Config",
    "ConfigError",
    "Evaluation",
    "IncompleteComparisonError",
    "Problem",
    "QuantizeReport",
    "RanksFailedError",
    "RunFailedError",
    "TrainResult",
    "compare",
    "compose",
    "dequantize",
    "evaluate",
    "load",
    "probe",
    "quantise",
    "quantize",
    "train",
]

defer_torchmetrics()
moved.install()

# A plain checkout has callbacks/, conf/ and recipes/ at its top; installations map them into the package.
_checkout = Path(__file__).resolve().parent.parent
if (_checkout / "pyproject.toml").is_file() and (_checkout / "recipes").is_dir():
    __path__.append(str(_checkout))

_API, _QUANTIZE = "lightning_llm.api", "lightning_llm.precision.any_module.quantize"
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
    "QuantizeReport": "lightning_llm.precision.any_module.report",
    "RanksFailedError": "lightning_llm.base.errors",
    "RunFailedError": "lightning_llm.base.errors",
    "dequantize": _QUANTIZE,
    "quantise": _QUANTIZE,
    "quantize": _QUANTIZE,
}
"""Public names and the modules that they are imported from on first use, since importing torch takes seconds."""

_ALIASES = {"quantise": "quantize"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), _ALIASES.get(name, name))


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _CallablePackage(ModuleType):
    """Package that is also a function of the API: `lightning_llm.train(...)` next to `lightning_llm.train.step`.

    Importing a module of a package sets the package as an attribute here, which would replace a function of that name.
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


for _name in ("compare", "evaluate", "probe", "train"):
    import_module(f"{__name__}.{_name}").__class__ = _CallablePackage
