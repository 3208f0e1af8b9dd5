"""Which linear layers a recipe quantises, by name alone. Pure: needs neither torch nor a model."""

import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

from lightning_llm.errors import Problem
from lightning_llm.schema.precision import ModuleRules, PrecisionConfig

_BLOCK = re.compile(r"(?:^|\.)(?:layers|blocks|h)\.(\d+)\.")


def reasons_to_stay_high(names: Iterable[str], recipe: PrecisionConfig, num_layers: int) -> dict[str, str | None]:
    """Return why each linear of `names` stays high, None where it is to be quantised: in some phase, if not in all.

    `num_layers`: blocks of the whole model, since first and last count by global index.
    """
    if not recipe.quantises:
        return dict.fromkeys(names, "the recipe quantises nothing")
    return {name: why_kept(name, recipe.modules, num_layers) for name in names}


def why_kept(name: str, rules: ModuleRules, num_layers: int) -> str | None:
    """Return why the linear called `name` stays high, or None where it is to be quantised."""
    found = _BLOCK.search(f"{name}.")
    if found is None:
        return "it lies outside the blocks (heads and embeddings stay high)"
    index = int(found.group(1))
    if index < rules.first_blocks_high:
        return f"modules.first_blocks_high={rules.first_blocks_high}"
    if index >= num_layers - rules.last_blocks_high:
        return f"modules.last_blocks_high={rules.last_blocks_high}"
    for glob in rules.exclude:
        if fnmatchcase(name, glob):
            return f"modules.exclude has '{glob}'"
    if not any(fnmatchcase(name, glob) for glob in rules.include):
        return "nothing in modules.include matches it"
    return None


def nothing_converted(recipe: PrecisionConfig, reasons: Mapping[str, str | None]) -> list[Problem]:
    """Return the problem of a recipe that quantises, but none of the linears in `reasons_to_stay_high`; else none."""
    if not recipe.quantises or None in reasons.values():
        return []
    if not reasons:
        return [Problem("precision", f"'{recipe.name}' quantises linear layers, but the model has none.")]
    met = "; ".join(dict.fromkeys(why for why in reasons.values() if why is not None))
    text = (
        f"'{recipe.name}' would quantise none of {len(reasons)} linear layers: {met}. Lower first/last_blocks_high, "
        f"widen include, narrow exclude, or take precision={recipe.compute_dtype}."
    )
    return [Problem("precision.modules", text)]


def unmatched(recipe: PrecisionConfig, names: Iterable[str]) -> list[Problem]:
    """Return the problem of each glob of a recipe that quantises which matches none of the model's linears."""
    known, rules = list(names), recipe.modules
    if not recipe.quantises:
        return []
    text = "has '{}', which matches no linear layer of this model. Its layers: {}."
    return [
        Problem(f"precision.modules.{key}", text.format(glob, ", ".join(_kinds(known))))
        for key, globs in (("include", rules.include), ("exclude", rules.exclude))
        for glob in globs
        if not any(fnmatchcase(name, glob) for name in known)
    ]


def _kinds(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in names))
