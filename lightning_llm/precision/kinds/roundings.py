"""Built-in roundings. Imports torch only to compute."""

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from lightning_llm.config.schema.cast_kinds import ROUNDINGS, RoundingKind
from lightning_llm.config.schema.number_formats import NumberFormat

if TYPE_CHECKING:
    from torch import Tensor

EXACT_MANTISSA_BITS = 3
"""Up to so many mantissa bits, whole steps (fewer than 16) plus 20 bits of noise are exact in fp32."""


@ROUNDINGS.register
class ToNearestEven(RoundingKind):
    """To nearest, ties to even; by fp32 additions alone."""

    name: Literal["even"] = "even"
    meaning: ClassVar[str] = "to nearest, ties to even, as hardware casts"
    counts_steps: ClassVar[bool] = False

    def round(self, v: "Tensor", fmt: NumberFormat, noise: Any) -> "Tensor":
        from lightning_llm.precision.cast.rounding import nearest_even

        return nearest_even(v, fmt)


@ROUNDINGS.register
class HalfAway(RoundingKind):
    """To nearest, ties away from zero."""

    name: Literal["half_away"] = "half_away"
    meaning: ClassVar[str] = 'to nearest, ties away from zero (microxcaling\'s "nearest")'
    label: ClassVar[str] = "away"

    def whole(self, steps: "Tensor", fmt: NumberFormat, noise: Any) -> "Tensor":
        return (steps + 0.5).floor()


@ROUNDINGS.register
class HalfToZero(RoundingKind):
    """To nearest, ties towards zero."""

    name: Literal["half_to_zero"] = "half_to_zero"
    meaning: ClassVar[str] = "to nearest, ties towards zero (Quartet)"
    label: ClassVar[str] = "to zero"

    def whole(self, steps: "Tensor", fmt: NumberFormat, noise: Any) -> "Tensor":
        return (steps - 0.5).ceil()


@ROUNDINGS.register
class Stochastic(RoundingKind):
    """Down after adding noise: Transformer Engine's `cvt.rs`, and the dither of arXiv 2502.20586."""

    name: Literal["stochastic"] = "stochastic"
    meaning: ClassVar[str] = (
        "up with the probability of the remainder, by adding `noise_bits` of noise (8 as NVIDIA's `cvt.rs`)"
    )
    label: ClassVar[str] = "SR"
    draws: ClassVar[bool] = True

    def whole(self, steps: "Tensor", fmt: NumberFormat, noise: "Tensor") -> "Tensor":
        if fmt.mantissa_bits <= EXACT_MANTISSA_BITS:
            return (steps + noise).floor()
        whole = steps.floor()
        return whole + ((steps - whole) + noise).floor()


@ROUNDINGS.register
class StochasticCompare(RoundingKind):
    """Up where the noise is below the remainder: Quartet's kernel."""

    name: Literal["stochastic_compare"] = "stochastic_compare"
    meaning: ClassVar[str] = "the same, by comparison with a random number (Quartet)"
    label: ClassVar[str] = "SR"
    draws: ClassVar[bool] = True

    def whole(self, steps: "Tensor", fmt: NumberFormat, noise: "Tensor") -> "Tensor":
        whole = steps.floor()
        # Not noise < steps - whole: Inductor (torch 2.13) keeps that bool in memory, and goes element by element.
        return (whole + 1).where((steps - whole) - noise > 0, whole)
