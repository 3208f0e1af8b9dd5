"""Casts of a weight that are not made where they are used: kept from earlier in a step, or come from other ranks."""

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
    """Source of a layer's weight casts; this one makes each where it is used. Subclasses keep them, or gather them."""

    def __init__(self) -> None:
        self.in_step = False

    def begin_step(self) -> None:
        """Begin a training step, within which weights stay as they are."""
        self.in_step = True

    def end_step(self) -> None:
        """End it: weights are to move, or have moved."""
        self.in_step = False

    def operand(self, wanted: WantedCast) -> Operand:
        """Return the operand that is `wanted`."""
        return wanted.make()

    def known_amax(self) -> Tensor | None:
        """Return the amax of the weight if it is known, or if the layer does not hold the weight itself; else None."""
        return None

    def tell_amax(self, amax: Tensor) -> None:
        """Take the `amax` of the weight, an fp32 scalar, where it was not known."""

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
        """Begin to keep, with nothing."""
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
        """Return the amax that this step has taken, or None."""
        return self._amax

    def tell_amax(self, amax: Tensor) -> None:
        """Keep the `amax` as long as the casts."""
        if self.in_step:
            self._amax = amax
