"""Plan of a quantized linear layer: six casts by slot, a backend, and how ranks share its tensors."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_llm.config.schema.precision import SLOTS, CastConfig, PrecisionConfig
from lightning_llm.precision.cast.inductor import Backend
from lightning_llm.precision.cast.quantize import Operand
from lightning_llm.precision.cast.random_bits import Origin
from lightning_llm.precision.cast.scales import Scaled
from lightning_llm.precision.linear.weight_casts import WeightCasts

SLOT_NAMES = tuple(f"{gemm}.{operand}" for gemm, operand in SLOTS)
GEMM_NAMES = ("fprop", "dgrad", "wgrad")
KEY_COUNT = len(SLOT_NAMES) + len(GEMM_NAMES)  # one key per slot for rounding, one per GEMM for its rotation's signs
ROLES = ("x", "w", "dy")  # the three tensors, each with one delayed scale
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def wgrad_dtype_of(recipe: PrecisionConfig) -> torch.dtype | None:
    """Return the dtype to which `recipe` rounds gradients of linear layers' weights; None for the compute dtype."""
    return None if recipe.wgrad_dtype is None else DTYPES[recipe.wgrad_dtype]


class CastRecord(NamedTuple):
    """Record of one cast: `slot`, its input `given` [R, C], the `rounded` tensor after the rotation, and the result."""

    slot: str
    given: Tensor
    cast: CastConfig
    axis: int
    rounded: Tensor
    scaled: Scaled
    operand: Operand


Observe = Callable[[CastRecord], None]


class Shard(NamedTuple):
    """Position of a role's local tensor in the whole one: its origin, and the maximum over the ranks that share it.

    `counts`: false if another rank holds the same shard and counts it. `group`: the process group of the ranks with the
    other parts, over which `reduce_amax` reduces; None if this rank has the whole. `part`: number of this part.
    """

    origin: Origin = Origin()
    reduce_amax: Callable[[Tensor], Tensor] | None = None
    counts: bool = True
    group: Any = None
    part: int = 0


@dataclass(frozen=True)
class LinearPlan:
    """Behavior of a quantized linear without its weights: six casts by slot name, a backend, the shards by role.

    `fixed`: the layer was swapped for its dtype only (fp16 on a CPU) and stays unquantized in every phase of the
    recipe. `rule`: see `rule_in_effect`, of the phase in effect. `observe` is
    called once per cast and must change nothing. `weight_casts`: cache of casts, None for none. `wgrad_dtype`: dtype to
    which dW is rounded, None for that of X.
    """

    casts: Mapping[str, CastConfig]
    backend: Backend
    shards: Mapping[str, Shard] = field(default_factory=dict)
    fixed: bool = False
    observe: Observe | None = None
    rule: int | None = None
    weight_casts: WeightCasts | None = None
    wgrad_dtype: torch.dtype | None = None

    @classmethod
    def from_recipe(cls, recipe: PrecisionConfig, backend: Backend, rule: int | None = None) -> "LinearPlan":
        """Return the plan of a layer that follows `rule` of `recipe`, or has its own slots."""
        return cls(recipe.casts_under(rule), backend, rule=rule, wgrad_dtype=wgrad_dtype_of(recipe))

    def with_weight_casts(self, source: WeightCasts) -> "LinearPlan":
        """Return the plan with casts of the weight from `source`."""
        return replace(self, weight_casts=source)

    def delayed_casts(self) -> dict[str, CastConfig]:
        """Return the casts that delayed scales are kept for, by role; the slots of one role share a scale."""
        named = ((slot.split(".")[1], cast) for slot, cast in self.casts.items())
        return {role: cast for role, cast in named if cast.scale_kind.from_history}

    @property
    def random(self) -> bool:
        """Whether any cast draws random bits."""
        return any(c.stochastic or (c.hadamard and c.hadamard.signs == "random") for c in self.casts.values())
