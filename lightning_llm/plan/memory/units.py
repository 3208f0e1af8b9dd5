"""FSDP2 wrap units by shape: parameters that are gathered and reduced together. Imports no torch."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from lightning_llm.config.schema import Config, ModelConfig, ParallelConfig
from lightning_llm.config.schema.optim import ParameterShard, role_in_block
from lightning_llm.model.structure import Same, block_parameters, first_alike, norm_of
from lightning_llm.plan.degrees import Degrees
from lightning_llm.plan.divisibility import SHARD_AXES


@dataclass(frozen=True)
class Unit:
    """Parameters of one FSDP2 group, unsharded; `cast`: gathered in the compute dtype.

    `coded`: the parameters that are gathered as codes, one byte per element (`buffers.gathered_units`), with
    `block_scales` and `tensor_scales`. `ep`: ranks that hold different experts and so do not shard the same ones;
    `parameters` are those of one of them.
    """

    parameters: tuple[ParameterShard, ...]
    cast: bool
    coded: tuple[ParameterShard, ...] = ()
    block_scales: int = 0
    tensor_scales: int = 0
    ep: int = 1

    def over(self, ranks: int) -> int:
        """Return how many of `ranks` ranks shard these parameters."""
        return max(1, ranks // self.ep)

    def shard(self, ranks: int) -> int:
        """Return the elements of one of `ranks` shards; FSDP2 pads each parameter's rows to a multiple of `ranks`."""
        over = self.over(ranks)
        return sum(-(-each.rows // over) * each.columns for each in self.parameters)

    def shards(self, ranks: int) -> Iterator[ParameterShard]:
        """Yield the shard of every parameter that each of `ranks` ranks holds, including padding."""
        over = self.over(ranks)
        for each in self.parameters:
            yield ParameterShard(-(-each.rows // over), each.columns, each.role)

    def code_bytes(self, ranks: int) -> int:
        """Return the bytes of codes in one of `ranks` shards."""
        return sum(-(-each.rows // ranks) * each.columns for each in self.coded)

    def gathered_bytes(self, ranks: int, width: int) -> int:
        """Return the bytes that each of `ranks` ranks sends into a gather: `width` per element, 1 for a code."""
        return width * self.shard(ranks) - (width - 1) * self.code_bytes(ranks)

    def whole(self, ranks: int) -> int:
        """Return the elements of all shards together, including padding."""
        return self.over(ranks) * self.shard(ranks)


@dataclass(frozen=True)
class Units:
    """The FSDP2 groups that `parallel.dp_shard.shard_decoder` makes of a rank's stages; a group may be empty."""

    blocks: tuple[Unit, ...]
    head: Unit
    embedding: Unit
    root: Unit
    experts: tuple[Unit, ...] = ()
    """The experts of each of `blocks`, if ranks divide them (parallel.ep)."""

    def dense(self) -> Iterator[Unit]:
        """Yield all groups but `experts`, one per block."""
        yield from self.blocks
        yield from (self.head, self.embedding, self.root)

    def each(self) -> Iterator[Unit]:
        """Yield all groups, one or two per block."""
        yield from self.dense()
        yield from self.experts

    def of_blocks(self) -> list[Unit]:
        """Return the groups of blocks in the order of a forward pass."""
        if not self.experts:
            return list(self.blocks)
        return [unit for pair in zip(self.blocks, self.experts, strict=True) for unit in pair]

    def shards(self, ranks: int) -> Iterator[ParameterShard]:
        """Yield the shard of every parameter of the model that each of `ranks` ranks holds."""
        for unit in self.each():
            yield from unit.shards(ranks)

    def shard(self, ranks: int) -> int:
        """Return the elements of the model on one of `ranks` ranks."""
        return sum(unit.shard(ranks) for unit in self.each())


def units_of(
    model: ModelConfig,
    layers: Sequence[int] | None = None,
    first: bool = True,
    last: bool = True,
    tp: int = 1,
    ep: int = 1,
) -> Units:
    """Return the groups of a decoder: one per block, head, embedding, and the rest as the root.

    A tied embedding and a table of positions belong to the root. A pipeline rank has the blocks `layers`, the
    embeddings if it has the `first` stage, and norm and head if it has the `last`. A tensor-parallel rank has its part
    of the linears and of the vocabulary, and whole norms and positions. An expert-parallel rank has its experts.
    """
    same, hidden, rows = Same(model), model.hidden_size, model.padded_vocab_size // tp
    norm = [ParameterShard(hidden, 1, "vector")] * len(norm_of(model).vectors(model))
    table = ParameterShard(rows, hidden, "embedding")
    tied = [table] if model.tie_embeddings and (first or last) else []
    learned = model.position == "learned" and first
    positions = [ParameterShard(model.max_sequence_length, hidden, "embedding")] if learned else []

    alike = [first_alike(model, index) for index in (range(model.num_layers) if layers is None else layers)]
    return Units(
        blocks=tuple(_block(same, index, tp, ep) for index in alike),
        experts=tuple(_experts(same, index, ep) for index in alike) if ep > 1 else (),
        head=Unit((ParameterShard(rows, hidden, "head"),) if last and not model.tie_embeddings else (), cast=True),
        embedding=Unit((table,) if first and not model.tie_embeddings else (), cast=False),
        root=Unit((*(norm if last else []), *positions, *tied), cast=False),
    )


@lru_cache(maxsize=1024)
def _block(same: Same, index: int, tp: int, ep: int) -> Unit:
    """Return a block's group, without the few parameters that no gradient updates: every rank has them whole."""
    trained = (each for each in block_parameters(same.model, index) if each.trained)
    own = (each for each in trained if ep == 1 or each.role != "expert")
    return Unit(tuple(_shard(each.shape, each.role, tp) for each in own), cast=True)


@lru_cache(maxsize=1024)
def _experts(same: Same, index: int, ep: int) -> Unit:
    """Return the group of a block's experts on one of `ep` ranks, gathered in the master dtype (`parallel.ep`)."""
    experts = (each for each in block_parameters(same.model, index) if each.trained and each.role == "expert")
    return Unit(tuple(_shard(each.shape, each.role, ep) for each in experts), cast=False, ep=ep)


def _shard(shape: tuple[int, ...], role: str, tp: int) -> ParameterShard:
    """Return a tensor-parallel rank's part of a block's parameter with this role."""
    axis = SHARD_AXES[role]["w"]
    rows, *rest = (size // tp if index == axis else size for index, size in enumerate(shape))
    return ParameterShard(rows, math.prod(rest), role_in_block(len(shape)))


def sums_in_tree(parallel: ParallelConfig) -> bool:
    """Return whether gradients are summed in tree order; `nodes.with_reduction` replaces `auto` first."""
    return parallel.reduction != "native"


def tree_buffers(micro_batches: int) -> int:
    """Return the largest number of partial sums that wait while the tree adds `micro_batches`.

    All pairs of micro-batches except the last pair go through a binary counter, so with n such pairs the number is
    floor(log2(n + 1)). For a power of two it is log2(micro_batches) - 1.
    """
    return ((micro_batches + 1) // 2).bit_length() - 1


def uses_fsdp(parallel: ParallelConfig, degrees: Degrees) -> bool:
    """Return whether FSDP2 manages the parameters: if ranks shard anything, or if the library sums gradients."""
    return (parallel.zero_stage > 0 and degrees.fsdp > 1) or (not sums_in_tree(parallel) and degrees.dp > 1)


def shard_ranks(parallel: ParallelConfig, degrees: Degrees) -> int:
    """Return the ranks that FSDP2 shards parameters over, including those that share sequences; 1 without FSDP2."""
    return degrees.fsdp if uses_fsdp(parallel, degrees) else 1


def reduces_once(parallel: ParallelConfig, degrees: Degrees) -> bool:
    """Return whether unsharded gradients wait for the last micro-batch of a step (ZeRO-1)."""
    return parallel.zero_stage == 1 and degrees.fsdp > 1


def sums_senders_apart(parallel: ParallelConfig, degrees: Degrees) -> bool:
    """Return whether gradients of divided experts are summed over a step's micro-batches before ranks (`parallel.ep`).

    So they are where gradients are reduced over all ranks once per step: the tree then has each rank's micro-batches
    one after another.
    """
    return sums_in_tree(parallel) and (parallel.zero_stage < 2 or degrees.fsdp == 1)


def micro_batches_per_rank(config: Config, degrees: Degrees) -> int:
    """Return the micro-batches per rank and optimizer step. `data.check` rejects uneven splits."""
    return config.data.global_batch_size // (config.data.micro_batch_size * degrees.dp)
