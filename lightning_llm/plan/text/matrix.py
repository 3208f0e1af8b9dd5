"""Every precision recipe on every kind of device: native, emulated, and why. For `plan --matrix` and the documents."""

from collections.abc import Iterable
from importlib import resources
from typing import Any

import yaml

from lightning_llm.config.schema import Config
from lightning_llm.config.schema.precision import PrecisionConfig
from lightning_llm.model.structure import linear_widths
from lightning_llm.precision.native.capability import DEVICES, Capability, capability_here
from lightning_llm.precision.native.decide import Decision, decide

Matrix = dict[str, dict[str, Decision]]


def shipped_recipes() -> list[PrecisionConfig]:
    """Return the recipes of conf/precision, by name."""
    files = list(resources.files("lightning_llm.conf").joinpath("precision").iterdir())
    texts = [file.read_text(encoding="utf-8") for file in files if file.name.endswith(".yaml")]
    made = [PrecisionConfig.model_validate(yaml.safe_load(text)) for text in texts]
    return sorted(made, key=lambda recipe: recipe.name)


def matrix(recipes: Iterable[PrecisionConfig], config: Config | None = None, here: Capability | None = None) -> Matrix:
    """Return {recipe: {device: decision}} under `precision.backend=auto`, for the sizes of `config`'s model.

    Without a config sizes fit. `here` adds a column of that name for this machine.
    """
    widths = linear_widths(config.model) if config else {}
    devices = {**DEVICES, **({"here": here} if here else {})}
    automatic = [recipe.model_copy(update={"backend": "auto"}) for recipe in recipes]
    return {
        recipe.name: {name: decide(recipe, device, widths) for name, device in devices.items()} for recipe in automatic
    }


def matrix_of(config: Config) -> Matrix:
    """Return the matrix of all shipped recipes and of the config's own, with this machine."""
    recipes = shipped_recipes()
    if config.precision.name not in {recipe.name for recipe in recipes}:
        recipes.append(config.precision)
    return matrix(recipes, config, capability_here(config.trainer.accelerator))


def matrix_facts(made: Matrix) -> dict[str, Any]:
    """Return a matrix as plain data: {recipe: {device: {"runs", "reason"}}}."""
    return {recipe: {device: each.facts() for device, each in row.items()} for recipe, row in made.items()}


def numbered(made: Matrix) -> tuple[list[list[str]], list[str]]:
    """Return (rows, reasons): a header and a row per recipe; a cell is "native", or "emulated (n)" for reason n."""
    devices = list(next(iter(made.values())))
    reasons: dict[str, int] = {}
    rows = [["recipe", *devices]]
    for recipe, row in made.items():
        cells = [_cell(each, reasons) for each in row.values()]
        rows.append([recipe, *cells])
    return rows, list(reasons)


def _cell(decision: Decision, reasons: dict[str, int]) -> str:
    if decision.runs == "native":
        return "native"
    return f"{decision.runs} ({reasons.setdefault(decision.reason, len(reasons) + 1)})"


def render_matrix(made: Matrix) -> str:
    """Return a matrix as text for a terminal."""
    rows, reasons = numbered(made)
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([*lines, "", *(f"({number}) {reason}" for number, reason in enumerate(reasons, 1))])
