"""Recipes made of a recipe: one slot alone quantised, or all but one. Pure: needs neither torch nor a model."""

from collections.abc import Mapping
from typing import Any

from lightning_llm.config.schema.precision import HIGH, CastConfig, PrecisionConfig, slots_of
from lightning_llm.precision.recipe.lint import still_broken


def without_rounding(cast: CastConfig) -> CastConfig:
    """Return `cast` with its rounding taken out: a rotation stays, since the other operand's must cancel with it."""
    return CastConfig(source=cast.source, hadamard=cast.hadamard)


def only_slot(recipe: PrecisionConfig, slot: str) -> PrecisionConfig:
    """Return the recipe in which `slot` ("wgrad.dy") alone is quantised, named "<recipe>_only_<slot>"."""
    return _without(recipe, set(slots_of(recipe)) - {slot}, f"{recipe.name}_only_{slot.replace('.', '_')}")


def all_but_slot(recipe: PrecisionConfig, slot: str) -> PrecisionConfig:
    """Return the recipe in which every slot but `slot` is quantised, named "<recipe>_without_<slot>"."""
    return _without(recipe, {slot}, f"{recipe.name}_without_{slot.replace('.', '_')}")


def _without(recipe: PrecisionConfig, slots: set[str], name: str) -> PrecisionConfig:
    """Return the recipe, less its phases, with the rounding taken out of `slots` in every layer."""
    values = recipe.model_dump(exclude={"fprop", "dgrad", "wgrad", "phases"}) | {"name": name}
    values |= _nested(_unrounded(slots_of(recipe), slots))
    for number, rule in enumerate(recipe.modules.casts or ()):
        if not rule.high:
            its = _nested(_unrounded(recipe.casts_under(number), slots))
            values["modules"]["casts"][number].update(its, recipe=None)
    made = PrecisionConfig.model_validate({**values, "allow": None})
    return PrecisionConfig.model_validate({**values, "allow": still_broken(made, recipe.allow or ())})


def _unrounded(casts: Mapping[str, CastConfig], slots: set[str]) -> dict[str, CastConfig]:
    made = {slot: without_rounding(cast) if slot in slots else cast for slot, cast in casts.items()}
    for slot, forward in (("dgrad.w", "fprop.w"), ("wgrad.x", "fprop.x")):
        if made[forward] == HIGH:  # which now leaves the tensor as it is
            made[slot] = made[slot].model_copy(update={"source": "high_precision"})
    return made


def _nested(casts: Mapping[str, CastConfig]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for slot, cast in casts.items():
        gemm, operand = slot.split(".")
        values.setdefault(gemm, {})[operand] = cast.model_dump()
    return values


def as_yaml_values(recipe: PrecisionConfig) -> dict[str, object]:
    """Return the contents of the recipe's YAML file: keys that differ from their defaults, in the schema's order."""
    return recipe.model_dump(mode="json", exclude_defaults=True)
