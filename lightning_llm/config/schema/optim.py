"""`optim`, `schedule` and `algorithm`: update rule, learning rate over time, training algorithm. Registered kinds.

A kind is a subclass of `OptimConfig` (`optim/kinds.py`), `ScheduleConfig` (`optim/schedule.py`) or `AlgorithmConfig`
(`train/algorithm.py`), or of one of them in an installed package (docs/howto/extend.md). Its fields are its YAML keys.
The planner and the training code call its methods.
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
"""Matrices of the blocks; tables of tokens and positions (a head tied to one, too); the head; what is no matrix: norms,
biases, and parameters of blocks with three or more dimensions."""


@dataclass(frozen=True)
class ParameterShard:
    """What one rank holds of a parameter: [rows, columns], all dimensions but the first; of a vector [elements, 1]."""

    rows: int
    columns: int
    role: Role

    @property
    def elements(self) -> int:
        """Elements of the shard, the padding of its rows included."""
        return self.rows * self.columns


def role_in_block(dimensions: int) -> Role:
    """Return the role of a block's parameter with so many dimensions."""
    return "hidden" if dimensions == 2 else "vector"


class OptimConfig(Group):
    """Base class of optimizers: the shared keys, and the methods that planner and training call."""

    module: ClassVar[str]
    """`package.module:Class` of the torch.optim.Optimizer, called with (parameters, config)."""

    name: str = Field(description="a registered optimizer")
    learning_rate: PositiveFloat = Field(description="peak learning rate; step_law, or step_law*0.5: of Step Law")
    weight_decay: NonNegativeFloat = Field(0.1, description="times the learning rate, taken off the weights per step")
    decay_norms: bool = Field(False, description="norms decay, too")
    decay_biases: bool = Field(False, description="biases decay, too")
    decay_embeddings: bool = Field(False, description="embeddings decay, too")
    gradient_clip_norm: PositiveFloat | None = Field(1.0, description="largest global gradient norm; null: no clipping")

    @property
    def takes_adamw_rates(self) -> bool:
        """Whether learning rates that serve AdamW serve, too: what Step Law is fitted on."""
        return False

    def state_bytes(self, shard: ParameterShard, dtype_bytes: int) -> int:
        """Return the bytes that a rank keeps of `shard`, whose weights have `dtype_bytes` each; step counts left out.

        State is sharded as its parameter is.
        """
        raise NotImplementedError

    def exchanged_bytes(self, shard: ParameterShard) -> int:
        """Return the bytes of `shard` as it travels to the rank that takes the whole matrix, 0 where none does."""
        return 0

    def shard_problem(self, columns: int, parts: int) -> str | None:
        """Return why rows of `columns` elements cannot be cut into `parts`, as the rest of a sentence; None if so."""
        return None

    def build(self, parameters: Iterable[tuple[str, Any]], on_whole: Any) -> Any:
        """Return the torch.optim.Optimizer over (name, nn.Parameter) pairs, the peak rate of each group as its `lr`.

        Parameters, gradients and state are this rank's DTensors where anything is sharded. `on_whole` is an
        `optim.matrices.OnWhole`: how a rule that needs whole matrices gets them.
        """
        return resolve_name(self.module)(parameters, self)


class ScheduleConfig(Group):
    """The learning rate as a factor of its peak, per optimizer step.

    Every schedule takes the keys of all that are built in, so that a recipe that sets one still composes with another.
    """

    name: str = Field(description="a registered schedule")
    warmup_steps: NonNegativeInt = Field(0, description="optimizer steps of linear warm-up, absolute")
    total_steps: PositiveInt | None = Field(
        None, description="steps over which the rate decays; null: trainer.max_steps"
    )
    decay_fraction: Fraction = Field(0.2, description="wsd: share of total_steps that decays")
    peak_factor: Annotated[float, Field(gt=0, le=1)] | None = Field(
        None, description="share of optim.learning_rate that the warm-up rises to, such as re-warming; null: all of it"
    )
    final_factor: Fraction | None = Field(
        0.1, description="cosine, wsd: the factor of the peak at total_steps; null where final_learning_rate is given"
    )
    final_learning_rate: NonNegativeFloat | None = Field(
        None, description="cosine, wsd: what optim.learning_rate falls to, in place of final_factor"
    )

    @model_validator(mode="before")
    @classmethod
    def _one_floor(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("final_learning_rate") is not None:
            return {"final_factor": None, **values}
        return values

    @property
    def peak(self) -> float:
        """The factor of `optim.learning_rate` that the warm-up rises to."""
        return 1.0 if self.peak_factor is None else self.peak_factor

    @property
    def floor(self) -> float:
        """The factor of the peak at total_steps. Raises ValueError for a rate: `relative_to` makes a factor of it."""
        if self.final_factor is None:
            raise ValueError("the floor is a rate: ask `relative_to(learning_rate)` for the schedule")
        return self.final_factor

    def relative_to(self, learning_rate: float) -> Self:
        """Return the schedule with a `final_learning_rate` as a factor of the peak that `learning_rate` has."""
        if self.final_learning_rate is None:
            return self
        factor = self.final_learning_rate / (learning_rate * self.peak)
        return self.model_copy(update={"final_factor": factor, "final_learning_rate": None})

    def after_warmup(self, updates: int, total: int) -> float:
        """Return the factor of the peak for the update after `updates` made ones of `total`, past the warm-up."""
        raise NotImplementedError


OPTIMIZERS: Registry[OptimConfig] = Registry("optimizer", "lightning_llm.optim.kinds", key="name")
SCHEDULES: Registry[ScheduleConfig] = Registry("schedule", "lightning_llm.optim.schedule", key="name")


class AlgorithmConfig(Group):
    """Base class of training algorithms: the shared key, and the methods that planner and training call."""

    module: ClassVar[str]
    """`package.module:Class` of the torch code, called with (parameters, config)."""

    name: str = Field(description="a registered training algorithm")

    def summed_axes(self, data_axes: Sequence[str]) -> Sequence[str]:
        """Return those of the mesh's `data_axes`, whose ranks have different data, over which gradients are summed.

        All of them, unless an algorithm lets ranks go apart and brings them together by itself. Of an axis that is left
        out each rank's step is that of its own group: gradients, the targets that its loss is a mean over, the norm.
        """
        return data_axes

    def state_bytes(self, shard: ParameterShard, dtype_bytes: int) -> int:
        """Return the bytes that a rank keeps of `shard`, whose weights have `dtype_bytes` each."""
        raise NotImplementedError

    def build(self, parameters: Iterable[tuple[str, Any]], layout: Any) -> Any:
        """Return the `train.algorithm.Algorithm` over this rank's (name, nn.Parameter) pairs.

        `layout` is the `parallel.layout.Layout`: what it reduces over which ranks.
        """
        return resolve_name(self.module)(parameters, self)


ALGORITHMS: Registry[AlgorithmConfig] = Registry("training algorithm", "lightning_llm.train.algorithm", key="name")
