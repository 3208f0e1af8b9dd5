"""Write the generated sections of README.md and docs/**/*.md from the program: recipes, rules, keys, casts, methods.

A section is between `<!-- generated: NAME -->` and `<!-- /generated -->`. `python docs/generate.py` rewrites all. With
`--check` it writes nothing and exits with 1 if a section is stale.
"""

import argparse
import inspect
import json
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from lightning_llm.base.registry import NameIn, Names, Registry
from lightning_llm.compare.report.methods import PASSAGES, plain
from lightning_llm.compare.report.references import KNOWN, keys_in
from lightning_llm.compare.statistics.seeds import power, seeds_needed
from lightning_llm.config.schema import Config
from lightning_llm.config.schema.base import Group
from lightning_llm.config.schema.cast_kinds import GRADIENTS, ROUNDINGS, SCALES, TRANSFORMS
from lightning_llm.config.schema.number_formats import NUMBER_FORMATS
from lightning_llm.config.schema.precision import CastConfig, LossScalingConfig, PrecisionConfig, slots_of
from lightning_llm.config.schema.sweep import SweepConfig
from lightning_llm.plan.describe import matrix_rows
from lightning_llm.precision.lint import NOT_TO_ALLOW, RULES, rule_name
from lightning_llm.precision.native.decide import decision_matrix

DOCS = Path(__file__).resolve().parent
sys.path.insert(0, str(DOCS / "internals"))  # a test loads this file by its path
import code_tables  # noqa: E402
import docstring_tables  # noqa: E402
import ladder_tables  # noqa: E402
import measured_tables  # noqa: E402
import plan_tables  # noqa: E402
import recipe_tables  # noqa: E402
import reference_tables  # noqa: E402

README = DOCS.parent / "README.md"
RECIPES = DOCS.parent / "conf" / "precision"
SECTION = re.compile(r"(<!-- generated: ([\w-]+) -->\n).*?(<!-- /generated -->)", re.DOTALL)

ORDER = (
    "fp32", "bf16", "fp16", "fp8", "int8", "mxfp8", "fp16_mxfp8", "mxfp6", "nvfp4", "fp4", "mxfp4_sr", "mxfp4",
    "quartet", "quartet_ii",
)  # fmt: skip
"""Prefixes of recipes' names in the order of the tables, the longest that fits counts; a name that has none is last."""


def recipes() -> list[tuple[PrecisionConfig, str]]:
    """Return every shipped recipe with the comment at the top of its file, as one line."""
    found = []
    for file in RECIPES.glob("*.yaml"):
        text = file.read_text(encoding="utf-8")
        comment = " ".join(line.lstrip("# ") for line in text.splitlines() if line.startswith("#"))
        found.append((PrecisionConfig.model_validate(yaml.safe_load(text)), comment))
    return sorted(found, key=lambda each: (_rank(each[0].name), each[0].name))


def _rank(name: str) -> int:
    prefixes = [prefix for prefix in ORDER if f"{name}_".startswith(f"{prefix}_")]
    return ORDER.index(max(prefixes, key=len)) if prefixes else len(ORDER)


def short_cast(cast: CastConfig, compute_dtype: str) -> str:
    """Return a slot in a few words, e.g. "e2m1 1x32 floor SR H64±"."""
    if not cast.quantizes:
        return compute_dtype
    words = [cast.format, cast.block, cast.scale_kind.label, cast.rounding_kind.label]
    if cast.amax == "row":
        words.append("of rows")
    if cast.candidates is not None:
        words.append("4/6")
    for factor in (cast.prescale, cast.headroom):
        words += [] if factor == 1 else [f"·{factor:.3g}"]
    if cast.hadamard is not None:
        words.append(f"H{cast.hadamard.size}" + {"none": "", "fixed": "+", "random": "±"}[cast.hadamard.signs])
    if cast.source == "quantised":
        words.append("of q")
    return " ".join(filter(None, words))


def recipe_slots() -> str:
    """Return the table of the six slots of every recipe."""
    rows = []
    for recipe, _ in recipes():
        slots = [short_cast(cast, recipe.compute_dtype) for cast in slots_of(recipe).values()]
        same = len(set(slots)) == 1
        rows.append([f"`{recipe.name}`", *(["all six: " + slots[0], *[""] * 5] if same else slots)])
    return _table(["recipe", *slots_of(recipes()[0][0])], rows)


def recipe_facts() -> str:
    """Return the table of unquantized parts, loss scaling, source and native hardware of every recipe."""
    rows = [
        [
            f"`{recipe.name}`",
            stays_unquantized(comment),
            loss_scaling(recipe.loss_scaling),
            recipe.reference,
            recipe.hardware,
        ]
        for recipe, comment in recipes()
    ]
    return _table(["recipe", "stays in high precision", "loss scaling", "source", "runs natively on"], rows)


def stays_unquantized(comment: str) -> str:
    """Return the sentence after "High precision:" in a recipe's comment; a recipe without one is high throughout."""
    found = re.search(r"High precision: (.+?)\.(?=\s|$)", comment)
    return found.group(1) if found else "everything"


def loss_scaling(config: LossScalingConfig | None) -> str:
    """Return dynamic loss scaling in a few words."""
    if config is None:
        return "none"
    return f"dynamic from {config.init_scale:g}, `detect: {config.detect}`"


def number_formats() -> str:
    """Return the table of number formats: grid, codes, source, native or emulated."""
    rows = [
        [
            f"`{row.name}`",
            f"{row.code_bits}",
            "two's complement" if row.integer else f"1, {row.exponent_bits}, {row.mantissa_bits}",
            "" if row.integer else f"{row.bias}",
            f"{row.max:g}",
            f"2^{row.min_exponent - row.mantissa_bits}",
            {"none": "", "nan": "NaN", "ieee": "Inf, NaN"}[row.specials],
            "native or emulated" if row.engine_dtype else "emulated",
            row.source,
        ]
        for row in NUMBER_FORMATS.values()
    ]
    grid = ["bits", "sign, exponent, mantissa", "bias", "largest", "smallest", "special"]
    return _table(["`format`", *grid, "runs", "source"], rows)


def slot_keys() -> str:
    """Return the table of the keys of a slot."""
    rows = [
        [f"`{key}`", _type(field), _default(field), field.description or ""] for key, field in config_fields(CastConfig)
    ]
    return _table(["key of a slot", "values", "default", "meaning"], rows)


def cast_values() -> str:
    """Return the tables of registered scales, roundings, transforms and gradient rules."""
    scales = [[f"`{name}`", SCALES[name].meaning, SCALES[name].source] for name in SCALES]
    tables = [_table(["`scale`", "elements are multiplied by", "as in"], scales)]
    for key, registry in (("rounding", ROUNDINGS), ("hadamard.transform", TRANSFORMS), ("gradient", GRADIENTS)):
        tables.append(_table([f"`{key}`", "meaning"], [[f"`{name}`", registry[name].meaning] for name in registry]))
    return "\n".join(tables)


def lint_rules() -> str:
    """Return the lint's rules, one numbered item each: name, rejected combination, source."""
    items = []
    for number, rule in enumerate(RULES, 1):
        text, _, source = inspect.cleandoc(rule.__doc__ or "").partition("\n\nSource: ")
        if not source:
            raise ValueError(f"{rule.__name__}: its docstring needs a line 'Source: ...'")
        fixed = " Cannot be allowed." if rule in NOT_TO_ALLOW else ""
        items.append(_item(number, f"`{rule_name(rule)}`: {_line(text)}{fixed}<br>Source: {_line(source)}"))
    return "".join(items)


PAGE_WIDTH = 140
"""Columns of a line of prose. A row of a table is one line of any length."""
MARGIN = 0.01
PAIR_SDS = (0.001, 0.002, 0.003, 0.005, 0.01, 0.02)
POWER_SEEDS = (2, 3, 5, 8)


def verdict_power() -> str:
    """Return the table of how often the right verdict is given, over the SD of a pair's difference and the seeds."""
    rows = []
    for sd in PAIR_SDS:
        for recipes in (1, 4):
            row = [f"{sd:g}", str(recipes)]
            for seeds in POWER_SEEDS:
                found = [power(gap, sd, seeds, MARGIN, recipes, recipes) for gap in (0.0, 3 * MARGIN)]
                row.append(" / ".join(f"{100 * each:.0f}" for each in found))
            needed = seeds_needed(0.0, sd, MARGIN, recipes, recipes)
            rows.append([*row, str(needed or "> 999")])
    header = ["SD of a pair", "recipes", *(f"{seeds} seeds" for seeds in POWER_SEEDS), "seeds for lossless at 0, 80 %"]
    return _table(header, rows)


def native_matrix() -> str:
    """Return the table of recipes and devices: native, or emulated with the number of the reason, listed below it."""
    rows, reasons = matrix_rows(decision_matrix(recipe for recipe, _ in recipes()))
    body = [[f"`{row[0]}`", *row[1:]] for row in rows[1:]]
    listed = "".join(_item(number, _line(text)) for number, text in enumerate(reasons, 1))
    return f"{_table(rows[0], body)}\n{listed}"


def config_keys() -> str:
    """Return every key of the config: a table per group, keys in the schema's order. Casts are described once."""
    tables: dict[str, list[list[str]]] = {}
    for key, field in config_fields(Config):
        group = key.partition(".")[0] if "." in key else ""
        tables.setdefault(group, []).append([f"`{key}`", _type(field), _default(field), field.description or ""])
    for key, field in config_fields(SweepConfig, "sweep."):
        tables.setdefault("sweep", []).append([f"`{key}`", _type(field), _default(field), field.description or ""])
    sections = []
    for group, rows in tables.items():
        title = {"": "Run", "sweep": "`sweep` (only with `train -m`)"}.get(group, f"`{group}`")
        sections.append(f"## {title}\n\n{_table(['key', 'value', 'default', 'meaning'], rows)}")
    return "\n".join(sections)


def config_fields(group: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yield every leaf key with its field; the six equal slots once, as `precision.GEMM.OPERAND`.

    A key of only some kinds of a registry is yielded as `optim[muon].KEY`.
    """
    for name, field in group.model_fields.items():
        if name in ("dgrad", "wgrad"):
            continue
        slots = name == "fprop"
        key = f"{prefix}GEMM.OPERAND" if slots else f"{prefix}{name}"
        inner = [CastConfig] if slots else _groups(field.annotation)
        registry = _registry(field)
        if registry is not None:
            yield from _kinds(key, registry, inner[0])
            continue
        if not slots and (field.description or not inner):
            yield key, field
        if inner and not key.endswith(("casts", "phases")):
            yield from config_fields(
                inner[0], f"{key}{'.NAME.' if get_origin(_plain(field.annotation)) is dict else '.'}"
            )


def _kinds(key: str, registry: Registry[Any], base: type[BaseModel]) -> Iterator[tuple[str, FieldInfo]]:
    """Yield the keys of a registry's kinds: the one that chooses the kind, those of all kinds, those of some."""
    annotation: Any = Literal[tuple(registry)]
    yield f"{key}.{registry.key}", FieldInfo(annotation=annotation, description=f"a registered {registry.noun}")
    common = {name: field for name, field in base.model_fields.items() if name != registry.key}
    yield from ((f"{key}.{name}", field) for name, field in common.items())
    own: dict[str, tuple[list[str], FieldInfo]] = {}
    for kind in registry:
        for name, field in registry[kind].model_fields.items():
            if name not in common and name != registry.key:
                own.setdefault(name, ([], field))[0].append(kind)
    for name, (kinds, field) in own.items():
        yield (f"{key}[{', '.join(kinds)}].{name}" if len(kinds) < len(registry) else f"{key}.{name}"), field


def _registry(field: FieldInfo) -> Registry[Any] | None:
    """Return the registry that a field's value is one of, also where null is allowed."""
    found = [
        *field.metadata,
        *(each for part in get_args(field.annotation) for each in getattr(part, "__metadata__", ())),
    ]
    return next((each for each in found if isinstance(each, Registry)), None)


def _plain(annotation: Any) -> Any:
    """Return an annotation without "or null"."""
    parts = [each for each in get_args(annotation) if each is not NoneType]
    inner = parts[0] if NoneType in get_args(annotation) and len(parts) == 1 else annotation
    return get_args(inner)[0] if get_origin(inner) is Annotated else inner


def _groups(annotation: Any) -> list[type[Group]]:
    return [each for each in _members(annotation) if isinstance(each, type) and issubclass(each, Group)]


def _members(annotation: Any) -> list[Any]:
    """Return the types that an annotation is made of."""
    if get_origin(annotation) is Annotated:
        return _members(get_args(annotation)[0])
    parts = get_args(annotation)
    return [annotation] if not parts or get_origin(annotation) is Literal else [m for p in parts for m in _members(p)]


def _type(field: FieldInfo) -> str:
    """Return the values that a key takes, in YAML terms."""
    words = {str: "text", int: "integer", float: "number", bool: "true, false", NoneType: "null", Any: "anything"}
    found = [f"`{name}`" for each in field.metadata if isinstance(each, NameIn) for name in each.registry]
    found += [f"`{name}`" for each in field.metadata if isinstance(each, Names) for name in each.names]
    for each in [] if found else _members(field.annotation):
        if get_origin(each) is Literal:
            found += [f"`{str(value).lower() if isinstance(value, bool) else value}`" for value in get_args(each)]
        elif isinstance(each, type) and issubclass(each, Group):
            found.append("keys below")
        elif each in words:
            found.append(words[each])
    shape = {dict: "names: ", tuple: "list: ", list: "list: "}.get(get_origin(_plain(field.annotation)), "")
    return shape + ", ".join(dict.fromkeys(found))


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "in the group's file"
    value = field.get_default(call_default_factory=True)
    return "" if isinstance(value, Group) else f"`{json.dumps(value)}`"


def methods() -> str:
    """Return the passages of a report's methods, each with when it is there, and the entries that they cite."""
    passages = [
        f"**{passage.heading}**{'' if passage.condition == 'always' else f', where {passage.condition}'}: "
        f"{plain(passage.text, KNOWN.values())}"
        for passage in PASSAGES
    ]
    cited = [entry for key, entry in KNOWN.items() if any(key in keys_in(each.text) for each in PASSAGES)]
    entries = " ".join(f"{reference.text.removesuffix('.')}." for reference in cited)
    return "".join(_item("-", text) for text in [*passages, f"**References**: {entries}"])


def _item(mark: int | str, text: str) -> str:
    """Return an item of a list, numbered or not, wrapped as the pages are."""
    start = f"{mark}. " if isinstance(mark, int) else f"{mark} "
    indent = " " * len(start)
    wrapped = textwrap.fill(
        text, PAGE_WIDTH, initial_indent=start, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    return f"{wrapped}\n"


def _line(text: str) -> str:
    """Return `text` on one line, with links where it cites arXiv."""
    return re.sub(r"arXiv (\d{4}\.\d{4,5})", r"[arXiv \1](https://arxiv.org/abs/\1)", " ".join(text.split()))


def _table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *([_line(cell).replace("|", "\\|") for cell in row] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


SECTIONS: dict[str, Callable[[], str]] = {
    "recipe-slots": recipe_slots,
    "recipe-facts": recipe_facts,
    "number-formats": number_formats,
    "slot-keys": slot_keys,
    "cast-values": cast_values,
    "lint-rules": lint_rules,
    "methods": methods,
    "verdict-power": verdict_power,
    **ladder_tables.SECTIONS,
    **recipe_tables.SECTIONS,
    **reference_tables.SECTIONS,
    **plan_tables.SECTIONS,
    **code_tables.SECTIONS,
    **docstring_tables.SECTIONS,
    **measured_tables.SECTIONS,
    "native-matrix": native_matrix,
    "config-keys": config_keys,
}


def regenerate(text: str) -> str:
    """Return a document with every generated section made anew. Raises ValueError where a name is unknown."""

    def replace(match: re.Match[str]) -> str:
        opening, name, closing = match.groups()
        if name not in SECTIONS:
            raise ValueError(f"no section '{name}'; there are {', '.join(SECTIONS)}")
        return f"{opening}\n{SECTIONS[name]()}\n{closing}"

    return SECTION.sub(replace, text)


def main(argv: list[str] | None = None) -> int:
    """Rewrite README.md and docs/**/*.md, or with --check return 1 where one is stale."""
    parser = argparse.ArgumentParser(description="Write the generated sections of README.md and docs/**/*.md.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where a section is stale")
    check = parser.parse_args(argv).check
    stale = 0
    for file in (README, *sorted(DOCS.rglob("*.md"))):
        text = file.read_text(encoding="utf-8")
        new = regenerate(text)
        if new == text:
            continue
        stale += 1
        print(f"{file.name}: {'stale, run python docs/generate.py' if check else 'rewritten'}")
        if not check:
            file.write_text(new, encoding="utf-8")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
