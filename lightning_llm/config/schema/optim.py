"""`optim` and `schedule`: the update rule, and the learning rate over time."""

from typing import Annotated, Literal

from pydantic import Field

from lightning_llm.config.schema.base import (
    Fraction,
    Group,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)

Beta = Annotated[float, Field(ge=0, lt=1)]


class OptimConfig(Group):
    """The optimizer."""

    name: Literal["adamw"]
    learning_rate: PositiveFloat = Field(description="peak learning rate")
    beta1: Beta = 0.9
    beta2: Beta = 0.95
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.1
    decay_norms: bool = False
    decay_biases: bool = False
    decay_embeddings: bool = False
    gradient_clip_norm: PositiveFloat | None = Field(1.0, description="largest global gradient norm; null: no clipping")


class ScheduleConfig(Group):
    """The learning rate as a factor of its peak, per optimizer step."""

    name: Literal["constant", "cosine", "wsd"]
    warmup_steps: NonNegativeInt = Field(0, description="optimizer steps of linear warm-up, absolute")
    total_steps: PositiveInt | None = Field(
        None, description="steps over which the rate decays; null: trainer.max_steps"
    )
    decay_fraction: Fraction = Field(0.2, description="wsd: share of total_steps that decays")
    final_factor: Fraction = Field(0.1, description="cosine, wsd: the factor at total_steps")
