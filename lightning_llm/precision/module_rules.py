"""Linear layers that a recipe quantizes, their casts, their share of a model. By name alone: no torch, no model.

The linears of experts have a name together, `..experts.gate_proj`, and one each, `..experts.3.gate_proj`; an expert
follows the rules of both.

In this order, a layer stays unquantized if it is outside the blocks, if it is in one of the first or last blocks that
`modules` keeps, if `exclude` matches it, or if `include` does not. Every other layer has the casts of the first rule in
`modules.casts` that matches it, or else the recipe's own.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from fractions import Fraction
from functools import cache
from itertools import chain
from types import MappingProxyType
from typing import Any

import yaml

from lightning_llm.base.errors import Problem
from lightning_llm.config.recipes import option_files
from lightning_llm.config.schema.module_rules import ModuleRules
from lightning_llm.config.schema.precision import UNQUANTIZED_RULE, CastRule, PrecisionConfig

_BLOCK = re.compile(r"(?:^|\.)(?:layers|blocks|h)\.(\d+)\.")
_EXPERT = re.compile(r"(.*\bexperts)\.(\d+)\.(\w+)")
_SINGLE = re.compile(r"experts\.(\d+|[\[?*])")
"""In a glob that may match single experts."""
NO_EXPERTS: Mapping[str, int] = MappingProxyType({})


def expert_place(linear: str, number: int) -> str:
    """Return the name that rules see of expert `number` of the linear `..experts.gate_proj`."""
    parent, _, kind = linear.rpartition(".")
    return f"{parent}.{number}.{kind}"


def _matches(name: str, glob: str) -> bool:
    """Return whether `glob` matches `name` or, of an expert, the name that it shares with the others."""
    if fnmatchcase(name, glob):
        return True
    expert = _EXPERT.fullmatch(name)
    return expert is not None and fnmatchcase(f"{expert[1]}.{expert[3]}", glob)


def _globs(rules: ModuleRules) -> Iterator[tuple[str, str]]:
    """Yield (key, glob) for each glob."""
    globs = [("include", rules.include), ("exclude", rules.exclude)]
    globs += [(f"casts.{number}.names", rule.names) for number, rule in enumerate(rules.casts or ())]
    for key, several in globs:
        yield from ((f"precision.modules.{key}", glob) for glob in several)


def _single_experts(recipe: PrecisionConfig, experts: Mapping[str, int]) -> dict[str, list[str]]:
    """Return the names of single experts by the name of their linear; {} where no glob can match one."""
    every = (glob for part in (recipe, *_phases(recipe)) for _, glob in _globs(part.modules))
    if not any(_SINGLE.search(glob) for glob in every):
        return {}
    return {name: [expert_place(name, number) for number in range(count)] for name, count in experts.items()}


def alike_experts(name: str, experts: int, recipe: PrecisionConfig, num_layers: int) -> list[tuple[str, int]]:
    """Return (name, experts) for each group of experts of the linear `name` that follow the same rules.

    The name is that of its first expert; `name` itself if all follow the same, as one of a linear without experts.
    """
    places = _single_experts(recipe, {name: experts}).get(name, []) if experts > 1 else []
    if not places:
        return [(name, experts)]
    parts = [recipe, *_phases(recipe)]
    groups: dict[tuple[int | None, ...], list[str]] = {}
    for place in places:
        groups.setdefault(tuple(rule_in_effect(place, part, num_layers) for part in parts), []).append(place)
    if len(groups) < 2:
        return [(name, experts)]
    return [(group[0], len(group)) for group in groups.values()]


def blocks_of(count: int | None, fraction: float | None, num_layers: int) -> int:
    """Return a number of blocks that is given as a `count`, or as a `fraction` of `num_layers` (half rounds up)."""
    if fraction is None:
        return count or 0
    return math.floor(Fraction(str(fraction)) * num_layers + Fraction(1, 2))


def reasons_to_stay_unquantized(
    names: Iterable[str], recipe: PrecisionConfig, num_layers: int, experts: Mapping[str, int] = NO_EXPERTS
) -> dict[str, str | None]:
    """Return why each linear of `names` stays unquantized; None if it is quantized in any phase.

    `num_layers`: blocks of the whole model, since first and last count by global index. `experts`: numbers of experts
    by linear; such a linear is quantized if one of its experts is.
    """
    if not recipe.quantizes:
        return dict.fromkeys(names, "the recipe quantises nothing")
    parts, single = [recipe, *_phases(recipe)], _single_experts(recipe, experts)
    found: dict[str, str | None] = {}
    for name in names:
        found[name] = _why_unquantized(name, recipe, num_layers)
        alike = [name, *single.get(name, ())]
        if any(_why_unquantized(each, part, num_layers) is None for part in parts for each in alike):
            found[name] = None
    return found


def _phases(recipe: PrecisionConfig) -> list[PrecisionConfig]:
    """Return the recipe in effect during each phase."""
    return [recipe.in_phase(number) for number in range(len(recipe.phases))]


def _why_unquantized(name: str, recipe: PrecisionConfig, num_layers: int) -> str | None:
    """Return why the linear `name` is not quantized outside of the recipe's phases, or None."""
    return _kept_by_modules(name, recipe.modules, num_layers) or _kept_by_casts(name, recipe, num_layers)


def _kept_by_modules(name: str, rules: ModuleRules, num_layers: int) -> str | None:
    """Return why the linear `name` stays unquantized under all casts, or None."""
    index = block_of(name)
    if index is None:
        return "it lies outside the blocks (heads and embeddings stay high)"
    for end in _ends(rules, num_layers):
        if (end[0] == "first" and index < end[3]) or (end[0] == "last" and index >= num_layers - end[3]):
            return _key_of_end(*end, num_layers)
    for glob in rules.exclude:
        if _matches(name, glob):
            return f"modules.exclude has '{glob}'"
    return None if any(_matches(name, glob) for glob in rules.include) else "nothing in modules.include matches it"


def _kept_by_casts(name: str, recipe: PrecisionConfig, num_layers: int) -> str | None:
    """Return why none of the recipe's casts outside of phases quantizes the linear `name`, or None."""
    number = rule_of(name, recipe.modules, num_layers)
    if any(cast.quantizes for cast in recipe.casts_under(number).values()):
        return None
    return "no rule of modules.casts fits it" if number is None else f"modules.casts.{number} keeps it high"


def block_of(name: str) -> int | None:
    """Return the global index of the block of the linear `name`, None outside of blocks."""
    found = _BLOCK.search(f"{name}.")
    return None if found is None else int(found.group(1))


def _ends(rules: ModuleRules, num_layers: int) -> Iterator[tuple[str, int | None, float | None, int]]:
    """Yield (end, count, fraction, unquantized blocks) for the ends "first" and "last" of the model."""
    for end in ("first", "last"):
        count, fraction = (getattr(rules, f"{end}_{kind}_high_precision") for kind in ("blocks", "fraction"))
        yield end, count, fraction, blocks_of(count, fraction, num_layers)


def _key_of_end(end: str, count: int | None, fraction: float | None, blocks: int, num_layers: int) -> str:
    """Return the key that keeps `blocks` blocks unquantized, with its value."""
    if fraction is None:
        return f"modules.{end}_blocks_high_precision={count}"
    return f"modules.{end}_fraction_high_precision={fraction:g}: {blocks} of {num_layers} blocks"


def fractions_of_no_block(rules: ModuleRules, num_layers: int) -> list[str]:
    """Return text for each fraction of blocks above 0 that rounds to no block, because the model has so few."""
    return [_key_of_end(*end, num_layers) for end in _ends(rules, num_layers) if end[2] and not end[3]]


def rule_of(name: str, rules: ModuleRules, num_layers: int) -> int | None:
    """Return the index of the first rule of `modules.casts` that matches the linear `name`; None if none does."""
    fitting = (number for number, rule in enumerate(rules.casts or ()) if _fits(name, rule, num_layers))
    return next(fitting, None)


def _fits(name: str, rule: CastRule, num_layers: int) -> bool:
    index = block_of(name)
    if index is None or not any(_matches(name, glob) for glob in rule.names):
        return False
    ends = (rule.first_blocks, rule.first_fraction, rule.last_blocks, rule.last_fraction)
    if all(each is None for each in ends):
        return True
    first, last = blocks_of(*ends[:2], num_layers), blocks_of(*ends[2:], num_layers)
    return index < first or index >= num_layers - last


def layers_of_casts(names: Iterable[str], recipe: PrecisionConfig, num_layers: int) -> dict[str, list[str]]:
    """Return {key of `recipe.cast_sets()`: quantized linears among `names` that use this set of casts}."""
    quantized = [name for name, why in reasons_to_stay_unquantized(names, recipe, num_layers).items() if why is None]
    found: dict[str, list[str]] = {key: [] for key in recipe.cast_sets()}
    parts = {"": recipe, **{f"phases.{number}": phase for number, phase in enumerate(_phases(recipe))}}
    for prefix, part in parts.items():
        for name in quantized:
            number = rule_in_effect(name, part, num_layers)
            if number != UNQUANTIZED_RULE:
                rule = "" if number is None else f"modules.casts.{number}"
                found[".".join(each for each in (prefix, rule) if each)].append(name)
    return found


def rule_in_effect(name: str, recipe: PrecisionConfig, num_layers: int) -> int | None:
    """Return the index of the rule of `modules.casts` that the linear `name` follows outside of phases.

    None: it has the recipe's own casts. `UNQUANTIZED_RULE`: `modules` keeps it unquantized until a phase begins.
    """
    if _kept_by_modules(name, recipe.modules, num_layers) is not None:
        return UNQUANTIZED_RULE
    return rule_of(name, recipe.modules, num_layers)


def nothing_converted(recipe: PrecisionConfig, reasons: Mapping[str, str | None]) -> list[Problem]:
    """Return a problem if `recipe` has casts but quantizes no linear, by `reasons` (`reasons_to_stay_unquantized`)."""
    if not recipe.quantizes or None in reasons.values():
        return []
    if not reasons:
        return [
            Problem(
                "precision",
                f"'{recipe.name}' quantizes linear layers, but the model has none. Set {recipe.compute_dtype}.",
            )
        ]
    met = "; ".join(dict.fromkeys(why for why in reasons.values() if why is not None))
    text = (
        f"'{recipe.name}' would quantize none of {len(reasons)} linear layers: {met}. Lower "
        "first/last_blocks_high_precision or _fraction_high_precision, widen include, narrow exclude, or set "
        f"precision={recipe.compute_dtype}."
    )
    return [Problem("precision.modules", text)]


NORMS = (
    "It names norms, which no recipe casts. In Transformer Engine's LayerNormLinear, delayed scaling casts the fp32 "
    "result of the norm; here the recipe casts the result rounded to compute_dtype. Under other recipes its cast is "
    "the linear's, as here."
)
ATTENTION = (
    "It names attention itself, but recipes have no slot for its products; Transformer Engine's FP8 attention "
    "(fp8_dpa, fp8_mha) has separate scales for Q, K, V, S and dP. Write {} for its linears."
)


def _what_it_names(glob: str, names: Iterable[str]) -> str:
    """Return why modules that `glob` matches, none of them a linear of `names`, are not cast; "" where it has none."""
    parts = {name.rpartition(".")[0] for name in names if block_of(name) is not None}
    if any(fnmatchcase(f"{part}_norm", glob) for part in parts):
        return f" {NORMS}"
    if any(fnmatchcase(part, glob) and part.endswith("attention") for part in parts):
        return " " + ATTENTION.format(f"'{glob}.*'")
    return ""


def _globs_of_nothing(rules: ModuleRules, names: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield (key, glob) for each glob that matches no linear of `names`."""
    for key, glob in _globs(rules):
        if not any(fnmatchcase(name, glob) for name in names):
            yield key, glob


def other_modules(
    recipe: PrecisionConfig, names: Iterable[str], experts: Mapping[str, int] = NO_EXPERTS
) -> list[Problem]:
    """Return the problems of globs that match norms, attention or absent experts, and no linear of `names`."""
    known, problems = list(names), []
    for key, glob in _globs_of_nothing(recipe.modules, known):
        if (absent := _no_such_expert(glob, experts)) is not None:
            problems.append(Problem(key, absent))
        elif why := _what_it_names(glob, known):
            problems.append(Problem(key, f"has '{glob}', which matches no linear layer.{why}"))
    return problems


def unmatched(
    recipe: PrecisionConfig, names: Iterable[str], num_layers: int, experts: Mapping[str, int] = NO_EXPERTS
) -> list[Problem]:
    """Return the problems of globs that match none of the model's linears, and of cast rules that no layer follows.

    `experts`: see `reasons_to_stay_unquantized`.
    """
    known = list(names)
    every = known + list(chain.from_iterable(_single_experts(recipe, experts).values()))
    if not recipe.quantizes:
        return []
    text = "has '{}', which matches no linear layer of this model. Its layers: {}.{}"
    problems = [
        Problem(key, _no_such_expert(glob, experts) or text.format(glob, ", ".join(_kinds(known)), why))
        for key, glob in _globs_of_nothing(recipe.modules, every)
        for why in [_what_it_names(glob, known)]
    ]
    reported = {problem.key for problem in problems}
    return problems + [
        Problem(
            f"precision.modules.casts.{number}", f"applies to no layer: {why}. Put it first, widen it, or remove it."
        )
        for number, why in idle_rules(recipe, every, num_layers).items()
        if f"precision.modules.casts.{number}.names" not in reported
    ]


def _no_such_expert(glob: str, experts: Mapping[str, int]) -> str | None:
    """Return that `glob` names an expert beyond the last one; None if it does not."""
    found = _SINGLE.search(glob)
    if found is None or not found[1].isdigit() or not experts or int(found[1]) < (most := max(experts.values())):
        return None
    return f"has '{glob}', which names expert {found[1]}, and there are {most} experts. Use 0 to {most - 1}."


def idle_rules(recipe: PrecisionConfig, names: Sequence[str], num_layers: int) -> dict[int, str]:
    """Return {index: reason} for the rules of `modules.casts` that apply to no linear of `names`."""
    rules, found = recipe.modules, {}
    for number, rule in enumerate(rules.casts or ()):
        why: dict[str, None] = {}
        for name in (name for name in names if _fits(name, rule, num_layers)):
            first = rule_of(name, rules, num_layers)
            kept = _kept_by_modules(name, rules, num_layers)
            if kept is None and first == number:
                break
            why[kept or f"modules.casts.{first} comes first and matches its layers"] = None
        else:
            found[number] = "; ".join(why) or "no layer in the blocks that it names matches"
    return found


def without_idle_rules(recipe: PrecisionConfig, names: Iterable[str], num_layers: int) -> PrecisionConfig:
    """Return `recipe` without the rules of `modules.casts` that apply to no linear of `names`."""
    idle = idle_rules(recipe, list(names), num_layers)
    kept = tuple(rule for number, rule in enumerate(recipe.modules.casts or ()) if number not in idle)
    return recipe.model_copy(update={"modules": recipe.modules.model_copy(update={"casts": kept or None})})


def _kinds(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in names))


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


def coverage(
    recipe: PrecisionConfig, names: Iterable[str], num_layers: int, experts: Mapping[str, int] = NO_EXPERTS
) -> Coverage | None:
    """Return the counts of linears `names` and of blocks that `recipe` quantizes; None for a recipe without casts."""
    if not recipe.quantizes:
        return None
    reasons = reasons_to_stay_unquantized(names, recipe, num_layers, experts)
    quantized = [name for name, reason in reasons.items() if reason is None]
    blocks = len({block_of(name) for name in quantized})
    return Coverage(len(quantized), len(reasons), blocks, num_layers, _shortfall(recipe, blocks, num_layers))


def _shortfall(recipe: PrecisionConfig, quantized: int, num_layers: int) -> str:
    """Return text on the number of unquantized blocks and the source's number, if either end has fewer; else "".

    The source of a shipped recipe is its file, before overrides; of any other recipe, its own keys. A fraction above 0
    counts as one block at least.
    """
    source = _shipped_rules(recipe.name) or recipe.modules
    kept = {end: blocks for end, _, _, blocks in _ends(recipe.modules, num_layers)}
    asked, short = [], False
    for end, count, fraction, blocks in _ends(source, num_layers):
        blocks = max(blocks, 1 if fraction else 0)
        short |= kept[end] < blocks
        if blocks:
            asked.append(f"the {end} {count}" if fraction is None else f"the {end} {100 * fraction:.4g} %")
    if not short:
        return ""
    who = "its source keeps" if recipe.reference else "it asks for"
    return (
        f"{num_layers - quantized} of {num_layers} blocks kept in {recipe.compute_dtype}; {who} {' and '.join(asked)}"
    )


@cache
def _shipped_rules(name: str) -> ModuleRules | None:
    """Return `modules` of the shipped recipe `name`; None if there is no such recipe, or its file has no `modules`."""
    file = option_files("precision").get(name)
    rules = yaml.safe_load(file.read_text(encoding="utf-8")).get("modules") if file else None
    return ModuleRules.model_validate(rules) if rules else None
