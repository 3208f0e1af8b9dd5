"""Bytes that a rank sends in an optimizer step, by formula. Imports no torch."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from lightning_llm.config.schema import Config
from lightning_llm.model.experts.kinds import MoE
from lightning_llm.model.structure import feed_forward_of
from lightning_llm.optim.kinds import DTYPE_BYTES
from lightning_llm.plan.axes.axis import AXES
from lightning_llm.plan.degrees import Degrees, shard_axes
from lightning_llm.plan.memory.activations import boundary_bytes, recomputed_layers, tokens_of
from lightning_llm.plan.memory.buffers import gathered_units
from lightning_llm.plan.memory.rank_bytes import peak_memory_pp_rank
from lightning_llm.plan.memory.units import Units, micro_batches_per_rank, shard_ranks
from lightning_llm.plan.nodes import TREE_SCATTER, ranks_per_node, share_between_nodes
from lightning_llm.plan.resolve import Plan
from lightning_llm.plan.stages import StagePart, layers_of, parts_of

Sent = Counter[tuple[str, str]]
"""Bytes that a rank sends in a step, by (kind of collective, participating axes, e.g. "dp_shard cp"). The tree's
all-to-alls have a separate kind."""

KINDS = ("all_gather", "reduce_scatter", "all_to_all", "all_reduce", "broadcast", "send")


def shards() -> str:
    """Return the axes over which FSDP2 shards, as they appear in keys of `Sent`: "dp_shard cp"."""
    return " ".join(shard_axes())


def bytes_sent(plan: Plan) -> dict[str, int]:
    """Return the bytes that a rank sends in one training step, by kind of collective, as a ring sends.

    - X bytes over R ranks count as X (R - 1) / R for a gather, a scatter or an all-to-all, and twice that for an
      all-reduce.
    - In fp32 a step of DDP, of ZeRO-1, and of ZeRO-2 with one micro-batch sends 2 Psi elements; ZeRO-3 sends at most 3
      Psi (ZeRO, arXiv 1910.02054, section 7), since head, embedding and root are gathered once per micro-batch, not
      twice.
    - Weights are sent in the recipe's gather_dtype (embeddings and root in the master dtype), gradients in
      main_grad_dtype. Weights that are gathered as codes take a byte per element, plus a 4-byte amax each in an
      all-reduce per step.
    - In a pipeline, these are the bytes of the rank that `memory_bytes` describes. `send` counts hidden states sent to
      the next stage, their gradients sent back, and a tied embedding's gradient once.
    - Matrices that the optimizer needs whole are sent once to one of the ranks that share them, and back.
    - Not counted: counts, norms and flags of a step (`small_bytes`), and the padding of replicas' buckets.
    """
    by_kind = dict.fromkeys(KINDS, 0)
    for (kind, _), size in _sent_on_fullest(plan).items():
        by_kind["all_to_all" if kind == TREE_SCATTER else kind] += size
    return by_kind


def small_bytes(config: Config) -> int:
    """Return the size in bytes up to which a collective is not counted: counts, norms, flags or losses of a step."""
    return max(64, 4 * config.data.global_batch_size // config.data.micro_batch_size)


def traffic_bytes(plan: Plan) -> dict[str, int]:
    """Return the total of `bytes_sent` by destination: `within_nodes` and `between_nodes`, the mean over ranks.

    A collective over R ranks on k machines uses a ring that enters each machine once, so k of R ranks send to another
    machine. In an all-to-all, every rank sends the same amount to each other rank. The tree sends a machine's sum once
    if its ranks form a subtree (`nodes.ranks_together`).
    """
    between = 0
    for (kind, axes), size in _sent_on_fullest(plan).items():
        between += int(size * share_between_nodes(plan.degrees, axes.split(), kind, ranks_per_node(plan.config)))
    return {"within_nodes": sum(bytes_sent(plan).values()) - between, "between_nodes": between}


def _sent_on_fullest(plan: Plan) -> Sent:
    return sent_at(plan.config, plan.degrees, peak_memory_pp_rank(plan))


@dataclass(frozen=True)
class RankStep:
    """One optimizer step of a rank with the pipeline stages `parts`: the input of `MeshAxis.add_sent`."""

    config: Config
    degrees: Degrees
    parts: list[StagePart]

    @cached_property
    def units(self) -> Units:
        """FSDP2 units of the ranks."""
        return gathered_units(self.config, self.parts, self.degrees)

    @cached_property
    def layers(self) -> list[int]:
        """Global indices of the blocks on these ranks."""
        return layers_of(self.parts)

    @cached_property
    def recomputed(self) -> list[int]:
        """Global indices of the blocks on these ranks that recompute their forward pass."""
        return recomputed_layers(self.config, self.parts)

    @property
    def micro_batches(self) -> int:
        """Micro-batches per rank and step."""
        return micro_batches_per_rank(self.config, self.degrees)

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch that a rank's tensor-parallel group computes."""
        return tokens_of(self.config, self.degrees)

    @property
    def boundary_bytes(self) -> int:
        """Bytes of the hidden states of a micro-batch between two blocks."""
        return boundary_bytes(self.config, self.degrees)

    @property
    def shard_ranks(self) -> int:
        """Ranks over which FSDP2 shards parameters."""
        return shard_ranks(self.config.parallel, self.degrees)

    @cached_property
    def gradient_bytes(self) -> int:
        """Bytes of a rank's (shards of) gradients, without those of `expert_gradient_bytes`."""
        elements = sum(unit.shard(self.shard_ranks) for unit in self.units.dense())
        return DTYPE_BYTES[self.config.precision.main_grad_dtype] * elements

    @cached_property
    def expert_gradient_bytes(self) -> int:
        """Bytes of a rank's (shards of) gradients of experts that ranks divide (parallel.ep)."""
        elements = sum(unit.shard(self.shard_ranks) for unit in self.units.experts)
        return DTYPE_BYTES[self.config.precision.main_grad_dtype] * elements

    @property
    def small_bytes(self) -> int:
        """Size in bytes up to which a collective is not counted."""
        return small_bytes(self.config)

    @property
    def summed_axes(self) -> Sequence[str]:
        """Data axes over which the training algorithm sums gradients in every step."""
        return self.config.chosen_algorithm.summed_axes(AXES.cutting("data"))


def sent_at(config: Config, degrees: Degrees, pp_rank: int) -> Sent:
    """Return the bytes that the ranks at `pp_rank` (0 .. pp - 1) of the pipeline send in a step."""
    step = RankStep(config, degrees, parts_of(config.model, config.parallel, degrees, pp_rank))
    sent: Sent = Counter()
    for axis in AXES.every().values():
        axis.add_sent(sent, step)
    ranks, width = step.shard_ranks, degrees.width
    dense = (shard for unit in step.units.dense() for shard in unit.shards(ranks))
    sharing, exchanged = ranks * width, sum(map(config.optim.exchanged_bytes, dense))
    axes = (*(shard_axes() if ranks > 1 else ()), *AXES.cutting("width"))
    sent["all_to_all", " ".join(axes)] += 2 * exchanged * (sharing - 1) // sharing
    sharing = ranks // degrees.ranks("ep")
    if sharing > 1 and step.units.experts:
        of_experts = (shard for unit in step.units.experts for shard in unit.shards(ranks))
        exchanged = sum(map(config.optim.exchanged_bytes, of_experts))
        sent["all_to_all", "edp"] += 2 * exchanged * (sharing - 1) // sharing
    for summed in (step.summed_axes, AXES.cutting("sequence")):
        several = [axis for axis in summed if degrees.ranks(axis) > 1]
        if (counts := _counted_bytes(step)) > step.small_bytes and several:
            ranks = degrees.ranks(*several)
            sent["all_reduce", " ".join(several)] += 2 * counts * (ranks - 1) // ranks
    return sent


def _counted_bytes(step: RankStep) -> int:
    """Return the bytes of the counts that routers sum over ranks in a step: int64 per expert, and of dropped choices.

    See `train.routing`.
    """
    kinds = (feed_forward_of(step.config.model, index) for index in step.layers)
    return sum(8 * (kind.experts + 1) for kind in kinds if isinstance(kind, MoE))
