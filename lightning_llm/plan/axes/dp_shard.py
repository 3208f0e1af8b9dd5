"""ZeRO: ranks that together hold one copy of the parameters and compute different micro-batches. Imports no torch."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar

from lightning_llm.base.errors import Problem
from lightning_llm.config.schema import Config
from lightning_llm.optim.kinds import DTYPE_BYTES
from lightning_llm.plan.axes.axis import AXES, Dimension, MeshAxis
from lightning_llm.plan.degrees import Degrees, shard_axes
from lightning_llm.plan.gradient_codes import scatter_kind, scattered_bytes
from lightning_llm.plan.memory.units import Unit, uses_fsdp

if TYPE_CHECKING:
    from lightning_llm.plan.traffic import RankStep, Sent


class ShardAxis(MeshAxis):
    """Axis of FSDP2's shards. Its traffic covers all ranks that FSDP2 shards over, including context-parallel ranks."""

    name: ClassVar[str] = "dp_shard"
    cuts: ClassVar[tuple[Dimension, ...]] = ("data", "parameters")
    in_every_mesh: ClassVar[bool] = True
    """True, because FSDP2 shards over this axis even if its degree is 1."""

    def layout_problems(self, config: Config, degrees: Degrees, fits: bool) -> Iterator[Problem]:
        if config.parallel.zero_stage == 0 and degrees.dp_shard > 1:
            text = f"is 0, and dp_shard={degrees.dp_shard} needs sharding. Set it to 1, 2 or 3, or use dp_replicate."
            yield Problem("parallel.zero_stage", text)
        algorithm = config.chosen_algorithm
        if degrees.dp_shard > 1 and self.name not in algorithm.summed_axes(AXES.cutting("data")):
            ranks = f"dp_shard={degrees.dp_shard} ranks unsummed, but FSDP2 sums them"
            text = f"is {algorithm.name}, which leaves gradients of {ranks}."
            yield Problem("algorithm", f"{text} Set parallel.dp_shard=1 and parallel.dp_replicate instead.")

    def add_sent(self, sent: "Sent", step: "RankStep") -> None:
        """Add gathers of weights, scatters of gradients, and amaxes of weights that are gathered as codes."""
        parallel, recipe, degrees, units = step.config.parallel, step.config.precision, step.degrees, step.units
        shards, ranks = " ".join(shard_axes()), step.shard_ranks

        def gather(unit: Unit) -> int:
            width = DTYPE_BYTES[recipe.gather_dtype if unit.cast else recipe.master_dtype]
            return unit.gathered_bytes(ranks, width) * (unit.over(ranks) - 1)

        if uses_fsdp(parallel, degrees):
            forward, blocks, experts = (sum(map(gather, each)) for each in (units.dense(), units.blocks, units.experts))
            each = parallel.zero_stage == 3
            sent["all_gather", shards] += step.micro_batches * (forward + blocks) if each else forward
            if units.experts:
                sent["all_gather", "edp"] += step.micro_batches * 2 * experts if each else experts
            of_tensors, width = 4 * sum(unit.tensor_scales for unit in units.blocks), degrees.width
            amaxes = of_tensors + 4 * sum(unit.block_scales for unit in units.blocks)
            if amaxes > step.small_bytes:
                sent["all_reduce", shards] += 2 * (amaxes * (ranks - 1) // ranks)
            if of_tensors > step.small_bytes:
                sent["all_reduce", "tp"] += 2 * (of_tensors * (width - 1) // width)
        times = step.micro_batches if parallel.zero_stage >= 2 else 1
        scatter = scatter_kind(step.config)
        scattered = sum(scattered_bytes(step.config, unit.shard(ranks)) for unit in units.dense())
        sent[scatter, shards] += times * scattered * (ranks - 1)
        if units.experts:
            sent[scatter, "edp"] += times * step.expert_gradient_bytes * (max(1, ranks // degrees.ranks("ep")) - 1)


AXIS = ShardAxis()
