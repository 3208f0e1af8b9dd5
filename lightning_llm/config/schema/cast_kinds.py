"""Base classes and registries of the parts of casts: scales, roundings, transforms, gradient rules. No torch.

A kind is a subclass in `precision/cast/scale_kinds.py`, `precision/cast/kinds.py` or an installed package
(docs/howto/extend.md). It declares its needs, its stored form and its limits, which schema, planner, sharding, lint and
native decision read. One method computes it; it imports torch in its body.
"""

from typing import Any, ClassVar

from pydantic import Field

from lightning_llm.base.registry import Registry
from lightning_llm.config.schema.base import Group
from lightning_llm.config.schema.number_formats import NumberFormat

SCALES: Registry["ScaleKind"] = Registry("scale", "lightning_llm.precision.cast.scale_kinds", key="name")
ROUNDINGS: Registry["RoundingKind"] = Registry("rounding", "lightning_llm.precision.cast.kinds", key="name")
TRANSFORMS: Registry["TransformKind"] = Registry("transform", "lightning_llm.precision.cast.kinds", key="name")
GRADIENTS: Registry["GradientKind"] = Registry("gradient rule", "lightning_llm.precision.cast.kinds", key="name")
REGISTRIES: tuple[Registry[Any], ...] = (SCALES, ROUNDINGS, TRANSFORMS, GRADIENTS)
"""Registries of the kinds that run within a cast."""


class ScaleKind(Group):
    """Base class of scales: factors that take the elements of a block into the range of the number format.

    The attributes describe the kind for code that does not compute scales, such as the planner.
    """

    meaning: ClassVar[str]
    """The factor that elements are multiplied by, in a few words."""
    source: ClassVar[str]
    """The library or paper that defines it."""
    label: ClassVar[str] = ""
    """Short name in tables of recipes."""
    significant_bits: ClassVar[int] = 0
    """Significant bits of a block's scale; 0 for powers of two, which are exact factors of an operand in bf16."""
    stored_bits: ClassVar[int] = 32
    """Bits of a block's scale in memory."""
    from_history: ClassVar[bool] = False
    """True if it depends on the amaxes of earlier steps (`delayed`) instead of the tensor."""
    shares_exponent: ClassVar[bool] = False
    """True for a shared exponent per small block (the E8M0 scales of OCP Microscaling)."""
    takes: ClassVar[frozenset[str]] = frozenset()
    """Optional keys of a slot that it uses: prescale, headroom, amax, scale_max, candidates."""
    from_block_amax: ClassVar[bool] = False
    """True if a block's scale depends only on the block's amax. Ranks that share a block then reduce only the amax."""
    clips: ClassVar[bool] = False
    """True if it clips large elements on purpose, which biases. Such a cast may set `clip_gradient`."""
    draws: ClassVar[bool] = False
    """True if it draws random bits for each block. Its casts then differ between micro-batches."""
    by_rotation: ClassVar[bool] = False
    """True if it depends on the groups of the cast's rotation (`hadamard`), which must be powers of two."""
    corrects: ClassVar[bool] = False
    """True if it corrects the error of clipped elements. `headroom` may then be above 1."""
    reads: ClassVar[int] = 2
    """Reads of the tensor by a fused kernel, for times in `plan`."""
    engine: ClassVar[dict[tuple[str, str], str]] = {}
    """{(format, block): Transformer Engine configuration (`native/express.py`) with this scale}."""

    name: str = Field(description="a registered scale")

    def problem(self, format: str, block: str) -> str | None:
        """Return the reason why the scale is undefined for blocks `block` of `format`; None if it is defined."""
        return None

    def needs_tensor_amax(self, block: str) -> bool:
        """Return True if it depends on the amax of the whole tensor, which shards must agree on."""
        return block == "tensor" and not self.from_history

    def has_factor(self, block: str) -> bool:
        """Return True if an fp32 factor of the whole tensor (`Scaled.tensor`) multiplies the product."""
        return False

    def unclipped_prescale(self, fmt: NumberFormat) -> float:
        """Return the largest value of the key `prescale` with which rounding to `fmt` clips no element."""
        return 1.0

    def scale(self, of: Any) -> Any:
        """Return the `Scaled` of a `BlocksToScale` (`precision/cast/scales.py`), a function that can be compiled."""
        raise NotImplementedError

    def stored(self, scaled: Any) -> Any:
        """Return the scales of a `Scaled` as kernels store them: a tensor of the shape of `scaled.block`."""
        return scaled.multiplier if scaled.block is None else scaled.block


class RoundingKind(Group):
    """Base class of roundings, which take a scaled element to a number of the format."""

    meaning: ClassVar[str]
    """The rule in a few words."""
    label: ClassVar[str] = ""
    """Short name in tables of recipes; "" for the default."""
    draws: ClassVar[bool] = False
    """True if it draws `noise_bits` random bits per element. Its casts then differ between micro-batches."""

    counts_steps: ClassVar[bool] = True
    """True if `whole` defines the rounding; False if `round` does."""

    name: str = Field(description="a registered rounding")

    def whole(self, steps: Any, fmt: NumberFormat, noise: Any) -> Any:
        """Return `steps` rounded to integers.

        `steps`: magnitudes divided by the spacing of the format's numbers around them, an fp32 tensor. `noise`: random
        numbers in [0, 1), fp32 of the same shape, if the kind `draws`.
        """
        raise NotImplementedError

    def round(self, v: Any, fmt: NumberFormat, noise: Any) -> Any:
        """Return fp32 `v` on the grid of `fmt`, saturated at its largest number; for kinds without `whole`."""
        raise NotImplementedError


class TransformKind(Group):
    """Base class of transforms: multiplication of both operands by an orthogonal matrix along the contraction axis.

    The matrix is applied to groups of `size` elements.
    """

    meaning: ClassVar[str]
    """The matrix in a few words."""

    name: str = Field(description="a registered transform")

    def size_problem(self, size: int) -> str | None:
        """Return the requirement that `size` violates ("must be a power of two"); None if `size` is allowed."""
        return None

    def exact_in_bf16(self, size: int) -> bool:
        """Return True if all entries are exact in bf16, so that a bf16 GEMM rounds only its result."""
        return False

    def matrix(self, size: int) -> Any:
        """Return the orthogonal matrix S of the transform, [size, size] fp32 on the CPU.

        A group x of elements, as a row, becomes x diag(signs) S.
        """
        raise NotImplementedError


class GradientKind(Group):
    """Base class of gradient rules: the derivative of a cast, elementwise."""

    meaning: ClassVar[str]
    """The derivative in a few words."""
    is_one: ClassVar[bool] = False
    """True if the derivative is 1 (straight-through), so nothing is saved or multiplied."""

    name: str = Field(description="a registered gradient rule")

    def factor(self, elements: Any, fmt: NumberFormat) -> Any:
        """Return the derivative at scaled `elements` before rounding, fp32 of their shape; can be compiled."""
        raise NotImplementedError
