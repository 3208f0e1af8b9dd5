"""Bytes that a rank holds, by formula. Imports no torch."""

from lightning_llm.config.schema import Config
from lightning_llm.optim.state_bytes import DTYPE_BYTES, state_bytes
from lightning_llm.plan.degrees import Degrees
from lightning_llm.plan.resolve import Plan
from lightning_llm.plan.stages import StagePart, chunks_in_flight, parts_of, units_at
from lightning_llm.plan.units import (
    Unit,
    Units,
    micro_batches_per_rank,
    reduces_once,
    shard_ranks,
    sums_in_tree,
    units_of,
    uses_fsdp,
)

REPLICA_BUCKET_BYTES = 25 * 2**20
"""How much gradient_sync sends at once where replicas are summed."""


def memory_bytes(plan: Plan) -> dict[str, int]:
    """Return bytes on the rank that holds the most, by kind; kinds peak at different times, so the sum is a bound.

    Of equal ranks that is rank 0. In a pipeline it is a rank of the stage that holds the most (`heaviest_place`).

    - `parameters`, `gradients`, `optimizer`: what persists, in shards or whole (ZeRO, arXiv 1910.02054, section 5; here
      masters are fp32 and the 16-bit weights are gathered). `gradients` are the sum in progress.
    - `unsharded_gradients`: ZeRO-1's, which wait for the last micro-batch of a step.
    - `tree_gradients`: partial sums that wait for their partner in the tree (`tree_buffers`).
    - `gathered`: weights that FSDP2 has put together: of the whole model in ZeRO-1 and 2; in ZeRO-3 of the root with
      head and two blocks, or with embedding and one block where that is more.
    - `compute_copies`: weights that are cast where they are used, kept for the backward pass.
    - `communication`: the largest thing reduced at once, as it is sent and as it is received.
    - `pipeline_buffers`: what stages receive; torch keeps one buffer per micro-batch and direction.
    - `activations`: Korthikanti et al. 2022 (arXiv 2205.05198) eq. 1 without the attention-score term, which SDPA does
      not store: 34 s b h per layer in 16 bit; see `_layer_bytes` for tensor and context parallelism. Of a recomputed
      layer its input stays, and with selective checkpointing `selective_bytes_per_token`; one layer at a time is whole
      again. In a pipeline, of all micro-batches in flight.
    - `logits`: s b V in the compute dtype and twice in fp32 (log-probabilities and their gradient); GPipe keeps those
      of all micro-batches in the compute dtype.
    """
    return _bytes_at(plan.config, plan.degrees, heaviest_place(plan.config, plan.degrees))


def heaviest_place(config: Config, degrees: Degrees) -> int:
    """Return the place in the pipeline, from 0, of the ranks that hold the most bytes; 0 without one."""
    return max(range(degrees.pp), key=lambda place: sum(_bytes_at(config, degrees, place).values()))


def _bytes_at(config: Config, degrees: Degrees, place: int) -> dict[str, int]:
    parts = parts_of(config.model, config.parallel, degrees, place)
    units, ranks = units_at(config.model, parts, degrees.tp), shard_ranks(config.parallel, degrees)
    gradient = DTYPE_BYTES[config.precision.main_grad_dtype]
    state = state_bytes(units.shards(ranks), config.optim, config.precision)
    turns, once = micro_batches_per_rank(config, degrees), reduces_once(config.parallel, degrees)
    buffers = tree_buffers(turns) if sums_in_tree(config.parallel) else 0
    chunks = chunks_in_flight(config.parallel, degrees.pp, place, turns)
    return {
        "parameters": state.parameters,
        "gradients": state.gradients,
        "optimizer": state.optimizer,
        "unsharded_gradients": gradient * units.shard(1) if once and turns > 1 else 0,
        "tree_gradients": buffers * gradient * units.shard(ranks) * (ranks if once else 1),
        "gathered": gathered_bytes(config, units, degrees),
        "compute_copies": _compute_copies(config, units, degrees, parts, chunks),
        "communication": _communication_bytes(config, units, degrees),
        "pipeline_buffers": turns * boundary_bytes(config, degrees) * sum(2 - part.first - part.last for part in parts),
        "activations": activation_bytes(config, degrees, parts, chunks),
        "logits": _logits_bytes(config, degrees, turns) if parts[-1].last else 0,
    }


def tokens_of(config: Config, degrees: Degrees) -> int:
    """Return how many tokens of a micro-batch a rank computes, its tensor-parallel group together."""
    return config.data.micro_batch_size * config.data.sequence_length // degrees.cp


def boundary_bytes(config: Config, degrees: Degrees) -> int:
    """Return the bytes of one micro-batch between two blocks, on one rank."""
    tokens = tokens_of(config, degrees) // (degrees.tp if config.parallel.sequence_parallel else 1)
    return DTYPE_BYTES[config.precision.compute_dtype] * tokens * config.model.hidden_size


def _logits_bytes(config: Config, degrees: Degrees, turns: int) -> int:
    logits = tokens_of(config, degrees) * config.model.padded_vocab_size // degrees.tp
    kept = turns if degrees.pp > 1 and config.parallel.schedule == "gpipe" else 1
    return logits * (kept * DTYPE_BYTES[config.precision.compute_dtype] + 8)


def tree_buffers(turns: int) -> int:
    """Return how many sums wait at most beside the running one while `turns` micro-batches are added by the tree.

    Pairs are pushed to a binary counter, all but the last: floor(log2(pairs + 1)), which is log2(turns) - 1 for powers
    of two.
    """
    return ((turns + 1) // 2).bit_length() - 1


def gathered_bytes(config: Config, units: Units, degrees: Degrees) -> int:
    """Return the bytes of gathered weights at their peak, 0 where no FSDP2 keeps them."""
    if not uses_fsdp(config.parallel, degrees):
        return 0

    def size(unit: Unit) -> int:
        dtype = config.precision.compute_dtype if unit.cast else config.precision.master_dtype
        return DTYPE_BYTES[dtype] * unit.whole(shard_ranks(config.parallel, degrees))

    if config.parallel.zero_stage < 3:
        return sum(map(size, units.each()))
    two_blocks = min(2, units.num_blocks) * size(units.block)  # the next one is gathered ahead
    return size(units.root) + max(size(units.head) + two_blocks, size(units.embedding) + size(units.block))


def recomputed_layers(config: Config, parts: list[StagePart]) -> int:
    """Return how many blocks of a rank's stages recompute their forward pass."""
    if config.parallel.activation_checkpoint == "none":
        return 0
    return sum(index % config.parallel.activation_checkpoint_every == 0 for part in parts for index in part.layers)


def activation_bytes(config: Config, degrees: Degrees, parts: list[StagePart], chunks: int) -> int:
    """Return the bytes that the blocks' forward passes leave for the backward pass, of `chunks` stages in flight."""
    again = recomputed_layers(config, parts)
    whole, kept = _layer_bytes(config, degrees), boundary_bytes(config, degrees)
    if config.parallel.activation_checkpoint == "selective":
        kept += tokens_of(config, degrees) * selective_bytes_per_token(config, degrees.tp)
    layers = sum(len(part.layers) for part in parts)
    held = ((layers - again) * whole + again * kept) * chunks // len(parts) + bool(again) * whole
    return held + _mask_bytes(config, degrees) * chunks


def _mask_bytes(config: Config, degrees: Degrees) -> int:
    """Return the bytes of the mask that says which keys of all ranks a rank's queries see: a bool for each pair."""
    if degrees.cp == 1:
        return 0
    sequences = config.data.micro_batch_size if config.data.document_mask else 1
    return sequences * config.data.sequence_length**2 // degrees.cp


def _layer_bytes(config: Config, degrees: Degrees) -> int:
    """Return the bytes that the forward pass of one block leaves on a rank, of one micro-batch.

    Tensor parallelism (arXiv 2205.05198, eq. 2 and 4): of 34, the 24 within attention and feed-forward are divided, and
    with sequence parallelism the 10 outside, too; but the inputs of both parts, 4, stay gathered here, where Megatron
    gathers them again. Context parallelism keeps the keys and values of all tokens, for all heads, as attention with a
    mask takes them on CUDA (`model.attention.for_all_heads`).
    """
    model, width, tp = config.model, DTYPE_BYTES[config.precision.compute_dtype], degrees.tp
    per_token = 34 if tp == 1 else 4 + 30 / tp if config.parallel.sequence_parallel else 10 + 24 / tp
    whole = int(per_token * tokens_of(config, degrees) * model.hidden_size) * width // 2
    if degrees.cp > 1:
        keys = 2 * model.num_heads * model.attention_head_dim // tp
        whole += degrees.cp * tokens_of(config, degrees) * keys * width
    return whole


def selective_bytes_per_token(config: Config, tp: int = 1) -> int:
    """Return the bytes of the outputs that `activation.checkpoint_blocks` keeps of one token in one block.

    Those are every matrix product's in the compute dtype: q, k, v, o, the feed-forward network's two or three; and
    attention's, with one fp32 log-sum-exp per head.
    """
    model = config.model
    query, key = model.num_heads * model.attention_head_dim, model.num_kv_heads * model.attention_head_dim
    widen = 2 if model.activation == "swiglu" else 1
    outputs = (2 * query + 2 * key + widen * model.ffn_hidden_size) // tp + 2 * model.hidden_size
    return DTYPE_BYTES[config.precision.compute_dtype] * outputs + 4 * model.num_heads // tp


def _compute_copies(config: Config, units: Units, degrees: Degrees, parts: list[StagePart], chunks: int) -> int:
    """Return the bytes of weights that the model casts on use. Embeddings are looked up in the master dtype.

    Every forward pass makes its own, so that a pipeline keeps those of all `chunks` in flight.
    """
    model, recipe = config.model, config.precision
    if recipe.compute_dtype == recipe.master_dtype:
        return 0
    # The last norm, and a tied embedding, which is cast to project.
    elements = units_of(model, 0, first=False, last=True, tp=degrees.tp).root.shard(1) if parts[-1].last else 0
    if not uses_fsdp(config.parallel, degrees):
        again = recomputed_layers(config, parts)
        blocks = (units.num_blocks - again) * chunks // len(parts)
        blocks += bool(again)  # a recomputed block casts its weights again, too
        elements += units.head.shard(1) + blocks * units.block.shard(1)
    return DTYPE_BYTES[recipe.compute_dtype] * elements


def _communication_bytes(config: Config, units: Units, degrees: Degrees) -> int:
    gradient, ranks = DTYPE_BYTES[config.precision.main_grad_dtype], shard_ranks(config.parallel, degrees)
    largest = 0
    if uses_fsdp(config.parallel, degrees):
        largest = 2 * gradient * max(unit.whole(ranks) for unit in units.each())
    if degrees.dp_replicate > 1 and sums_in_tree(config.parallel):
        tensors = [-(-rows // ranks) * width for unit in units.each() for rows, width in unit.shapes]
        bucket = max(gradient * max(tensors), min(REPLICA_BUCKET_BYTES, gradient * sum(tensors)))
        largest = max(largest, 3 * bucket)  # flat, padded to the ranks, received
    return largest
