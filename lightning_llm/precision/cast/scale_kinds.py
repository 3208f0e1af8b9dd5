"""Built-in scales. Imports torch only to compute."""

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from lightning_llm.config.schema.cast_kinds import SCALES, ScaleKind
from lightning_llm.config.schema.number_formats import NumberFormat

if TYPE_CHECKING:
    from torch import Tensor

    from lightning_llm.precision.cast.scales import BlocksToScale, Scaled


@SCALES.register
class FP32Scale(ScaleKind):
    """fp32 scale. Elements are multiplied by the format's largest number / amax of the tensor or block, in fp32."""

    name: Literal["fp32"] = "fp32"
    meaning: ClassVar[str] = "largest number / amax, in fp32"
    source: ClassVar[str] = "Transformer Engine, current and block scaling; DeepSeek-V3"
    label: ClassVar[str] = "fp32"
    from_block_amax: ClassVar[bool] = True
    significant_bits: ClassVar[int] = 24
    takes: ClassVar[frozenset[str]] = frozenset({"headroom"})
    engine: ClassVar[dict[tuple[str, str], str]] = {("e4m3", "tensor"): "current", ("e4m3", "1x128"): "subchannel"}

    def has_factor(self, block: str) -> bool:
        return block == "tensor"

    def scale(self, of: "BlocksToScale") -> "Scaled":
        return of.from_amax(power_of_two=False)


@SCALES.register
class PowerOfTwoScale(ScaleKind):
    """Scale as `FP32Scale`, with the multiplier rounded down to a power of two."""

    name: Literal["power_of_two"] = "power_of_two"
    meaning: ClassVar[str] = "the same, rounded down to a power of two"
    source: ClassVar[str] = "Transformer Engine `Float8BlockScaling`"
    label: ClassVar[str] = "2^k"
    takes: ClassVar[frozenset[str]] = FP32Scale.takes
    from_block_amax: ClassVar[bool] = True
    engine: ClassVar[dict[tuple[str, str], str]] = FP32Scale.engine

    def scale(self, of: "BlocksToScale") -> "Scaled":
        return of.from_amax(power_of_two=True)


class SharedExponent(ScaleKind):
    """Base class of E8M0 scales: a power of two per block, stored as its biased exponent."""

    stored_bits: ClassVar[int] = 8
    shares_exponent: ClassVar[bool] = True
    takes: ClassVar[frozenset[str]] = frozenset({"prescale"})
    reads: ClassVar[int] = 1

    def problem(self, format: str, block: str) -> str | None:
        if block == "tensor":
            return "an e8m0 scale needs a block (1x32 in the OCP MX formats), not block: tensor"
        return None

    def exponents(self, of: "BlocksToScale") -> "Tensor":
        """Return the biased exponents of the blocks of `of`, int32 with size-1 block axes; 255 for NaN."""
        raise NotImplementedError

    def scale(self, of: "BlocksToScale") -> "Scaled":
        from lightning_llm.precision.cast.scales import scaled_by_exponents

        return scaled_by_exponents(self.exponents(of), of.cast.prescale)

    def stored(self, scaled: "Scaled") -> Any:
        from lightning_llm.precision.cast.scales import e8m0_exponent

        return super().stored(scaled) if scaled.block is None else e8m0_exponent(scaled.block)


@SCALES.register
class E8M0CeilScale(SharedExponent):
    """E8M0 scale: the smallest power of two with which no element is clipped."""

    name: Literal["e8m0_ceil"] = "e8m0_ceil"
    meaning: ClassVar[str] = "1 / smallest power of two >= amax / largest number; nothing clips"
    source: ClassVar[str] = "Transformer Engine `MXFP8BlockScaling`"
    label: ClassVar[str] = "ceil"
    takes: ClassVar[frozenset[str]] = frozenset({"prescale", "headroom"})
    from_block_amax: ClassVar[bool] = True
    engine: ClassVar[dict[tuple[str, str], str]] = {("e4m3", "1x32"): "mxfp8"}

    def exponents(self, of: "BlocksToScale") -> "Tensor":
        from lightning_llm.precision.cast.scales import e8m0_ceil

        return e8m0_ceil(of.block_amax(), of.cast.largest)


@SCALES.register
class E8M0FloorScale(SharedExponent):
    """E8M0 scale of OCP Microscaling: amax is rounded down to a power of two, so the top of a binade is clipped."""

    name: Literal["e8m0_floor"] = "e8m0_floor"
    meaning: ClassVar[str] = "1 / 2^(floor(log2 amax) - largest exponent); the top of a binade clips"
    source: ClassVar[str] = "OCP Microscaling v1.0"
    label: ClassVar[str] = "floor"

    def unclipped_prescale(self, fmt: NumberFormat) -> float:
        return fmt.largest_fraction

    def exponents(self, of: "BlocksToScale") -> "Tensor":
        from lightning_llm.precision.cast.scales import e8m0_floor

        # microxcaling's maximum propagates NaN into the block's exponent; CUDA's ignores it.
        return e8m0_floor(of.block_amax(nan=float("inf")), of.fmt)


@SCALES.register
class E8M0EvenScale(SharedExponent):
    """E8M0 scale of the amax after rounding it to the format's mantissa bits (torchao `ScaleCalculationMode.EVEN`)."""

    name: Literal["e8m0_even"] = "e8m0_even"
    meaning: ClassVar[str] = "as e8m0_floor, of amax rounded half up to the mantissa bits of the format"
    source: ClassVar[str] = "torchao `ScaleCalculationMode.EVEN`"
    label: ClassVar[str] = "even"

    def unclipped_prescale(self, fmt: NumberFormat) -> float:
        return fmt.max / ((2 - 2.0 ** -(fmt.mantissa_bits + 1)) * 2.0**fmt.max_exponent)

    def exponents(self, of: "BlocksToScale") -> "Tensor":
        from lightning_llm.precision.cast.scales import e8m0_even

        return e8m0_even(of.block_amax(nan=float("inf")), of.fmt)


@SCALES.register
class UnitScale(ScaleKind):
    """No scale: the multiplier is 1. For models with unit scaling, where tensors have a standard deviation near 1."""

    name: Literal["unit"] = "unit"
    meaning: ClassVar[str] = "1"
    source: ClassVar[str] = "unit scaling, arXiv 2303.11257; u-muP, arXiv 2407.17465"
    label: ClassVar[str] = "unit"
    reads: ClassVar[int] = 1

    def problem(self, format: str, block: str) -> str | None:
        return None if block == "tensor" else f"scale: unit needs block: tensor, and block is {block}"

    def needs_tensor_amax(self, block: str) -> bool:
        return False

    def scale(self, of: "BlocksToScale") -> "Scaled":
        import torch

        from lightning_llm.precision.cast.scales import Scaled

        return Scaled(torch.ones((), device=of.blocks.device), None, None)


@SCALES.register
class TwoLevelScale(ScaleKind):
    """Scales of NVFP4: an E4M3 scale per block of 16 elements, and one fp32 scale per tensor."""

    name: Literal["two_level_e4m3"] = "two_level_e4m3"
    meaning: ClassVar[str] = "an E4M3 scale per block under one fp32 scale per tensor"
    source: ClassVar[str] = "Transformer Engine >= 2.15 `NVFP4BlockScaling`"
    label: ClassVar[str] = "e4m3"
    significant_bits: ClassVar[int] = 4
    takes: ClassVar[frozenset[str]] = frozenset({"headroom", "amax", "scale_max", "candidates"})
    stored_bits: ClassVar[int] = 8
    engine: ClassVar[dict[tuple[str, str], str]] = {("e2m1", "1x16"): "nvfp4"}

    def problem(self, format: str, block: str) -> str | None:
        if format == "e2m1" and block in ("1x16", "16x16"):
            return None
        return (
            f"scale: two_level_e4m3 (NVFP4) needs format e2m1 with block 1x16 or 16x16, not {format} with block {block}"
        )

    def needs_tensor_amax(self, block: str) -> bool:
        return True

    def has_factor(self, block: str) -> bool:
        return True

    def scale(self, of: "BlocksToScale") -> "Scaled":
        from lightning_llm.precision.cast.nvfp4_scales import two_level

        return two_level(of)


@SCALES.register
class EdenScale(ScaleKind):
    """Scales of Quartet II: NVFP4 block scales, corrected for the error of their rotation group.

    The corrected scales are rounded stochastically.
    """

    name: Literal["eden"] = "eden"
    meaning: ClassVar[str] = (
        "as two_level_e4m3; the codes' scales are that times |x|^2 / <x, codes> of the rotation's group, with "
        "stochastic rounding to E4M3: unbiased under random rotations"
    )
    source: ClassVar[str] = "Quartet II (MS-EDEN), arXiv 2601.22813"
    label: ClassVar[str] = "eden"
    significant_bits: ClassVar[int] = 4
    stored_bits: ClassVar[int] = 8
    takes: ClassVar[frozenset[str]] = frozenset({"headroom", "scale_max"})
    draws: ClassVar[bool] = True
    by_rotation: ClassVar[bool] = True
    corrects: ClassVar[bool] = True

    def needs_tensor_amax(self, block: str) -> bool:
        return True

    def has_factor(self, block: str) -> bool:
        return True

    def problem(self, format: str, block: str) -> str | None:
        if (format, block) == ("e2m1", "1x16"):
            return None
        return f"scale: eden (Quartet II) needs format e2m1 with block 1x16, not {format} with block {block}"

    def scale(self, of: "BlocksToScale") -> "Scaled":
        from lightning_llm.precision.cast.nvfp4_scales import ms_eden

        return ms_eden(of)


@SCALES.register
class DelayedScale(ScaleKind):
    """The scale of a tensor from the amaxes of earlier steps (`linear/delayed.py`)."""

    name: Literal["delayed"] = "delayed"
    meaning: ClassVar[str] = "largest number / amax of earlier steps"
    source: ClassVar[str] = "Transformer Engine `DelayedScaling`"
    label: ClassVar[str] = "delayed"
    significant_bits: ClassVar[int] = 24
    from_history: ClassVar[bool] = True
    reads: ClassVar[int] = 1
    engine: ClassVar[dict[tuple[str, str], str]] = {("e4m3", "tensor"): "delayed"}

    def problem(self, format: str, block: str) -> str | None:
        return None if block == "tensor" else f"scale: delayed needs block: tensor, and block is {block}"

    def has_factor(self, block: str) -> bool:
        return True

    def scale(self, of: "BlocksToScale") -> "Scaled":
        from lightning_llm.precision.cast.scales import Scaled, divide

        multiplier = of.kept_multiplier()
        return Scaled(multiplier, None, divide(1.0, multiplier))


@SCALES.register
class QuestScale(ScaleKind):
    """Scale of QuEST: a power of two from the standard deviation of a block of 32. It clips the largest elements."""

    name: Literal["quest"] = "quest"
    meaning: ClassVar[str] = "1 / power of two from the block's standard deviation; clips about 7 % of a Gaussian"
    source: ClassVar[str] = "Quartet, arXiv 2505.14669"
    label: ClassVar[str] = "quest"
    stored_bits: ClassVar[int] = 8
    clips: ClassVar[bool] = True

    def problem(self, format: str, block: str) -> str | None:
        if (format, block) == ("e2m1", "1x32"):
            return None
        return f"scale: quest (Quartet) needs format e2m1 with block 1x32, not {format} with block {block}"

    def scale(self, of: "BlocksToScale") -> "Scaled":
        from lightning_llm.precision.cast.scales import Scaled, divide, quest_scale

        power = quest_scale(*of.moments())
        return Scaled(divide(1.0, power), power, None)
