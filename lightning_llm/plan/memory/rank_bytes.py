"""Bytes that a rank holds, by formula. Imports no torch."""

from collections.abc import Hashable
from typing import NamedTuple

from lightning_llm.config.schema import Config
from lightning_llm.optim.state_bytes import DTYPE_BYTES, StateBytes, state_bytes
from lightning_llm.plan.degrees import Degrees
from lightning_llm.plan.memory.accounting import OURS, Accounting
from lightning_llm.plan.memory.activations import on_gpu
from lightning_llm.plan.memory.buffers import communication_bytes, gather_buffer_bytes, gathered_bytes
from lightning_llm.plan.memory.passes import coming_and_going
from lightning_llm.plan.memory.units import Units, reduces_once, shard_ranks, sums_in_tree, tree_buffers
from lightning_llm.plan.memory.weight_casts import gathered_units, kept_cast_bytes
from lightning_llm.plan.resolve import Plan
from lightning_llm.plan.stages import StagePart, parts_of, rank_kind
from lightning_llm.plan.teachers import teacher_bytes

ALLOCATOR_RESERVE = 0.05
"""Of what comes and goes in a step, what CUDA's caching allocator holds beyond it: blocks of other sizes than are asked
for. An assumption, not a measurement."""


class PeakMemory(NamedTuple):
    """What a rank holds: `largest` of each kind in bytes, whenever that is; `at_peak` what it holds of each at the time
    when the sum is largest, which is the `moment`."""

    largest: dict[str, int]
    at_peak: dict[str, int]
    moment: str

    @property
    def total(self) -> int:
        """Bytes at the peak."""
        return sum(self.at_peak.values())


def memory_bytes(plan: Plan, accounting: Accounting = OURS) -> dict[str, int]:
    """Return bytes on the rank that holds the most: the largest of each kind, and `total`, all kinds at the peak.

    Kinds are largest at different times, so that `total` may be less than their sum. Of equal ranks that is rank 0; in
    a pipeline it is a rank of the stage that holds the most (`peak_memory_pp_rank`).

    - `parameters`, `gradients`, `optimizer`: what persists, in shards or whole (ZeRO, arXiv 1910.02054, section 5; here
      masters are fp32 and the 16-bit weights are gathered). `gradients` are the sum in progress.
    - `teachers`: the weights of `distil.teachers`, whole on each rank.
    - `unsharded_gradients`: ZeRO-1's, which wait for a stage's last micro-batch of a step.
    - `tree_gradients`: partial sums that wait for their partner in the tree (`tree_buffers`).
    - `gathered`: weights that FSDP2 has put together: of the whole model in ZeRO-1 and 2; in ZeRO-3 of the root with
      head and two blocks, or with embedding and one block where that is more.
    - `gather_buffers`: what weights are gathered into before they are taken apart, of two units after one another,
      and codes until they are numbers.
    - `compute_copies`: weights that are cast where they are used, kept for the backward pass.
    - `weight_casts`: quantised weights that are kept from a step's first micro-batch to its last: emulated ones have
      2 bytes per element, or twice that where the two GEMMs read other numbers.
    - `communication`: the largest thing reduced at once, as it is sent and as it is received.
    - `pipeline_buffers`: receives that are posted, the gradient that was sent last, and what micro-batches in flight
      have given to the next stage.
    - `activations`: what parts keep of the micro-batches in flight (`Part.saved_tensors`); of a recomputed block its
      input, and with selective checkpointing `selective_bytes_per_token`.
    - `backward`: what the backward pass of a block has beside it: what it recomputes, the gradients of its
      activations, and those of its weights before they are reduced.
    - `logits`: those of a micro-batch, their gradient, and fp32 copies of a chunk (`model.logit_chunks`), or of a chunk
      of many logits, with gradients of hidden states and head (`model.loss`); they are given back before the first
      block's backward pass. GPipe keeps those of all micro-batches.
    - `teacher_logits`: what teachers predict of a micro-batch, in fp32.
    - `allocator_reserve`: on a GPU, `ALLOCATOR_RESERVE` of what comes and goes.
    """
    peak = peak_memory(plan, accounting)
    return peak.largest | {"total": peak.total}


def peak_memory(plan: Plan, accounting: Accounting = OURS) -> PeakMemory:
    """Return what the rank that holds the most holds."""
    return _fullest(plan, accounting)[1]


def peak_memory_pp_rank(plan: Plan, accounting: Accounting = OURS) -> int:
    """Return the pipeline rank, from 0, of the ranks that hold the most bytes; 0 without one."""
    return _fullest(plan, accounting)[0]


def _fullest(plan: Plan, accounting: Accounting) -> tuple[int, PeakMemory]:
    """Return the pipeline rank that holds the most, the first of equals, and what it holds.

    Of ranks of one kind the first has the most micro-batches in flight under every schedule: the others are not asked.
    """
    config, degrees = plan.config, plan.degrees
    first: dict[Hashable, int] = {}
    for pp_rank in range(degrees.pp):
        first.setdefault(rank_kind(config, parts_of(config.model, config.parallel, degrees, pp_rank)), pp_rank)
    held = {pp_rank: memory_at(plan, pp_rank, accounting) for pp_rank in first.values()}
    fullest = max(held, key=lambda pp_rank: held[pp_rank].total)
    return fullest, held[fullest]


def memory_at(plan: Plan, pp_rank: int, accounting: Accounting = OURS) -> PeakMemory:
    """Return what the ranks at `pp_rank` (0 .. pp - 1) of the pipeline hold."""
    parts = parts_of(plan.config.model, plan.config.parallel, plan.degrees, pp_rank)
    persistent, throughout = held_throughout(plan, parts, accounting)
    largest, at_peak, moment = coming_and_going(plan, parts, pp_rank, accounting)
    transient = throughout | at_peak
    reserve = int(ALLOCATOR_RESERVE * sum(transient.values())) if on_gpu(plan) else 0
    reserved = {"allocator_reserve": reserve}
    return PeakMemory(persistent | throughout | largest | reserved, persistent | transient | reserved, moment)


def held_throughout(
    plan: Plan, parts: list[StagePart], accounting: Accounting = OURS
) -> tuple[dict[str, int], dict[str, int]]:
    """Return the bytes of a rank with stages `parts` that persist, and those of buffers that it has in all passes."""
    config, degrees = plan.config, plan.degrees
    units, ranks = gathered_units(config, parts, degrees), shard_ranks(config.parallel, degrees)
    gradient, once = DTYPE_BYTES[config.precision.main_grad_dtype], reduces_once(config.parallel, degrees)
    state = _state_bytes(config, degrees, units, accounting)
    buffers = tree_buffers(plan.micro_batches) if sums_in_tree(config.parallel) else 0
    persistent = {"parameters": state.parameters, "gradients": state.gradients, "optimizer": state.optimizer}
    if config.distil is not None:
        persistent["teachers"] = teacher_bytes(config)
    throughout = {
        "tree_gradients": buffers * gradient * units.shard(ranks) * (ranks if once else 1),
        "gathered": gathered_bytes(config, units, degrees, accounting),
        "gather_buffers": gather_buffer_bytes(config, units, degrees, accounting),
        "communication": communication_bytes(config, units, degrees),
        "weight_casts": kept_cast_bytes(plan, parts),
    }
    if accounting.buffers:  # gradients are reduced, and weights gathered, where they lie
        throughout = dict.fromkeys(throughout, 0)
    return persistent, throughout


def _state_bytes(config: Config, degrees: Degrees, units: Units, accounting: Accounting) -> StateBytes:
    ranks = shard_ranks(config.parallel, degrees)
    if not accounting.buffers:
        return state_bytes(units.shards(ranks), config.optim, config.chosen_algorithm, config.precision)
    elements, sharing = units.shard(1), degrees.dp_shard if config.parallel.zero_stage else 1
    return StateBytes(parameters=2 * elements, gradients=4 * elements, optimizer=-(-12 * elements // sharing))
