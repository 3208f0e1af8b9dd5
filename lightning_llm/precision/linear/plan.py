"""Plan of a quantized linear layer: six casts by slot, backend, shards by rank, and the source of weight casts."""

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
from lightning_llm.precision.linear.weight_rules import serve_both, why_not_kept

SLOT_NAMES = tuple(f"{gemm}.{operand}" for gemm, operand in SLOTS)
GEMM_NAMES = ("fprop", "dgrad", "wgrad")
KEY_COUNT = len(SLOT_NAMES) + len(GEMM_NAMES)  # one key per slot for rounding, one per GEMM for its rotation's signs
ROLES = ("x", "w", "dy")  # the three tensors, each with one delayed scale
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def wgrad_dtype_of(recipe: PrecisionConfig) -> torch.dtype | None:
    """Return the dtype to which `recipe` rounds gradients of linear layers' weights; None for the compute dtype."""
    return None if recipe.wgrad_dtype is None else DTYPES[recipe.wgrad_dtype]


class CastRecord(NamedTuple):
    """Record of one cast of `slot`, for observers.

    `given` [R, C]: its input. `rounded`: the input after the rotation, which is rounded. `scaled`, `operand`: its
    result.
    """

    slot: str
    given: Tensor
    cast: CastConfig
    axis: int
    rounded: Tensor
    scaled: Scaled
    operand: Operand


Observe = Callable[[CastRecord], None]


class Shard(NamedTuple):
    """This rank's part of one operand (x, w or dy) of a linear that several ranks share.

    `origin`: its position in the whole tensor. `reduce_amax`: replaces an amax by the maximum over all parts; None if
    this rank has the whole. `counts`: false if another rank holds the same part and counts it in statistics. `group`:
    process group of the ranks with the other parts; None if this rank has the whole. `part`: number of this part.
    """

    origin: Origin = Origin()
    reduce_amax: Callable[[Tensor], Tensor] | None = None
    counts: bool = True
    group: Any = None
    part: int = 0


class WantedCast(NamedTuple):
    """Request for the cast of a weight [N, K] in `slot`.

    `casts`: all six; `weight`: returns the weight; `make`: casts it.

    `observed`: `make` reports the cast to an observer, so it must be called.
    """

    slot: str
    casts: Mapping[str, CastConfig]
    observed: bool
    weight: Callable[[], Tensor]
    make: Callable[[], Operand]


class WeightCasts:
    """Source of a layer's weight casts. This one computes a cast at each use; subclasses cache or gather casts."""

    def __init__(self) -> None:
        self.in_step = False

    def begin_step(self) -> None:
        """Begin a training step, within which weights do not change."""
        self.in_step = True

    def end_step(self) -> None:
        """End the training step: weights change now, or have changed."""
        self.in_step = False

    def operand(self, wanted: WantedCast) -> Operand:
        """Return the operand requested by `wanted`."""
        return wanted.make()

    def known_amax(self) -> Tensor | None:
        """Return the amax of the weight, an fp32 scalar; None if it must be computed from the weight."""
        return None

    def tell_amax(self, amax: Tensor) -> None:
        """Receive the `amax` of the weight, an fp32 scalar, which was computed because `known_amax` returned None."""

    def check_unquantized(self) -> None:
        """Raise RuntimeError if the layer now has codes instead of the weight, which an unquantized GEMM needs."""


class KeptCasts(WeightCasts):
    """Casts of one weight, cached from a training step's first micro-batch to its last backward pass.

    Weights do not change until then, so the casts of every micro-batch and recomputation have the same bits. Casts with
    random bits or scales per micro-batch, and observed casts, are made each time. If both GEMMs read the same cast, one
    is cached (`serve_both`).
    """

    def __init__(self, rotated: bool = True) -> None:
        """`rotated`: whether rotated weights can be kept, see `why_not_kept`."""
        super().__init__()
        self.rotated = rotated
        self.kept: dict[str, Operand] = {}
        self._amax: Tensor | None = None

    def begin_step(self) -> None:
        """Begin a training step with an empty cache."""
        self.end_step()
        super().begin_step()

    def end_step(self) -> None:
        """Drop the cached casts."""
        super().end_step()
        self.kept.clear()
        self._amax = None

    def operand(self, wanted: WantedCast) -> Operand:
        """Return the cached cast of the slot, or make and cache it."""
        if not self.in_step or wanted.observed or why_not_kept(wanted.casts, wanted.slot, self.rotated) is not None:
            return wanted.make()
        key = "both" if serve_both(wanted.casts) else wanted.slot
        if key not in self.kept:
            self.kept[key] = wanted.make()
        return self.kept[key]

    def known_amax(self) -> Tensor | None:
        """Return the amax received in this step (`tell_amax`), or None."""
        return self._amax

    def tell_amax(self, amax: Tensor) -> None:
        """Cache the `amax` until the end of the step, like the casts."""
        if self.in_step:
            self._amax = amax


@dataclass(frozen=True)
class LinearPlan:
    """Settings of a quantized linear: six casts by slot name, how they run (`backend`), and this rank's shards by role.

    `fixed`: the layer was swapped for its dtype only (fp16 on a CPU) and stays unquantized in every phase of the
    recipe. `rule`: number of the rule of `modules.casts` in effect (`rule_in_effect`). `observe` is called once per
    cast and must change nothing. `weight_casts`: source of weight casts; None computes them at each use. `wgrad_dtype`:
    dtype to which dW is rounded, None for that of X.
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
        """Return the plan of a layer that follows rule number `rule` of `recipe`; None: the recipe's own slots."""
        return cls(recipe.casts_under(rule), backend, rule=rule, wgrad_dtype=wgrad_dtype_of(recipe))

    def with_weight_casts(self, source: WeightCasts) -> "LinearPlan":
        """Return the plan with casts of the weight from `source`."""
        return replace(self, weight_casts=source)

    def delayed_casts(self) -> dict[str, CastConfig]:
        """Return {role: cast} of the casts with delayed scales. The slots of one role share a scale."""
        named = ((slot.split(".")[1], cast) for slot, cast in self.casts.items())
        return {role: cast for role, cast in named if cast.scale_kind.from_history}

    @property
    def random(self) -> bool:
        """Whether any cast draws random bits."""
        return any(c.stochastic or (c.hadamard and c.hadamard.signs == "random") for c in self.casts.values())
