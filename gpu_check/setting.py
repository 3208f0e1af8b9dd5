"""Models, recipes and timing that several checks share. Recipes and sizes are read from conf/, without Hydra."""

import time
from collections.abc import Callable
from importlib import resources
from typing import Any

import torch
import yaml

from lightning_llm.matrix import shipped_recipes
from lightning_llm.precision.capability import Capability, capability_here
from lightning_llm.precision.native import Decision, decide
from lightning_llm.schema.model import ModelConfig
from lightning_llm.schema.precision import PrecisionConfig

DEVICE = "cuda"


def recipes() -> dict[str, PrecisionConfig]:
    """Return the shipped recipes by name."""
    return {recipe.name: recipe for recipe in shipped_recipes()}


def model_config(name: str, **keys: Any) -> ModelConfig:
    """Return conf/model/`name`.yaml with `keys` changed."""
    text = resources.files("lightning_llm.conf").joinpath("model", f"{name}.yaml").read_text(encoding="utf-8")
    values = {**yaml.safe_load(text), **keys}
    if keys:
        values["parameters_published"] = None
    return ModelConfig.model_validate(values)


def here() -> Capability:
    """Return what this machine has."""
    return capability_here("cuda")


def native_recipes() -> dict[str, tuple[PrecisionConfig, Decision]]:
    """Return the quantising recipes that run natively on this machine, with the decision."""
    made = {name: (recipe, decide(recipe, here())) for name, recipe in recipes().items() if recipe.quantises}
    return {name: (recipe, decision) for name, (recipe, decision) in made.items() if decision.runs == "native"}


def synchronise() -> None:
    """Wait until the device has done what it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def milliseconds(work: Callable[[], object], warmup: int = 3, repeats: int = 10, rounds: int = 3) -> float:
    """Return the milliseconds of one call on the GPU: the median of `rounds`, each a mean over `repeats`."""
    for _ in range(warmup):
        work()
    synchronise()
    found = []
    for _ in range(rounds):
        began = time.perf_counter()
        for _ in range(repeats):
            work()
        synchronise()
        found.append((time.perf_counter() - began) / repeats * 1e3)
    return sorted(found)[rounds // 2]
