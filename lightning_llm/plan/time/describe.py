"""The time of a step as plain data and as text, with the speeds of published runs. Imports no torch.

The ratios of published over predicted speed come from `make bench ARGS=plan_time`, over the runs of
`benchmarks/published_steps.py`; a test recomputes them. They differ between families of layouts, so a search that
compares families favors those with low ratios.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from lightning_llm.config.schema import ClusterConfig, Config
from lightning_llm.plan.degrees import Degrees
from lightning_llm.plan.resolve import Plan
from lightning_llm.plan.time.operations import PARTS
from lightning_llm.plan.time.step import StepTimer, no_time

LONG = 32768
"""Sequence length in tokens from which attention dominates."""


@dataclass(frozen=True)
class Ratio:
    """Published over predicted speeds of the `runs` of one family of layouts; None without runs."""

    family: str
    runs: int = 0
    low: float | None = None
    median: float | None = None
    high: float | None = None

    def as_data(self) -> dict[str, Any]:
        """Return the ratio as plain data."""
        return asdict(self)


RATIOS = {
    each.family: each
    for each in (
        Ratio("ZeRO-3 alone", 8, 0.44, 0.46, 0.48),
        Ratio("ZeRO-3 with tensor parallelism", 5, 0.54, 0.63, 0.78),
        Ratio("replicas alone", 1, 0.47, 0.47, 0.47),
        Ratio("replicas with tensor parallelism", 3, 0.52, 0.59, 0.62),
        Ratio("pipeline", 10, 0.51, 0.75, 0.87),
        Ratio("sequences of 32K tokens or more", 4, 0.21, 0.29, 0.37),
        Ratio("sequences of 32K tokens or more, with a pipeline", 4, 0.42, 0.54, 0.64),
        Ratio("ZeRO-1 or ZeRO-2 without a pipeline"),
        Ratio("context parallelism of shorter sequences"),
    )
}


def published_ratio(config: Config, degrees: Degrees) -> Ratio:
    """Return the ratio of a layout's family."""
    return RATIOS[_family(config, degrees)]


def _family(config: Config, degrees: Degrees) -> str:
    zero_stage = config.parallel.zero_stage if degrees.fsdp > 1 else 0
    if config.data.sequence_length >= LONG:
        return "sequences of 32K tokens or more" + (", with a pipeline" if degrees.pp > 1 else "")
    if degrees.cp > 1:
        return "context parallelism of shorter sequences"
    if degrees.pp > 1:
        return "pipeline"
    if zero_stage in (1, 2):
        return "ZeRO-1 or ZeRO-2 without a pipeline"
    kind = "ZeRO-3" if zero_stage else "replicas"
    return f"{kind} with tensor parallelism" if degrees.tp > 1 else f"{kind} alone"


def range_text(ratio: dict[str, Any]) -> str:
    """Return `Ratio.as_data` as "0.44-0.48", or "none" without published runs."""
    return f"{ratio['low']:.2f}-{ratio['high']:.2f}" if ratio["runs"] else "none"


def ratio_text(ratio: dict[str, Any]) -> str:
    """Return `Ratio.as_data` as a sentence."""
    if not ratio["runs"]:
        return f"no published run to compare with ({ratio['family']})"
    runs = f"{ratio['runs']} published run{'s' if ratio['runs'] > 1 else ''}"
    return (
        f"{runs} reached {range_text(ratio)} of the predicted speed, median {ratio['median']:.2f} ({ratio['family']})"
    )


TIMED = ("bubble_fraction", "tokens_per_second", "mfu", "peak", "run_hours", "assumed", "published")
"""Keys of `time` that are None if the step has no time."""


def time_facts(plan: Plan) -> dict[str, Any]:
    """Return the time of a step on the config's cluster as data: `step_seconds` and `time`, None without a cluster.

    Without a time, `step_seconds` and all but the first two of `time` are None. Parts that take no time are absent.

    - `step_seconds.total`: one optimizer step of the busiest rank, the sum of the parts below.
    - `step_seconds.gemm`: linear layers: forward, input gradient, weight gradient, recomputation.
    - `step_seconds.attention`: mixers without their linear layers.
    - `step_seconds.memory_bound`: norms, activation functions, rotary positions, residuals, casts, FSDP copies, loss.
    - `step_seconds.tensor_parallel`, `step_seconds.context_parallel`, `step_seconds.expert_parallel`: collectives.
    - `step_seconds.gathers`, `step_seconds.reductions`: FSDP's all-gathers and sums of gradients that nothing overlaps.
    - `step_seconds.optimizer`: clipping and the update.
    - `step_seconds.bubble`: waiting for other pipeline stages.
    - `time.cluster`: name of the cluster.
    - `time.no_time`: the reason if the step has no time, such as `emulated (REASON)`; else null.
    - `time.bubble_fraction`: mean fraction of a step that ranks wait for other stages.
    - `time.tokens_per_second`: per device.
    - `time.mfu`, `time.peak`: model FLOPs utilization, and the peak that it refers to, as text.
    - `time.run_hours`: hours of `trainer.max_steps` steps.
    - `time.assumed`: the assumptions, as text.
    - `time.published`: published over predicted speed of the layout's family: `family`, `runs`, `low`, `median`,
      `high`.
    """
    cluster = plan.config.cluster
    if cluster is None:
        return {"step_seconds": None, "time": None}
    if (reason := no_time(plan, cluster)) is not None:
        return {"step_seconds": None, "time": {"cluster": cluster.name, "no_time": reason} | dict.fromkeys(TIMED)}
    timer = StepTimer(plan, cluster)
    step = timer.time
    by_part = {part: step.seconds[part] for part in PARTS if step.seconds.get(part)}
    values = (
        step.bubble_fraction,
        step.tokens_per_second,
        step.mfu,
        step.needed.text(),
        step.total * plan.config.trainer.max_steps / 3600,
        list(assumptions(plan, cluster, timer)),
        published_ratio(plan.config, plan.degrees).as_data(),
    )
    return {
        "step_seconds": by_part | {"total": step.total},
        "time": {"cluster": cluster.name, "no_time": None} | dict(zip(TIMED, values, strict=True)),
    }


def time_rows(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the time of a step, from `plan_facts`, as (name, text) lines for a terminal."""
    time = facts["time"]
    if time is None:
        return []
    if time["no_time"] is not None:
        return [("time", f"no time: {time['no_time']}")]
    parts = dict(facts["step_seconds"])
    total = parts.pop("total")
    bubble = f", {time['bubble_fraction']:.1%} of it waiting for stages" if time["bubble_fraction"] > 5e-4 else ""
    return [
        ("time", f"{_seconds(total)} per step on {time['cluster']} at best{bubble}"),
        *((f"  {part}", f"{_seconds(value)}, {value / total:.1%}") for part, value in parts.items()),
        ("speed", f"{time['tokens_per_second']:,.4g} tokens/s per device, MFU {time['mfu']:.1%} of {time['peak']}"),
        ("run", _run_text(time["run_hours"], facts["max_steps"], facts["layout"]["world"])),
        *(("  assumed", each) for each in time["assumed"]),
        ("  published", ratio_text(time["published"])),
    ]


def _run_text(hours: float, steps: int, devices: int) -> str:
    return f"{hours:,.4g} hours for {steps:,} steps at best, {hours * devices:,.4g} device hours"


def _seconds(value: float) -> str:
    for limit, factor, unit in ((1.0, 1, "s"), (1e-3, 1e3, "ms")):
        if value >= limit:
            return f"{value * factor:.4g} {unit}"
    return f"{value * 1e6:.3g} us"


def assumptions(plan: Plan, cluster: ClusterConfig, timer: StepTimer) -> Iterator[str]:
    """Yield the assumptions behind the time of a step, one line each."""
    recipe, device = plan.config.precision, timer.device
    formats = dict.fromkeys([recipe.compute_dtype, *timer.formats.units])
    peaks = ", ".join(f"{each} {(device.peak(each) or 0) / 1e12:.4g}" for each in formats)
    source = "measured" if cluster.peak_tflops else "its data sheet's"
    memory = f"memory at {cluster.memory_gb_per_second:g} GB/s"
    yield f"{cluster.hardware} at {source} peaks ({peaks} TFLOP/s), {memory}"
    if plan.degrees.world > 1:
        within, between = cluster.within_node.gb_per_second, cluster.between_nodes.gb_per_second
        hidden = "FSDP's overlap computation" if cluster.overlap else "no overlap with computation"
        yield f"collectives at {within:g} GB/s within and {between:g} GB/s between machines, {hidden}"
    if timer.formats.units:
        yield f"casts by {plan.decision.reason}, on {' and '.join(sorted(timer.formats.units))} units"
    if recipe.phases:
        yield "every step uses the recipe's own casts, not those of its phases"
    if any(plan.config.optim.exchanged_bytes(shard) for shard in timer.shards(0)):
        yield f"matrix products of {plan.config.optim.name} are not counted"
