"""Check that a rank's bytes fit the planned device; changes that make them fit, or use free memory. No torch."""

from collections.abc import Iterator
from typing import Any

from lightning_llm.base.hardware import GIB, MEMORY_GIB, memory_bytes_here
from lightning_llm.config.schema import Config
from lightning_llm.plan.check import config_problems
from lightning_llm.plan.degrees import Degrees
from lightning_llm.plan.memory import OURS, Accounting
from lightning_llm.plan.memory.rank_bytes import memory_bytes
from lightning_llm.plan.resolve import DerivedConfig, Plan

RESERVE = 0.05
"""Fraction of device memory that a proposed change leaves free, for CUDA's context and memory that is not counted."""
Overrides = dict[str, Any]


def hardware_facts(plan: Plan, accounting: Accounting = OURS) -> dict[str, Any]:
    """Return the planned devices: `name`, `devices` (their number), `memory_bytes` of one (None if unknown).

    `spare_bytes` is the device's memory less a rank's estimated bytes, negative if they do not fit; neither includes
    CUDA's context. `change` is the first of `cheaper` that fits with `RESERVE`: its `overrides` and the rank's
    `memory_bytes`; None if no change is needed or none is enough. `faster` is the same for the first of `roomier` that
    fits, on a GPU.
    """
    memory = device_memory_bytes(plan)
    facts = {
        "name": plan.config.planned_hardware or plan.capability.device,
        "devices": plan.degrees.world,
        "memory_bytes": memory,
        "fits": None,
        "spare_bytes": None,
        "change": None,
        "faster": None,
    }
    if memory is None:
        return facts
    spare = memory - memory_bytes(plan, accounting)["total"]
    found: dict[str, Any] = {"fits": spare >= 0, "spare_bytes": spare}
    if spare < 0:
        found["change"] = _first_that_fits(plan, cheaper(plan.config, plan.degrees), memory, accounting)
    elif plan.capability.compute_capability is not None:
        found["faster"] = _first_that_fits(plan, roomier(plan), memory, accounting)
    return facts | found


def hardware_row(facts: dict[str, Any]) -> tuple[str, str]:
    """Return `hardware_facts` as a row of the plan: (label, text)."""
    name = f"{facts['devices']} x {facts['name']}"
    if facts["memory_bytes"] is None:
        return "hardware", f"{name}; set hardware=h100 (or a100, b200, ...) to check whether the memory is enough"
    spare, change, faster = facts["spare_bytes"] / GIB, facts["change"], facts["faster"]
    line = f"{name} of {facts['memory_bytes'] / GIB:.0f} GiB: "
    if spare >= 0:
        line += f"fits, {spare:.1f} GiB to spare"
        if faster is not None:
            gain = "recomputes less" if "checkpoint" in faster["overrides"][0] else "has larger GEMMs"
            needed = faster["memory_bytes"] / GIB
            line += f"; {' '.join(faster['overrides'])} also fits, at {needed:.1f} GiB, and {gain}"
        return "hardware", line
    line += f"does not fit, {-spare:.1f} GiB missing; "
    if change is None:
        return "hardware", f"{line}try more ranks, parallel.tp or parallel.pp"
    return "hardware", f"{line}{' '.join(change['overrides'])} would fit, at {change['memory_bytes'] / GIB:.1f} GiB"


def cheaper(config: Config, degrees: Degrees) -> Iterator[Overrides]:
    """Yield changes that reduce memory, cheapest in time first: recomputation, smaller GEMMs, gathered weights."""
    key = "parallel.activation_checkpoint"
    recompute = {"none": ["selective", "full"], "selective": ["full"]}.get(config.parallel.activation_checkpoint, [])
    by_block = {} if config.parallel.activation_checkpoint_layers is None else {f"{key}_layers": None}
    size = config.data.micro_batch_size
    smaller: list[Overrides] = [{"data.micro_batch_size": size >> n} for n in range(1, size.bit_length())]
    smaller = [each for each in smaller if size % each["data.micro_batch_size"] == 0]
    sharded: list[Overrides] = []
    if degrees.dp > 1 and (config.parallel.zero_stage < 3 or degrees.dp_replicate > 1):
        sharded = [{"parallel.zero_stage": 3, "parallel.dp_replicate": 1, "parallel.dp_shard": None}]
    checkpointed: list[Overrides] = [{key: each, **by_block} for each in recompute]
    one = [*checkpointed[:-1], *smaller, *checkpointed[-1:]]
    most = {name: value for each in (checkpointed, smaller) for name, value in (each[-1] if each else {}).items()}
    yield from one
    yield from sharded
    yield from ({**first, **then} for first in sharded for then in one)
    yield most
    yield from ({**first, **most} for first in sharded)


def roomier(plan: Plan) -> Iterator[Overrides]:
    """Yield changes that use more memory to save time, most first: no or less recomputation, then larger GEMMs.

    Larger GEMMs come from fewer micro-batches of more tokens, except in a pipeline, which needs micro-batches.
    """
    config, key = plan.config, "parallel.activation_checkpoint"
    if config.parallel.activation_checkpoint_layers is not None:
        return  # chosen by a search
    if config.parallel.activation_checkpoint != "none":
        yield {key: "none", **({} if config.parallel.activation_checkpoint_every == 1 else {f"{key}_every": 1})}
    if config.parallel.activation_checkpoint == "full":
        yield {key: "selective"}
    size, fewer = config.data.micro_batch_size, plan.micro_batches
    if plan.degrees.pp == 1:
        yield from ({"data.micro_batch_size": size * n} for n in range(fewer, 1, -1) if fewer % n == 0)


def _first_that_fits(
    plan: Plan, several: Iterator[Overrides], memory: int, accounting: Accounting
) -> dict[str, Any] | None:
    for overrides in several:
        config = _changed(plan.config, overrides)
        derived = DerivedConfig(config, plan.capability)
        if config_problems(derived):
            continue
        needed = memory_bytes(derived.plan(), accounting)["total"]
        if needed <= (1 - RESERVE) * memory:
            words = [f"{key}={'null' if value is None else value}" for key, value in overrides.items()]
            return {"overrides": words, "memory_bytes": needed}
    return None


def _changed(config: Config, overrides: Overrides) -> Config:
    for key, value in overrides.items():
        group, _, name = key.partition(".")
        config = config.model_copy(update={group: getattr(config, group).model_copy(update={name: value})})
    return config


def device_memory_bytes(plan: Plan) -> int | None:
    """Return the memory of one planned device in bytes; None if the device is unknown."""
    config = plan.config
    if config.planned_hardware in MEMORY_GIB:
        return MEMORY_GIB[config.planned_hardware] * GIB
    if plan.degrees.world > config.trainer.devices:  # on other machines
        return None
    on_gpu = plan.capability.compute_capability is not None
    here = memory_bytes_here("cuda" if on_gpu else "cpu")
    return here if here is None or on_gpu else here // config.trainer.devices
