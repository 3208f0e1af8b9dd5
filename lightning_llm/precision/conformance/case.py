"""One recorded case: its arrays as tensors, the comparison, and casts run eagerly or compiled."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_llm.config.schema.number_formats import NUMBER_FORMATS
from lightning_llm.config.schema.precision import CastConfig
from lightning_llm.precision.cast import inductor
from lightning_llm.precision.cast.quantize import Quantized, quantize
from lightning_llm.precision.cast.rounding import decode

BF16_ARRAYS = ("x", "X", "W", "dY", "rht_xT")


class Check(NamedTuple):
    """Result of comparing one recorded array; `error` is None if it agrees."""

    array: str
    error: str | None


@dataclass
class Runner:
    """Runs tensor functions eagerly or compiled by Inductor; equal functions are compiled once."""

    compiled: bool
    _functions: dict[Any, Callable[..., Any]] = field(default_factory=dict)

    @property
    def backend(self) -> inductor.Backend:
        """Name of the backend: "eager" or "compiled"."""
        return "compiled" if self.compiled else "eager"

    def __call__(self, function: Callable[..., Any], *tensors: Any, **constants: Any) -> Any:
        """Return function(*tensors, **constants). `constants` must be hashable; they are part of the compiled graph."""
        key = (function, tuple(sorted(constants.items())))
        if key not in self._functions:
            self._functions[key] = self._bind(function, constants)
        return self._functions[key](*tensors)

    def _bind(self, function: Callable[..., Any], constants: dict[str, Any]) -> Callable[..., Any]:
        def bound(*tensors: Any) -> Any:
            return function(*tensors, **constants)

        return inductor.compiled(bound, _identity(function, constants)) if self.compiled else bound

    def quantize(
        self,
        x: Tensor,
        cast: CastConfig,
        axis: int = 1,
        noise: Tensor | None = None,
        amax: Tensor | None = None,
        delayed: Tensor | None = None,
    ) -> Quantized:
        """Return the result of `quantize.quantize`, eager or compiled."""
        values, stored, dequantized, inside = self(_quantize, x, noise, amax, delayed, cast=cast, axis=axis)
        return Quantized(values, stored, dequantized, inside, cast.number_format)


def _quantize(
    x: Tensor, noise: Tensor | None, amax: Tensor | None, delayed: Tensor | None, cast: CastConfig, axis: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    made = quantize(x, cast, axis, noise=noise, amax=amax, delayed=delayed)
    return made.values, made.stored_scale, made.dequantized, made.inside


@dataclass(frozen=True)
class Case:
    """One recorded case. `spec`: its entry in the manifest. `arrays`: {name: recorded array}."""

    spec: dict[str, Any]
    arrays: dict[str, np.ndarray[Any, Any]]
    run: Runner

    @property
    def name(self) -> str:
        """Name of the case in the manifest."""
        return str(self.spec["name"])

    def __contains__(self, array: str) -> bool:
        return array in self.spec["arrays"]

    def tensor(self, array: str) -> Tensor:
        """Return a recorded array as a tensor; uint16 arrays are bit patterns of bf16."""
        value = self.arrays[array]
        if value.dtype == np.uint16 and array in BF16_ARRAYS:
            return torch.from_numpy(value.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(np.ascontiguousarray(value).reshape(value.shape))

    def exact(self, array: str, actual: Tensor) -> Check:
        """Compare `actual` with a recorded array: all numbers must be equal.

        NaN equals NaN; zeros may differ in sign.
        """
        expected = self.tensor(array).double()
        actual = actual.detach().double().reshape(expected.shape)
        wrong = ~((actual == expected) | (actual.isnan() & expected.isnan()))
        return self._verdict(array, wrong, actual, expected)

    def codes(self, array: str, actual: Tensor, name: str) -> Check:
        """Compare uint8 codes with a recorded array, bit for bit, including signs of zeros. All NaN codes are equal."""
        expected = self.tensor(array)
        actual = actual.reshape(expected.shape)
        same = actual == expected
        if (fmt := NUMBER_FORMATS[name]).has_nan:
            same |= decode(actual.contiguous(), fmt).isnan() & decode(expected, fmt).isnan()
        return self._verdict(array, ~same, actual, expected)

    def close(self, array: str, actual: Tensor, tolerance: Tensor | float, excused: float = 0.0) -> Check:
        """Compare with a recorded array within an absolute `tolerance`; a fraction `excused` of elements may differ."""
        expected = self.tensor(array).double()
        actual = actual.detach().double().reshape(expected.shape)
        wrong = ~((actual - expected).abs() <= tolerance)
        return self._verdict(array, wrong, actual, expected, excused)

    def _verdict(self, array: str, wrong: Tensor, actual: Tensor, expected: Tensor, excused: float = 0.0) -> Check:
        count = int(wrong.sum())
        if count <= excused * wrong.numel():
            return Check(array, None)
        first = int(wrong.flatten().nonzero()[0])
        got, want = actual.flatten()[first].item(), expected.flatten()[first].item()
        return Check(array, f"{count} of {wrong.numel()} differ; first at {first}: {got!r}, recorded {want!r}")


def _identity(function: Callable[..., Any], constants: Mapping[str, Any]) -> list[Any]:
    """Return JSON data by which the kernels of `function` with these constants are kept between processes.

    It includes the function's own source, since files of this folder are no part of a kernel's key.
    """
    values = {name: repr(value) for name, value in sorted(constants.items())}
    return ["vectors", function.__module__, function.__qualname__, inspect.getsource(function), values]
