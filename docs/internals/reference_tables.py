"""Generated sections of the reference: the command line, other trainers' names for settings, recipes by GPU, sweeps."""

import argparse
import math
from collections.abc import Iterator
from typing import Any

import yaml

from lightning_llm.cli.command_line import VERBS, _parser
from lightning_llm.config.recipes import describe, recipe_files
from lightning_llm.config.schema.aliases import ALIASES, REFUSED_CALLBACKS, TRAINER_KEYS
from lightning_llm.config.schema.precision import PrecisionConfig, slots_of
from lightning_llm.config.schema.sweep import SweepConfig
from lightning_llm.precision.native.decide import DEVICES, HARDWARE, decision_matrix, shipped_recipes

DTYPE_BITS = {"fp32": 32, "fp16": 16, "bf16": 16}
BOARDS = {
    "cpu": "CPU", "a100": "A100", "l4": "L4", "l40": "L40", "l40s": "L40S", "rtx4090": "RTX 4090", "h100": "H100",
    "h200": "H200", "gh200": "GH200", "b200": "B200", "gb200": "GB200", "rtx5090": "RTX 5090",
}  # fmt: skip


def table(header: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table."""
    lines = [header, ["---"] * len(header), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def command_line() -> str:
    """Return every verb with its arguments and flags, read from the argparse parsers."""
    sections = []
    for name, parser in _subparsers(_parser()).items():
        text = [f"## `{name}`", _sentence(VERBS[name].help)]
        actions = _subparsers(parser)
        for label, inner in actions.items() or [("", parser)]:
            text += [f"### `{name} {label}`", _sentence(inner.description or "")] if label else []
            text.append(f"```text\n{_usage(inner)}\n```")
            text += [table(["argument", "default", "meaning"], rows)] if (rows := list(_arguments(inner))) else []
        sections.append("\n\n".join(each.rstrip("\n") for each in text) + "\n")
    return "\n".join(sections)


def _subparsers(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


def _usage(parser: argparse.ArgumentParser) -> str:
    """Return the usage, broken into the same lines in every terminal and Python version."""
    words = [parser.prog]
    for action in parser._actions:
        if "--help" in action.option_strings:
            continue
        value = _value(action)
        if action.option_strings:
            words.append(f"[{action.option_strings[0]}{f' {value}' if value else ''}]")
        else:
            words.append(f"[{value} ...]" if action.nargs == "*" else f"[{value}]" if action.nargs == "?" else value)
    lines = [""]
    for word in words:
        if len(lines[-1]) + len(word) > 110:
            lines.append("   ")
        lines[-1] += f"{' ' if lines[-1] else ''}{word}"
    return "\n".join(lines)


def _value(action: argparse.Action) -> str:
    if action.nargs == 0:
        return ""
    if action.metavar is None and action.choices:
        return "{" + ",".join(map(str, action.choices)) + "}"
    name = action.metavar if isinstance(action.metavar, str) else action.dest.upper() if action.option_strings else None
    return f"{name or action.dest}{' ...' if action.nargs == '+' else ''}"


def _arguments(parser: argparse.ArgumentParser) -> Iterator[list[str]]:
    for action in parser._actions:
        if "--help" in action.option_strings:
            continue
        value = _value(action)
        names = ", ".join(action.option_strings) or action.dest
        typed = f"`{names}{f' {value}' if action.option_strings and value else ''}`"
        default = "" if action.default in (None, False, []) else f"`{action.default}`"
        yield [typed, default, _sentence(" ".join((action.help or "").split()) % _shown(action))]


def _shown(action: argparse.Action) -> dict[str, Any]:
    return {**vars(action), "prog": "lightning-llm"}


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + ("" if not text or text[-1] in ".?!" else ".")


def other_trainers() -> str:
    """Return the settings of other trainers that the command line and YAML files recognize, with the keys here."""
    names: dict[str, list[str]] = {}
    for theirs, ours in ALIASES.items():
        names.setdefault(ours, []).append(f"`{theirs}`")
    return table(["here", "elsewhere"], [[_code(ours), ", ".join(theirs)] for ours, theirs in names.items()])


def lightning_settings() -> str:
    """Return the arguments of Lightning's Trainer and its callbacks with their replacements here."""
    rows = [[f"`Trainer({name}=)`", _code(ours)] for name, ours in TRAINER_KEYS.items()]
    rows += [[f"`{name}`", _code(ours)] for name, ours in REFUSED_CALLBACKS.items()]
    return table(["Lightning", "here"], rows)


def _code(key: str) -> str:
    return f"`{key}`" if " " not in key else key


def recipes_by_gpu() -> str:
    """Return, for each kind of device, the recipes that run natively, those of the narrowest GEMM operands first."""
    found = {recipe.name: recipe for recipe in shipped_recipes()}
    made = decision_matrix(found.values())
    rows = []
    for device in DEVICES:
        boards = [BOARDS[name] for name, each in HARDWARE.items() if each is DEVICES[device]]
        native: dict[int, list[str]] = {}
        for name, row in made.items():
            if row[device].runs == "native":
                native.setdefault(operand_bits(found[name]), []).append(f"`{name}`")
        ranked = "; ".join(f"**{bits} bits**: {', '.join(native[bits])}" for bits in sorted(native))
        rows.append([", ".join(boards), f"`{device}`", ranked])
    return table(["device", "`plan --matrix`", "native, narrowest operands first"], rows)


def operand_bits(recipe: PrecisionConfig) -> int:
    """Return the bits of the widest of the six GEMM operands."""
    casts = slots_of(recipe).values()
    dtype = DTYPE_BITS[recipe.compute_dtype]
    return max(cast.number_format.code_bits if cast.quantizes else dtype for cast in casts)


def shipped_sweeps() -> str:
    """Return the shipped sweeps with their number of jobs and the first sentence of their files."""
    rows = []
    for name, file in recipe_files():
        found = yaml.safe_load(file.read_text(encoding="utf-8"))
        params = found.get("hydra", {}).get("sweeper", {}).get("params")
        if not params:
            continue
        sweep = found.get("sweep", {})
        looks = sweep.get("looks", SweepConfig().looks) if sweep.get("until") else (1,)
        own = [f"{key}={values}" for key, values in params.items()]
        lines = [own, *(line.split() for line in sweep.get("also", []))]
        counted = [[word for word in line if len(looks) == 1 or not word.startswith("seed=")] for line in lines]
        jobs, first = sum(math.prod(word.count(",") + 1 for word in line) for line in counted), looks[0]
        rows.append([f"`{name}`", f"{jobs * first}{' at the first look' if first > 1 else ''}", describe(file)])
    return table(["recipe", "jobs", "content"], rows)


SECTIONS = {
    "shipped-sweeps": shipped_sweeps,
    "command-line": command_line,
    "other-trainers": other_trainers,
    "lightning-settings": lightning_settings,
    "recipes-by-gpu": recipes_by_gpu,
}
