"""Bytes that a rank sends in an optimizer step, by formula. Imports no torch."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from lightning_llm.config.schema import Config
from lightning_llm.optim.state_bytes import DTYPE_BYTES
from lightning_llm.plan.axes.axis import AXES
from lightning_llm.plan.degrees import Degrees, shard_axes
from lightning_llm.plan.memory.activations import boundary_bytes, recomputed_layers, tokens_of
from lightning_llm.plan.memory.rank_bytes import peak_memory_pp_rank
from lightning_llm.plan.memory.units import Units, micro_batches_per_rank, shard_ranks
from lightning_llm.plan.memory.weight_casts import gathered_units
from lightning_llm.plan.nodes import TREE_SCATTER, ranks_per_node, share_between_nodes
from lightning_llm.plan.resolve import Plan
from lightning_llm.plan.stages import StagePart, layers_of, parts_of

Sent = Counter[tuple[str, str]]
"""Bytes that a rank sends in a step, by kind of collective and the axes whose ranks take part ("dp_shard cp"); the
all-to-alls of the tree are a kind of their own."""

KINDS = ("all_gather", "reduce_scatter", "all_to_all", "all_reduce", "broadcast", "send")


def shards() -> str:
    """Return the axes over which FSDP2 shards, as `Sent` has them: "dp_shard cp"."""
    return " ".join(shard_axes())


def bytes_sent(plan: Plan) -> dict[str, int]:
    """Return the bytes that each rank sends to others in one training step, by kind of collective, as a ring sends.

    Of X bytes over R ranks that is X (R - 1) / R for a gather, a scatter or an all-to-all, and twice that for an
    all-reduce. In fp32 a step of DDP, ZeRO-1, and with one micro-batch ZeRO-2, sends 2 Psi elements, ZeRO-3 at most 3
    Psi (ZeRO, arXiv 1910.02054, section 7): head, embedding and root are gathered once per micro-batch, not twice.
    Weights travel in the recipe's gather_dtype (embeddings and root in the master's), gradients in main_grad_dtype.
    In a pipeline these are the bytes of the ranks that `memory_bytes` is of, and `send` is what goes to the stages
    beside theirs: a micro-batch's hidden states forward, their gradients back, and a tied embedding's gradient once.
    Matrices that the optimizer needs whole travel once to one of the ranks that share them, and back.
    Weights that travel as codes take a byte per element, and 4 of each one's amax in an all-reduce of a step.
    Left out: the counts, norms and flags of a step (`small_bytes`), and the padding of replicas' buckets.
    """
    by_kind = dict.fromkeys(KINDS, 0)
    for (kind, _), size in _sent_on_fullest(plan).items():
        by_kind["all_to_all" if kind == TREE_SCATTER else kind] += size
    return by_kind


def small_bytes(config: Config) -> int:
    """Return the bytes up to which a collective is left out: it carries counts, norms, flags or losses of a step."""
    return max(64, 4 * config.data.global_batch_size // config.data.micro_batch_size)


def traffic_bytes(plan: Plan) -> dict[str, int]:
    """Return `bytes_sent` in all by where they go: `within_nodes` and `between_nodes`, a rank's mean.

    Machines have `ranks_per_node`. A collective over R ranks of k machines goes round a ring that enters each machine
    once, so k of R ranks send to another machine; in an all-to-all every rank sends as much to each of the others. The
    tree sends a machine's sum once where its ranks are a subtree (`nodes.ranks_together`).
    """
    between = 0
    for (kind, axes), size in _sent_on_fullest(plan).items():
        between += int(size * share_between_nodes(plan.degrees, axes.split(), kind, ranks_per_node(plan.config)))
    return {"within_nodes": sum(bytes_sent(plan).values()) - between, "between_nodes": between}


def _sent_on_fullest(plan: Plan) -> Sent:
    return sent_at(plan.config, plan.degrees, peak_memory_pp_rank(plan))


@dataclass(frozen=True)
class RankStep:
    """A step of the ranks with stages `parts`, as the axes see it that add what they send."""

    config: Config
    degrees: Degrees
    parts: list[StagePart]

    @cached_property
    def units(self) -> Units:
        """What the ranks shard."""
        return gathered_units(self.config, self.parts, self.degrees)

    @cached_property
    def layers(self) -> list[int]:
        """Blocks, by global index."""
        return layers_of(self.parts)

    @cached_property
    def recomputed(self) -> list[int]:
        """Those of them that recompute their forward pass."""
        return recomputed_layers(self.config, self.parts)

    @property
    def micro_batches(self) -> int:
        """Of each rank."""
        return micro_batches_per_rank(self.config, self.degrees)

    @property
    def tokens(self) -> int:
        """Of a micro-batch that a rank computes, its tensor-parallel group together."""
        return tokens_of(self.config, self.degrees)

    @property
    def boundary_bytes(self) -> int:
        """Bytes of a micro-batch between two blocks."""
        return boundary_bytes(self.config, self.degrees)

    @property
    def shard_ranks(self) -> int:
        """Ranks over which FSDP2 cuts parameters."""
        return shard_ranks(self.config.parallel, self.degrees)

    @cached_property
    def gradient_bytes(self) -> int:
        """Bytes of a rank's (shards of) gradients."""
        return DTYPE_BYTES[self.config.precision.main_grad_dtype] * self.units.shard(self.shard_ranks)

    @property
    def small_bytes(self) -> int:
        """Bytes up to which a collective is left out."""
        return small_bytes(self.config)

    @property
    def summed_axes(self) -> Sequence[str]:
        """Axes of data over which the training algorithm has gradients summed in every step."""
        return self.config.chosen_algorithm.summed_axes(AXES.cutting("data"))


def sent_at(config: Config, degrees: Degrees, pp_rank: int) -> Sent:
    """Return what the ranks at `pp_rank` (0 .. pp - 1) of the pipeline send in a step."""
    step = RankStep(config, degrees, parts_of(config.model, config.parallel, degrees, pp_rank))
    sent: Sent = Counter()
    for axis in AXES.values():
        axis.add_sent(sent, step)
    ranks, width = step.shard_ranks, degrees.width
    sharing, exchanged = ranks * width, sum(map(config.optim.exchanged_bytes, step.units.shards(ranks)))
    axes = (*(shard_axes() if ranks > 1 else ()), *AXES.cutting("width"))
    sent["all_to_all", " ".join(axes)] += 2 * exchanged * (sharing - 1) // sharing
    return sent
