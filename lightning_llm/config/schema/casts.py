"""One cast: the quantization of a GEMM operand (see `config.schema.precision` for the six of a linear layer)."""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from lightning_llm.base.registry import NameIn, Names
from lightning_llm.config.schema.base import Group, NonNegativeInt, PositiveInt
from lightning_llm.config.schema.cast_kinds import (
    GRADIENTS,
    ROUNDINGS,
    SCALES,
    TRANSFORMS,
    GradientKind,
    RoundingKind,
    ScaleKind,
    TransformKind,
)
from lightning_llm.config.schema.number_formats import (
    GRID_KEYS,
    NUMBER_FORMATS,
    NumberFormat,
    grid_name,
    number_format,
)

FORMATS = ("high", *NUMBER_FORMATS)
BLOCKS = ("tensor", "row", "1x128", "128x128", "1x32", "32x32", "1x16", "16x16")
"""Blocks of published recipes; others are allowed."""
LARGEST_BLOCK = 4096


def _format(value: Any) -> Any:
    """Return the name of a format given by name or by its grid. Raises ValueError."""
    if isinstance(value, Mapping):
        return grid_name(value)
    try:
        known = value in FORMATS or bool(number_format(value))
    except (KeyError, TypeError):
        known = False
    if not known:
        names = ", ".join(repr(name) for name in FORMATS)
        raise ValueError(f"must be {names} or a mapping with the keys {', '.join(GRID_KEYS)}")
    return value


def _block(value: Any) -> Any:
    """Return `value` if it is a block. Raises ValueError."""
    sizes = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", value) if isinstance(value, str) else None
    if value in ("tensor", "row") or (sizes and max(map(int, sizes.groups())) <= LARGEST_BLOCK):
        return value
    raise ValueError(
        "must be 'tensor', 'row' (one scale per vector along the contraction axis) or AxB, A elements across and B "
        f"along the contraction axis, up to {LARGEST_BLOCK}: '1x32', '128x128'"
    )


def block_size(block: str) -> tuple[int, int] | None:
    """Return the size of a block as (elements across, elements along the contraction axis): (1, 32) of "1x32".

    0 elements along the axis mean all of them ("row"). None for "tensor".
    """
    if block == "tensor":
        return None
    if block == "row":
        return 1, 0
    across, along = block.split("x")
    return int(across), int(along)


Format = Annotated[str, BeforeValidator(_format), Names(FORMATS)]
Block = Annotated[str, BeforeValidator(_block), Names(BLOCKS)]
Scale = str
Rounding = str
Sign = Annotated[int, Field(ge=-1, le=1)]

BF16_BITS = 8
"""Significant bits of bf16, the dtype of emulated operands."""
SLOTS = (("fprop", "x"), ("fprop", "w"), ("dgrad", "dy"), ("dgrad", "w"), ("wgrad", "dy"), ("wgrad", "x"))


class HadamardConfig(Group):
    """Rotation of groups of `size` along the contraction axis: x -> x diag(signs) S, S = H / sqrt(size) (H: Sylvester).

    The axis is padded with zeros to whole groups. `transform` sets another orthogonal S.
    """

    size: int = Field(ge=2, le=1024, description="elements per group, a power of two")
    transform: Annotated[str, NameIn(TRANSFORMS)] = Field(
        "hadamard",
        description="the orthogonal matrix: a registered transform",
        exclude_if=lambda name: name == "hadamard",  # recipes from before the key keep their hash
    )
    signs: Literal["none", "fixed", "random"] = Field(
        "none", description="fixed: those of `vector`; random: keyed, new for each call and GEMM"
    )
    vector: Annotated[tuple[Sign, ...], Field(strict=False)] | None = Field(None, description="signs=fixed: +1 and -1")
    round_to: Literal["fp32", "bf16"] = Field("fp32", description="dtype that the rotated tensor is rounded to")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if (problem := self.transform_kind.size_problem(self.size)) is not None:
            raise ValueError(f"size={self.size}: {problem}")
        if (self.signs == "fixed") != (self.vector is not None):
            raise ValueError("`vector` must be set with signs: fixed, and only then")
        if self.vector is not None and (len(self.vector) != self.size or 0 in self.vector):
            raise ValueError(f"vector has {len(self.vector)} entries: must have {self.size}, each 1 or -1")
        return self

    @property
    def transform_kind(self) -> TransformKind:
        """The registered kind `transform`, which declares and computes the matrix."""
        return TRANSFORMS.instance(self.transform)

    def padded(self, length: int) -> int:
        """Return the length of a contraction axis of `length` elements after padding to whole groups."""
        return length + -length % self.size


class DelayedConfig(Group):
    """Amax history of delayed scaling (Transformer Engine `DelayedScaling`)."""

    history_length: PositiveInt = Field(1024, description="number of updates that an amax is kept")
    algorithm: Literal["max", "most_recent"] = Field("max", description="the amax of the history that sets the scale")
    margin: NonNegativeInt = Field(0, description="the scale is divided by 2^margin")
    update: Literal["step", "micro_batch"] = Field(
        "step",
        description="update of scales: after an optimizer step, or after a micro-batch of all data-parallel ranks",
        exclude_if=lambda update: update == "step",  # recipes from before the key keep their hash
    )


CandidateFactor = Annotated[float, Field(ge=0.125, le=8)]


class CandidatesConfig(Group):
    """Candidate scales of each block; the one with the smallest error is used (4/6, arXiv 2512.02010)."""

    by: Literal["mae", "mse", "max"] = Field(
        "mae", description="error of a block: sum of magnitudes, sum of squares, or largest magnitude"
    )
    factors: Annotated[tuple[CandidateFactor, ...], Field(strict=False, min_length=2, max_length=4)] = Field(
        (1.0, 1.5), description="factors of the block's scale; of equal errors the first wins"
    )

    @model_validator(mode="after")
    def _differ(self) -> Self:
        if len(set(self.factors)) < len(self.factors):
            raise ValueError(f"factors={list(self.factors)}: must differ, because equal scales have equal errors")
        return self


class CastConfig(Group):
    """Quantization of one operand of one GEMM. Blocks are along the contraction axis (1x32: 32 elements of it)."""

    format: Format = Field(
        "high", description="high: stays in compute_dtype; or its grid, {mantissa, min_exponent, max_exponent, max}"
    )
    block: Block = Field(
        "tensor",
        description="elements that share a scale: all, a row along the contraction axis, or AxB with B along it",
    )
    scale: Annotated[Scale, NameIn(SCALES)] = Field("fp32", description="kind of the scale")
    rounding: Annotated[Rounding, NameIn(ROUNDINGS)] = Field(
        "even", description="rounding of a scaled element to a code"
    )
    noise_bits: Literal[8, 20] = Field(20, description="random bits per element of stochastic rounding")
    prescale: float = Field(
        1.0,
        ge=0.125,
        le=1,
        description="factor before rounding, divided out after the GEMM; 0.75: stochastic E2M1 cannot clip",
    )
    headroom: float = Field(
        1.0,
        ge=0.125,
        le=1.5,
        description="factor of the largest number that a scale takes amax to; 16/17: scales rounded down clip nothing",
        exclude_if=lambda headroom: headroom == 1,  # recipes from before the key keep their hash
    )
    amax: Literal["tensor", "row"] = Field(
        "tensor",
        description="two-level scales: fp32 scale per tensor, or per vector along the contraction axis",
        exclude_if=lambda amax: amax == "tensor",  # recipes from before the key keep their hash
    )
    scale_max: float = Field(
        448.0,
        ge=1,
        le=448,
        description="two-level scales: largest block scale that the fp32 scale aims at; 256 leaves room for candidates",
        exclude_if=lambda largest: largest == 448,  # recipes from before the key keep their hash
    )
    candidates: CandidatesConfig | None = Field(
        None,
        description="two-level scales: block scales to choose among; null: one",
        exclude_if=lambda candidates: candidates is None,  # recipes from before the key keep their hash
    )
    hadamard: HadamardConfig | None = Field(
        None, description="rotation before the cast; with format high: rotate without rounding"
    )
    source: Literal["high_precision", "quantised"] = Field(
        "high_precision", description="quantised: quantize the output of fprop's cast again (with format high: use it)"
    )
    clip_gradient: bool = Field(False, description="fprop only: no gradient for elements that were clipped")
    gradient: Annotated[str, NameIn(GRADIENTS)] = Field(
        "straight_through",
        description="fprop only: derivative of the cast; clip_gradient: true is quartet_mask",
        exclude_if=lambda rule: rule == "straight_through",  # recipes from before the key keep their hash
    )
    amax_scope: Literal["logical", "shard"] = Field(
        "logical", description="tensor amax over all shards, or over this rank's"
    )
    delayed: DelayedConfig | None = Field(None, description="scale=delayed: the amax history")

    @property
    def quantizes(self) -> bool:
        """True if the operand is quantized."""
        return self.format != "high"

    @property
    def number_format(self) -> NumberFormat:
        """The number format. Raises KeyError for high."""
        return number_format(self.format)

    @property
    def scale_kind(self) -> ScaleKind:
        """The registered kind `scale`, which declares and computes scales."""
        return SCALES.instance(self.scale)

    @property
    def rounding_kind(self) -> RoundingKind:
        """The registered kind `rounding`, which declares and computes the rounding."""
        return ROUNDINGS.instance(self.rounding)

    @property
    def gradient_kind(self) -> GradientKind:
        """The registered gradient rule, which declares and computes the derivative of the cast."""
        return GRADIENTS.instance("quartet_mask" if self.clip_gradient else self.gradient)

    @property
    def needs_tensor_amax(self) -> bool:
        """True if the scale depends on the whole tensor's amax, which shards must agree on."""
        return self.amax == "tensor" and self.scale_kind.needs_tensor_amax(self.block)

    @property
    def has_factor(self) -> bool:
        """True if an fp32 factor of the whole tensor multiplies the product of the GEMM."""
        return self.prescale != 1 or self.scale_kind.has_factor(self.block)

    @property
    def stored_bits(self) -> float:
        """Bits per element of the stored operand: a code, and its share of the block's scale."""
        bits, size = float(self.number_format.code_bits), self.block_size
        return bits if size is None or 0 in size else bits + self.scale_kind.stored_bits / (size[0] * size[1])

    @property
    def largest(self) -> float:
        """The number that an amax is scaled to: the format's largest, times `headroom`."""
        return self.number_format.max * self.headroom

    @property
    def stochastic(self) -> bool:
        """True if the rounding of elements or of scales draws random bits."""
        return self.rounding_kind.draws or self.scale_kind.draws

    @property
    def block_size(self) -> tuple[int, int] | None:
        """Size of a block: (elements across, elements along the contraction axis), see `block_size`."""
        return block_size(self.block)

    @property
    def is_square(self) -> bool:
        """True if blocks are square, with more than one element per side."""
        return self.block_size is not None and self.block_size[0] == self.block_size[1] > 1

    @property
    def scales_partial_sums(self) -> bool:
        """True if block scales multiply partial sums of the GEMM, because value times scale may not fit bf16."""
        if self.block == "tensor":
            return False
        return self.number_format.mantissa_bits + 1 + self.scale_kind.significant_bits > BF16_BITS

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.format == "high":
            plain = CastConfig.model_construct(source=self.source, hadamard=self.hadamard)
            if others := [key for key in type(self).model_fields if getattr(self, key) != getattr(plain, key)]:
                text = "Set a format, or omit what it does not take"
                raise ValueError(f"format: high takes no {', '.join(others)}. {text}")
            return self
        kind = self.scale_kind
        _ = self.rounding_kind, self.gradient_kind  # created here: Dynamo cannot trace it in a cast
        if kind.from_history != (self.delayed is not None):
            raise ValueError("`delayed` ({history_length, ...}) must be set with scale: delayed, and only then")
        if (problem := kind.problem(self.format, self.block)) is not None:
            raise ValueError(problem)
        for key in ("prescale", "headroom", "amax", "scale_max", "candidates"):
            if getattr(self, key) != type(self).model_fields[key].default and key not in kind.takes:
                those = ", ".join(name for name in SCALES if key in SCALES[name].takes)
                raise ValueError(f"{key} needs a scale of {those}, and scale is {self.scale}")
        if kind.by_rotation and self.hadamard is not None and self.hadamard.size & (self.hadamard.size - 1):
            raise ValueError(f"hadamard.size={self.hadamard.size}: must be a power of two with scale: {self.scale}")
        if self.amax == "row" and self.block_size is not None and self.block_size[0] != 1:
            raise ValueError(f"amax: row needs blocks of one row (1x16), and block is {self.block}")
        if self.headroom > 1 and not kind.corrects:
            raise ValueError(
                f"headroom={self.headroom:g}: must be at most 1 with scale: {self.scale}, or elements clip"
            )
        if kind.draws and self.rounding_kind.draws:
            raise ValueError(f"scale: {self.scale} draws random bits itself, and rounding is {self.rounding}. Set even")
        if self.candidates is not None and self.stochastic:
            raise ValueError(f"candidates are compared by their errors, and rounding is {self.rounding}. Set even")
        if self.clip_gradient and not kind.clips:
            clipping = " or ".join(name for name in SCALES if SCALES[name].clips)
            raise ValueError(f"clip_gradient needs scale: {clipping}, which clips on purpose")
        if self.clip_gradient and self.gradient != "straight_through":
            raise ValueError(f"clip_gradient: true is gradient: quartet_mask, and gradient is {self.gradient}. Set one")
        return self


UNQUANTIZED = CastConfig()
