"""One cast: the quantization of a GEMM operand (see `config.schema.precision` for the six of a linear layer)."""

from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import Field, model_validator

from lightning_llm.config.schema.base import Group, NonNegativeInt, PositiveFloat, PositiveInt
from lightning_llm.config.schema.number_formats import NUMBER_FORMATS, NumberFormat

if TYPE_CHECKING:
    Format = str
else:
    Format = Literal["high", *NUMBER_FORMATS]
Block = Literal["tensor", "1x128", "128x128", "1x32", "32x32", "1x16", "16x16"]
Scale = Literal["fp32", "power_of_two", "e8m0_ceil", "e8m0_floor", "two_level_e4m3", "delayed", "quest"]
Rounding = Literal["even", "half_away", "half_to_zero", "stochastic", "stochastic_compare"]
Sign = Annotated[int, Field(ge=-1, le=1)]

SCALE_MEANINGS: dict[Scale, tuple[str, str]] = {
    "fp32": ("largest number / amax, in fp32", "Transformer Engine, current and block scaling; DeepSeek-V3"),
    "power_of_two": ("the same, rounded down to a power of two", "Transformer Engine `Float8BlockScaling`"),
    "e8m0_ceil": (
        "1 / smallest power of two >= amax / largest number; nothing clips", "Transformer Engine `MXFP8BlockScaling`"
    ),
    "e8m0_floor": (
        "1 / 2^(floor(log2 amax) - largest exponent); the top of a binade clips", "OCP Microscaling v1.0"
    ),
    "two_level_e4m3": (
        "an E4M3 scale per block under one fp32 scale per tensor", "Transformer Engine >= 2.15 `NVFP4BlockScaling`"
    ),
    "delayed": ("largest number / amax of earlier steps", "Transformer Engine `DelayedScaling`"),
    "quest": (
        "1 / power of two from the block's standard deviation; clips about 7 % of a Gaussian",
        "Quartet, arXiv 2505.14669",
    ),
}  # fmt: skip
"""Kind of scale -> the factor of a block's elements, and the source that uses it."""

ROUNDING_MEANINGS: dict[Rounding, str] = {
    "even": "to nearest, ties to even, as hardware casts",
    "half_away": 'to nearest, ties away from zero (microxcaling\'s "nearest")',
    "half_to_zero": "to nearest, ties towards zero (Quartet)",
    "stochastic": "up with the probability of the remainder, by adding `noise_bits` of noise (8 as NVIDIA's `cvt.rs`)",
    "stochastic_compare": "the same, by comparison with a random number (Quartet)",
}
"""Kind of rounding -> how a scaled element becomes a code."""

SCALE_BITS: dict[Scale, int] = {"fp32": 24, "two_level_e4m3": 4}
"""Significant bits of a block's scale; none for powers of two."""
BF16_BITS = 8
"""Significant bits of bf16, the dtype of emulated operands."""
STOCHASTIC = ("stochastic", "stochastic_compare")
SLOTS = (("fprop", "x"), ("fprop", "w"), ("dgrad", "dy"), ("dgrad", "w"), ("wgrad", "dy"), ("wgrad", "x"))


class HadamardConfig(Group):
    """Rotation of groups of `size` along the contraction axis: x -> x diag(signs) H / sqrt(size) (H: Sylvester).

    The axis is padded with zeros to whole groups.
    """

    size: int = Field(ge=2, le=1024, description="elements per group, a power of two")
    signs: Literal["none", "fixed", "random"] = Field(
        "none", description="fixed: those of `vector`; random: keyed, new for each call and GEMM"
    )
    vector: Annotated[tuple[Sign, ...], Field(strict=False)] | None = Field(None, description="signs=fixed: +1 and -1")
    round_to: Literal["fp32", "bf16"] = Field("fp32", description="dtype that the rotated tensor is rounded to")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.size & (self.size - 1):
            raise ValueError(f"size={self.size}: must be a power of two, 2, 4, ..., 1024")
        if (self.signs == "fixed") != (self.vector is not None):
            raise ValueError("`vector` must be set with signs: fixed, and only then")
        if self.vector is not None and (len(self.vector) != self.size or 0 in self.vector):
            raise ValueError(f"vector has {len(self.vector)} entries: must have {self.size}, each 1 or -1")
        return self

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
    scale: Scale = Field("fp32", description="kind of the scale")
    rounding: Rounding = Field("even", description="rounding of a scaled element to a code")
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
    def stochastic(self) -> bool:
        """Whether rounding draws random bits."""
        return self.rounding in STOCHASTIC

    @property
    def is_square(self) -> bool:
        """Whether blocks are square and have more than one element per side."""
        return self.block in ("128x128", "32x32", "16x16")

    @property
    def scales_partial_sums(self) -> bool:
        """Whether block scales multiply partial sums of the GEMM, because code value times scale may not fit bf16."""
        if self.block == "tensor":
            return False
        return self.number_format.mantissa_bits + 1 + SCALE_BITS.get(self.scale, 0) > BF16_BITS

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.format == "high":
            plain = CastConfig.model_construct(source=self.source, hadamard=self.hadamard)
            if any(getattr(self, key) != getattr(plain, key) for key in type(self).model_fields):
                raise ValueError("format: high takes no block, scale, rounding or prescale. Set a format, or omit them")
        if (self.scale == "delayed") != (self.delayed is not None):
            raise ValueError("`delayed` ({history_length, ...}) must be set with scale: delayed, and only then")
        self._check_blocks()
        if self.prescale != 1 and self.scale not in ("e8m0_floor", "e8m0_ceil"):
            raise ValueError(f"prescale needs an e8m0 scale, and scale is {self.scale}")
        if self.clip_gradient and self.scale != "quest":
            raise ValueError("clip_gradient needs scale: quest, the only scale that clips on purpose")
        return self

    def _check_blocks(self) -> None:
        """Raise ValueError if the scale is not defined for the block or the format."""
        tensor, sixteen = self.block == "tensor", self.block in ("1x16", "16x16")
        given = f"{self.format} with block {self.block}"
        if self.scale == "delayed" and not tensor:
            raise ValueError(f"scale: delayed needs block: tensor, and block is {self.block}")
        if self.scale == "two_level_e4m3" and not (sixteen and self.format == "e2m1"):
            raise ValueError(f"scale: two_level_e4m3 (NVFP4) needs format e2m1 with block 1x16 or 16x16, not {given}")
        if self.scale.startswith("e8m0") and tensor:
            raise ValueError("an e8m0 scale needs a block (1x32 in the OCP MX formats), not block: tensor")
        if self.scale == "quest" and not (self.block == "1x32" and self.format == "e2m1"):
            raise ValueError(f"scale: quest (Quartet) needs format e2m1 with block 1x32, not {given}")


HIGH = CastConfig()
