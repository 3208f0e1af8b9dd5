"""One cast: the quantization of a GEMM operand (see `config.schema.precision` for the six of a linear layer)."""

from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import Field, model_validator

from lightning_llm.base.registry import NameIn
from lightning_llm.config.schema.base import Group, NonNegativeInt, PositiveFloat, PositiveInt
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
from lightning_llm.config.schema.number_formats import NUMBER_FORMATS, NumberFormat

if TYPE_CHECKING:
    Format = str
else:
    Format = Literal["high", *NUMBER_FORMATS]
Block = Literal["tensor", "1x128", "128x128", "1x32", "32x32", "1x16", "16x16"]
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
        """The kind of the matrix: its declaration and its function."""
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


class CastConfig(Group):
    """Quantization of one operand of one GEMM. Blocks are along the contraction axis (1x32: 32 elements of it)."""

    format: Format = Field("high", description="high: stays in compute_dtype")
    block: Block = Field(
        "tensor",
        description="elements that share a scale; the last number is along the contraction axis (zero-padded)",
    )
    scale: Annotated[Scale, NameIn(SCALES)] = Field("fp32", description="kind of the scale")
    rounding: Annotated[Rounding, NameIn(ROUNDINGS)] = Field(
        "even", description="rounding of a scaled element to a code"
    )
    noise_bits: Literal[8, 20] = Field(20, description="random bits per element of stochastic rounding")
    prescale: PositiveFloat = Field(
        1.0,
        le=1,
        description="factor before rounding, divided out after the GEMM; 0.75: stochastic E2M1 cannot clip",
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
        description="fprop only: derivative of the cast; clip_gradient: true is clip_mask",
        exclude_if=lambda rule: rule == "straight_through",  # recipes from before the key keep their hash
    )
    amax_scope: Literal["logical", "shard"] = Field(
        "logical", description="tensor amax over all shards, or over this rank's"
    )
    delayed: DelayedConfig | None = Field(None, description="scale=delayed: the amax history")

    @property
    def quantises(self) -> bool:
        """Whether the operand is quantized."""
        return self.format != "high"

    @property
    def number_format(self) -> NumberFormat:
        """The number format. Raises KeyError for high."""
        return NUMBER_FORMATS[self.format]

    @property
    def scale_kind(self) -> ScaleKind:
        """The kind of the scale: its declaration and its function."""
        return SCALES.instance(self.scale)

    @property
    def rounding_kind(self) -> RoundingKind:
        """The kind of the rounding: its declaration and its function."""
        return ROUNDINGS.instance(self.rounding)

    @property
    def gradient_kind(self) -> GradientKind:
        """The rule of the gradient: its declaration and its function."""
        return GRADIENTS.instance("clip_mask" if self.clip_gradient else self.gradient)

    @property
    def needs_tensor_amax(self) -> bool:
        """Whether the scale depends on the whole tensor's amax, which shards must agree on."""
        return self.scale_kind.needs_tensor_amax(self.block)

    @property
    def has_factor(self) -> bool:
        """Whether an fp32 factor of the whole tensor multiplies the product of the GEMM."""
        return self.prescale != 1 or self.scale_kind.has_factor(self.block)

    @property
    def stored_bits(self) -> float:
        """Bits per element of the stored operand: a code, and its share of the block's scale."""
        if self.block == "tensor":
            return float(self.number_format.code_bits)
        rows, columns = (int(each) for each in self.block.split("x"))
        return self.number_format.code_bits + self.scale_kind.stored_bits / (rows * columns)

    @property
    def stochastic(self) -> bool:
        """Whether rounding draws random bits."""
        return self.rounding_kind.draws

    @property
    def is_square(self) -> bool:
        """Whether blocks are square and have more than one element per side."""
        return self.block in ("128x128", "32x32", "16x16")

    @property
    def scales_partial_sums(self) -> bool:
        """Whether block scales multiply partial sums of the GEMM, because code value times scale may not fit bf16."""
        if self.block == "tensor":
            return False
        return self.number_format.mantissa_bits + 1 + self.scale_kind.significant_bits > BF16_BITS

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.format == "high":
            plain = CastConfig.model_construct(source=self.source, hadamard=self.hadamard)
            if any(getattr(self, key) != getattr(plain, key) for key in type(self).model_fields):
                raise ValueError("format: high takes no block, scale, rounding or prescale. Set a format, or omit them")
            return self
        kind = self.scale_kind
        if kind.from_history != (self.delayed is not None):
            raise ValueError("`delayed` ({history_length, ...}) must be set with scale: delayed, and only then")
        if (problem := kind.problem(self.format, self.block)) is not None:
            raise ValueError(problem)
        if self.prescale != 1 and not kind.shares_exponent:
            raise ValueError(f"prescale needs an e8m0 scale, and scale is {self.scale}")
        if self.clip_gradient and not kind.clips:
            clipping = " or ".join(name for name in SCALES if SCALES[name].clips)
            raise ValueError(f"clip_gradient needs scale: {clipping}, which clips on purpose")
        if self.clip_gradient and self.gradient != "straight_through":
            raise ValueError(f"clip_gradient: true is gradient: clip_mask, and gradient is {self.gradient}. Set one")
        return self


HIGH = CastConfig()
