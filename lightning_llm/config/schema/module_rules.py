"""`precision.modules`: which linear layers a recipe quantises, and which of them have casts of their own."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from lightning_llm.config.schema.base import Fraction, Group, NonNegativeInt, PositiveInt
from lightning_llm.config.schema.casts import HIGH, SLOTS, CastConfig

Globs = Annotated[tuple[str, ...], Field(strict=False)]
SELECTS = {"names", "first_blocks", "first_fraction", "last_blocks", "last_fraction"}
"""Keys of a `CastRule` that say which layers it is for."""


class FpropSlots(Group):
    """Slots of fprop that a rule sets; null: the recipe's own."""

    x: CastConfig | None = None
    w: CastConfig | None = None


class DgradSlots(Group):
    """Slots of dgrad that a rule sets; null: the recipe's own."""

    dy: CastConfig | None = None
    w: CastConfig | None = None


class WgradSlots(Group):
    """Slots of wgrad that a rule sets; null: the recipe's own."""

    dy: CastConfig | None = None
    x: CastConfig | None = None


class CastRule(Group):
    """Casts of their own for the linear layers that `names` matches, in the blocks that are named (none: in all).

    `recipe`, `high` or slots say which casts; slots beside a `recipe` come before that recipe's.
    """

    names: Globs = Field(("*",), min_length=1, description="globs over module names; a layer needs one that matches")
    first_blocks: PositiveInt | None = Field(None, description="only in so many blocks at the start, or `last_...`")
    first_fraction: Fraction | None = Field(None, description="the same as a fraction of the model's blocks")
    last_blocks: PositiveInt | None = Field(None, description="only in so many blocks at the end, or `first_...`")
    last_fraction: Fraction | None = Field(None, description="the same as a fraction of the model's blocks")
    recipe: str | None = Field(None, description="take the six slots of this precision recipe, and nothing else of it")
    high: Literal[True] | None = Field(None, description="stay in compute_dtype")
    fprop: FpropSlots | None = None
    dgrad: DgradSlots | None = None
    wgrad: WgradSlots | None = None

    def given(self) -> dict[str, CastConfig]:
        """Return the casts that the rule sets, by dotted slot name; the others are the recipe's own."""
        if self.high:
            return {f"{gemm}.{operand}": HIGH for gemm, operand in SLOTS}
        parts = {gemm: getattr(self, gemm) for gemm, _ in SLOTS if getattr(self, gemm) is not None}
        named = {f"{gemm}.{operand}": getattr(parts[gemm], operand) for gemm, operand in SLOTS if gemm in parts}
        return {slot: cast for slot, cast in named.items() if cast is not None}

    @model_validator(mode="after")
    def _says_which_casts(self) -> Self:
        _one_of_each_end(self, "first_blocks", "last_blocks", "first_fraction", "last_fraction")
        given = self.given()
        if self.high and (self.recipe is not None or self.fprop or self.dgrad or self.wgrad):
            raise ValueError("high: true leaves nothing to cast; drop it, or `recipe` and the slots")
        if self.recipe is not None and len(given) < len(SLOTS):
            raise ValueError(
                f"recipe: {self.recipe} is read when a config is composed (--config-dir, precision=...), and was not "
                "here; write its six slots"
            )
        if not given:
            raise ValueError("says no casts; give `recipe` (another precision recipe), `high: true`, or slots")
        return self


def _one_of_each_end(group: Group, *keys: str) -> None:
    """Raise ValueError where an end of the model is given as a count and as a fraction; `keys`: counts, fractions."""
    for count, fraction in zip(keys[:2], keys[2:], strict=True):
        if getattr(group, count) and getattr(group, fraction) is not None:
            unset = "0" if "high" in count else "null"
            raise ValueError(
                f"has {count}={getattr(group, count)} and {fraction}={getattr(group, fraction):g}; set {count} to "
                f"{unset}, or {fraction} to null"
            )


class ModuleRules(Group):
    """Which linear layers are quantised, and how. Norms, embeddings, attention and the head are never.

    A fraction of the blocks is rounded to the nearest count of them, halves up.
    """

    first_blocks_high_precision: NonNegativeInt = Field(
        0, description="blocks at the start that stay high, by global index"
    )
    last_blocks_high_precision: NonNegativeInt = Field(
        0, description="blocks at the end that stay high, by global index"
    )
    first_fraction_high_precision: Fraction | None = Field(
        None, description="instead of a count: a fraction of the blocks"
    )
    last_fraction_high_precision: Fraction | None = Field(
        None, description="instead of a count: a fraction of the blocks"
    )
    include: Globs = Field(("*",), description="globs over module names; a layer needs one that matches")
    exclude: Globs = Field((), description="globs over module names; one that matches keeps the layer high")
    casts: Annotated[tuple[CastRule, ...], Field(strict=False)] | None = Field(
        None, description="casts of their own for some layers of those that do not stay high; the first rule that fits"
    )

    @model_validator(mode="after")
    def _one_way_for_each_end(self) -> Self:
        _one_of_each_end(
            self,
            "first_blocks_high_precision",
            "last_blocks_high_precision",
            "first_fraction_high_precision",
            "last_fraction_high_precision",
        )
        return self
