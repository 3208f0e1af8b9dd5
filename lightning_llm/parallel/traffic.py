"""Bytes that a rank sends in an optimizer step, by formula, for data-parallel layouts and pipelines. Imports no torch."""

from lightning_llm.optim.state_bytes import DTYPE_BYTES
from lightning_llm.parallel.degrees import resolve_degrees
from lightning_llm.parallel.memory import boundary_bytes, heaviest_place
from lightning_llm.parallel.stages import parts_of, units_at
from lightning_llm.parallel.units import Unit, micro_batches_per_rank, uses_fsdp
from lightning_llm.schema import Config


def bytes_sent(config: Config) -> dict[str, int]:
    """Return the bytes that each rank sends to others in one training step, by kind of collective, as a ring sends.

    Of X bytes over R ranks that is X (R - 1) / R for a gather, a scatter or an all-to-all, and twice that for an
    all-reduce. In fp32 a step of DDP, ZeRO-1, and with one micro-batch ZeRO-2, sends 2 Psi elements, ZeRO-3 at most 3
    Psi (ZeRO, arXiv 1910.02054, section 7): head, embedding and root are gathered once per micro-batch, not twice.
    Weights travel in the compute dtype (embeddings and root in the master's), gradients in precision.main_grad_dtype.
    In a pipeline these are the bytes of the ranks that `memory_bytes` is of, and `send` is what goes to the stages
    beside theirs: a micro-batch's hidden states forward, their gradients back, and a tied embedding's gradient once.
    Left out: the counts, norms and flags of a step, some hundred bytes, and the padding of replicas' buckets.
    """
    parallel, recipe = config.parallel, config.precision
    degrees = resolve_degrees(parallel, config.world or config.trainer.devices)
    ranks, replicas = degrees.dp_shard, degrees.dp_replicate
    parts = parts_of(config.model, parallel, degrees, heaviest_place(config, degrees))
    units, turns = units_at(config.model, parts), micro_batches_per_rank(config, degrees)
    sent = dict.fromkeys(("all_gather", "reduce_scatter", "all_to_all", "all_reduce", "send"), 0)

    def gather(unit: Unit) -> int:
        width = DTYPE_BYTES[recipe.compute_dtype if unit.cast else recipe.master_dtype]
        return width * unit.shard(ranks) * (ranks - 1)

    if uses_fsdp(parallel, degrees):
        forward, blocks = sum(map(gather, units.each())), units.num_blocks * gather(units.block)
        sent["all_gather"] = turns * (forward + blocks) if parallel.zero_stage == 3 else forward
    shard = DTYPE_BYTES[recipe.main_grad_dtype] * units.shard(ranks)
    scatter = "all_to_all" if parallel.reduction == "tree" else "reduce_scatter"
    sent[scatter] += (turns if parallel.zero_stage >= 2 else 1) * shard * (ranks - 1)
    sent["send"] = turns * boundary_bytes(config) * sum(2 - part.first - part.last for part in parts)
    if degrees.pp > 1 and config.model.tie_embeddings and (parts[0].first or parts[-1].last):
        table = config.model.padded_vocab_size * config.model.hidden_size
        sent["send"] += DTYPE_BYTES[recipe.main_grad_dtype] * table // ranks
    once = shard * (replicas - 1) // replicas
    if parallel.reduction == "native":
        sent["all_reduce"] += 2 * once
    else:
        sent["all_to_all"] += once
        sent["all_gather"] += once
    return sent
