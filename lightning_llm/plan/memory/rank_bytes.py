"""Peak bytes of a rank: persistent state, buffers for a whole step, temporary bytes of each pass. Imports no torch."""

import math
from collections.abc import Hashable, Iterator
from typing import NamedTuple

from lightning_llm.config.schema import Config
from lightning_llm.model.flops import CHUNK_ELEMENTS
from lightning_llm.model.structure import block_parameters
from lightning_llm.optim.kinds import DTYPE_BYTES, StateBytes, state_bytes
from lightning_llm.plan.degrees import Degrees
from lightning_llm.plan.memory import OURS, Accounting
from lightning_llm.plan.memory.activations import (
    BlockBytes,
    block_bytes,
    boundary_bytes,
    loss_chunks,
    on_gpu,
    stage_bytes,
    tokens_of,
)
from lightning_llm.plan.memory.buffers import (
    communication_bytes,
    compute_copy_bytes,
    gather_buffer_bytes,
    gathered_bytes,
    gathered_units,
    kept_cast_bytes,
)
from lightning_llm.plan.memory.units import (
    Units,
    reduces_once,
    shard_ranks,
    sums_in_tree,
    sums_senders_apart,
    tree_buffers,
    uses_fsdp,
)
from lightning_llm.plan.resolve import Plan
from lightning_llm.plan.stages import (
    Pass,
    StagePart,
    block_kinds,
    layers_of,
    parts_of,
    passes_of,
    rank_kind,
    receives_waiting,
    units_at,
)
from lightning_llm.plan.teachers import teacher_bytes

Kinds = dict[str, int]


class Stage(NamedTuple):
    """Bytes of one pipeline stage of a rank, by purpose; the whole model without a pipeline."""

    kept: int
    """Activations saved by blocks, embedding and head, per micro-batch in flight."""
    given: int
    """Outputs to the next stage, per micro-batch in flight."""
    received: int
    """Receive buffers for all micro-batches of a step, in trainers that keep one for each; else 0."""
    copies: int
    """Weights cast on use, per micro-batch in flight."""
    recast: int
    """Weights cast again during recomputation, one block at a time."""
    logits: int
    """Logits, per micro-batch in flight."""
    loss: int
    """Temporary bytes of the loss and its gradient, without the logits."""
    taught: int
    """Teachers' predictions, from before the forward pass until the loss has its gradient."""
    teaching: int
    """Peak bytes while the predictions of several teachers are combined."""
    backward: int
    """Temporary bytes of a block's backward pass."""
    unsharded: int
    """Unsharded gradients that wait for the step's last micro-batch."""

    @classmethod
    def of(cls, plan: Plan, part: StagePart, accounting: Accounting) -> "Stage":
        """Return the bytes of the pipeline stage `part`."""
        config, degrees = plan.config, plan.degrees
        units = units_at(config.model, [part], degrees)
        made: dict[Hashable, BlockBytes] = {}
        kinds = list(block_kinds(config, part.layers))
        for index, kind in zip(part.layers, kinds, strict=True):
            if kind not in made:
                made[kind] = block_bytes(plan, index, accounting)
        blocks = [made[kind] for kind in kinds]
        once = reduces_once(config.parallel, degrees) and plan.micro_batches > 1 and not accounting.buffers
        kept_logits, loss = _logits_bytes(plan, accounting) if part.last else (0, 0)
        taught, teaching, gradient = _teacher_bytes(plan)
        copies, recast = (0, 0) if accounting.buffers else compute_copy_bytes(plan, part, units)
        boundary = boundary_bytes(config, degrees)
        waiting = sum(unit.shard(1) for unit in units.dense())
        buffers = plan.micro_batches * boundary * (2 - part.first - part.last)
        reduced = 0
        if uses_fsdp(config.parallel, degrees):
            reduced = DTYPE_BYTES[config.precision.gather_dtype] * max(unit.shard(1) for unit in units.blocks)
            master = DTYPE_BYTES[config.precision.master_dtype]
            reduced = max(reduced, *(master * unit.shard(1) for unit in units.experts), 0)
        return cls(
            kept=sum(each.kept for each in blocks) + stage_bytes(plan, part, accounting),
            given=0 if part.last or accounting.gives_away else boundary,
            received=buffers if accounting.receives_all else 0,
            copies=copies,
            recast=recast,
            logits=kept_logits,
            loss=loss + gradient,
            taught=taught,
            teaching=teaching,
            backward=max(each.backward for each in blocks) + reduced,
            unsharded=DTYPE_BYTES[config.precision.main_grad_dtype] * waiting if once else 0,
        )


def coming_and_going(
    plan: Plan, parts: list[StagePart], pp_rank: int, accounting: Accounting
) -> tuple[Kinds, Kinds, str]:
    """Return temporary bytes of a rank: (maximum of each kind over time, each kind at the peak, moment of the peak).

    The peak is the moment at which the sum of all kinds is largest. Passes follow the schedule's order. A stage's
    gradients wait from its first backward pass to its last. Logits and the loss' temporary tensors are freed before the
    first block's backward pass.
    """
    stages = [Stage.of(plan, part, accounting) for part in parts]
    held, waits = [0] * len(stages), [0] * len(stages)
    largest: Kinds = {}
    peak: tuple[Kinds, str] = ({}, "")

    def look(moment: str, passing: int, backward: int = 0, logits: int = 0, taught: int = 0) -> None:
        nonlocal peak
        found = _kinds(stages, held, waits) | {"backward": backward, "teacher_logits": taught}
        found["logits"] += logits
        found["pipeline_buffers"] += passing
        for kind, size in found.items():
            largest[kind] = max(largest.get(kind, 0), size)
        if sum(found.values()) > sum(peak[0].values()):
            peak = found, moment

    last = plan.micro_batches - 1
    seen = set()
    for each, passing in _passing(plan, pp_rank, accounting):
        at = each.stage // plan.degrees.pp
        stage = stages[at]
        if each.forward:
            if stage.teaching:
                look("the teachers' forward passes", passing, taught=stage.teaching)
            held[at] += 1
        state = each.forward, at, each.micro_batch == last, passing, *held, *waits
        if state in seen:  # most of a step repeats
            held[at] -= not each.forward
            waits[at] = waits[at] if each.forward else 0 if each.micro_batch == last else stage.unsharded
            continue
        seen.add(state)
        if stage.loss:
            look("the loss of a micro-batch", passing, logits=stage.loss, taught=stage.taught)
        if not each.forward:
            waits[at] = stage.unsharded
            look("a block's backward pass", passing, stage.backward, 0 if accounting.keeps_outputs else -stage.logits)
            held[at] -= 1
            waits[at] = 0 if each.micro_batch == last else stage.unsharded
    return largest, *peak


def _passing(plan: Plan, pp_rank: int, accounting: Accounting) -> Iterator[tuple[Pass, int]]:
    """Yield each pass and the bytes of messages at that time: posted receives and the last sent gradient.

    A forward pass's input is not included, since its stage keeps it; neither are sent outputs (`Stage.given`).
    """
    parallel, pp, boundary = plan.config.parallel, plan.degrees.pp, boundary_bytes(plan.config, plan.degrees)
    passes = passes_of(parallel, pp, pp_rank, plan.micro_batches)
    waiting, sent = receives_waiting(parallel, pp, plan.micro_batches)[pp_rank], 0
    for each, received in zip(passes, waiting, strict=True):
        own = each.forward and each.stage > 0
        others = accounting.receives_all or accounting.gives_away
        yield each, 0 if others else boundary * (received - own + sent)
        if not each.forward and each.stage > 0:
            sent = 1


def _kinds(stages: list[Stage], held: list[int], waits: list[int]) -> Kinds:
    found = dict.fromkeys(("compute_copies", "pipeline_buffers", "activations", "logits"), 0)
    for stage, count in zip(stages, held, strict=True):
        found["compute_copies"] += stage.recast + stage.copies * count
        found["pipeline_buffers"] += stage.received + stage.given * count
        found["activations"] += stage.kept * count
        found["logits"] += stage.logits * count
    return {"unsharded_gradients": sum(waits)} | found


def _teacher_bytes(plan: Plan) -> tuple[int, int, int]:
    """Return the bytes of teachers' predictions of a micro-batch: (kept, peak while computed, extra in the loss).

    The divergence adds to the cross entropy: a second gradient of the logits, if labels are learned, too, and five fp32
    arrays per chunk instead of two. While it combines, `Ensemble` has one member's logits and log-probabilities, and
    the mean before and after adding them, in fp32.
    """
    config = plan.config
    if config.distil is None:
        return 0, 0, 0
    width, count = DTYPE_BYTES[config.precision.compute_dtype], len(config.distil.teachers)
    rows = tokens_of(config, plan.degrees)
    predicted, logits = rows * config.model.vocab_size, rows * config.model.padded_vocab_size
    making = 16 * predicted if count > 1 else 4 * predicted + width * logits
    chunk = min(logits, CHUNK_ELEMENTS["cuda" if on_gpu(plan) else "cpu"])
    return 4 * predicted, making, 12 * chunk + (width * logits if config.distil.weight < 1 else 0)


def _logits_bytes(plan: Plan, accounting: Accounting) -> tuple[int, int]:
    """Return the bytes of a micro-batch's logits: (kept, peak of temporary bytes in the loss).

    The loss needs the logits' gradient and, unless compiled, two fp32 copies of a chunk. For many logits it runs over
    parts of the rows and has the gradients of hidden states and weight (`model.loss`). torch's cross entropy over all
    logits in fp32 has the log-probabilities, their gradient and its product with the softmax; with a vocabulary split
    by DTensor also the exponentials (`torch.distributed.tensor.parallel.loss`).
    """
    config, degrees = plan.config, plan.degrees
    logits = tokens_of(config, degrees) * config.model.padded_vocab_size // degrees.width
    width = DTYPE_BYTES[config.precision.compute_dtype]
    if accounting.fp32_logits:
        wide = 4 * logits * (4 if degrees.width > 1 else 3)
        if degrees.pp == 1:
            return 0, wide
        return width * logits, wide
    chunks, capped = loss_chunks(config, degrees, on_gpu(plan)), 1 if config.model.logit_cap else 0  # saved by tanh
    logits, hidden = chunks.at_once * chunks.width, config.model.hidden_size
    fused = plan.compiled and on_gpu(plan) and degrees.width == 1  # `parallel.tp.loss_sum_of`: nothing in fp32
    taken = logits * width + (0 if fused else 8 * min(logits, CHUNK_ELEMENTS["cuda" if on_gpu(plan) else "cpu"]))
    if config.precision.wgrad_dtype is not None and not on_gpu(plan):  # operands are widened
        taken = max(taken, 4 * (logits + chunks.at_once * hidden) - logits * width * capped)
    if chunks.number == 1:
        return logits * width * (1 + capped), taken
    # Kept instead: the gradients of hidden states and weight; of the weight one chunk's, and the sum of all.
    weight = chunks.width * hidden
    given = DTYPE_BYTES[config.precision.wgrad_dtype or config.precision.compute_dtype]
    return chunks.rows * hidden * width + weight * given, logits * width * (1 + capped) + taken + 4 * weight


ALLOCATOR_RESERVE = 0.05
"""Fraction of a step's temporary bytes that CUDA's caching allocator reserves in addition, in blocks of other sizes
than requested. An assumption, not a measurement."""


class PeakMemory(NamedTuple):
    """Peak memory of a rank in bytes, by kind.

    `largest`: maximum of each kind over time; `at_peak`: each kind at `moment`, when their sum is largest.
    """

    largest: dict[str, int]
    at_peak: dict[str, int]
    moment: str

    @property
    def total(self) -> int:
        """Total bytes at the peak."""
        return sum(self.at_peak.values())


def memory_bytes(plan: Plan, accounting: Accounting = OURS) -> dict[str, int]:
    """Return {kind: bytes} of the rank that needs the most memory: the maximum of each kind over time, and `total`.

    `total` is the sum of all kinds at the moment of the peak. It may be less than the sum of the maxima, because kinds
    are largest at different times. The rank is rank 0, or in a pipeline one at `peak_memory_pp_rank`.

    - `parameters`, `gradients`, `optimizer`: persistent state: master weights, the gradient sum in progress, state of
      the optimizer and the training algorithm (ZeRO, arXiv 1910.02054, section 5; here masters are fp32).
    - `teachers`: weights of `distil.teachers`, whole on each rank.
    - `unsharded_gradients`: with ZeRO-1, gradients that wait for a stage's last micro-batch.
    - `tree_gradients`: partial sums of `parallel.reduction=tree` that wait for their partner.
    - `gathered`: weights gathered by FSDP2: the whole model with ZeRO-1 and 2; with ZeRO-3 the root with head and two
      blocks, or with embedding and one block if that is more.
    - `gather_buffers`: buffers that weights are gathered into, for two consecutive units, and codes until they are
      converted.
    - `compute_copies`: weights cast on use and kept for the backward pass, where FSDP2 does not gather them cast.
    - `weight_casts`: quantized weights kept within a step (`precision.keep_weight_casts`): 2 bytes per element if
      emulated, 4 if the two GEMMs read different numbers; native codes.
    - `communication`: send and receive buffers of the largest reduction.
    - `pipeline_buffers`: posted receives, the last gradient sent, outputs of micro-batches in flight.
    - `activations`: activations saved for backward of the micro-batches in flight; of a recomputed block its input,
      with `selective` also the outputs of matrix products and attention.
    - `backward`: temporary bytes of a block's backward pass: recomputed activations, their gradients, and gradients of
      its weights before they are reduced.
    - `logits`: logits of a micro-batch, their gradient and, unless the loss is compiled, an fp32 chunk of 2^27 elements
      (CPU: 2^19); if they are computed by chunks, one chunk with the gradients of hidden states and head. GPipe keeps
      those of all micro-batches.
    - `teacher_logits`: fp32 logits of all teachers for a micro-batch, and one teacher's own at a time.
    - `allocator_reserve`: on a GPU, 5 % of the memory that is allocated and freed within a step.
    """
    peak = peak_memory(plan, accounting)
    return peak.largest | {"total": peak.total}


def peak_memory(plan: Plan, accounting: Accounting = OURS) -> PeakMemory:
    """Return the peak memory of the rank that needs the most."""
    return _fullest(plan, accounting)[1]


def peak_memory_pp_rank(plan: Plan, accounting: Accounting = OURS) -> int:
    """Return the pipeline rank (0 .. pp - 1) with the largest peak memory; 0 without a pipeline."""
    return _fullest(plan, accounting)[0]


def _fullest(plan: Plan, accounting: Accounting) -> tuple[int, PeakMemory]:
    """Return the pipeline rank with the most bytes (the first of equals), and its memory.

    Of ranks with equal structure only the first is computed: it has the most micro-batches in flight in every schedule.
    """
    config, degrees = plan.config, plan.degrees
    first: dict[Hashable, int] = {}
    for pp_rank in range(degrees.pp):
        first.setdefault(rank_kind(config, parts_of(config.model, config.parallel, degrees, pp_rank)), pp_rank)
    held = {pp_rank: memory_at(plan, pp_rank, accounting) for pp_rank in first.values()}
    fullest = max(held, key=lambda pp_rank: held[pp_rank].total)
    return fullest, held[fullest]


def memory_at(plan: Plan, pp_rank: int, accounting: Accounting = OURS) -> PeakMemory:
    """Return the peak memory of a rank at `pp_rank` (0 .. pp - 1) of the pipeline."""
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
    """Return ({kind: persistent bytes}, {kind: bytes of buffers for a whole step}) of a rank with stages `parts`."""
    config, degrees = plan.config, plan.degrees
    units, ranks = gathered_units(config, parts, degrees), shard_ranks(config.parallel, degrees)
    gradient, once = DTYPE_BYTES[config.precision.main_grad_dtype], reduces_once(config.parallel, degrees)
    state = _state_bytes(config, degrees, units, accounting)
    buffers = tree_buffers(plan.micro_batches) if sums_in_tree(config.parallel) else 0
    parameters = state.parameters + _frozen_bytes(config, parts)
    persistent = {"parameters": parameters, "gradients": state.gradients, "optimizer": state.optimizer}
    if config.distil is not None:
        persistent["teachers"] = teacher_bytes(config)
    throughout = {
        "tree_gradients": gradient * _waiting_elements(plan, units, ranks, buffers, once),
        "gathered": gathered_bytes(config, units, degrees, accounting),
        "gather_buffers": gather_buffer_bytes(config, units, degrees, accounting),
        "communication": communication_bytes(config, units, degrees),
        "weight_casts": kept_cast_bytes(plan, parts),
    }
    if accounting.buffers:  # gradients are reduced, and weights gathered, in place
        throughout = dict.fromkeys(throughout, 0)
    return persistent, throughout


def _waiting_elements(plan: Plan, units: Units, ranks: int, buffers: int, once: bool) -> int:
    """Return the elements of partial sums of gradients that wait in the tree.

    Those of divided experts wait for each sender, one micro-batch after another (`parallel.ep`), where gradients are
    reduced once per step.
    """
    elements = buffers * sum(unit.shard(ranks) for unit in units.dense()) * (ranks if once else 1)
    if not units.experts:
        return elements
    if not sums_senders_apart(plan.config.parallel, plan.degrees):
        return elements + buffers * sum(unit.shard(ranks) for unit in units.experts)
    waiting = plan.micro_batches.bit_length() - 1
    return elements + waiting * sum(unit.ep * unit.shard(1) for unit in units.experts)


def _frozen_bytes(config: Config, parts: list[StagePart]) -> int:
    """Return the bytes of the parameters that no gradient updates, which each rank has whole."""
    every = (each for index in layers_of(parts) for each in block_parameters(config.model, index))
    elements = sum(math.prod(each.shape) for each in every if not each.trained)
    return DTYPE_BYTES[config.precision.master_dtype] * elements


def _state_bytes(config: Config, degrees: Degrees, units: Units, accounting: Accounting) -> StateBytes:
    ranks = shard_ranks(config.parallel, degrees)
    if not accounting.buffers:
        return state_bytes(units.shards(ranks), config.optim, config.chosen_algorithm, config.precision)
    elements, sharing = units.shard(1), degrees.dp_shard if config.parallel.zero_stage else 1
    return StateBytes(parameters=2 * elements, gradients=4 * elements, optimizer=-(-12 * elements // sharing))
