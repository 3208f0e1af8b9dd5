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

from lightning_llm.schema.base import Fraction, Group, NonNegativeInt, PositiveFloat, PositiveInt

Dtype = Literal["fp32", "bf16", "fp16"]
Format = Literal["high", "e4m3", "e5m2", "e2m1"]
Block = Literal["tensor", "1x128", "128x128", "1x32", "32x32", "1x16", "16x16"]
Scale = Literal["fp32", "power_of_two", "e8m0_ceil", "e8m0_floor", "two_level_e4m3", "delayed", "quest"]
Rounding = Literal["even", "half_away", "half_to_zero", "stochastic", "stochastic_compare"]
Sign = Annotated[int, Field(ge=-1, le=1)]

STOCHASTIC = ("stochastic", "stochastic_compare")
SLOTS = (("fprop", "x"), ("fprop", "w"), ("dgrad", "dy"), ("dgrad", "w"), ("wgrad", "dy"), ("wgrad", "x"))


class HadamardConfig(Group):
    """The rotation of groups of `size` along the contraction axis: x -> x diag(signs) H / sqrt(size) (H: Sylvester)."""

    size: int = Field(ge=2, le=1024, description="a power of two that divides the contraction axis")
    signs: Literal["none", "fixed", "random"] = Field("none", description="random: keyed, fresh per call and GEMM")
    vector: Annotated[tuple[Sign, ...], Field(strict=False)] | None = Field(None, description="signs=fixed: +1 and -1")
    round_to: Literal["fp32", "bf16"] = Field("fp32", description="dtype the rotated tensor is kept in")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.size & (self.size - 1):
            raise ValueError(f"size {self.size} is not a power of two; allowed are 2, 4, ..., 1024")
        if (self.signs == "fixed") != (self.vector is not None):
            raise ValueError("`vector` goes with signs: fixed, and only with it")
        if self.vector is not None and (len(self.vector) != self.size or 0 in self.vector):
            raise ValueError(f"vector needs {self.size} entries, each 1 or -1; it has {len(self.vector)}")
        return self


class DelayedConfig(Group):
    """Delayed scaling's history of amax (Transformer Engine `DelayedScaling`)."""

    history_length: PositiveInt = Field(1024, description="updates that an amax stays for")
    algorithm: Literal["max", "most_recent"] = "max"
    margin: NonNegativeInt = Field(0, description="the scale is divided by 2^margin")
    update: Literal["step", "micro_batch"] = Field(
        "step",
        description="when scales move: after an optimizer step, or after one micro-batch of every data-parallel rank",
        exclude_if=lambda update: update == "step",  # recipes from before the key keep their hash
    )


class CastConfig(Group):
    """How one operand of one GEMM is quantised. Blocks lie along the contraction axis (1x32: 32 elements of it)."""

    format: Format = Field("high", description="high: stays in compute_dtype")
    block: Block = Field("tensor", description="who shares a scale; last number: along the contraction axis")
    scale: Scale = Field("fp32", description="kind of the scale, see docs/precision.md")
    rounding: Rounding = "even"
    noise_bits: Literal[8, 20] = Field(20, description="random bits per element of stochastic rounding")
    prescale: PositiveFloat = Field(1.0, le=1, description="multiplies before rounding, divided out after the GEMM")
    hadamard: HadamardConfig | None = Field(None, description="with format high: rotated, and not rounded")
    source: Literal["high_precision", "quantised"] = Field(
        "high_precision", description="quantised: re-quantise (or, with format high, use) what fprop's slot produced"
    )
    clip_gradient: bool = Field(False, description="fprop only: no gradient through elements that were clipped")
    amax_scope: Literal["logical", "shard"] = Field("logical", description="tensor-level amax over all shards, or one")
    delayed: DelayedConfig | None = None

    @property
    def quantises(self) -> bool:
        """Whether the operand leaves compute_dtype at all."""
        return self.format != "high"

    @property
    def stochastic(self) -> bool:
        """Whether rounding draws random bits."""
        return self.rounding in STOCHASTIC

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.format == "high":
            plain = CastConfig.model_construct(source=self.source, hadamard=self.hadamard)
            if any(getattr(self, key) != getattr(plain, key) for key in type(self).model_fields):
                raise ValueError("format: high takes no block, scale, rounding or prescale; name a format or drop them")
        if (self.scale == "delayed") != (self.delayed is not None):
            raise ValueError("`delayed` ({history_length, ...}) goes with scale: delayed, and only with it")
        self._check_blocks()
        if self.prescale != 1 and self.scale not in ("e8m0_floor", "e8m0_ceil"):
            raise ValueError(f"prescale goes with an e8m0 scale, not with {self.scale}")
        if self.clip_gradient and self.scale != "quest":
            raise ValueError("clip_gradient goes with scale: quest, the only scale that clips on purpose")
        return self

    def _check_blocks(self) -> None:
        """Raise ValueError where a scale kind is not defined for the block or the format."""
        tensor, sixteen = self.block == "tensor", self.block in ("1x16", "16x16")
        if self.scale == "delayed" and not tensor:
            raise ValueError(f"scale: delayed is one scale per tensor; block is {self.block}")
        if self.scale == "two_level_e4m3" and not (sixteen and self.format == "e2m1"):
            raise ValueError("scale: two_level_e4m3 is NVFP4's: format e2m1 with block 1x16 or 16x16")
        if self.scale.startswith("e8m0") and tensor:
            raise ValueError("an e8m0 scale belongs to a block (1x32 in the OCP MX formats), not to a tensor")
        if self.scale == "quest" and not (self.block == "1x32" and self.format == "e2m1"):
            raise ValueError("scale: quest is Quartet's: format e2m1 with block 1x32")


HIGH = CastConfig()


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


Globs = Annotated[tuple[str, ...], Field(strict=False)]


class ModuleRules(Group):
    """Which linear layers are quantised. Norms, embeddings, attention and the head are never."""

    first_blocks_high: NonNegativeInt = Field(0, description="blocks at the start that stay high, by global index")
    last_blocks_high: NonNegativeInt = Field(0, description="blocks at the end that stay high, by global index")
    include: Globs = Field(("*",), description="globs over module names; a layer needs one that matches")
    exclude: Globs = Field((), description="globs over module names; one that matches keeps the layer high")


class LossScalingConfig(Group):
    """Dynamic loss scaling (Micikevicius et al., arXiv 1710.03740), Megatron's and torch's rules as one."""

    init_scale: PositiveFloat = 65536.0
    growth_factor: float = Field(2.0, gt=1)
    backoff_factor: float = Field(0.5, gt=0, lt=1)
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

    eps: PositiveFloat | None = None
    beta2: float | None = Field(None, gt=0, lt=1)


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

    name: str
    compute_dtype: Dtype = Field(description="dtype of activations, and of operands that are not quantised")
    reference: str = Field("", description="the paper or code the recipe follows")
    hardware: str = Field("", description="what runs it natively")
    master_dtype: Literal["fp32", "bf16"] = "fp32"
    reduce_dtype: Literal["fp32", "bf16"] = Field("fp32", description="dtype gradients are summed in over ranks")
    main_grad_dtype: Literal["fp32", "bf16"] = Field("fp32", description="dtype gradients accumulate in")
    backend: Literal["auto", "native", "emulated"] = "auto"
    casts: Literal["auto", "compiled", "eager"] = Field(
        "auto", description="how emulated casts run, to the same bits; auto: compiled where there is a compiler"
    )
    fprop: FpropConfig = FpropConfig()
    dgrad: DgradConfig = DgradConfig()
    wgrad: WgradConfig = WgradConfig()
    modules: ModuleRules = ModuleRules()
    loss_scaling: LossScalingConfig | None = None
    optimizer: OptimizerHints = OptimizerHints()
    phases: Annotated[tuple[PhaseConfig, ...], Field(strict=False)] = ()

    @model_validator(mode="after")
    def _phases_apart(self) -> Self:
        ordered = sorted(self.phases, key=lambda phase: phase.start)
        for before, after in pairwise(ordered):
            if after.start < before.end:
                raise ValueError(f"phases overlap: one ends at {before.end}, the next starts at {after.start}")
        return self

    @property
    def quantises(self) -> bool:
        """Whether any slot, in any phase, leaves compute_dtype."""
        parts: tuple[PrecisionConfig | PhaseConfig, ...] = (self, *self.phases)
        return any(cast.quantises for part in parts for cast in slots_of(part).values())

    @property
    def updates_every_micro_batch(self) -> bool:
        """Whether some delayed scale, in any phase, moves within an optimizer step."""
        parts: tuple[PrecisionConfig | PhaseConfig, ...] = (self, *self.phases)
        delayed = [cast.delayed for part in parts for cast in slots_of(part).values()]
        return any(each is not None and each.update == "micro_batch" for each in delayed)

    @property
    def recipe_hash(self) -> str:
        """The recipe's identity: 12 hex digits of BLAKE2b over every key that changes numbers."""
        content = self.model_dump(mode="json", exclude={"name", "reference", "hardware", "backend", "casts"})
        text = json.dumps(content, sort_keys=True, separators=(",", ":"))
        return blake2b(text.encode(), digest_size=6).hexdigest()

    def at(self, step: int, max_steps: int) -> "PrecisionConfig":
        """Return the recipe in force at `step` (from 0) of `max_steps`: itself, or with a phase's slots."""
        for phase in self.phases:
            if phase.start * max_steps <= step < phase.end * max_steps:
                return self.model_copy(update={gemm: getattr(phase, gemm) for gemm in ("fprop", "dgrad", "wgrad")})
        return self


def slots_of(part: PrecisionConfig | PhaseConfig) -> dict[str, CastConfig]:
    """Return the six casts of a recipe or of one phase, by dotted slot name, in the order of `SLOTS`."""
    return {f"{gemm}.{operand}": getattr(getattr(part, gemm), operand) for gemm, operand in SLOTS}
