"""`precision.modules` and `precision.phases`: the layers that a recipe quantizes, and changes during the run.

A rule gives some layers casts of their own; a phase gives a part of the run other casts or other layers.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from lightning_llm.config.schema.base import Fraction, Group, NonNegativeInt, PositiveInt
from lightning_llm.config.schema.casts import SLOTS, UNQUANTIZED, CastConfig

Globs = Annotated[tuple[str, ...], Field(strict=False)]
SELECTS = {"names", "first_blocks", "first_fraction", "last_blocks", "last_fraction"}
"""Keys of a `CastRule` that select layers."""


class FpropSlots(Group):
    """Casts that a rule or phase sets for the operands of the forward GEMM (fprop); null: the recipe's own."""

    x: CastConfig | None = None
    w: CastConfig | None = None


class DgradSlots(Group):
    """Casts that a rule or phase sets for the operands of the GEMM of input gradients (dgrad); null: the recipe's."""

    dy: CastConfig | None = None
    w: CastConfig | None = None


class WgradSlots(Group):
    """Casts that a rule or phase sets for the operands of the GEMM of weight gradients (wgrad); null: the recipe's."""

    dy: CastConfig | None = None
    x: CastConfig | None = None


def given_slots(fprop: FpropSlots | None, dgrad: DgradSlots | None, wgrad: WgradSlots | None) -> dict[str, CastConfig]:
    """Return {dotted slot: cast}, e.g. {"fprop.x": cast}, of the slots that are set in these three GEMMs."""
    parts = {"fprop": fprop, "dgrad": dgrad, "wgrad": wgrad}
    named = {f"{gemm}.{operand}": getattr(parts[gemm], operand, None) for gemm, operand in SLOTS}
    return {slot: cast for slot, cast in named.items() if cast is not None}


class CastRule(Group):
    """Separate casts for the linear layers that match `names`, in the selected blocks (default: all blocks).

    Casts come from `recipe`, `high` or slots; slots override those of `recipe`.
    """

    names: Globs = Field(("*",), min_length=1, description="globs of module names; one of them must match")
    first_blocks: PositiveInt | None = Field(None, description="only in this many first blocks (or in `last_...`)")
    first_fraction: Fraction | None = Field(None, description="the same as a fraction of the model's blocks")
    last_blocks: PositiveInt | None = Field(None, description="only in this many last blocks (or in `first_...`)")
    last_fraction: Fraction | None = Field(None, description="the same as a fraction of the model's blocks")
    recipe: str | None = Field(
        None, description="use the six slots of this precision recipe, and none of its other keys"
    )
    high: Literal[True] | None = Field(None, description="do not quantize")
    fprop: FpropSlots | None = None
    dgrad: DgradSlots | None = None
    wgrad: WgradSlots | None = None

    def given(self) -> dict[str, CastConfig]:
        """Return {dotted slot: cast} of the slots that the rule sets; other slots keep the recipe's casts."""
        if self.high:
            return {f"{gemm}.{operand}": UNQUANTIZED for gemm, operand in SLOTS}
        return given_slots(self.fprop, self.dgrad, self.wgrad)

    def with_slots(self, slots: Mapping[str, CastConfig]) -> "CastRule":
        """Return a copy of the rule in which `slots`, {dotted slot: cast}, replace its own."""
        its = self.given() | dict(slots)
        fprop = FpropSlots(x=its.get("fprop.x"), w=its.get("fprop.w"))
        dgrad = DgradSlots(dy=its.get("dgrad.dy"), w=its.get("dgrad.w"))
        wgrad = WgradSlots(dy=its.get("wgrad.dy"), x=its.get("wgrad.x"))
        return self.model_copy(update={"high": None, "fprop": fprop, "dgrad": dgrad, "wgrad": wgrad})

    @model_validator(mode="after")
    def _says_which_casts(self) -> Self:
        _one_of_each_end(self, "first_blocks", "last_blocks", "first_fraction", "last_fraction")
        given = self.given()
        if self.high and (self.recipe is not None or self.fprop or self.dgrad or self.wgrad):
            raise ValueError("`high: true` cannot be combined with `recipe` or slots. Remove one of them")
        if self.recipe is not None and len(given) < len(SLOTS):
            raise ValueError(
                f"recipe: {self.recipe} is only resolved when a config is composed (--config-dir, precision=...). "
                "Write its six slots"
            )
        if not given:
            raise ValueError("has no casts. Give `recipe` (another precision recipe), `high: true`, or slots")
        return self


def _one_of_each_end(group: Group, *keys: str) -> None:
    """Raise ValueError if an end of the model has both a count and a fraction; `keys`: counts, then fractions."""
    for count, fraction in zip(keys[:2], keys[2:], strict=True):
        if getattr(group, count) and getattr(group, fraction) is not None:
            unset = "0" if "high" in count else "null"
            raise ValueError(
                f"has {count}={getattr(group, count)} and {fraction}={getattr(group, fraction):g}; set {count} to "
                f"{unset}, or {fraction} to null"
            )


class ModuleRules(Group):
    """Selection of the linear layers to quantize. Norms, embeddings, attention and the head are never quantized.

    A fraction of the blocks is rounded to the nearest number of blocks, halves up.
    """

    first_blocks_high_precision: NonNegativeInt = Field(0, description="first blocks that are not quantized")
    last_blocks_high_precision: NonNegativeInt = Field(0, description="last blocks that are not quantized")
    first_fraction_high_precision: Fraction | None = Field(
        None, description="instead of a count: a fraction of the blocks"
    )
    last_fraction_high_precision: Fraction | None = Field(
        None, description="instead of a count: a fraction of the blocks"
    )
    include: Globs = Field(("*",), description="globs of module names; layers that match none are not quantized")
    exclude: Globs = Field((), description="globs of module names; layers that match one are not quantized")
    casts: Annotated[tuple[CastRule, ...], Field(strict=False)] | None = Field(
        None, description="separate casts for some of the quantized layers; the first matching rule applies"
    )

    @model_validator(mode="after")
    def _one_way_for_each_end(self) -> Self:
        ends = [f"{end}_{unit}_high_precision" for unit in ("blocks", "fraction") for end in ("first", "last")]
        _one_of_each_end(self, *ends)
        return self


class PhaseConfig(Group):
    """Other slots for a part of the run, e.g. no quantization in the last tenth.

    Without `inherit`, slots that are not set are not quantized, and all layers that `modules` quantizes have the
    phase's slots. With `inherit`, slots and keys of `modules` that are not set are the recipe's, and a slot that is set
    replaces the recipe's in every layer, also in those of a rule of the recipe's `modules.casts`.
    """

    start: Fraction = Field(description="first step, as a fraction of trainer.max_steps")
    end: Fraction = Field(1.0, description="step after the last, as a fraction of trainer.max_steps")
    inherit: bool = Field(
        False,
        description="keep the recipe's slots and `modules` where the phase sets none; false: slots that are not set "
        "are not quantized",
        exclude_if=lambda inherit: not inherit,  # recipes from before the key keep their hash
    )
    fprop: FpropSlots = FpropSlots()
    dgrad: DgradSlots = DgradSlots()
    wgrad: WgradSlots = WgradSlots()
    modules: ModuleRules | None = Field(
        None,
        description="other layers to quantize; null: the recipe's `modules`, without its `casts` if inherit is false",
        exclude_if=lambda modules: modules is None,
    )

    @model_validator(mode="before")
    @classmethod
    def _unquantized_where_not_set(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        slots = {gemm: values.get(gemm) or {} for gemm, _ in SLOTS}
        slots = {gemm: dict(its) if isinstance(its, Mapping | Group) else its for gemm, its in slots.items()}
        for gemm, operand in () if values.get("inherit") else SLOTS:
            if isinstance(slots[gemm], dict):
                slots[gemm].setdefault(operand, UNQUANTIZED)
        return {**values, **slots}

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.start >= self.end:
            raise ValueError(f"start={self.start}: must be below end={self.end}")
        missing = [f"{gemm}.{operand}" for gemm, operand in SLOTS if getattr(getattr(self, gemm), operand) is None]
        if missing and not self.inherit:
            raise ValueError(f"{', '.join(missing)}: null keeps the recipe's cast. Set inherit: true, or give a cast")
        return self

    def given(self) -> dict[str, CastConfig]:
        """Return {dotted slot: cast} of the slots that the phase sets."""
        return given_slots(self.fprop, self.dgrad, self.wgrad)
