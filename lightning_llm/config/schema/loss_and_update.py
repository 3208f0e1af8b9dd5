"""The keys of a precision recipe outside the linears: loss scaling, settings of the optimizer, rounding of weights."""

from typing import Literal, Self

from pydantic import Field, model_validator

from lightning_llm.config.schema.base import Group, PositiveFloat, PositiveInt


class LossScalingConfig(Group):
    """Dynamic loss scaling (Micikevicius et al., arXiv 1710.03740); covers the rules of Megatron and torch."""

    init_scale: PositiveFloat = Field(65536.0, description="scale of the first step's loss")
    growth_factor: float = Field(2.0, gt=1, description="factor after growth_interval steps without overflow")
    backoff_factor: float = Field(0.5, gt=0, lt=1, description="factor after an overflow")
    growth_interval: PositiveInt = Field(2000, description="steps in a row without overflow before the scale grows")
    hysteresis: PositiveInt = Field(1, description="overflows before the scale shrinks; reset when it grows")
    min_scale: PositiveFloat | None = Field(1.0, description="floor; null: none")
    detect: Literal["gradients", "operands"] = Field(
        "gradients", description="operands: also look for Inf and NaN in operands, before saturation hides them"
    )

    @property
    def floor(self) -> float:
        """The smallest scale: `min_scale`, or the smallest normal fp32 number, which can still be divided by."""
        return self.min_scale or 2.0**-126

    @model_validator(mode="after")
    def _begins_above_its_floor(self) -> Self:
        if self.min_scale is not None and self.init_scale < self.min_scale:
            raise ValueError(f"init_scale {self.init_scale:g} is below min_scale {self.min_scale:g}")
        return self


class OptimizerHints(Group):
    """Optimizer settings that are part of the recipe, so that comparisons stay controlled; null: keep."""

    eps: PositiveFloat | None = Field(None, description="replaces optim.eps; null: keep")
    beta2: float | None = Field(None, gt=0, lt=1, description="replaces optim.beta2; null: keep")


class UpdateConfig(Group):
    """How the optimizer rounds updated master weights."""

    rounding: Literal["even", "stochastic", "kahan"] = Field(
        "even",
        description="rounding of updated bf16 master weights; even: to nearest, so changes below 1/512 of a weight are "
        "lost; stochastic: up or down at random, exact in the mean; kahan: the error is kept in bf16 and added to the "
        "next change",
    )
