"""Sources of weight casts: computed at each use, cached within a step, or gathered from other ranks."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from torch import Tensor

from lightning_llm.config.schema.precision import CastConfig
from lightning_llm.precision.cast.quantize import Operand
from lightning_llm.precision.linear.weight_rules import serve_both, why_not_kept


class WantedCast(NamedTuple):
    """Request for the cast of a weight [N, K] for `slot` of six `casts`; `make` computes it.

    `observed`: `make` reports to an observer.
    """

    slot: str
    casts: Mapping[str, CastConfig]
    observed: bool
    weight: Callable[[], Tensor]
    make: Callable[[], Operand]


class WeightCasts:
    """Source of a layer's weight casts. This one computes a cast at each use; subclasses cache or gather casts."""

    def __init__(self) -> None:
        self.in_step = False

    def begin_step(self) -> None:
        """Begin a training step, within which weights do not change."""
        self.in_step = True

    def end_step(self) -> None:
        """End the training step: weights change now, or have changed."""
        self.in_step = False

    def operand(self, wanted: WantedCast) -> Operand:
        """Return the operand requested by `wanted`."""
        return wanted.make()

    def known_amax(self) -> Tensor | None:
        """Return the amax of the weight if it is known, or if the layer does not hold the weight itself; else None."""
        return None

    def tell_amax(self, amax: Tensor) -> None:
        """Receive the `amax` of the weight, an fp32 scalar, which was computed because `known_amax` returned None."""

    def check_high(self) -> None:
        """Raise RuntimeError if the layer does not hold the weight itself."""


class KeptCasts(WeightCasts):
    """Casts of one weight, cached from a training step's first micro-batch to its last backward pass.

    Weights do not change until then, so the casts of every micro-batch and recomputation have the same bits. Casts with
    random bits or scales per micro-batch, and observed casts, are made each time. If both GEMMs read the same cast, one
    is cached (`serve_both`).
    """

    def __init__(self, rotated: bool = True) -> None:
        """`rotated`: whether rotated weights can be kept, see `why_not_kept`."""
        super().__init__()
        self.rotated = rotated
        self.kept: dict[str, Operand] = {}
        self._amax: Tensor | None = None

    def begin_step(self) -> None:
        """Begin a training step with an empty cache."""
        self.end_step()
        super().begin_step()

    def end_step(self) -> None:
        """Drop the cached casts."""
        super().end_step()
        self.kept.clear()
        self._amax = None

    def operand(self, wanted: WantedCast) -> Operand:
        """Return the cached cast of the slot, or make and cache it."""
        if not self.in_step or wanted.observed or why_not_kept(wanted.casts, wanted.slot, self.rotated) is not None:
            return wanted.make()
        key = "both" if serve_both(wanted.casts) else wanted.slot
        if key not in self.kept:
            self.kept[key] = wanted.make()
        return self.kept[key]

    def known_amax(self) -> Tensor | None:
        """Return the amax received in this step (`tell_amax`), or None."""
        return self._amax

    def tell_amax(self, amax: Tensor) -> None:
        """Cache the `amax` until the end of the step, like the casts."""
        if self.in_step:
            self._amax = amax
