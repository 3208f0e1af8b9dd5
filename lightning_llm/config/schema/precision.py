"""`precision`: a recipe as data: six operand slots, the modules they apply to, and all other dtypes.

Every linear layer runs three GEMMs. Each GEMM has two operands, each with a separate cast, blocked along the axis that
the GEMM sums over (X is [M, K], W is [N, K], dY is [M, N]):

    fprop  Y  = X  W^T    sums over K    slots fprop.x,  fprop.w
    dgrad  dX = dY W      sums over N    slots dgrad.dy, dgrad.w
    wgrad  dW = dY^T X    sums over M    slots wgrad.dy, wgrad.x

Slots that are not set stay in `compute_dtype`. A published recipe should need only a YAML file and no Python.
"""

import json
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from itertools import pairwise
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from lightning_llm.base.registry import NameIn
from lightning_llm.config.schema.aliases import first_name
from lightning_llm.config.schema.base import Group, PositiveFloat, PositiveInt
from lightning_llm.config.schema.cast_kinds import SCALES
from lightning_llm.config.schema.casts import (
    SLOTS,
    UNQUANTIZED,
    Block,
    CastConfig,
    DelayedConfig,
    Format,
    HadamardConfig,
    Rounding,
    Scale,
    block_size,
)
from lightning_llm.config.schema.module_rules import (
    SELECTS,
    CastRule,
    ModuleRules,
    PhaseConfig,
)

__all__ = [
    "SELECTS",
    "SLOTS",
    "UNQUANTIZED",
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
    "UpdateConfig",
    "WgradConfig",
    "block_size",
    "slots_of",
]

Dtype = Literal["fp32", "bf16", "fp16"]
UNQUANTIZED_RULE = -1
"""Stands for the number of a rule in layers that are not quantized now, but in another phase."""
NOT_IDENTITY = {"name", "reference", "hardware", "backend", "casts", "parameter_gather", "keep_weight_casts"}
"""Keys that are not in a recipe's hash: names, and choices of how the same numbers are computed."""
LATER = (
    ("", "allow"),
    ("", "wgrad_dtype"),
    ("modules", "first_fraction_high_precision"),
    ("modules", "last_fraction_high_precision"),
    ("modules", "casts"),
)
"""(group, key) of keys added later: their null is not in a recipe's hash."""


class FpropConfig(Group):
    """Casts of the operands of the forward GEMM, Y = X W^T."""

    x: CastConfig = UNQUANTIZED
    w: CastConfig = UNQUANTIZED


class DgradConfig(Group):
    """Casts of the operands of the GEMM of input gradients, dX = dY W."""

    dy: CastConfig = UNQUANTIZED
    w: CastConfig = UNQUANTIZED


class WgradConfig(Group):
    """Casts of the operands of the GEMM of weight gradients, dW = dY^T X."""

    dy: CastConfig = UNQUANTIZED
    x: CastConfig = UNQUANTIZED


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


class GradientCodesConfig(Group):
    """Codes in which data-parallel ranks send gradients to be summed."""

    format: Format = Field(description="format of the codes: one of 4 or 8 bits")
    block: Block = Field("1x128", description="consecutive elements that share a scale, 1xN")
    scale: Annotated[Scale, NameIn(SCALES)] = Field(
        "power_of_two", description="kind of the scale, one that follows from the block alone"
    )

    @property
    def cast(self) -> CastConfig:
        """These codes as a cast."""
        return CastConfig(format=self.format, block=self.block, scale=self.scale)

    @field_validator("scale")
    @classmethod
    def _is_of_one_block(cls, scale: str) -> str:
        kind = SCALES.instance(scale)
        if not (kind.from_block_amax or kind.shares_exponent):
            raise ValueError("must follow from the block alone: fp32, power_of_two, e8m0_ceil, e8m0_floor or e8m0_even")
        return scale

    @model_validator(mode="after")
    def _is_a_cast(self) -> Self:
        if self.format == "high":
            raise ValueError("format: high sends no codes. Set a format such as e4m3, or gradient_reduction to null")
        _ = self.cast
        return self


class UpdateConfig(Group):
    """`precision.update`: rounding of updated master weights."""

    rounding: Literal["even", "stochastic", "kahan"] = Field(
        "even",
        description="rounding of updated bf16 master weights; even: to nearest, so changes below 1/512 of a weight are "
        "lost; stochastic: up or down at random, exact in the mean; kahan: the error is kept in bf16 and added to the "
        "next change",
    )


class PrecisionConfig(Group):
    """`precision`: a precision recipe. By default nothing is quantized; `name` and `compute_dtype` are required."""

    name: str = Field(description="name of its file, or your own")
    compute_dtype: Dtype = Field(description="dtype of activations and of operands that are not quantized")
    reference: str = Field("", description="the paper or code the recipe follows")
    hardware: str = Field("", description="hardware that runs it natively")
    master_dtype: Literal["fp32", "bf16"] = Field("fp32", description="dtype of the master weights")
    reduce_dtype: Literal["fp32", "bf16"] = Field("fp32", description="dtype of gradient sums over ranks")
    main_grad_dtype: Literal["fp32", "bf16"] = Field("fp32", description="dtype of gradient accumulation")
    wgrad_dtype: Literal["fp32"] | None = Field(
        None,
        description="dtype that linear layers' weight gradients are rounded to before accumulation; null: "
        "compute_dtype; fp32: no rounding",
    )
    backend: Literal["auto", "native", "emulated"] = Field(
        "auto", description="native: use Transformer Engine or refuse; auto: native if it computes exactly the recipe"
    )
    casts: Literal["auto", "compiled", "eager"] = Field(
        "auto", description="execution of emulated casts, with the same bits; auto: compiled if there is a compiler"
    )
    parameter_gather: Literal["high", "quantised"] = Field(
        "high",
        description="format of gathered shards: high: compute_dtype; quantised: FP8 codes, with the same bits",
    )
    gradient_reduction: GradientCodesConfig | None = Field(
        None,
        description="codes in which ranks send gradients to be summed; null: sent in reduce_dtype",
        exclude_if=lambda codes: codes is None,  # recipes from before the key keep their hash
    )
    keep_weight_casts: bool | None = Field(
        None,
        description="keep weight casts within a step, with the same bits; null: if several forward passes use "
        "them and ZeRO does not shard the weights",
    )
    fprop: FpropConfig = FpropConfig()
    dgrad: DgradConfig = DgradConfig()
    wgrad: WgradConfig = WgradConfig()
    modules: ModuleRules = ModuleRules()
    allow: Annotated[tuple[str, ...], Field(strict=False)] | None = Field(
        None, description="names of lint rules that this recipe violates on purpose (see docs/reference/precision.md)"
    )
    loss_scaling: LossScalingConfig | None = Field(None, description="dynamic loss scaling; null: none")
    optimizer: OptimizerHints = OptimizerHints()
    update: UpdateConfig = Field(
        UpdateConfig(),
        description="rounding of master weights",
        exclude_if=lambda update: update == UpdateConfig(),  # recipes from before the key keep their hash
    )
    phases: Annotated[tuple[PhaseConfig, ...], Field(strict=False)] = Field(
        (), description="other slots for parts of the run"
    )

    @model_validator(mode="before")
    @classmethod
    def _phases_inherit_modules(cls, values: Any) -> Any:
        if not isinstance(values, Mapping) or not isinstance(values.get("phases"), Sequence):
            return values
        own = values.get("modules")
        own = own.model_dump() if isinstance(own, ModuleRules) else own or {}

        def completed(phase: Any) -> Any:
            if not (isinstance(phase, Mapping) and phase.get("inherit") and isinstance(own, Mapping)):
                return phase
            its = phase.get("modules")
            return {**phase, "modules": {**own, **its}} if isinstance(its, Mapping) else phase

        return {**values, "phases": [completed(phase) for phase in values["phases"]]}

    @model_validator(mode="before")
    @classmethod
    def _one_master_dtype(cls, values: Any) -> Any:
        """Accept `master_dtype` within `update` too, next to the rounding."""
        if not isinstance(values, Mapping) or not isinstance(values.get("update"), Mapping):
            return values
        update = dict(values["update"])
        if "master_dtype" not in update:
            return values
        dtype = update.pop("master_dtype")
        if values.get("master_dtype", dtype) != dtype:
            raise ValueError(
                f"update.master_dtype={dtype}: master_dtype={values['master_dtype']} is set, too. Give one of them"
            )
        return {**values, "update": update, "master_dtype": dtype}

    @model_validator(mode="after")
    def _rounds_what_is_rounded(self) -> Self:
        if self.update.rounding != "even" and self.master_dtype == "fp32":
            raise ValueError(
                f"update.rounding={self.update.rounding}: needs bf16 master weights; those of fp32 are rounded to "
                "nearest. Set master_dtype, main_grad_dtype and reduce_dtype to bf16, or update.rounding=even"
            )
        return self

    @model_validator(mode="after")
    def _phases_apart(self) -> Self:
        ordered = sorted(self.phases, key=lambda phase: phase.start)
        for before, after in pairwise(ordered):
            if after.start < before.end:
                raise ValueError(f"phases must not overlap: one ends at {before.end}, the next starts at {after.start}")
        return self

    def cast_sets(self) -> "dict[str, dict[str, CastConfig]]":
        """Return {key: six casts}: "" (the recipe's own), "modules.casts.0", .., "phases.0", ..

        The casts of a phase, and those of its rules ("phases.0.modules.casts.0"), replace all others during its steps.
        """
        sets = self._own_cast_sets()
        for number in range(len(self.phases)):
            for key, casts in self.in_phase(number)._own_cast_sets().items():
                sets[f"phases.{number}.{key}" if key else f"phases.{number}"] = casts
        return sets

    def _own_cast_sets(self) -> "dict[str, dict[str, CastConfig]]":
        own = slots_of(self)
        return {"": own} | {f"modules.casts.{n}": own | rule.given() for n, rule in enumerate(self.modules.casts or ())}

    def casts_under(self, rule: int | None) -> "dict[str, CastConfig]":
        """Return the six casts of layers that rule number `rule` of `modules.casts` applies to.

        None: no rule. `UNQUANTIZED_RULE`: layers that are quantized in other phases only.
        """
        if rule == UNQUANTIZED_RULE:
            return {f"{gemm}.{operand}": UNQUANTIZED for gemm, operand in SLOTS}
        own = slots_of(self)
        return own if rule is None or self.modules.casts is None else own | self.modules.casts[rule].given()

    @property
    def quantizes(self) -> bool:
        """Whether any slot in any module or phase is quantized."""
        return any(cast.quantizes for casts in self.cast_sets().values() for cast in casts.values())

    @property
    def gather_dtype(self) -> Dtype:
        """Dtype in which FSDP2 gathers blocks and head, and so of their gradients in autograd."""
        return self.compute_dtype if self.wgrad_dtype is None else self.master_dtype

    @property
    def updates_every_micro_batch(self) -> bool:
        """Whether any delayed scale is updated within an optimizer step."""
        delayed = [cast.delayed for casts in self.cast_sets().values() for cast in casts.values()]
        return any(each is not None and each.update == "micro_batch" for each in delayed)

    @property
    def recipe_hash(self) -> str:
        """The recipe's hash: 12 hex digits of BLAKE2b over all keys that change numbers, and `allow`.

        Keys added later are omitted while null, and renamed keys use their first name, so that hashes stay the same.
        """
        content = self.model_dump(mode="json", exclude=NOT_IDENTITY)
        for group, key in LATER:
            values = content[group] if group else content
            if values[key] is None:
                del values[key]
        modules = content["modules"].items()
        content["modules"] = {first_name(f"precision.modules.{key}").rpartition(".")[2]: each for key, each in modules}
        if self.modules.casts is not None:  # by the resulting casts, not by how a rule gives them
            rules = [rule.model_dump(mode="json", include=SELECTS) for rule in self.modules.casts]
            for number, rule in enumerate(rules):
                casts = self.casts_under(number)
                rule["slots"] = {slot: cast.model_dump(mode="json") for slot, cast in casts.items()}
            content["modules"]["casts"] = rules
        content["phases"] = [self._phase_content(number) for number in range(len(self.phases))]
        text = json.dumps(content, sort_keys=True, separators=(",", ":"))
        return blake2b(text.encode(), digest_size=6).hexdigest()

    def _phase_content(self, number: int) -> dict[str, Any]:
        """Return the hashed content of a phase: its keys, or the hash of the resulting recipe if it inherits."""
        phase = self.phases[number]
        if not phase.inherit and phase.modules is None:
            return phase.model_dump(mode="json")
        return {"start": phase.start, "end": phase.end, "recipe": self.in_phase(number).recipe_hash}

    def at(self, step: int, max_steps: int) -> "PrecisionConfig":
        """Return the recipe in effect at `step` (from 0) of `max_steps`: itself, or `in_phase`."""
        for number, phase in enumerate(self.phases):
            if phase.start * max_steps <= step < phase.end * max_steps:
                return self.in_phase(number)
        return self

    def in_phase(self, number: int) -> "PrecisionConfig":
        """Return the recipe, without phases, that is in effect during phase `number`.

        Layers that the recipe's `modules` excludes are not quantized in a phase either, unless the phase has its own
        `modules` that include them.
        """
        phase = self.phases[number]
        slots, modules = slots_of(self) | phase.given(), phase.modules or self.modules
        if not phase.inherit and phase.modules is None:
            modules = modules.model_copy(update={"casts": None})
        elif phase.inherit and modules.casts and modules.casts == self.modules.casts:
            casts = tuple(rule.with_slots(phase.given()) for rule in modules.casts)
            modules = modules.model_copy(update={"casts": casts})
        return self.model_copy(update={**_by_gemm(slots), "modules": modules, "phases": ()})


def _by_gemm(slots: Mapping[str, CastConfig]) -> dict[str, FpropConfig | DgradConfig | WgradConfig]:
    return {
        "fprop": FpropConfig(x=slots["fprop.x"], w=slots["fprop.w"]),
        "dgrad": DgradConfig(dy=slots["dgrad.dy"], w=slots["dgrad.w"]),
        "wgrad": WgradConfig(dy=slots["wgrad.dy"], x=slots["wgrad.x"]),
    }


def slots_of(recipe: PrecisionConfig) -> dict[str, CastConfig]:
    """Return the recipe's six casts by dotted slot name, in the order of `SLOTS`."""
    return {f"{gemm}.{operand}": getattr(getattr(recipe, gemm), operand) for gemm, operand in SLOTS}
