"""`precision`: a recipe as data. Six operand slots, which modules they apply to, and the dtypes of everything else.

Every linear layer runs three GEMMs; each GEMM has two operands, each with its own cast, blocked along the axis that
this GEMM sums over (X is [M, K], W is [N, K], dY is [M, N]):

    fprop  Y  = X  W^T    sums over K    slots fprop.x,  fprop.w
    dgrad  dX = dY W      sums over N    slots dgrad.dy, dgrad.w
    wgrad  dW = dY^T X    sums over M    slots wgrad.dy, wgrad.x

A slot that is not named stays in `compute_dtype`. A published recipe should need a YAML file and no Python.
"""

import json
from hashlib import blake2b
from itertools import pairwise
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from lightning_llm.config.schema.base import Fraction, Group, PositiveFloat, PositiveInt
from lightning_llm.config.schema.casts import (
    HIGH,
    SLOTS,
    STOCHASTIC,
    Block,
    CastConfig,
    DelayedConfig,
    Format,
    HadamardConfig,
    Rounding,
    Scale,
)
from lightning_llm.config.schema.migrations import first_name
from lightning_llm.config.schema.module_rules import SELECTS, CastRule, ModuleRules

__all__ = [
    "HIGH",
    "SELECTS",
    "SLOTS",
    "STOCHASTIC",
    "Block",
    "CastConfig",
    "CastRule",
    "DelayedConfig",
    "DgradConfig",
    "Dtype",
    "Format",
    "FpropConfig",
    "HadamardConfig",
    "LossScalingConfig",
    "ModuleRules",
    "OptimizerHints",
    "PhaseConfig",
    "PrecisionConfig",
    "Rounding",
    "Scale",
    "WgradConfig",
    "slots_of",
]

Dtype = Literal["fp32", "bf16", "fp16"]
NOT_IDENTITY = {"name", "reference", "hardware", "backend", "casts", "parameter_gather", "keep_weight_casts"}
"""Names, and how and where the same numbers are computed: no part of a recipe's hash."""
LATER = (
    ("", "allow"),
    ("", "wgrad_dtype"),
    ("modules", "first_fraction_high_precision"),
    ("modules", "last_fraction_high_precision"),
    ("modules", "casts"),
)
"""Keys, with their group, that recipes once did not have: null is no part of a recipe's hash."""


class FpropConfig(Group):
    """Operands of Y = X W^T."""

    x: CastConfig = HIGH
    w: CastConfig = HIGH


class DgradConfig(Group):
    """Operands of dX = dY W."""

    dy: CastConfig = HIGH
    w: CastConfig = HIGH


class WgradConfig(Group):
    """Operands of dW = dY^T X."""

    dy: CastConfig = HIGH
    x: CastConfig = HIGH


class LossScalingConfig(Group):
    """Dynamic loss scaling (Micikevicius et al., arXiv 1710.03740), Megatron's and torch's rules as one."""

    init_scale: PositiveFloat = Field(65536.0, description="by which the first step's loss is multiplied")
    growth_factor: float = Field(2.0, gt=1, description="times the scale after growth_interval steps without overflow")
    backoff_factor: float = Field(0.5, gt=0, lt=1, description="times the scale after an overflow")
    growth_interval: PositiveInt = Field(2000, description="good steps in a row before the scale grows")
    hysteresis: PositiveInt = Field(1, description="overflows before the scale shrinks; restored when it grows")
    min_scale: PositiveFloat | None = Field(1.0, description="floor; null: none")
    detect: Literal["gradients", "operands"] = Field(
        "gradients", description="operands: also look for Inf and NaN in what is cast, before saturation hides them"
    )

    @property
    def floor(self) -> float:
        """The least scale: `min_scale`, or the least normal fp32 number, by which can still be divided."""
        return self.min_scale or 2.0**-126

    @model_validator(mode="after")
    def _begins_above_its_floor(self) -> Self:
        if self.min_scale is not None and self.init_scale < self.min_scale:
            raise ValueError(f"init_scale {self.init_scale:g} is below min_scale {self.min_scale:g}")
        return self


class OptimizerHints(Group):
    """Optimizer settings that belong to the recipe, so that a comparison of recipes stays controlled; null: keep."""

    eps: PositiveFloat | None = Field(None, description="in the place of optim.eps; null: optim's")
    beta2: float | None = Field(None, gt=0, lt=1, description="in the place of optim.beta2; null: optim's")


class PhaseConfig(Group):
    """Another set of slots for a part of the run, e.g. high precision for the last tenth."""

    start: Fraction = Field(description="first step, as a fraction of trainer.max_steps")
    end: Fraction = Field(1.0, description="step after the last, as a fraction of trainer.max_steps")
    fprop: FpropConfig = FpropConfig()
    dgrad: DgradConfig = DgradConfig()
    wgrad: WgradConfig = WgradConfig()

    @model_validator(mode="after")
    def _forward_in_time(self) -> Self:
        if self.start >= self.end:
            raise ValueError(f"a phase must end after it starts; start is {self.start}, end {self.end}")
        return self


class PrecisionConfig(Group):
    """A precision recipe. The default of everything is high precision, so `name` and `compute_dtype` make a recipe."""

    name: str = Field(description="the file it was composed from, or your own name")
    compute_dtype: Dtype = Field(description="dtype of activations, and of operands that are not quantised")
    reference: str = Field("", description="the paper or code the recipe follows")
    hardware: str = Field("", description="what runs it natively")
    master_dtype: Literal["fp32", "bf16"] = Field("fp32", description="dtype of the weights that are updated")
    reduce_dtype: Literal["fp32", "bf16"] = Field("fp32", description="dtype gradients are summed in over ranks")
    main_grad_dtype: Literal["fp32", "bf16"] = Field("fp32", description="dtype gradients accumulate in")
    wgrad_dtype: Literal["fp32"] | None = Field(
        None,
        description="dtype that linear layers' weight gradients are rounded to before they accumulate; null: "
        "compute_dtype, fp32: not at all",
    )
    backend: Literal["auto", "native", "emulated"] = Field(
        "auto", description="native: Transformer Engine, or refuse; auto: native where it is exactly the recipe"
    )
    casts: Literal["auto", "compiled", "eager"] = Field(
        "auto", description="how emulated casts run, to the same bits; auto: compiled where there is a compiler"
    )
    parameter_gather: Literal["high", "quantised"] = Field(
        "high",
        description="what sharded weights are gathered as: in compute_dtype, or, to the same bits, as FP8 codes",
    )
    keep_weight_casts: bool | None = Field(
        None,
        description="keep casts of weights within a step, to the same bits; null: where several forward passes read "
        "them, and ZeRO does not shard the weights",
    )
    fprop: FpropConfig = FpropConfig()
    dgrad: DgradConfig = DgradConfig()
    wgrad: WgradConfig = WgradConfig()
    modules: ModuleRules = ModuleRules()
    allow: Annotated[tuple[str, ...], Field(strict=False)] | None = Field(
        None,
        description="lint rules that this recipe breaks on purpose, by name (listed in docs/reference/precision.md)",
    )
    loss_scaling: LossScalingConfig | None = Field(None, description="dynamic loss scaling; null: none")
    optimizer: OptimizerHints = OptimizerHints()
    phases: Annotated[tuple[PhaseConfig, ...], Field(strict=False)] = Field(
        (), description="other slots for parts of the run"
    )

    @model_validator(mode="after")
    def _phases_apart(self) -> Self:
        ordered = sorted(self.phases, key=lambda phase: phase.start)
        for before, after in pairwise(ordered):
            if after.start < before.end:
                raise ValueError(f"phases overlap: one ends at {before.end}, the next starts at {after.start}")
        return self

    def cast_sets(self) -> "dict[str, dict[str, CastConfig]]":
        """Return every set of six casts, by the key it stands under: "" (the recipe's own), "modules.casts.0", ..,

        "phases.0", .. A phase replaces all of the others for its steps.
        """
        own = slots_of(self)
        rules = {f"modules.casts.{n}": own | rule.given() for n, rule in enumerate(self.modules.casts or ())}
        return {"": own, **rules, **{f"phases.{n}": slots_of(phase) for n, phase in enumerate(self.phases)}}

    def casts_under(self, rule: int | None) -> "dict[str, CastConfig]":
        """Return the six casts of layers that rule number `rule` of `modules.casts` fits (None: none does)."""
        own = slots_of(self)
        return own if rule is None or self.modules.casts is None else own | self.modules.casts[rule].given()

    @property
    def quantises(self) -> bool:
        """Whether any slot, in any module or phase, leaves compute_dtype."""
        return any(cast.quantises for casts in self.cast_sets().values() for cast in casts.values())

    @property
    def gather_dtype(self) -> Dtype:
        """What FSDP2 gathers blocks and head in: autograd gives a gradient the dtype of what was gathered."""
        return self.compute_dtype if self.wgrad_dtype is None else self.master_dtype

    @property
    def updates_every_micro_batch(self) -> bool:
        """Whether some delayed scale, in any module or phase, moves within an optimizer step."""
        delayed = [cast.delayed for casts in self.cast_sets().values() for cast in casts.values()]
        return any(each is not None and each.update == "micro_batch" for each in delayed)

    @property
    def recipe_hash(self) -> str:
        """The recipe's identity: 12 hex digits of BLAKE2b over every key that changes numbers, and over `allow`.

        Keys that came later are left out while they are null, and renamed ones count by their first name, so that
        recipes keep their hash.
        """
        content = self.model_dump(mode="json", exclude=NOT_IDENTITY)
        for group, key in LATER:
            values = content[group] if group else content
            if values[key] is None:
                del values[key]
        modules = content["modules"].items()
        content["modules"] = {first_name(f"precision.modules.{key}").rpartition(".")[2]: each for key, each in modules}
        if self.modules.casts is not None:  # by what they come to, however a rule says it
            rules = [rule.model_dump(mode="json", include=SELECTS) for rule in self.modules.casts]
            for number, rule in enumerate(rules):
                casts = self.casts_under(number)
                rule["slots"] = {slot: cast.model_dump(mode="json") for slot, cast in casts.items()}
            content["modules"]["casts"] = rules
        text = json.dumps(content, sort_keys=True, separators=(",", ":"))
        return blake2b(text.encode(), digest_size=6).hexdigest()

    def at(self, step: int, max_steps: int) -> "PrecisionConfig":
        """Return the recipe in force at `step` (from 0) of `max_steps`: itself, or with a phase's slots in all layers.

        Layers that stay high by `modules` do so in phases, too.
        """
        for phase in self.phases:
            if phase.start * max_steps <= step < phase.end * max_steps:
                slots = {gemm: getattr(phase, gemm) for gemm in ("fprop", "dgrad", "wgrad")}
                return self.model_copy(update={**slots, "modules": self.modules.model_copy(update={"casts": None})})
        return self


def slots_of(part: PrecisionConfig | PhaseConfig) -> dict[str, CastConfig]:
    """Return the six casts of a recipe or of one phase, by dotted slot name, in the order of `SLOTS`."""
    return {f"{gemm}.{operand}": getattr(getattr(part, gemm), operand) for gemm, operand in SLOTS}
