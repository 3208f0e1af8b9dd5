"""`optim`, `schedule` and `algorithm`: update rule, learning rate over time, training algorithm. Registered kinds.

A kind is a subclass of `OptimConfig`, `ScheduleConfig` or `AlgorithmConfig`: in `optim/kinds.py`, or in an installed
package (docs/howto/extend.md). Its fields are its YAML keys. The planner and the training code call its methods.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from lightning_llm.base.registry import Registry
from lightning_llm.config.schema.base import (
    Fraction,
    Group,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)

Beta = Annotated[float, Field(ge=0, lt=1)]
Role = Literal["hidden", "embedding", "head", "vector"]
"""hidden: matrices of the blocks; embedding: tables of tokens and positions, and a tied head; head: an untied head;
vector: norms, biases, and parameters of blocks with three or more dimensions."""


@dataclass(frozen=True)
class ParameterShard:
    """A rank's shard of a parameter as [rows, all other dimensions]; [elements, 1] for vectors."""

    rows: int
    columns: int
    role: Role

    @property
    def elements(self) -> int:
        """Elements of the shard, including the padding of its rows."""
        return self.rows * self.columns


def role_in_block(dimensions: int) -> Role:
    """Return the role of a block's parameter with `dimensions` dimensions."""
    return "hidden" if dimensions == 2 else "vector"


class OptimConfig(Group):
    """Base class of optimizers: the shared keys, and the methods that planner and training call."""

    module: ClassVar[str]
    """`package.module:Class` of the torch.optim.Optimizer, called with (parameters, config)."""
    rounds_weights: ClassVar[bool] = False
    """Whether the optimizer has a method `with_rounding(rounding)`, which returns one that writes weights by an
    `optim.optimizer.WeightRounding`."""

    name: str = Field(description="a registered optimizer")
    learning_rate: PositiveFloat = Field(description="peak learning rate; step_law or step_law*0.5: from Step Law")
    weight_decay: NonNegativeFloat = Field(0.1, description="decoupled weight decay, times the learning rate")
    decay_norms: bool = Field(False, description="also decay norms")
    decay_biases: bool = Field(False, description="also decay biases")
    decay_embeddings: bool = Field(False, description="also decay embeddings")
    gradient_clip_norm: PositiveFloat | None = Field(1.0, description="largest global gradient norm; null: no clipping")

    @property
    def takes_adamw_rates(self) -> bool:
        """True if it works with AdamW's learning rates, which Step Law predicts."""
        return False

    def state_bytes(self, shard: ParameterShard, dtype_bytes: int) -> int:
        """Return the bytes of a rank's state for `shard` with `dtype_bytes` per weight, without step counts.

        State is sharded like its parameter.
        """
        raise NotImplementedError

    def exchanged_bytes(self, shard: ParameterShard) -> int:
        """Return the bytes that a rank sends for `shard` to the rank that updates the whole matrix.

        0 if each rank updates its own shard.
        """
        return 0

    def shard_problem(self, columns: int, parts: int) -> str | None:
        """Return why rows of `columns` elements cannot be split into `parts`, as the end of a sentence, else None."""
        return None

    def build(self, parameters: Iterable[tuple[str, Any]], on_whole: Any) -> Any:
        """Return the torch.optim.Optimizer over (name, nn.Parameter) pairs, with `lr` set to each group's peak rate.

        If anything is sharded, parameters, gradients and state are this rank's DTensors. `on_whole` is an
        `optim.matrices.OnWhole`, which gives update rules whole matrices.
        """
        return resolve_name(self.module)(parameters, self)


class ScheduleConfig(Group):
    """Base class of schedules: the learning rate as a factor of its peak, per optimizer step.

    Every schedule has the keys of all built-in ones, so that a preset which sets a key still composes with another
    schedule.
    """

    name: str = Field(description="a registered schedule")
    warmup_steps: NonNegativeInt = Field(0, description="optimizer steps of linear warm-up")
    total_steps: PositiveInt | None = Field(None, description="step at which the decay ends; null: trainer.max_steps")
    decay_fraction: Fraction = Field(0.2, description="wsd: fraction of total_steps with decay")
    peak_factor: Annotated[float, Field(gt=0, le=1)] | None = Field(
        None, description="fraction of optim.learning_rate reached by warm-up, e.g. for re-warming; null: 1"
    )
    final_factor: Fraction | None = Field(
        0.1, description="cosine, wsd: factor of the peak at total_steps; null if final_learning_rate is set"
    )
    final_learning_rate: NonNegativeFloat | None = Field(
        None, description="cosine, wsd: learning rate at total_steps, instead of final_factor"
    )

    @model_validator(mode="before")
    @classmethod
    def _one_floor(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("final_learning_rate") is not None:
            return {"final_factor": None, **values}
        return values

    @property
    def peak(self) -> float:
        """The factor of `optim.learning_rate` at the end of the warm-up."""
        return 1.0 if self.peak_factor is None else self.peak_factor

    @property
    def floor(self) -> float:
        """The factor of the peak at total_steps. Raises ValueError if it is a rate; `relative_to` converts it."""
        if self.final_factor is None:
            raise ValueError("the floor is a rate: call `relative_to(learning_rate)` first")
        return self.final_factor

    def relative_to(self, learning_rate: float) -> Self:
        """Return the schedule with `final_learning_rate` converted to `final_factor`, given the peak learning rate."""
        if self.final_learning_rate is None:
            return self
        factor = self.final_learning_rate / (learning_rate * self.peak)
        return self.model_copy(update={"final_factor": factor, "final_learning_rate": None})

    def after_warmup(self, updates: int, total: int) -> float:
        """Return the factor of the peak for the next update after `updates` of `total`, past the warm-up."""
        raise NotImplementedError


OPTIMIZERS: Registry[OptimConfig] = Registry("optimizer", "lightning_llm.optim.kinds", key="name")
SCHEDULES: Registry[ScheduleConfig] = Registry("schedule", "lightning_llm.optim.kinds", key="name")


class AlgorithmConfig(Group):
    """Base class of training algorithms: the shared key, and the methods that planner and training call."""

    module: ClassVar[str]
    """`package.module:Class` of the torch code, called with (parameters, config)."""

    name: str = Field(description="a registered training algorithm")

    def summed_axes(self, data_axes: Sequence[str]) -> Sequence[str]:
        """Return the axes among `data_axes` (axes with different data) over which gradients are summed in every step.

        All of them by default. An algorithm that lets ranks diverge and synchronizes them itself omits an axis; then
        gradients, the number of target tokens and the gradient norm are those of each rank's own group.
        """
        return data_axes

    def state_bytes(self, shard: ParameterShard, dtype_bytes: int) -> int:
        """Return the bytes of a rank's state for `shard` with `dtype_bytes` per weight."""
        raise NotImplementedError

    def build(self, parameters: Iterable[tuple[str, Any]], layout: Any) -> Any:
        """Return the `train.step.Algorithm` over this rank's (name, nn.Parameter) pairs.

        `layout` is the `parallel.layout.Layout`, with the groups of ranks to reduce over.
        """
        return resolve_name(self.module)(parameters, self)


ALGORITHMS: Registry[AlgorithmConfig] = Registry("training algorithm", "lightning_llm.optim.kinds", key="name")
