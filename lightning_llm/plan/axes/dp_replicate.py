"""Replicas: ranks with the same (shards of) parameters and different micro-batches. Imports no torch."""

from typing import TYPE_CHECKING, ClassVar

from lightning_llm.plan.axes.axis import Dimension, MeshAxis
from lightning_llm.plan.gradient_codes import scatter_kind, scattered_bytes
from lightning_llm.plan.memory.units import sums_in_tree
from lightning_llm.plan.nodes import TREE_SCATTER

if TYPE_CHECKING:
    from lightning_llm.plan.traffic import RankStep, Sent


class ReplicaAxis(MeshAxis):
    """Axis of replicas, which sum their gradients once per step: in tree order, or by FSDP2."""

    name: ClassVar[str] = "dp_replicate"
    cuts: ClassVar[tuple[Dimension, ...]] = ("data",)
    on_ranks: ClassVar[str] = "lightning_llm.parallel.dp_replicate:Replicas"

    def add_sent(self, sent: "Sent", step: "RankStep") -> None:
        """Add the all-reduce of gradients; in tree order, its two halves: a reduce-scatter and an all-gather."""
        if self.name not in step.summed_axes:
            return
        if step.config.precision.gradient_reduction is not None:
            replicas = step.degrees.ranks(self.name)
            part = -(-step.units.shard(step.shard_ranks) // replicas)
            sent[scatter_kind(step.config), self.name] += scattered_bytes(step.config, part) * (replicas - 1)
            sent["all_gather", self.name] += step.gradient_bytes * (replicas - 1) // replicas
            return
        summed = {self.name: step.gradient_bytes}
        if step.units.experts:
            # Ranks that share sequences share experts first.
            folded = step.degrees.of_experts.ranks(self.name) < step.degrees.ranks(self.name)
            of_experts = "edp" if folded else self.name
            summed[of_experts] = summed.get(of_experts, 0) + step.expert_gradient_bytes
        for axis, size in summed.items():
            replicas = step.degrees.ranks(axis)
            once = size * (replicas - 1) // replicas
            if sums_in_tree(step.config.parallel):
                sent[TREE_SCATTER, axis] += once
                sent["all_gather", axis] += once
            else:
                sent["all_reduce", axis] += 2 * once


AXIS = ReplicaAxis()
