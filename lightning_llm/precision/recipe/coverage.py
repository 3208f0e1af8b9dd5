"""How much of a model a precision recipe quantizes, in linear layers and blocks. Pure: needs no torch."""

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import yaml

from lightning_llm.config.recipes import option_files
from lightning_llm.config.schema.module_rules import ModuleRules
from lightning_llm.config.schema.precision import PrecisionConfig
from lightning_llm.precision.recipe.module_rules import block_of, blocks_of, reasons_to_stay_high


@dataclass(frozen=True)
class Coverage:
    """Counts of one recipe on one model: `linears` of `all_linears` and `blocks` of `all_blocks` are quantized.

    A block counts as quantized when any of its linear layers is, in any phase. `all_linears` includes an untied head.
    `shortfall`: blocks that the recipe's source keeps in high precision and these do not; "" if there are none.
    """

    linears: int
    all_linears: int
    blocks: int
    all_blocks: int
    shortfall: str = ""

    @property
    def text(self) -> str:
        """The counts for a table or a line, e.g. "21 of 22 linear layers quantized, in 3 of 3 blocks"."""
        layers = f"{self.linears} of {self.all_linears} linear layers quantized"
        return f"{layers}, in {self.blocks} of {self.all_blocks} blocks"

    @property
    def suffix(self) -> str:
        """The shortfall in brackets, to follow the recipe's name; "" if there is none."""
        return f" ({self.shortfall})" if self.shortfall else ""

    def as_data(self) -> dict[str, Any]:
        """Return the counts as plain data."""
        return asdict(self)


def coverage(recipe: PrecisionConfig, names: Iterable[str], num_layers: int) -> Coverage | None:
    """Return how many of the linear layers `names`, and of the blocks, `recipe` quantizes; None without casts."""
    if not recipe.quantises:
        return None
    reasons = reasons_to_stay_high(names, recipe, num_layers)
    quantized = [name for name, reason in reasons.items() if reason is None]
    blocks = len({block_of(name) for name in quantized})
    return Coverage(len(quantized), len(reasons), blocks, num_layers, _shortfall(recipe, blocks, num_layers))


def _shortfall(recipe: PrecisionConfig, quantized: int, num_layers: int) -> str:
    """Return how many blocks stay high and how many the source keeps, if either end has fewer than that; else "".

    The source of a shipped recipe is its file, whatever keys were overridden; of any other recipe, its own keys. A
    fraction above 0 counts as one block at least.
    """
    source = _shipped_rules(recipe.name) or recipe.modules
    asked = {end: text for end, text, blocks in _ends(source, num_layers) if blocks}
    kept = {end: blocks for end, _, blocks in _ends(recipe.modules, num_layers, least=0)}
    if all(kept[end] >= blocks for end, _, blocks in _ends(source, num_layers)):
        return ""
    who = "its source keeps" if recipe.reference else "it asks for"
    ends = " and ".join(f"the {end} {text}" for end, text in asked.items())
    return f"{num_layers - quantized} of {num_layers} blocks kept in {recipe.compute_dtype}; {who} {ends}"


def _ends(rules: ModuleRules, num_layers: int, least: int = 1) -> Iterator[tuple[str, str, int]]:
    """Yield (end, its count or percentage, blocks of `num_layers`); a fraction above 0 gives `least` blocks or more."""
    for end in ("first", "last"):
        count, fraction = (
            getattr(rules, f"{end}_blocks_high_precision"),
            getattr(rules, f"{end}_fraction_high_precision"),
        )
        text = f"{count}" if fraction is None else f"{100 * fraction:.4g} %"
        yield end, text, max(blocks_of(count, fraction, num_layers), least if fraction else 0)


@cache
def _shipped_rules(name: str) -> ModuleRules | None:
    """Return `modules` of the shipped recipe `name`; None if there is no such recipe, or its file has no `modules`."""
    file = option_files("precision").get(name)
    rules = yaml.safe_load(file.read_text(encoding="utf-8")).get("modules") if file else None
    return ModuleRules.model_validate(rules) if rules else None
