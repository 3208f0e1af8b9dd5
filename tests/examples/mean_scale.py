from typing import ClassVar, Literal

from lightning_llm.config.schema.cast_kinds import SCALES, ScaleKind


@SCALES.register
class MeanScale(ScaleKind):
    """Scale of a block from its mean magnitude, as BitNet's absmean: three means become the largest number."""

    name: Literal["mean"] = "mean"
    meaning: ClassVar[str] = "largest number / (3 x mean magnitude), rounded down to a power of two; clips"
    source: ClassVar[str] = "an example, after absmean of BitNet b1.58, arXiv 2402.17764"
    label: ClassVar[str] = "mean"
    stored_bits: ClassVar[int] = 8
    clips: ClassVar[bool] = True

    def problem(self, format, block):
        return None if block.startswith("1x") else f"scale: mean needs a block 1xN, and block is {block}"

    def scale(self, of):
        import torch

        from lightning_llm.precision.cast.rounding import power_of_two_floor
        from lightning_llm.precision.cast.scales import Scaled, axes_within, divide

        mean = of.blocks.float().abs().mean(axes_within(of.shape), keepdim=True)
        mean = torch.where(mean > 0, mean, 1.0)
        multiplier = power_of_two_floor(divide(of.fmt.max / 3, mean))
        return Scaled(multiplier, divide(1.0, multiplier), None)
