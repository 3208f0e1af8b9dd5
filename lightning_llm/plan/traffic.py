"""Bytes that a rank sends in an optimizer step, by formula. Imports no torch."""

import math
from collections import Counter

from lightning_llm.config.schema import Config, ModelConfig
from lightning_llm.model.structure import block_linears, block_parameters, for_layers, mixer_of, norm_of
from lightning_llm.optim.state_bytes import DTYPE_BYTES
from lightning_llm.plan.degrees import Degrees
from lightning_llm.plan.memory.activations import boundary_bytes, recomputed_layers, tokens_of
from lightning_llm.plan.memory.rank_bytes import peak_memory_pp_rank
from lightning_llm.plan.memory.units import Unit, micro_batches_per_rank, shard_ranks, sums_in_tree, uses_fsdp
from lightning_llm.plan.memory.weight_casts import gathered_units
from lightning_llm.plan.nodes import SHARD_AXES, TREE_SCATTER, ranks_per_node, share_between_nodes
from lightning_llm.plan.resolve import Plan
from lightning_llm.plan.stages import StagePart, layers_of, parts_of

SHARDS = " ".join(SHARD_AXES)

Sent = Counter[tuple[str, str]]
"""Bytes that a rank sends in a step, by kind of collective and the axes whose ranks take part ("dp_shard cp"); the
all-to-alls of the tree are a kind of their own."""

KINDS = ("all_gather", "reduce_scatter", "all_to_all", "all_reduce", "broadcast", "send")


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


def sent_at(config: Config, degrees: Degrees, pp_rank: int) -> Sent:
    """Return what the ranks at `pp_rank` (0 .. pp - 1) of the pipeline send in a step."""
    parallel, recipe = config.parallel, config.precision
    ranks, replicas = shard_ranks(parallel, degrees), degrees.dp_replicate
    parts = parts_of(config.model, parallel, degrees, pp_rank)
    units, micro_batches = gathered_units(config, parts, degrees), micro_batches_per_rank(config, degrees)
    sent: Sent = Counter()

    def gather(unit: Unit) -> int:
        width = DTYPE_BYTES[recipe.gather_dtype if unit.cast else recipe.master_dtype]
        return unit.gathered_bytes(ranks, width) * (ranks - 1)

    if uses_fsdp(parallel, degrees):
        forward, blocks = sum(map(gather, units.each())), sum(map(gather, units.blocks))
        sent["all_gather", SHARDS] = micro_batches * (forward + blocks) if parallel.zero_stage == 3 else forward
        amaxes = 4 * sum(len(unit.coded) for unit in units.blocks)
        if amaxes > small_bytes(config):
            sent["all_reduce", SHARDS] += 2 * (amaxes * (ranks - 1) // ranks)
            sent["all_reduce", "tp"] += 2 * (amaxes * (degrees.tp - 1) // degrees.tp)
    shard = DTYPE_BYTES[recipe.main_grad_dtype] * units.shard(ranks)
    tree = sums_in_tree(parallel)
    sent[TREE_SCATTER if tree else "reduce_scatter", SHARDS] += (
        (micro_batches if parallel.zero_stage >= 2 else 1) * shard * (ranks - 1)
    )
    sent["send", "pp"] = (
        micro_batches * boundary_bytes(config, degrees) * sum(2 - part.first - part.last for part in parts)
    )
    if degrees.pp > 1 and config.model.tie_embeddings and (parts[0].first or parts[-1].last):
        table = config.model.padded_vocab_size // degrees.tp * config.model.hidden_size
        sent["send", "pp"] += DTYPE_BYTES[recipe.main_grad_dtype] * table // ranks
    once = shard * (replicas - 1) // replicas
    if tree:
        sent[TREE_SCATTER, "dp_replicate"] += once
        sent["all_gather", "dp_replicate"] += once
    else:
        sent["all_reduce", "dp_replicate"] += 2 * once
    sharing, exchanged = ranks * degrees.tp, sum(map(config.optim.exchanged_bytes, units.shards(ranks)))
    sent["all_to_all", f"{SHARDS} tp" if ranks > 1 else "tp"] += 2 * exchanged * (sharing - 1) // sharing
    if degrees.tp > 1:
        _add_tensor_parallel(sent, config, degrees, parts, micro_batches)
    if degrees.cp > 1:
        _add_context_parallel(sent, config, degrees, parts, micro_batches)
        if not uses_fsdp(parallel, degrees):
            sent["all_reduce", "cp"] += 2 * shard * (degrees.cp - 1) // degrees.cp
    return sent


def _add_tensor_parallel(
    sent: Sent, config: Config, degrees: Degrees, parts: list[StagePart], micro_batches: int
) -> None:
    """Add what crosses a tensor-parallel group.

    Each cut part is entered and left once, forward and backward: four times per layer a gather or a scatter of the
    hidden states of all tokens with sequence parallelism, else twice an all-reduce of as many bytes as both together
    (arXiv 2205.05198, section 4.2.2). The embedding is left in the master dtype and the head entered; the loss takes
    three fp32 numbers per token. A recomputed layer repeats its forward pass, up to what is left last. Gradients of
    norms, positions and row-parallel biases are all-reduced once per step, or else the first rank's go to the others;
    those of norms within heads are always all-reduced, and of duplicated linears the first rank's always go. What a
    duplicated linear gives is all-reduced in the backward pass.
    """
    recipe, model, sequence = config.precision, config.model, config.parallel.sequence_parallel
    tokens, hidden = tokens_of(config, degrees), config.model.hidden_size
    once = (degrees.tp - 1) * DTYPE_BYTES[recipe.compute_dtype] * tokens * hidden // degrees.tp
    looked_up = (degrees.tp - 1) * DTYPE_BYTES[recipe.master_dtype] * tokens * hidden // degrees.tp
    layers, again = len(layers_of(parts)), len(recomputed_layers(config, parts))
    first, last = parts[0].first, parts[-1].last
    roles = ("replicate", "per_head", "duplicate")
    alike, per_head, duplicated = (_elements(model, layers_of(parts), role) for role in roles)
    alike += last * hidden * len(norm_of(model).vectors(model))
    alike += model.max_sequence_length * hidden if first and model.position == "learned" else 0
    summed, sent_on = (alike + per_head, duplicated) if sequence else (per_head, alike + duplicated)
    width, ranks = DTYPE_BYTES[recipe.main_grad_dtype], shard_ranks(config.parallel, degrees)
    sent["all_reduce", "tp"] += 2 * (width * summed // ranks) * (degrees.tp - 1) // degrees.tp
    sent["broadcast", "tp"] += (width * sent_on // ranks) * (degrees.tp - 1) // degrees.tp
    given = DTYPE_BYTES[recipe.compute_dtype] * tokens * _duplicated_outputs(model, layers_of(parts))
    sent["all_reduce", "tp"] += micro_batches * 2 * given * (degrees.tp - 1) // degrees.tp
    if sequence:
        sent["all_gather", "tp"] += micro_batches * ((4 * layers + 2 * again + last) * once + first * looked_up)
        sent["reduce_scatter", "tp"] += micro_batches * ((4 * layers + again + last) * once + first * looked_up)
    else:
        sent["all_reduce", "tp"] += micro_batches * 2 * ((4 * layers + again + last) * once + first * looked_up)
    if last:
        sent["all_reduce", "tp"] += micro_batches * 2 * (3 * 4 * tokens) * (degrees.tp - 1) // degrees.tp


def _elements(model: ModelConfig, layers: list[int], role: str) -> int:
    """Return the elements of the parameters of this role in the blocks `layers`, as norms and row-parallel biases."""

    def within(index: int) -> int:
        return sum(math.prod(each.shape) for each in block_parameters(model, index) if each.role == role)

    return sum(for_layers(model, layers, within))


def _duplicated_outputs(model: ModelConfig, layers: list[int]) -> int:
    """Return the elements per token that duplicated linears of the blocks `layers` give."""

    def within(index: int) -> int:
        return sum(linear.outputs.length for linear in block_linears(model, index) if linear.role == "duplicate")

    return sum(for_layers(model, layers, within))


def _add_context_parallel(
    sent: Sent, config: Config, degrees: Degrees, parts: list[StagePart], micro_batches: int
) -> None:
    """Add what every mixer gathers (keys and values), forward, twice where recomputed, and its gradients back."""
    model, layers = config.model, layers_of(parts)
    per_element = DTYPE_BYTES[config.precision.compute_dtype] * tokens_of(config, degrees) * (degrees.cp - 1)

    def gathered(index: int) -> int:
        return per_element * (mixer_of(model, index).context_elements(model) // degrees.tp)

    forward = for_layers(model, [*layers, *recomputed_layers(config, parts)], gathered)
    sent["all_gather", "cp"] += micro_batches * sum(forward)
    sent["reduce_scatter", "cp"] += micro_batches * sum(for_layers(model, layers, gathered))
