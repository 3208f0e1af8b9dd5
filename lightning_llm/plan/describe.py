"""A layout, and the matrix of recipes and devices, as plain data and as text. Imports no torch."""

from collections.abc import Callable
from typing import Any

from lightning_llm.base.hardware import GIB
from lightning_llm.plan.axes.axis import AXES
from lightning_llm.plan.degrees import Degrees, bitwise_problem
from lightning_llm.plan.memory import OURS, Accounting
from lightning_llm.plan.memory.rank_bytes import peak_memory, peak_memory_pp_rank
from lightning_llm.plan.memory.units import uses_fsdp
from lightning_llm.plan.nodes import nodes_are_assumed, ranks_per_node
from lightning_llm.plan.resolve import Plan
from lightning_llm.plan.stages import bubble_fraction, split_layers
from lightning_llm.plan.traffic import bytes_sent, traffic_bytes
from lightning_llm.precision.native.decide import Decision, Matrix

SHOWN_RANKS, SHOWN_GROUPS, SHOWN_STAGES = 64, 4, 8
"""All groups are listed up to SHOWN_RANKS ranks; for larger worlds SHOWN_GROUPS groups of at most SHOWN_RANKS ranks.
With more than SHOWN_STAGES stages, the terminal shows the first and last two."""


def layout_facts(plan: Plan) -> dict[str, Any]:
    """Return the layout as data: keys, degrees, groups, and micro-batches of a rank.

    `groups` has an entry for each axis above 1: `count` groups of `size` ranks, `stride` apart, and their `ranks` (all
    of them up to 64 ranks). `bitwise` is whether the layout trains to the bits of one rank at the same micro-batch
    size, `bitwise_problem` why not. `pipeline` is `pipeline_facts`, or None without a pipeline.
    """
    config, degrees, micro_batches = plan.config, plan.degrees, plan.micro_batches
    parallel = config.parallel
    problem = difference_to_one_rank(plan)
    return {
        "name": parallel.name,
        "world": degrees.world,
        **degrees.by_axis,
        **{axis: ranks for axis, ranks in degrees.folded.items() if ranks > 1},
        "zero_stage": parallel.zero_stage,
        "sequence_parallel": parallel.sequence_parallel and degrees.tp > 1,
        "ranks_per_node": ranks_per_node(config),
        "ranks_per_node_assumed": nodes_are_assumed(config),
        "reduction": parallel.reduction,
        "activation_checkpoint": parallel.activation_checkpoint,
        "activation_checkpoint_every": parallel.activation_checkpoint_every,
        "activation_checkpoint_layers": parallel.activation_checkpoint_layers,
        "compile": plan.compiled,
        "pipeline": pipeline_facts(plan) if degrees.pp > 1 else None,
        "groups": {axis: _group_facts(degrees, axis) for axis in AXES.every() if getattr(degrees, axis) > 1},
        "micro_batches_per_rank": micro_batches,
        "bitwise": problem is None,
        "bitwise_problem": problem,
    }


def cost_facts(plan: Plan, accounting: Accounting = OURS) -> dict[str, Any]:
    """Return `memory_bytes`, `memory_peak`, `accounting`, `bytes_sent` and `traffic_bytes` of a rank.

    `memory_bytes` is `PeakMemory.largest` and the `total` at the peak; `memory_peak` has the peak's `moment`, and its
    `bytes` by kind.
    """
    peak = peak_memory(plan, accounting)
    return {
        "memory_bytes": peak.largest | {"total": peak.total},
        "memory_peak": {"moment": peak.moment, "bytes": peak.at_peak},
        "accounting": accounting.name,
        "bytes_sent": bytes_sent(plan),
        "traffic_bytes": traffic_bytes(plan),
    }


def pipeline_facts(plan: Plan) -> dict[str, Any]:
    """Return a pipeline's `schedule`, `virtual_stages`, `stages` and `bubble_fraction`.

    Each of `stages` has its `pp_rank` (0 .. pp - 1), `layers` as [first, last], and whether it has the `embedding` and
    the `head`. `bubble_fraction` is the idle fraction of a step if all stages take equally long. `peak_memory_pp_rank`
    is the rank that `memory_bytes` and `bytes_sent` describe.
    """
    config, degrees, parallel = plan.config, plan.degrees, plan.config.parallel
    return {
        "schedule": parallel.schedule,
        "virtual_stages": parallel.virtual_stages,
        "stages": [
            {
                "pp_rank": part.index % degrees.pp,
                "layers": [part.layers[0], part.layers[-1]],
                "embedding": part.first,
                "head": part.last,
            }
            for part in split_layers(config.model, degrees.pp * parallel.virtual_stages)
        ],
        "bubble_fraction": bubble_fraction(degrees.pp, plan.micro_batches, parallel.virtual_stages),
        "peak_memory_pp_rank": peak_memory_pp_rank(plan),
    }


def difference_to_one_rank(plan: Plan) -> str | None:
    """Return why the layout does not train to the bits of a single rank with tree summation; None if it does."""
    config, degrees, parallel = plan.config, plan.degrees, plan.config.parallel
    for name, axis in reversed(list(AXES.every().items())):
        if degrees.ranks(name) > 1 and (reason := axis.order_problem(degrees)):
            return reason
    # A graph keeps norms' weights in fp32, FSDP2 gathers them in compute_dtype; without that rounding bits agree.
    rounds = config.precision.gather_dtype != config.precision.master_dtype
    if plan.compiled and rounds and uses_fsdp(parallel, degrees):
        return f"compiled blocks round differently if FSDP2 gathers weights in {config.precision.gather_dtype}"
    if degrees.pp > 1 and config.model.tie_embeddings:
        return "the gradients of the tied embedding are summed over micro-batches on two stages, then added"
    if config.precision.gradient_reduction is not None and degrees.dp > 1:
        return "precision.gradient_reduction rounds each rank's gradients before they are summed"
    if parallel.reduction == "native" and degrees.dp * plan.micro_batches > 1:
        return "parallel.reduction=native sums ranks in the library's order, and micro-batches one after another"
    if degrees.dp > 1 and config.precision.updates_every_micro_batch:
        return (
            f"delayed scales that are updated after every micro-batch (update: micro_batch) use the largest amax of "
            f"the {degrees.dp} micro-batches that ranks run at once"
        )
    return bitwise_problem(degrees, parallel.zero_stage, plan.micro_batches)


def _group_facts(degrees: Degrees, axis: str) -> dict[str, Any]:
    groups = degrees.groups(axis)
    shown = groups if degrees.world <= SHOWN_RANKS else [group[:SHOWN_RANKS] for group in groups[:SHOWN_GROUPS]]
    return {"count": len(groups), "size": len(groups[0]), "stride": groups[0][1] - groups[0][0], "ranks": shown}


def layout_rows(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """Return `layout_facts` as lines for a terminal, each a name and a text."""
    world = f"{facts['world']} rank{'s' if facts['world'] > 1 else ''}"
    degrees = " x ".join(f"{axis}={facts[axis]}" for axis in AXES if facts[axis] > 1)
    folded = [f"{axis}={facts[axis]} among them" for axis in AXES.folded if facts.get(axis, 1) > 1]
    words = [f"{world}: {degrees}" if degrees else world, *folded]
    words += ["sequence parallel"] if facts["sequence_parallel"] else []
    words += [f"ZeRO-{facts['zero_stage']}"] if facts["zero_stage"] else []
    words += [f"{facts['reduction']} reduction"] if facts["world"] > 1 else []
    if modes := facts["activation_checkpoint_layers"]:
        counts = [f"{modes.count(mode)} {mode}" for mode in dict.fromkeys(modes)]
        words.append(f"checkpointing by block ({', '.join(counts)})")
    elif facts["activation_checkpoint"] != "none":
        every = facts["activation_checkpoint_every"]
        words.append(f"{facts['activation_checkpoint']} checkpointing{f' of 1 block in {every}' if every > 1 else ''}")
    words += ["compiled"] if facts["compile"] else []
    differ = f"may differ from one rank's: {facts['bitwise_problem']}"
    return [
        ("layout", ", ".join([facts["name"], *words])),
        *((f"  {axis}", _group_text(group)) for axis, group in facts["groups"].items()),
        ("  bits", "equal one rank's" if facts["bitwise"] else differ),
        *_pipeline_rows(facts["pipeline"]),
    ]


def _pipeline_rows(pipeline: dict[str, Any] | None) -> list[tuple[str, str]]:
    if pipeline is None:
        return []
    several = pipeline["virtual_stages"] > 1
    words = [pipeline["schedule"], *([f"{pipeline['virtual_stages']} stages per rank"] if several else [])]
    words += [f"bubble {pipeline['bubble_fraction']:.1%}", f"most memory on stage {pipeline['peak_memory_pp_rank']}"]
    texts = []
    for stage in pipeline["stages"]:
        low, high = stage["layers"]
        layers = f"layer {low}" if low == high else f"layers {low}-{high}"
        parts = [*(["embedding"] if stage["embedding"] else []), layers, *(["norm, head"] if stage["head"] else [])]
        texts.append(f"[{', '.join(parts)}]")
    shown = texts if len(texts) <= SHOWN_STAGES else [*texts[:2], "..", *texts[-2:]]
    return [("  pipeline", ", ".join(words)), ("  stages", " ".join(shown))]


def _group_text(group: dict[str, Any]) -> str:
    """Return e.g. "512 groups of 2: [0 512] [1 513] [2 514] [3 515] ..."."""
    stride, size = group["stride"], group["size"]
    shown = []
    for ranks in group["ranks"][:SHOWN_GROUPS]:
        first = ranks[0]
        few = ranks if size <= 8 else [first, first + stride, "..", first + (size - 1) * stride]
        shown.append(f"[{' '.join(map(str, few))}]")
    more = " ..." if group["count"] > len(shown) else ""
    return f"{group['count']} group{'s' if group['count'] > 1 else ''} of {size}: {' '.join(shown)}{more}"


def byte_rows(name: str, text: str, kinds: dict[str, int], shown: Callable[[int], str]) -> list[tuple[str, str]]:
    """Return bytes by kind as lines, formatted by `shown`: the sum first, then each kind that is not zero."""
    parts = [(f"  {kind}", shown(size)) for kind, size in kinds.items() if size]
    return [(name, f"{shown(sum(kinds.values()))} {text}"), *parts]


def memory_text(size: int) -> str:
    """Return bytes of device memory in GiB (2^30), the unit of CUDA's messages."""
    return f"{size / GIB:.3f} GiB"


def traffic_text(size: int) -> str:
    """Return bytes of traffic in GB (10^9), matching links' GB/s."""
    return f"{size / 1e9:.3f} GB"


def memory_rows(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the peak memory of a rank, from `plan_facts`, as lines."""
    peak = facts["memory_peak"]
    trainer = "" if facts["accounting"] == OURS.name else f", for {facts['accounting']}"
    text = f"per rank at most, in {peak['moment']}{trainer}, estimated"
    return byte_rows("memory", text, peak["bytes"], memory_text)


def sent_rows(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the bytes that a rank sends in a step, from `plan_facts`, as lines."""
    return byte_rows("sent", "per rank and step", facts["bytes_sent"], traffic_text)


def traffic_row(facts: dict[str, Any]) -> tuple[str, str]:
    """Return the bytes sent within and between machines, from `plan_facts`, as a line."""
    traffic, layout = facts["traffic_bytes"], facts["layout"]
    per_node, assumed = layout["ranks_per_node"], layout["ranks_per_node_assumed"]
    why = ", assumed; set trainer.devices" if assumed else ""
    text = f"{traffic_text(traffic['within_nodes'])} within, {traffic_text(traffic['between_nodes'])} between machines"
    return "  to ranks", f"{text} (of {per_node} rank{'s' if per_node > 1 else ''}{why})"


def matrix_facts(made: Matrix) -> dict[str, Any]:
    """Return the matrix as plain data: {recipe: {device: {"runs", "reason"}}}."""
    return {recipe: {device: each.facts() for device, each in row.items()} for recipe, row in made.items()}


def matrix_rows(made: Matrix) -> tuple[list[list[str]], list[str]]:
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
    """Return the matrix as text for a terminal."""
    rows, reasons = matrix_rows(made)
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([*lines, "", *(f"({number}) {reason}" for number, reason in enumerate(reasons, 1))])
