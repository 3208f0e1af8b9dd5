"""Bytes that a rank holds, by formula. Imports no torch."""

from itertools import pairwise

from lightning_llm.config.schema import Config
from lightning_llm.model.spec import block_parts, for_layers, mixer_of
from lightning_llm.optim.state_bytes import DTYPE_BYTES, state_bytes
from lightning_llm.plan.degrees import Degrees
from lightning_llm.plan.resolve import Plan
from lightning_llm.plan.stages import StagePart, chunks_in_flight, layers_of, parts_of, units_at
from lightning_llm.plan.units import (
    Unit,
    Units,
    micro_batches_per_rank,
    reduces_once,
    shard_ranks,
    sums_in_tree,
    tree_buffers,
    units_of,
    uses_fsdp,
)

REPLICA_BUCKET_BYTES = 25 * 2**20
"""How much gradient_sync sends at once where replicas are summed."""


def memory_bytes(plan: Plan) -> dict[str, int]:
    """Return bytes on the rank that holds the most, by kind; kinds peak at different times, so the sum is a bound.

    Of equal ranks that is rank 0. In a pipeline it is a rank of the stage that holds the most (`peak_memory_pp_rank`).

    - `parameters`, `gradients`, `optimizer`: what persists, in shards or whole (ZeRO, arXiv 1910.02054, section 5; here
      masters are fp32 and the 16-bit weights are gathered). `gradients` are the sum in progress.
    - `unsharded_gradients`: ZeRO-1's, which wait for the last micro-batch of a step.
    - `tree_gradients`: partial sums that wait for their partner in the tree (`tree_buffers`).
    - `gathered`: weights that FSDP2 has put together: of the whole model in ZeRO-1 and 2; in ZeRO-3 of the root with
      head and two blocks, or with embedding and one block where that is more.
    - `compute_copies`: weights that are cast where they are used, kept for the backward pass.
    - `communication`: the largest thing reduced at once, as it is sent and as it is received.
    - `pipeline_buffers`: what stages receive; torch keeps one buffer per micro-batch and direction.
    - `activations`: what parts keep (`Part.saved_activations`), of Llama and GPT by Korthikanti et al. 2022 (arXiv
      2205.05198) eq. 1 without the attention-score term, which SDPA does not store: 34 s b h per layer in 16 bit; see
      `_layer_bytes` for tensor and context parallelism. Of a recomputed layer its input stays, and with selective
      checkpointing `selective_bytes_per_token`; one layer at a time is whole again. In a pipeline, of all micro-batches
      in flight.
    - `logits`: s b V in the compute dtype and twice in fp32 (log-probabilities and their gradient); GPipe keeps those
      of all micro-batches in the compute dtype.
    """
    return _bytes_at(plan.config, plan.degrees, peak_memory_pp_rank(plan.config, plan.degrees))


def peak_memory_pp_rank(config: Config, degrees: Degrees) -> int:
    """Return the pipeline rank, from 0, of the ranks that hold the most bytes; 0 without one."""
    return max(range(degrees.pp), key=lambda pp_rank: sum(_bytes_at(config, degrees, pp_rank).values()))


def _bytes_at(config: Config, degrees: Degrees, pp_rank: int) -> dict[str, int]:
    parts = parts_of(config.model, config.parallel, degrees, pp_rank)
    units, ranks = units_at(config.model, parts, degrees.tp), shard_ranks(config.parallel, degrees)
    gradient = DTYPE_BYTES[config.precision.main_grad_dtype]
    state = state_bytes(units.shards(ranks), config.optim, config.chosen_algorithm, config.precision)
    micro_batches, once = micro_batches_per_rank(config, degrees), reduces_once(config.parallel, degrees)
    buffers = tree_buffers(micro_batches) if sums_in_tree(config.parallel) else 0
    chunks = chunks_in_flight(config.parallel, degrees.pp, pp_rank, micro_batches)
    return {
        "parameters": state.parameters,
        "gradients": state.gradients,
        "optimizer": state.optimizer,
        "unsharded_gradients": gradient * units.shard(1) if once and micro_batches > 1 else 0,
        "tree_gradients": buffers * gradient * units.shard(ranks) * (ranks if once else 1),
        "gathered": gathered_bytes(config, units, degrees),
        "compute_copies": _compute_copies(config, units, degrees, parts, chunks),
        "communication": _communication_bytes(config, units, degrees),
        "pipeline_buffers": micro_batches
        * boundary_bytes(config, degrees)
        * sum(2 - part.first - part.last for part in parts),
        "activations": activation_bytes(config, degrees, parts, chunks),
        "logits": _logits_bytes(config, degrees, micro_batches) if parts[-1].last else 0,
    }


def tokens_of(config: Config, degrees: Degrees) -> int:
    """Return how many tokens of a micro-batch a rank computes, its tensor-parallel group together."""
    return config.data.micro_batch_size * config.data.sequence_length // degrees.cp


def boundary_bytes(config: Config, degrees: Degrees) -> int:
    """Return the bytes of one micro-batch between two blocks, on one rank."""
    tokens = tokens_of(config, degrees) // (degrees.tp if config.parallel.sequence_parallel else 1)
    return DTYPE_BYTES[config.precision.compute_dtype] * tokens * config.model.hidden_size


def _logits_bytes(config: Config, degrees: Degrees, micro_batches: int) -> int:
    logits = tokens_of(config, degrees) * config.model.padded_vocab_size // degrees.tp
    kept = micro_batches if degrees.pp > 1 and config.parallel.schedule == "gpipe" else 1
    capped = 1 if config.model.logit_cap else 0  # keeps what tanh gave
    return logits * ((kept + capped) * DTYPE_BYTES[config.precision.compute_dtype] + 8)


def gathered_bytes(config: Config, units: Units, degrees: Degrees) -> int:
    """Return the bytes of gathered weights at their peak, 0 where no FSDP2 keeps them."""
    if not uses_fsdp(config.parallel, degrees):
        return 0

    def size(unit: Unit) -> int:
        dtype = config.precision.compute_dtype if unit.cast else config.precision.master_dtype
        return DTYPE_BYTES[dtype] * unit.whole(shard_ranks(config.parallel, degrees))

    if config.parallel.zero_stage < 3:
        return sum(map(size, units.each()))
    blocks = [size(block) for block in units.blocks]
    two_blocks = max(map(sum, pairwise(blocks)), default=sum(blocks))  # the next one is gathered ahead
    return size(units.root) + max(size(units.head) + two_blocks, size(units.embedding) + blocks[0])


def recomputed_layers(config: Config, parts: list[StagePart]) -> list[int]:
    """Return the blocks of a rank's stages that recompute their forward pass, by global index."""
    if config.parallel.activation_checkpoint == "none":
        return []
    return [index for index in layers_of(parts) if index % config.parallel.activation_checkpoint_every == 0]


def activation_bytes(config: Config, degrees: Degrees, parts: list[StagePart], chunks: int) -> int:
    """Return the bytes that the blocks' forward passes leave for the backward pass, of `chunks` stages in flight."""
    again, tokens, layers = recomputed_layers(config, parts), tokens_of(config, degrees), layers_of(parts)
    each = for_layers(config.model, layers, lambda index: _layer_bytes(config, degrees, index))
    whole = dict(zip(layers, each, strict=True))
    kept = {index: whole[index] for index in layers if index not in again}
    for index in again:
        kept[index] = boundary_bytes(config, degrees)
        if config.parallel.activation_checkpoint == "selective":
            kept[index] += tokens * selective_bytes_per_token(config, index, degrees.tp)
    held = sum(kept.values()) * chunks // len(parts) + max((whole[index] for index in again), default=0)
    return held + _mask_bytes(config, degrees, layers) * chunks


def _mask_bytes(config: Config, degrees: Degrees, layers: list[int]) -> int:
    """Return the bytes of the masks that say which keys a rank's queries see, a bool for each pair.

    There is one for each window of the blocks `layers`, None among them; where attention is plainly causal, on whole
    sequences without documents, there is none, nor for recurrent mixers.
    """
    mixers = for_layers(config.model, layers, lambda index: mixer_of(config.model, index))
    windows = {mixer.window_tokens(config.model) for mixer in mixers if not mixer.recurrent}
    if degrees.cp == 1 and not config.data.document_mask:
        windows = {window for window in windows if window is not None and window < config.data.sequence_length}
    masks = len(windows)
    sequences = config.data.micro_batch_size if config.data.document_mask else 1
    return masks * sequences * config.data.sequence_length**2 // degrees.cp


def _layer_bytes(config: Config, degrees: Degrees, index: int) -> int:
    """Return the bytes that the forward pass of block `index` leaves on a rank, of one micro-batch.

    Tensor parallelism divides what lies within mixer and feed-forward (arXiv 2205.05198, eq. 2 and 4), and with
    sequence parallelism what lies outside, too; but the inputs of both stay gathered here, where Megatron gathers them
    again. Of context parallelism mixers keep what they gather (`Mixer.context_elements`).
    """
    width, tokens, tp = DTYPE_BYTES[config.precision.compute_dtype], tokens_of(config, degrees), degrees.tp
    saved = [
        part.saved_activations(config.model, width, config.data.sequence_length)
        for part in block_parts(config.model, index).values()
    ]
    within, gathered, outside = map(sum, zip(*saved, strict=True))
    if config.parallel.sequence_parallel:
        whole = tokens * gathered + tokens * (within + outside) // tp
    else:
        whole = tokens * (gathered + outside) + tokens * within // tp
    if degrees.cp > 1:
        _, kept = mixer_of(config.model, index).context_elements(config.model)
        whole += degrees.cp * tokens * (kept // tp) * width
    return whole


def selective_bytes_per_token(config: Config, index: int, tp: int = 1) -> int:
    """Return the bytes of the outputs that `activation.checkpoint_blocks` keeps of one token in block `index`.

    Those are every linear's in the compute dtype, and of the mixer what its kernel gives (`Part.kernel_outputs`).
    """
    model, width = config.model, DTYPE_BYTES[config.precision.compute_dtype]
    kept = 0
    for part in block_parts(model, index).values():
        kept += part.kernel_outputs(model, width, config.data.sequence_length) // tp
        for linear in part.linears(model):
            kept += width * linear.outputs.length // (tp if linear.role == "column" else 1)
    return kept


def _compute_copies(config: Config, units: Units, degrees: Degrees, parts: list[StagePart], chunks: int) -> int:
    """Return the bytes of weights that the model casts on use. Embeddings are looked up in the master dtype.

    Every forward pass makes its own, so that a pipeline keeps those of all `chunks` in flight.
    """
    model, recipe = config.model, config.precision
    if recipe.compute_dtype == recipe.master_dtype:
        return 0
    # The last norm, and a tied embedding, which is cast to project.
    elements = units_of(model, (), first=False, last=True, tp=degrees.tp).root.shard(1) if parts[-1].last else 0
    if not uses_fsdp(config.parallel, degrees):
        again = set(recomputed_layers(config, parts))
        sizes = dict(zip(layers_of(parts), (block.shard(1) for block in units.blocks), strict=True))
        kept = [size for index, size in sizes.items() if index not in again]
        elements += units.head.shard(1) + max((sizes[index] for index in again), default=0)  # cast again, one at a time
        elements += (len(kept) * chunks // len(parts)) * sum(kept) // max(1, len(kept))
    return DTYPE_BYTES[recipe.compute_dtype] * elements


def _communication_bytes(config: Config, units: Units, degrees: Degrees) -> int:
    gradient, ranks = DTYPE_BYTES[config.precision.main_grad_dtype], shard_ranks(config.parallel, degrees)
    largest = 0
    if uses_fsdp(config.parallel, degrees):
        largest = 2 * gradient * max(unit.whole(ranks) for unit in units.each())
    if degrees.dp_replicate > 1 and sums_in_tree(config.parallel):
        tensors = [shard.elements for shard in units.shards(ranks)]
        bucket = max(gradient * max(tensors), min(REPLICA_BUCKET_BYTES, gradient * sum(tensors)))
        largest = max(largest, 3 * bucket)  # flat, padded to the ranks, received
    return largest
