"""Built-in roundings, transforms and gradient rules of casts. Imports torch only to compute."""

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from lightning_llm.config.schema.cast_kinds import (
    GRADIENTS,
    ROUNDINGS,
    TRANSFORMS,
    GradientKind,
    RoundingKind,
    TransformKind,
)
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
    """Stochastic rounding: add uniform noise below one step, then round down.

    As Transformer Engine's `cvt.rs`, and the dither of arXiv 2502.20586.
    """

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
    """Stochastic rounding: up where uniform noise is below the remainder, as Quartet's kernel rounds."""

    name: Literal["stochastic_compare"] = "stochastic_compare"
    meaning: ClassVar[str] = "the same, by comparison with a random number (Quartet)"
    label: ClassVar[str] = "SR"
    draws: ClassVar[bool] = True

    def whole(self, steps: "Tensor", fmt: NumberFormat, noise: "Tensor") -> "Tensor":
        whole = steps.floor()
        # Not noise < steps - whole: Inductor (torch 2.13) keeps that bool in memory, and goes element by element.
        return (whole + 1).where((steps - whole) - noise > 0, whole)


@TRANSFORMS.register
class Hadamard(TransformKind):
    """Sylvester's Hadamard matrix divided by the square root of its size. It spreads outliers over their group."""

    name: Literal["hadamard"] = "hadamard"
    meaning: ClassVar[str] = "Sylvester's Hadamard matrix over the root of its size"

    def size_problem(self, size: int) -> str | None:
        return "must be a power of two, 2, 4, ..., 1024" if size & (size - 1) else None

    def exact_in_bf16(self, size: int) -> bool:
        return size.bit_length() % 2 == 1  # sizes 4, 16, 64, 256: the root is a power of two

    def matrix(self, size: int) -> "Tensor":
        import torch

        h = torch.ones(1, 1)
        while h.shape[0] < size:
            h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)], 0)
        return h * torch.tensor(size, dtype=torch.float32).rsqrt().item()


@GRADIENTS.register
class StraightThrough(GradientKind):
    """Straight-through gradient: the derivative of a cast is 1 (Bengio et al., arXiv 1308.3432)."""

    name: Literal["straight_through"] = "straight_through"
    meaning: ClassVar[str] = "1 everywhere"
    is_one: ClassVar[bool] = True


@GRADIENTS.register
class ClipMask(GradientKind):
    """0 for clipped elements.

    A multiplier takes amax to the largest number within two roundings of fp32: such an element is not clipped.
    """

    name: Literal["clip_mask"] = "clip_mask"
    meaning: ClassVar[str] = "1 up to the largest number, 0 for scaled elements beyond it, which were clipped"

    def factor(self, elements: "Tensor", fmt: NumberFormat) -> "Tensor":
        import torch

        return torch.where(elements.abs() <= fmt.max * (1 + 2.0**-22), 1.0, 0.0)


@GRADIENTS.register
class QuartetMask(GradientKind):
    """0 for clipped elements and for those at the largest number (Quartet's kernel, arXiv 2505.14669)."""

    name: Literal["quartet_mask"] = "quartet_mask"
    meaning: ClassVar[str] = "1 below the largest number, 0 from there on (Quartet)"

    def factor(self, elements: "Tensor", fmt: NumberFormat) -> "Tensor":
        import torch

        return torch.where(elements.abs() < fmt.max, 1.0, 0.0)
