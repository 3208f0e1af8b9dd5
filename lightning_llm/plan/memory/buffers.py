"""Copies of weights and gradients during a step: gathered, cast, and sent. Imports no torch."""

from itertools import pairwise

from lightning_llm.config.schema import Config
from lightning_llm.model.structure import block_linears
from lightning_llm.optim.state_bytes import DTYPE_BYTES
from lightning_llm.plan.degrees import Degrees, replica_axes
from lightning_llm.plan.memory.accounting import OURS, Accounting
from lightning_llm.plan.memory.activations import code_bits, on_gpu, recomputed_layers
from lightning_llm.plan.memory.units import Unit, Units, shard_ranks, sums_in_tree, units_of, uses_fsdp
from lightning_llm.plan.memory.weight_casts import keeps_codes
from lightning_llm.plan.nodes import ranks_per_node, ranks_together
from lightning_llm.plan.resolve import Plan
from lightning_llm.plan.stages import StagePart
from lightning_llm.precision.recipe.module_rules import reasons_to_stay_high

REPLICA_BUCKET_BYTES = 25 * 2**20
"""Largest bucket of `parallel.gradient_sync`, unless one parameter is larger."""


def gathered_bytes(config: Config, units: Units, degrees: Degrees, accounting: Accounting = OURS) -> int:
    """Return the peak bytes of gathered weights; 0 without FSDP2."""
    if not uses_fsdp(config.parallel, degrees):
        return 0
    if config.parallel.zero_stage < 3:
        return sum(_whole_bytes(config, degrees, unit, accounting) for unit in units.each())
    blocks = [_whole_bytes(config, degrees, block, accounting) for block in units.blocks]
    root, head, embedding = (
        _whole_bytes(config, degrees, unit, accounting) for unit in (units.root, units.head, units.embedding)
    )
    two_blocks = max(map(sum, pairwise(blocks)), default=sum(blocks))  # the next one is prefetched
    if accounting.one_root:
        return root + head + embedding + two_blocks
    return root + max(head + two_blocks, embedding + blocks[0])


def _whole_bytes(config: Config, degrees: Degrees, unit: Unit, accounting: Accounting) -> int:
    cast = unit.cast or accounting.one_root
    dtype = config.precision.gather_dtype if cast else config.precision.master_dtype
    return DTYPE_BYTES[dtype] * unit.whole(shard_ranks(config.parallel, degrees))


def gather_buffer_bytes(config: Config, units: Units, degrees: Degrees, accounting: Accounting) -> int:
    """Return the peak bytes of gather buffers: two consecutive units, the root and then blocks."""
    if not uses_fsdp(config.parallel, degrees):
        return 0
    outside = [_whole_bytes(config, degrees, unit, accounting) for unit in (units.root, units.head, units.embedding)]
    root = sum(outside) if accounting.one_root else max(outside)
    ranks, width = shard_ranks(config.parallel, degrees), DTYPE_BYTES[config.precision.gather_dtype]
    blocks = [ranks * unit.gathered_bytes(ranks, width) for unit in units.blocks]
    codes = [ranks * unit.code_bytes(ranks) for unit in units.blocks]  # in separate buffers, until they are converted
    pairs = zip(pairwise(blocks), codes[1:], strict=True)
    return max(root + blocks[0] + codes[0], max((sum(pair) + code for pair, code in pairs), default=0))


def compute_copy_bytes(plan: Plan, part: StagePart, units: Units) -> tuple[int, int]:
    """Return the bytes of weights that are cast on use: (kept per forward pass in flight, for one block at a time).

    Embeddings are looked up in the master dtype. FSDP2 gathers weights already cast, except for norms and a tied
    embedding outside the blocks. A linear with emulated casts keeps its master weight and casts it again. A linear in
    Transformer Engine keeps the 16-bit weight and its codes in both directions, unless the codes are kept for the whole
    step (`weight_casts`).
    """
    config, degrees = plan.config, plan.degrees
    model, recipe = config.model, config.precision
    if recipe.compute_dtype == recipe.master_dtype:
        return 0, 0
    width = DTYPE_BYTES[recipe.compute_dtype]
    # The last norm, and a tied embedding, which is cast to project.
    outside = units_of(model, (), first=False, last=True, tp=degrees.width).root.shard(1) if part.last else 0
    if uses_fsdp(config.parallel, degrees) and recipe.gather_dtype == recipe.compute_dtype:
        return width * outside, 0
    again = set(recomputed_layers(config, [part]))
    sizes = {index: _copied_in_block(plan, index, unit) for index, unit in zip(part.layers, units.blocks, strict=True)}
    head = 0 if _emulates_all(plan) else units.head.shard(1)
    kept = width * (outside + head) + sum(size for index, size in sizes.items() if index not in again)
    return kept, max((sizes[index] for index in again), default=0)


def _copied_in_block(plan: Plan, index: int, unit: Unit) -> int:
    """Return the bytes of cast weights of block `index` that its forward pass keeps."""
    config = plan.config
    width, tp = DTYPE_BYTES[config.precision.compute_dtype], plan.degrees.width
    copied = width * unit.shard(1)
    names = [f"layers.{index}.{linear.name}" for linear in block_linears(config.model, index)]
    reasons = reasons_to_stay_high(names, config.precision, config.model.num_layers)
    for name, linear in zip(names, block_linears(config.model, index), strict=True):
        elements = linear.elements // (tp if linear.role in ("column", "row", "expert") else 1)
        if bits := code_bits(plan, name):
            copied += 0 if keeps_codes(plan, name, index) else int(2 * elements * bits / 8)
        elif reasons[name] is None or _emulates_all(plan):
            copied -= width * elements
    return copied


def _emulates_all(plan: Plan) -> bool:
    """Return whether every linear is emulated, as with fp16 on a CPU."""
    return plan.config.precision.compute_dtype == "fp16" and not on_gpu(plan)


def communication_bytes(config: Config, units: Units, degrees: Degrees) -> int:
    """Return the peak bytes of gradients being reduced: send and receive buffers.

    FSDP2 reduces one group after another. Other gradients go in buckets through the collectives they need
    (`parallel.gradient_sync`), except for the few parameters that tensor-parallel ranks replicate.
    """
    gradient, ranks = DTYPE_BYTES[config.precision.main_grad_dtype], shard_ranks(config.parallel, degrees)
    fsdp = uses_fsdp(config.parallel, degrees)
    largest = 2 * gradient * max(unit.whole(ranks) for unit in units.each()) if fsdp else 0
    shared = degrees.sequence > 1 and not fsdp
    tensors = [gradient * shard.elements for shard in units.shards(ranks)]
    held = [largest, bucket_bytes(sum(tensors), max(tensors), shared, 1)]
    for axis in replica_axes() if sums_in_tree(config.parallel) else ():
        together = ranks_together(degrees, (axis,), ranks_per_node(config))
        held.append(bucket_bytes(sum(tensors), max(tensors), shared, degrees.ranks(axis), together))
    return max(held)


def bucket_bytes(total: int, largest: int, shared: bool, replicas: int, together: int = 1) -> int:
    """Return the peak bytes of buckets for `total` bytes of gradients, `largest` bytes of one parameter.

    A bucket stays in memory through its collectives: an all-reduce over ranks that share sequences (`shared`), one
    all-to-all over `replicas`, or two if a machine first sums its `together` ranks, and an all-gather. The bucket in
    the first all-to-all needs twice its bytes, the one in the second its receive buffer, the last one its part of the
    sum.
    """
    collectives = shared + (2 + (together > 1) if replicas > 1 else 0)
    if not collectives:
        return 0
    bucket = max(largest, min(REPLICA_BUCKET_BYTES, total))
    received = bucket + bucket // replicas if replicas > 1 else 0
    received += bucket // together if together > 1 else 0
    return min(collectives * bucket, total) + received
