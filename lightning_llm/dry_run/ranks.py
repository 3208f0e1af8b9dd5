"""Every rank of a plan that differs from others, dry, in processes of their own, and what the formulas say."""

from dataclasses import asdict
from typing import Any

from lightning_llm.dry_run.processes import count_ranks
from lightning_llm.dry_run.rank import RankCounts
from lightning_llm.plan.memory.rank_bytes import memory_bytes, peak_memory_pp_rank
from lightning_llm.plan.nodes import ranks_per_node
from lightning_llm.plan.resolve import Plan
from lightning_llm.plan.traffic import bytes_sent

EXACT = ("parameters", "gradients", "optimizer")
"""Kinds of `memory_bytes` that the formulas have exactly."""


def dry_run(plan: Plan) -> dict[str, Any]:
    """Return what the ranks of `plan` do in one step, counted by running it on fake tensors.

    One rank for each pipeline rank: the first of its stage, which has the largest shards. Keys: `ranks`, a list of
    `RankCounts` as data; of the rank that `plan` is of, `memory_bytes` by kind and `bytes_sent` by kind, with the keys
    of `plan_facts`; `traffic_bytes` within and between nodes, a mean over ranks; `differences`, where formulas and
    counts are not the same: `name`, `planned` and `counted` bytes.

    Raises:
        ConfigError: where a rank cannot be run dry, with the reason.
        RanksFailedError: where a rank's process was killed.
    """
    stride = plan.degrees.world // plan.degrees.pp
    # The last stage takes longest, by its loss: begun last it would run alone.
    counts = count_ranks(plan, range(0, plan.degrees.world, stride)[::-1])[::-1]
    peak = max(counts, key=lambda each: each.peak_bytes)
    planned_of = counts[peak_memory_pp_rank(plan)]
    return {
        "memory_bytes": _memory(peak),
        "peak_memory_pp_rank": peak.pp_rank,
        "bytes_sent": planned_of.sent_bytes,
        "traffic_bytes": _traffic(plan, planned_of),
        "differences": _differences(plan, planned_of),
        "ranks": [{key: value for key, value in asdict(each).items() if key != "between"} for each in counts],
    }


def _memory(counts: RankCounts) -> dict[str, int]:
    held = {kind: getattr(counts, f"{kind}_bytes") for kind in EXACT}
    return {**held, "activations_and_buffers": counts.peak_bytes - sum(held.values()), "total": counts.peak_bytes}


def _traffic(plan: Plan, counts: RankCounts) -> dict[str, int]:
    """Return the bytes by where they go: round a ring, or in an all-to-all from this rank to each of the others."""
    per_node, between = ranks_per_node(plan.config), 0.0
    for kind, ranks, size in counts.between:
        nodes = [rank // per_node for rank in ranks]
        own = nodes.count(counts.rank // per_node)
        share = (len(ranks) - own) / (len(ranks) - 1) if kind == "all_to_all" else len(set(nodes)) / len(ranks)
        between += size * (share if len(set(nodes)) > 1 else 0)
    return {"within_nodes": sum(size for *_, size in counts.between) - int(between), "between_nodes": int(between)}


def _differences(plan: Plan, counts: RankCounts) -> list[dict[str, Any]]:
    planned, sent = memory_bytes(plan), {kind: size for kind, size in bytes_sent(plan).items() if size}
    pairs = [(f"memory_bytes.{kind}", planned[kind], getattr(counts, f"{kind}_bytes")) for kind in EXACT]
    kinds = {*sent, *counts.sent_bytes}
    pairs += [(f"bytes_sent.{kind}", sent.get(kind, 0), counts.sent_bytes.get(kind, 0)) for kind in kinds]
    return [
        {"name": name, "planned": expected, "counted": counted}
        for name, expected, counted in sorted(pairs)
        if expected != counted
    ]
