"""The linear layers of a module that a recipe quantizes, with the reason for each other one."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from lightning_llm.base.errors import ConfigError, Problem
from lightning_llm.config.schema.precision import PrecisionConfig
from lightning_llm.precision.any_module.selection import (
    Blocks,
    FoundLinear,
    blocks_in,
    is_conv1d,
    linears_in,
    plain_name,
    why_not_convertible,
)
from lightning_llm.precision.module_rules import reasons_to_stay_unquantized, unmatched

SHOWN = 8
"""Most names in a message."""
WITHOUT_ENDS = {
    "first_blocks_high_precision": 0,
    "last_blocks_high_precision": 0,
    "first_fraction_high_precision": None,
    "last_fraction_high_precision": None,
}


@dataclass(frozen=True)
class Choice:
    """The linear layers of a module that a recipe quantizes. `reasons`: {name: why it is skipped, None if quantized}.

    `recipe`: without rules for first and last blocks if there are none. `places`: names of the layers as rules of the
    recipe see them, "layers.INDEX.REST"; `on_fast_paths`: layers that nn.TransformerEncoderLayer reads in evaluation
    without calling them.
    """

    root: nn.Module
    recipe: PrecisionConfig
    linears: tuple[FoundLinear, ...]
    blocks: Blocks
    reasons: Mapping[str, str | None]
    places: Mapping[str, str]
    on_fast_paths: frozenset[str]
    ends_apply: bool = True

    @property
    def quantized(self) -> list[FoundLinear]:
        """The layers to quantize, in order."""
        return [linear for linear in self.linears if self.reasons[linear.name] is None]

    @property
    def other_matrices(self) -> list[str]:
        """Names of matrices in the blocks that are in no linear layer (e.g. fused experts), with "*" for numbers."""
        owners = {
            name: module
            for name, module in self.root.named_modules()
            if not isinstance(module, nn.Linear | nn.Embedding) and not is_conv1d(module)
        }
        found = (
            plain_name(f"{path}.{name}" if path else name)
            for path, module in owners.items()
            for name, parameter in module.named_parameters(recurse=False)
            if parameter.ndim > 1
        )
        return list(dict.fromkeys(_kind(name) for name in found if self.blocks.canonical(name) is not None))

    @property
    def widths(self) -> dict[str, int]:
        """{"NAME.in_features" or "NAME.out_features": size} of the quantized layers; equal blocks are listed once."""
        found: dict[str, int] = {}
        for linear in self.quantized:
            for side, size in (("in_features", linear.in_features), ("out_features", linear.out_features)):
                kind = f"{_kind(linear.name)}.{side}"
                found[kind if found.get(kind, size) == size else f"{linear.name}.{side}"] = size
        return found


def choose(
    root: nn.Module,
    recipe: PrecisionConfig,
    keep: Sequence[str],
    named_blocks: str | Sequence[str] | None,
    max_steps: int | None,
) -> Choice:
    """Return the linear layers of `root` that `recipe` quantizes, and why others are skipped.

    `keep`, `named_blocks`, `max_steps`: the arguments `keep`, `blocks` and `max_steps` of `quantize`.

    Raises:
        ConfigError: with all problems; also if no layer would be quantized.
    """
    linears = linears_in(root)
    if not linears:
        kinds = ", ".join(sorted({type(each).__name__ for each in root.modules()})[:SHOWN])
        raise ConfigError(Problem("module", f"has no linear layer, only {kinds}. Pass a module with nn.Linear layers."))
    if not recipe.quantizes:
        raise ConfigError(
            Problem(
                "recipe",
                f"'{recipe.name}' quantizes nothing: it only sets dtypes. Use a recipe with casts, such as mxfp8.",
                recipe.name,
            )
        )
    blocks = blocks_in(root, named_blocks)
    problems = [*_unmatched_globs(keep, linears), *_without_steps(recipe, max_steps)]
    usable = recipe if blocks.paths else _without_ends(recipe)
    reasons, places = _own_reasons(root, linears, blocks, keep)
    decided = reasons_to_stay_unquantized(places.values(), usable, blocks.count)
    problems += unmatched(usable, places.values(), blocks.count) if places else []
    reasons |= {name: decided[place] for name, place in places.items()}
    fast = _on_fast_paths(root)
    choice = Choice(root, usable, tuple(linears), blocks, reasons, places, fast, usable == recipe)
    if not choice.quantized:
        problems.append(_nothing(choice))
    if problems:
        raise ConfigError(problems)
    return choice


def _own_reasons(
    root: nn.Module, linears: Sequence[FoundLinear], blocks: Blocks, keep: Sequence[str]
) -> tuple[dict[str, str | None], dict[str, str]]:
    """Return why layers are skipped under every recipe, and the places of the others in the blocks, by name."""
    reasons: dict[str, str | None] = {}
    places: dict[str, str] = {}
    tied = _tied(root)
    for linear in linears:
        name, place = linear.name, blocks.canonical(linear.name)
        reasons[name] = None  # in the module's order
        kept = next((glob for glob in keep if any(matches(each, glob) for each in linear.names)), None)
        if kept is not None:
            reasons[name] = f"keep has '{kept}'"
        elif place is None:
            reasons[name] = f"it is outside of the blocks ({', '.join(blocks.paths)})"
        elif why := why_not_convertible(linear, root):
            reasons[name] = why
        elif id(linear.module.weight) in tied:
            reasons[name] = f"its weight is tied to {tied[id(linear.module.weight)]}"
        else:
            places[name] = place
    return reasons, places


def _without_ends(recipe: PrecisionConfig) -> PrecisionConfig:
    """Return `recipe` without rules that keep first and last blocks unquantized: there are no blocks."""
    phases = tuple(
        phase.model_copy(update={"modules": phase.modules.model_copy(update=WITHOUT_ENDS)}) if phase.modules else phase
        for phase in recipe.phases
    )
    modules = recipe.modules.model_copy(update=WITHOUT_ENDS)
    return recipe.model_copy(update={"modules": modules, "phases": phases})


def matches(name: str, glob: str) -> bool:
    """Whether `glob` matches a module name, one of its parents, or an ending of either that begins after a dot."""
    parts = name.split(".")
    ends = [parts[:stop] for stop in range(1, len(parts) + 1)]
    return any(fnmatchcase(".".join(end[start:]), glob) for end in ends for start in range(len(end)))


def _unmatched_globs(keep: Sequence[str], linears: Sequence[FoundLinear]) -> Iterator[Problem]:
    for glob in keep:
        if not any(matches(name, glob) for linear in linears for name in linear.names):
            yield Problem(
                "keep", f"has '{glob}', which matches no linear layer. Use names of these: {_kinds(linears)}."
            )


def _without_steps(recipe: PrecisionConfig, max_steps: int | None) -> Iterator[Problem]:
    if recipe.phases and max_steps is None:
        text = f"must be given: phases of '{recipe.name}' are fractions of the training's steps. Give their number."
        yield Problem("max_steps", text)


def _nothing(choice: Choice) -> Problem:
    met = "; ".join(dict.fromkeys(why for why in choice.reasons.values() if why is not None))
    text = (
        f"would quantize none of {len(choice.linears)} linear layers: {met}. Shorten keep, or change the "
        f"recipe's modules. There are {_kinds(choice.linears)}."
    )
    return Problem("recipe", text, choice.recipe.name)


def _tied(root: nn.Module) -> dict[int, str]:
    """Return {id of a weight: name} of embeddings."""
    return {id(each.weight): plain_name(name) for name, each in root.named_modules() if isinstance(each, nn.Embedding)}


def _on_fast_paths(root: nn.Module) -> frozenset[str]:
    return frozenset(
        plain_name(f"{path}.{child}" if path else child)
        for path, each in root.named_modules()
        if isinstance(each, nn.TransformerEncoderLayer)
        for child in ("linear1", "linear2")
    )


def _kind(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)", "*", name)


def _kinds(linears: Sequence[FoundLinear]) -> str:
    """Return the names of the layers, block numbers as `*` if the rest of the names distinguishes the layers."""
    kinds = list(dict.fromkeys(_kind(linear.name) or "the module itself" for linear in linears))
    if not any(re.search(r"[^*.]", kind) for kind in kinds):  # numbers alone, as in nn.Sequential
        kinds = [linear.name for linear in linears]
    more = f" and {len(kinds) - SHOWN} more" if len(kinds) > SHOWN else ""
    return ", ".join(kinds[:SHOWN]) + more
