"""Swap a model's linear layers for quantised ones, by name, before anything is sharded or materialised."""

import re
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from lightning_llm.errors import ConfigError, Problem
from lightning_llm.precision import inductor
from lightning_llm.precision.inductor import Backend
from lightning_llm.precision.linear import LinearPlan
from lightning_llm.precision.module import QuantisedLinear
from lightning_llm.schema.precision import ModuleRules, PrecisionConfig, slots_of

_BLOCK = re.compile(r"(?:^|\.)(?:layers|blocks|h)\.(\d+)\.")


@dataclass(frozen=True)
class SwapReport:
    """What was swapped. `kept` says why by name; `note` what the user should hear about how the casts run."""

    converted: tuple[str, ...]
    kept: dict[str, str]
    backend: Backend
    note: str | None

    def __str__(self) -> str:
        lines = [f"{len(self.converted)} linear layers quantised, {len(self.kept)} kept high ({self.backend} casts)"]
        lines += [f"  kept {name}: {why}" for name, why in self.kept.items()]
        return "\n".join(lines if self.note is None else [*lines, f"  {self.note}"])


def choose_backend(device_type: str) -> tuple[Backend, str | None]:
    """Return how casts run on this kind of device, and, where that is slow, a note that says why."""
    reason = inductor.why_not(device_type)
    if reason is None:
        return "compiled", None
    return "eager", f"casts run eagerly, some ten times slower: no compiler was found ({reason})"


def swap_linears(
    model: nn.Module, recipe: PrecisionConfig, num_layers: int, device_type: str, backend: Backend | None = None
) -> SwapReport:
    """Replace the layers that `recipe` quantises; parameters stay the same objects under the same names.

    `num_layers`: blocks of the whole model, since first and last count by global index. `backend` null: compiled where
    there is a compiler for `device_type`. A recipe in fp16 swaps every linear on a CPU, where an fp16 GEMM is emulated.
    Raises ConfigError where a recipe that quantises converts nothing.
    """
    note = None
    if backend is None:
        backend, note = choose_backend(device_type)
    quantising = LinearPlan.of(recipe.at(0, 1), backend)
    emulate = recipe.compute_dtype == "fp16" and device_type == "cpu"
    casts = slots_of(PrecisionConfig(name="high", compute_dtype=recipe.compute_dtype))
    high = LinearPlan(casts, backend, fixed=True)
    converted, kept = [], {}
    for name, module in list(model.named_modules()):
        if not isinstance(module, nn.Linear):
            continue
        why = why_kept(name, recipe.modules, num_layers) if recipe.quantises else "the recipe quantises nothing"
        if why is None:
            converted.append(name)
        else:
            kept[name] = why
        if why is None or emulate:
            _replace(model, name, QuantisedLinear(name, module, quantising if why is None else high))
    if recipe.quantises and not converted:
        raise ConfigError(_nothing_converted(recipe, kept))
    return SwapReport(tuple(converted), kept, backend, note)


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


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)


def _nothing_converted(recipe: PrecisionConfig, kept: dict[str, str]) -> Problem:
    """Say that a quantising recipe found no layer, and the reasons it met."""
    if not kept:
        return Problem("precision", f"'{recipe.name}' quantises linear layers, but the model has none.")
    reasons = "; ".join(dict.fromkeys(kept.values()))
    return Problem(
        "precision.modules",
        f"'{recipe.name}' would quantise none of {len(kept)} linear layers: {reasons}. Lower first/last_blocks_high, "
        "or widen include.",
    )
