"""Figures of a probe: errors of rounded gradients, and outlier channels of the operands of linear layers.

Letters: g is the reference, g_k the gradient of key k of K (K = 1 for recipes without random numbers), e_k = g_k - g.
Sums are over elements.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_llm.precision.outliers import ChannelFigures
from lightning_llm.probe.passes import Passes


@dataclass(frozen=True)
class Sums:
    """Sums over elements from which `figures` computes errors; sums of several tensors or batches add up with +.

    Tuples have one entry per random key k, `pairs` one fewer.
    """

    elements: int
    reference: float  # |g|^2
    errors: tuple[float, ...]  # |e_k|^2
    along: tuple[float, ...]  # <g_k, g>
    norms: tuple[float, ...]  # |g_k|^2
    pairs: tuple[float, ...]  # <e_k, e_(k + 1)>
    total: float  # |sum_k e_k|^2

    def __add__(self, other: "Sums") -> "Sums":
        def both(one: Any, two: Any) -> Any:
            return tuple(a + b for a, b in zip(one, two, strict=True)) if isinstance(one, tuple) else one + two

        return Sums(*map(both, vars(self).values(), vars(other).values()))


class Collector:
    """Accumulates the `Sums` of one tensor from samples that are added one at a time, with three tensors in memory."""

    def __init__(self, reference: Tensor):
        """`reference`: the exact tensor, any shape."""
        self.reference = reference.detach().float()
        self._total: Tensor | None = None
        self._before: Tensor | None = None
        self._errors: list[float] = []
        self._along: list[float] = []
        self._norms: list[float] = []
        self._pairs: list[float] = []

    def add(self, sample: Tensor) -> None:
        """Add the sample of the next random key."""
        sample = sample.detach().float()
        error = sample - self.reference
        self._errors.append(_dot(error, error))
        self._along.append(_dot(sample, self.reference))
        self._norms.append(_dot(sample, sample))
        if self._before is not None:
            self._pairs.append(_dot(self._before, error))
        self._total = error if self._total is None else self._total + error
        self._before = error

    def sums(self) -> Sums:
        """Return the sums over all samples added so far. Raises ValueError without a sample."""
        if self._total is None:
            raise ValueError("no sample was added: call add first")
        return Sums(
            self.reference.numel(),
            _dot(self.reference, self.reference),
            tuple(self._errors),
            tuple(self._along),
            tuple(self._norms),
            tuple(self._pairs),
            _dot(self._total, self._total),
        )


def _dot(a: Tensor, b: Tensor) -> float:
    return torch.dot(a.flatten().double(), b.flatten().double()).item()


def compare(reference: Tensor, samples: Sequence[Tensor]) -> Sums:
    """Return the `Sums` of all `samples` against `reference`; `figures` computes their errors from it."""
    collector = Collector(reference)
    for sample in samples:
        collector.add(sample)
    return collector.sums()


def figures(sums: Sums) -> dict[str, float]:
    """Return errors by name, computed from `sums`; {} if the reference is zero throughout or not finite.

    - `error`: mean_k |e_k|² / |g|²: noise power over signal power. `sqnr_db` is its inverse in dB, absent for no error.
    - `cosine`: mean_k ⟨g_k, g⟩ / (|g_k| |g|): direction of a single step.
    - `gain`: mean_k ⟨g_k, g⟩ / |g|² - 1: below 0, steps along the gradient are too short.
    - `variance`: Σ_k |e_k - ē|² / (K - 1) / |g|², 0 for K = 1: averages out over steps, as the noise of a smaller batch
      does (Bottou, Curtis and Nocedal, arXiv 1606.04838, section 4); compare it with that noise.
    - `bias`: |E e| / |g|: does not average out (Tseng et al., arXiv 2502.20586). Its square is estimated by the mean of
      ⟨e_k, e_l⟩ over k ≠ l, (|Σ e|² - Σ |e_k|²) / (K (K - 1)), an unbiased U-statistic (Hoeffding 1948, doi
      10.1214/aoms/1177730196); for K = 1 the whole error is bias.
    - `bias_floor`: two standard errors of that estimate: a smaller bias, printed as `<0.02`, cannot be distinguished
      from none. More `--keys` lower it. For a true bias of 0 products of different pairs are uncorrelated, so the
      estimate's variance is that of one product over their number.
    """
    keys, reference = len(sums.errors), sums.reference
    if reference == 0 or not math.isfinite(reference + sum(sums.errors)):
        return {}
    error = sum(sums.errors) / keys / reference
    cosines = [a / math.sqrt(n * reference) if n else 0.0 for a, n in zip(sums.along, sums.norms, strict=True)]
    made = {"error": error, "cosine": sum(cosines) / keys, "gain": sum(sums.along) / keys / reference - 1}
    if error > 0:
        made["sqnr_db"] = -10 * math.log10(error)
    if keys == 1:
        return {**made, "variance": 0.0, "bias": math.sqrt(error), "bias_floor": 0.0}
    spread = max(0.0, sum(sums.errors) - sums.total / keys) / (keys - 1) / reference
    squared = (sums.total - sum(sums.errors)) / (keys * (keys - 1)) / reference
    product = math.sqrt(sum(pair**2 for pair in sums.pairs) / len(sums.pairs)) / reference
    floor = 2 * product * math.sqrt(2 / (keys * (keys - 1)))
    return {**made, "variance": spread, "bias": math.sqrt(max(0.0, squared)), "bias_floor": math.sqrt(floor)}


def channel_outliers(model: Passes) -> dict[str, dict[str, dict[str, Any]]]:
    """Return {layer: {"x", "w" or "dy": its `ChannelFigures` as a dict}} of the first batch's unquantized operands.

    `model.high()` must have run. Operands that are zero or not finite are left out.
    """
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for name in model.layers:
        kept = model.tensors[name]
        operands = {"x": kept.x, "w": model.matrix(name), "dy": kept.dy}
        measured = {key: ChannelFigures.of(each) for key, each in operands.items() if each is not None}
        found[name] = {key: asdict(each) for key, each in measured.items() if each is not None}
    return found
