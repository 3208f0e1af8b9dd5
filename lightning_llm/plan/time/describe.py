"""The time of a step as plain data and as text, for `plan`. Imports no torch."""

from collections.abc import Iterator
from typing import Any

from lightning_llm.config.schema import ClusterConfig
from lightning_llm.plan.resolve import Plan
from lightning_llm.plan.time.cost import PARTS
from lightning_llm.plan.time.step import StepTimer


def time_facts(plan: Plan) -> dict[str, Any]:
    """Return the time of a step on the config's cluster as data: `step_seconds` and `time`, None without a cluster.

    `step_seconds` are by part those of the rank that works longest, see `cost.PARTS`, and `total`, their sum and the
    step's. In `time`: `cluster`; `bubble_fraction`, the part of a step in which ranks wait for other stages, their
    mean; `tokens_per_second` of a device; `mfu`, model FLOPs over the devices' peak in the compute dtype; `assumed`,
    what the times rest on.
    """
    cluster = plan.config.cluster
    if cluster is None:
        return {"step_seconds": None, "time": None}
    timer = StepTimer(plan, cluster)
    step = timer.time
    by_part = {part: step.seconds[part] for part in PARTS if step.seconds.get(part)}
    return {
        "step_seconds": by_part | {"total": step.total},
        "time": {
            "cluster": cluster.name,
            "bubble_fraction": step.bubble_fraction,
            "tokens_per_second": step.tokens_per_second,
            "mfu": step.mfu,
            "assumed": list(_assumptions(plan, cluster, timer)),
        },
    }


def time_rows(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the time of a step, of `plan_facts`, as lines for a terminal, each a name and a text."""
    time = facts["time"]
    if time is None:
        return []
    parts = dict(facts["step_seconds"])
    total = parts.pop("total")
    bubble = f", {time['bubble_fraction']:.1%} of it waiting for stages" if time["bubble_fraction"] > 5e-4 else ""
    return [
        ("time", f"{_seconds(total)} per step on {time['cluster']} at best{bubble}"),
        *((f"  {part}", f"{_seconds(value)}, {value / total:.1%}") for part, value in parts.items()),
        ("speed", f"{time['tokens_per_second']:,.4g} tokens/s per device, {time['mfu']:.1%} MFU"),
        *(("  assumed", each) for each in time["assumed"]),
    ]


def _seconds(value: float) -> str:
    for limit, factor, unit in ((1.0, 1, "s"), (1e-3, 1e3, "ms")):
        if value >= limit:
            return f"{value * factor:.4g} {unit}"
    return f"{value * 1e6:.3g} us"


def _assumptions(plan: Plan, cluster: ClusterConfig, timer: StepTimer) -> Iterator[str]:
    recipe, device = plan.config.precision, timer.device
    formats = dict.fromkeys([recipe.compute_dtype, *timer.formats.units])
    peaks = ", ".join(f"{each} {(device.peak(each) or 0) / 1e12:.4g}" for each in formats)
    source = "measured" if cluster.peak_tflops else "its data sheet's"
    memory = f"memory at {cluster.memory_gb_per_second:g} GB/s"
    yield f"{cluster.hardware} at {source} peaks ({peaks} TFLOP/s), {memory}"
    if plan.degrees.world > 1:
        within, between = cluster.within_node.gb_per_second, cluster.between_nodes.gb_per_second
        hidden = "FSDP's beside computation" if cluster.overlap else "none beside computation"
        yield f"collectives at {within:g} GB/s within and {between:g} GB/s between machines, {hidden}"
    if timer.formats.units and plan.decision.runs != "native":
        units = " and ".join(sorted(timer.formats.units))
        yield f"casts as if native, on {units} units; this plan's run {plan.decision.runs}: {plan.decision.reason}"
    if timer.formats.without_unit:
        yield f"{cluster.hardware} has no unit for these casts: GEMMs in {recipe.compute_dtype}, emulation not counted"
    if any(plan.config.optim.exchanged_bytes(shard) for shard in timer.shards(0)):
        yield f"matrix products of {plan.config.optim.name} are not counted"
