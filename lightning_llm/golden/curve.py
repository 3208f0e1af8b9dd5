"""Golden curves: the first steps' figures as measured, and as series of numbers in the order a step computes them.

Imports no torch.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from lightning_llm.tracking.files import NON_FINITE

LOSS, GRAD_NORM, LEARNING_RATE = "loss", "grad_norm", "lr"
GRADIENT_NORMS = "gradient_norms"


@dataclass(frozen=True)
class StepFigures:
    """Figures of one step, the same on every rank. Norms are those before clipping.

    `loss`, `grad_norm`: fp32 numbers. `gradient_norms`: fp64, by parameter names that no layout changes, in the order
    of the forward pass, the loss scale divided out.
    """

    step: int
    loss: float
    grad_norm: float
    learning_rate: float
    gradient_norms: dict[str, float]
    loss_scale: float = 1.0


@dataclass(frozen=True)
class Measured:
    """The first steps, and where their numbers come from (`tracking.provenance.origin_of`); the same on every rank."""

    figures: list[StepFigures]
    origin: dict[str, Any]

    def as_data(self) -> dict[str, Any]:
        """Return JSON data for another process; NaN and infinities as Python writes them."""
        return asdict(self)

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> "Measured":
        """Return the figures described by `as_data`."""
        return cls([StepFigures(**each) for each in data["figures"]], dict(data["origin"]))


@dataclass(frozen=True)
class Curve:
    """The first steps, one number per step in each field; `gradient_norms` by parameter, in order of the forward pass.

    All but the learning rate are fp32 numbers, written with as few digits as bring them back: so is how gradients are
    sharded, which shows in the last bits of fp64, left out of the norms.
    """

    loss: list[float]
    grad_norm: list[float]
    lr: list[float]
    gradient_norms: dict[str, list[float]] = field(default_factory=dict)

    @classmethod
    def of(cls, figures: Sequence[StepFigures]) -> "Curve":
        """Return the curve of some first steps. A parameter that has no gradient in one of them counts as NaN there."""
        names = list(dict.fromkeys(name for each in figures for name in each.gradient_norms))
        return cls(
            [as_fp32(each.loss) for each in figures],
            [as_fp32(each.grad_norm) for each in figures],
            [each.learning_rate for each in figures],
            {name: [as_fp32(each.gradient_norms.get(name, np.nan)) for each in figures] for name in names},
        )

    @property
    def steps(self) -> int:
        """Number of steps."""
        return len(self.loss)

    def first(self, steps: int) -> "Curve":
        """Return the curve of its first `steps` steps."""
        norms = {name: its[:steps] for name, its in self.gradient_norms.items()}
        return Curve(self.loss[:steps], self.grad_norm[:steps], self.lr[:steps], norms)

    @property
    def series(self) -> dict[str, list[float]]:
        """All numbers by name ("loss", "gradient_norms.NAME", ...), in the order in which a step computes them.

        Gradients come from the loss down to the embedding, as the backward pass makes them.
        """
        norms = {f"{GRADIENT_NORMS}.{name}": its for name, its in reversed(self.gradient_norms.items())}
        return {LEARNING_RATE: self.lr, LOSS: self.loss, **norms, GRAD_NORM: self.grad_norm}

    def is_like(self, other: "Curve") -> bool:
        """Return whether another curve has as many steps and the same parameters."""
        return self.steps == other.steps and self.gradient_norms.keys() == other.gradient_norms.keys()

    def numbers(self) -> Iterator[tuple[int, str, float]]:
        """Yield (step, counted from 0; name; number), step by step."""
        for step in range(self.steps):
            for name, its in self.series.items():
                yield step, name, its[step]

    def as_data(self) -> dict[str, Any]:
        """Return it for JSON, which has no word for numbers that are not finite: "nan", "inf", "-inf"."""
        norms = {name: _spelled(its) for name, its in self.gradient_norms.items()}
        own = {LOSS: self.loss, GRAD_NORM: self.grad_norm, LEARNING_RATE: self.lr}
        return {**{name: _spelled(its) for name, its in own.items()}, GRADIENT_NORMS: norms}

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> "Curve":
        """Return the curve described by `as_data`. Raises ValueError, TypeError or KeyError where it is no curve."""
        norms = {str(name): _read(its) for name, its in data[GRADIENT_NORMS].items()}
        curve = cls(_read(data[LOSS]), _read(data[GRAD_NORM]), _read(data[LEARNING_RATE]), norms)
        if {len(its) for its in curve.series.values()} != {curve.steps} or not curve.steps:
            raise ValueError("not as many numbers of each kind as steps")
        return curve


def combined(curves: Sequence[Curve], combine: Callable[[Any], float]) -> Curve:
    """Return the curve that `combine` gives from each number's values [len(curves)], fp64, in `curves`."""

    def of(series: Sequence[Sequence[float]]) -> list[float]:
        return [combine(np.array(values, dtype=np.float64)) for values in zip(*series, strict=True)]

    return Curve(
        of([each.loss for each in curves]),
        of([each.grad_norm for each in curves]),
        of([each.lr for each in curves]),
        {name: of([each.gradient_norms[name] for each in curves]) for name in curves[0].gradient_norms},
    )


def as_fp32(number: float) -> float:
    """Return the number rounded to fp32, as the shortest decimal that brings that back."""
    with np.errstate(over="ignore"):
        return float(str(np.float32(number)))


def same(one: float, other: float) -> bool:
    """Return whether two numbers are the same, NaN included."""
    return one == other or (one != one and other != other)


def _spelled(numbers: Sequence[float]) -> list[float | str]:
    return [number if np.isfinite(number) else str(float(number)) for number in numbers]


def _read(numbers: Any) -> list[float]:
    if not isinstance(numbers, list):
        raise TypeError("numbers are not a list")
    return [NON_FINITE[each] if isinstance(each, str) else float(each) for each in numbers]
