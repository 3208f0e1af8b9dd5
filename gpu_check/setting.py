"""Models, recipes and timing that several checks share. Recipes and sizes are read from conf/, without Hydra."""

import statistics
import time
from collections.abc import Callable, Mapping
from importlib import resources
from typing import Any

import torch
import yaml

from lightning_llm.base.hardware import memory_bytes_here
from lightning_llm.config.schema.model import ModelConfig
from lightning_llm.config.schema.precision import PrecisionConfig
from lightning_llm.precision.native.decide import Capability, Decision, capability_here, decide, shipped_recipes

DEVICE = "cuda"
WARMUP_SECONDS = 0.3
SMALL_DEVICE_BYTES = 100e9
"""On smaller devices, e.g. an H100 with 80 GiB, checks that need much memory run sequentially or with less at once."""


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


def is_small_device() -> bool:
    """Return whether the device has less than SMALL_DEVICE_BYTES, or an unknown size."""
    return (memory_bytes_here(DEVICE) or 0) < SMALL_DEVICE_BYTES


def here() -> Capability:
    """Return the capability of this machine: GPU, CUDA and Transformer Engine."""
    return capability_here("cuda")


def native_recipes() -> dict[str, tuple[PrecisionConfig, Decision]]:
    """Return {name: (recipe, decision)} of the shipped recipes that quantize and run natively on this machine."""
    made = {name: (recipe, decide(recipe, here())) for name, recipe in recipes().items() if recipe.quantizes}
    return {name: (recipe, decision) for name, (recipe, decision) in made.items() if decision.runs == "native"}


def synchronise() -> None:
    """Wait for all work on the device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def milliseconds(contenders: Mapping[str, Callable[[], object]], repeats: int = 5, rounds: int = 5) -> dict[str, float]:
    """Return the milliseconds of one call of each contender: the median of `rounds`, each a mean over `repeats`.

    Each is warmed up for WARMUP_SECONDS, to compile, fill caches and raise clocks. Then they take turns in a rotating
    order, so that changes of the device (clocks, heat, other users) affect all of them equally.
    """
    names, found = list(contenders), {name: list[float]() for name in contenders}
    for work in contenders.values():
        _warm_up(work)
    for turn in range(rounds):
        for offset in range(len(names)):
            name = names[(turn + offset) % len(names)]
            began = time.perf_counter()
            for _ in range(repeats):
                contenders[name]()
            synchronise()
            found[name].append((time.perf_counter() - began) / repeats * 1e3)
    return {name: statistics.median(each) for name, each in found.items()}


def _warm_up(work: Callable[[], object]) -> None:
    work()  # compiles, not timed
    synchronise()
    began, calls = time.perf_counter(), 1
    while calls < 3 or time.perf_counter() - began < WARMUP_SECONDS:
        work()
        synchronise()
        calls += 1
