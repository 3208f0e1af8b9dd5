"""Recipes made of a recipe: one slot alone quantised, or all but one. Pure: needs neither torch nor a model."""

from lightning_llm.schema.precision import HIGH, CastConfig, PrecisionConfig, slots_of


def without_rounding(cast: CastConfig) -> CastConfig:
    """Return `cast` with its rounding taken out: a rotation stays, since the other operand's must cancel with it."""
    return CastConfig(source=cast.source, hadamard=cast.hadamard)


def only_slot(recipe: PrecisionConfig, slot: str) -> PrecisionConfig:
    """Return the recipe in which `slot` ("wgrad.dy") alone is quantised, named "<recipe>_only_<slot>"."""
    casts = slots_of(recipe)
    kept = {name: cast if name == slot else without_rounding(cast) for name, cast in casts.items()}
    return _with_slots(recipe, kept, f"{recipe.name}_only_{slot.replace('.', '_')}")


def all_but_slot(recipe: PrecisionConfig, slot: str) -> PrecisionConfig:
    """Return the recipe in which every slot but `slot` is quantised, named "<recipe>_without_<slot>"."""
    casts = slots_of(recipe)
    casts[slot] = without_rounding(casts[slot])
    return _with_slots(recipe, casts, f"{recipe.name}_without_{slot.replace('.', '_')}")


def _with_slots(recipe: PrecisionConfig, casts: dict[str, CastConfig], name: str) -> PrecisionConfig:
    for slot, forward in (("dgrad.w", "fprop.w"), ("wgrad.x", "fprop.x")):
        if casts[forward] == HIGH:  # which now leaves the tensor as it is
            casts[slot] = casts[slot].model_copy(update={"source": "high_precision"})
    values = recipe.model_dump(exclude={"fprop", "dgrad", "wgrad", "phases"}) | {"name": name}
    for slot, cast in casts.items():
        gemm, operand = slot.split(".")
        values.setdefault(gemm, {})[operand] = cast.model_dump()
    return PrecisionConfig.model_validate(values)


def as_yaml_values(recipe: PrecisionConfig) -> dict[str, object]:
    """Return what a YAML file of the recipe holds: keys that differ from their defaults, in the schema's order."""
    return recipe.model_dump(mode="json", exclude_defaults=True)
