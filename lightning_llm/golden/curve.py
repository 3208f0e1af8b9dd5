"""Golden curves: the first steps' numbers as series, and the band around them in which a rerun must be. No torch.

A band is the allowed distance between runs of one program. It is measured over repeats, not chosen. Runs of one program
on one machine, or on machines that round otherwise, give numbers that scatter around their mean, with a separate
variance per number. Of n runs with mean m and standard deviation s, one more run is within

    m +- t(n - 1, 1 - p / 2) * s * sqrt(1 + 1 / n)

with probability 1 - p if they are normal: the prediction interval for one further observation (G. J. Hahn and
W. Q. Meeker, "Statistical Intervals", Wiley 1991, section 4.7). Student's t accounts for the uncertainty of s.
A check compares many numbers and fails if one is outside, so each gets p = `false_alarms` / count (Bonferroni): an
unchanged program fails in at most that share of checks, however the numbers are correlated. Few runs make it wide: with
3,000 numbers and one false alarm in 100 checks it is 632 s with 3 runs, 24 s with 6, 9.6 s with 11, 6.5 s with 21.

Numbers are stored in fp32. Rounding to fp32, with a variance of u^2 / 12 for a unit u in the last place, hides scatter
if all runs round to the same number; it is added to s^2.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from scipy import special  # and not stats, which takes a second to import

from lightning_llm.tracking.files import NON_FINITE

LOSS, GRAD_NORM, LEARNING_RATE = "loss", "grad_norm", "lr"
GRADIENT_NORMS = "gradient_norms"


@dataclass(frozen=True)
class StepFigures:
    """Numbers of one optimizer step, the same on every rank. Gradient norms are those before clipping.

    `loss`: nats per token, and `grad_norm`, of all parameters together: fp32 numbers. `gradient_norms`: {parameter:
    norm of its gradient}, fp64, divided by the loss scale, in the order of the forward pass; names do not depend on the
    layout.
    """

    step: int
    loss: float
    grad_norm: float
    learning_rate: float
    gradient_norms: dict[str, float]
    loss_scale: float = 1.0


@dataclass(frozen=True)
class Measured:
    """The numbers of the first steps (`figures`), and the versions, hardware, code and data that produced them.

    `origin`: as `tracking.provenance.origin_of` returns it. The same on every rank.
    """

    figures: list[StepFigures]
    origin: dict[str, Any]

    def as_data(self) -> dict[str, Any]:
        """Return the content as JSON data, for `from_data` in another process. NaN and infinities stay numbers."""
        return asdict(self)

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> "Measured":
        """Return the object that `as_data` wrote."""
        return cls([StepFigures(**each) for each in data["figures"]], dict(data["origin"]))


@dataclass(frozen=True)
class Curve:
    """Numbers of the first steps, as a golden file stores them: each field has one number per step.

    `gradient_norms`: {parameter: norms}, in order of the forward pass. All but the learning rate are fp32 numbers, in
    the shortest decimal form that reads back to the same fp32 number. Rounding to fp32 removes the last bits of fp64
    norms, which depend on how gradients are sharded.
    """

    loss: list[float]
    grad_norm: list[float]
    lr: list[float]
    gradient_norms: dict[str, list[float]] = field(default_factory=dict)

    @classmethod
    def of(cls, figures: Sequence[StepFigures]) -> "Curve":
        """Return the curve of these steps. A parameter without a gradient in a step has the norm NaN there."""
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
        """Return a curve with only the first `steps` steps."""
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
        """Yield (step, name, number) of all numbers, step by step. Steps count from 0."""
        for step in range(self.steps):
            for name, its in self.series.items():
                yield step, name, its[step]

    def as_data(self) -> dict[str, Any]:
        """Return the curve as JSON data; numbers that are not finite are the strings "nan", "inf" and "-inf"."""
        norms = {name: _spelled(its) for name, its in self.gradient_norms.items()}
        own = {LOSS: self.loss, GRAD_NORM: self.grad_norm, LEARNING_RATE: self.lr}
        return {**{name: _spelled(its) for name, its in own.items()}, GRADIENT_NORMS: norms}

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> "Curve":
        """Return the curve that `as_data` wrote. Raises ValueError, TypeError or KeyError for any other data."""
        norms = {str(name): _read(its) for name, its in data[GRADIENT_NORMS].items()}
        curve = cls(_read(data[LOSS]), _read(data[GRAD_NORM]), _read(data[LEARNING_RATE]), norms)
        if {len(its) for its in curve.series.values()} != {curve.steps} or not curve.steps:
            raise ValueError("not as many numbers of each kind as steps")
        return curve


def combined(curves: Sequence[Curve], combine: Callable[[Any], float]) -> Curve:
    """Return the curve in which each number is `combine` of that number's values in all `curves`.

    `combine` gets an fp64 array of shape [len(curves)]: for example the mean.
    """

    def of(series: Sequence[Sequence[float]]) -> list[float]:
        return [combine(np.array(values, dtype=np.float64)) for values in zip(*series, strict=True)]

    return Curve(
        of([each.loss for each in curves]),
        of([each.grad_norm for each in curves]),
        of([each.lr for each in curves]),
        {name: of([each.gradient_norms[name] for each in curves]) for name in curves[0].gradient_norms},
    )


def as_fp32(number: float) -> float:
    """Return `number` rounded to fp32, as the float with the shortest decimal form that reads back to it."""
    with np.errstate(over="ignore"):
        return float(str(np.float32(number)))


def same(one: float, other: float) -> bool:
    """Return whether two numbers are equal; NaN equals NaN."""
    return one == other or (one != one and other != other)


def _spelled(numbers: Sequence[float]) -> list[float | str]:
    return [number if np.isfinite(number) else str(float(number)) for number in numbers]


def _read(numbers: Any) -> list[float]:
    if not isinstance(numbers, list):
        raise TypeError("numbers are not a list")
    return [NON_FINITE[each] if isinstance(each, str) else float(each) for each in numbers]


FP32_UNIT = 2.0**-23
"""Largest distance of neighboring fp32 numbers, relative to their size."""
FEWEST_REPEATS = 2
"""Least number of repeats for a band. With one repeat the standard deviation s has one degree of freedom, and the band
would be 200,000 s wide."""


@dataclass(frozen=True)
class Noise:
    """Mean and standard deviation of each number over `runs` runs of one recipe; both None if all had the same bits.

    `nudged`: all runs except the first began with weights changed by a rounding error (`measure.nudge_weights`).
    """

    runs: int
    nudged: bool
    mean: Curve | None = None
    sd: Curve | None = None

    def first(self, steps: int) -> "Noise":
        """Return the noise of the first `steps` steps only."""
        mean, sd = (each.first(steps) if each else None for each in (self.mean, self.sd))
        return replace(self, mean=mean, sd=sd)

    @classmethod
    def of(cls, curves: Sequence[Curve], nudged: bool) -> "Noise":
        """Return the noise over `curves`, at least three, which have the same steps and parameters."""
        first = curves[0]
        if all(each.as_data() == first.as_data() for each in curves):
            return cls(len(curves), nudged)
        mean = combined(curves, lambda values: as_fp32(_finite(values.mean)))
        sd = combined(curves, lambda values: float(f"{_finite(lambda: values.std(ddof=1)):.3e}"))
        return cls(len(curves), nudged, mean, sd)

    def as_data(self) -> dict[str, Any]:
        """Return the noise as JSON data."""
        spread = {} if self.mean is None or self.sd is None else {"mean": self.mean.as_data(), "sd": self.sd.as_data()}
        return {"runs": self.runs, "nudged": self.nudged, **spread}

    @classmethod
    def from_data(cls, data: Any) -> "Noise":
        """Return the noise that `as_data` wrote. Raises ValueError, TypeError or KeyError for any other data."""
        spread = [Curve.from_data(data[key]) for key in ("mean", "sd")] if "mean" in data else []
        return cls(int(data["runs"]), bool(data["nudged"]), *spread)


@dataclass(frozen=True)
class Band:
    """Prediction interval of each number for a further run of the same program (see the module).

    `false_alarms`: share of checks of an unchanged program that may find a number outside the band, for example 0.01.
    """

    noise: Noise
    false_alarms: float

    @cached_property
    def compared(self) -> int:
        """Number of values that a check compares: all but learning rates, which no rounding of a device changes."""
        return 0 if self.noise.mean is None else (len(self.noise.mean.series) - 1) * self.noise.mean.steps

    @cached_property
    def deviations(self) -> float:
        """Allowed distance of a number from the mean, in standard deviations."""
        runs = self.noise.runs
        quantile = -special.stdtrit(runs - 1, self.false_alarms / (2 * max(1, self.compared)))
        return float(quantile * math.sqrt(1 + 1 / runs))

    @cached_property
    def _spread(self) -> dict[str, tuple[list[float], list[float]]]:
        mean, sd = self.noise.mean, self.noise.sd
        if mean is None or sd is None:
            return {}
        others = sd.series
        return {name: (its, others[name]) for name, its in mean.series.items()}

    def interval(self, name: str, step: int) -> tuple[float, float] | None:
        """Return (mean, allowed distance from it) of the number `name` at `step`; None if it was not finite in a run.

        A learning rate may differ by the rounding to fp32 only: the host computes it from the step.
        """
        mean, sd = (its[step] for its in self._spread[name])
        if name == LEARNING_RATE:
            return mean, FP32_UNIT * abs(mean)
        if not math.isfinite(mean) or not math.isfinite(sd):
            return None
        return mean, self.deviations * math.sqrt(sd**2 + (FP32_UNIT * mean) ** 2 / 12)

    def widths(self, of: str) -> list[float]:
        """Return the allowed distances relative to |mean|, ascending: one per step and number called `of` or `of.*`."""
        names = [name for name in self._spread if name == of or name.startswith(f"{of}.")]
        steps = 0 if self.noise.mean is None else self.noise.mean.steps
        found = [self.interval(name, step) for name in names for step in range(steps)]
        return sorted(width / abs(mean) for mean, width in filter(None, found) if mean)

    @property
    def gradient_norm_widths(self) -> list[float]:
        """Allowed relative distances of the gradient norms of parameters, ascending (see `widths`)."""
        return self.widths(GRADIENT_NORMS)


def _finite(compute: Any) -> float:
    """Return the result of `compute`, without warnings about values that are not finite."""
    with np.errstate(invalid="ignore", over="ignore"):
        return float(compute())
