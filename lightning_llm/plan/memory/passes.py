"""Bytes that come and go with the forward and backward passes of a step. Imports no torch."""

from collections.abc import Hashable, Iterator
from typing import NamedTuple

from lightning_llm.model.logit_chunks import CHUNK_ELEMENTS
from lightning_llm.optim.state_bytes import DTYPE_BYTES
from lightning_llm.plan.memory.accounting import Accounting
from lightning_llm.plan.memory.activations import (
    BlockBytes,
    block_bytes,
    boundary_bytes,
    loss_chunks,
    on_gpu,
    stage_bytes,
    tokens_of,
)
from lightning_llm.plan.memory.buffers import compute_copy_bytes
from lightning_llm.plan.memory.units import reduces_once, uses_fsdp
from lightning_llm.plan.resolve import Plan
from lightning_llm.plan.stages import Pass, StagePart, block_kinds, passes_of, receives_waiting, units_at

Kinds = dict[str, int]


class Stage(NamedTuple):
    """Bytes of one stage of a rank."""

    kept: int
    """By blocks and what lies around them, of each micro-batch in flight."""
    given: int
    """As outputs to the next stage, of each micro-batch in flight."""
    received: int
    """In buffers of all micro-batches of a step, where there are such."""
    copies: int
    """Of weights that are cast on use, for each micro-batch in flight."""
    recast: int
    """Of weights that are cast again, of one block at a time."""
    logits: int
    """Of each micro-batch in flight."""
    loss: int
    """Beside the logits, while the loss or its gradient is taken."""
    taught: int
    """Of what teachers predict, from before the forward pass until the gradient of the loss is there."""
    teaching: int
    """Of the same while several teachers' predictions are made one, at most."""
    backward: int
    """Of a block's backward pass, beside what is kept."""
    unsharded: int
    """Of gradients that wait for the step's last micro-batch."""

    @classmethod
    def of(cls, plan: Plan, part: StagePart, accounting: Accounting) -> "Stage":
        """Return those of the stage `part`."""
        config, degrees = plan.config, plan.degrees
        units = units_at(config.model, [part], degrees.width)
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
        buffers = plan.micro_batches * boundary * (2 - part.first - part.last)
        reduced = max(unit.shard(1) for unit in units.blocks) if uses_fsdp(config.parallel, degrees) else 0
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
            backward=max(each.backward for each in blocks) + DTYPE_BYTES[config.precision.gather_dtype] * reduced,
            unsharded=DTYPE_BYTES[config.precision.main_grad_dtype] * units.shard(1) if once else 0,
        )


def coming_and_going(
    plan: Plan, parts: list[StagePart], pp_rank: int, accounting: Accounting
) -> tuple[Kinds, Kinds, str]:
    """Return the largest of each kind that comes and goes, what there is of each at the peak, and when that is.

    The passes are those of the schedule, in its order. A stage's gradients wait from its first backward pass to its
    last; logits and what the loss needs are given back before the first block's backward pass.
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
        if state in seen:  # as in most of a step
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
    """Yield each pass, and the bytes that are between two ranks then: posted receives, and the gradient sent last.

    A forward pass's own input is left out: it is among what its stage keeps. (Sent outputs are, too: `Stage.given`.)
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
    """Return the bytes of what teachers predict of a micro-batch as it is kept, and at most while it is made.

    And what the divergence has beside the cross entropy: a second gradient of the logits, where labels are learned,
    too, and five fp32 arrays of a chunk where that has two. `Ensemble` holds one member's logits and logarithms, and of
    all the mean before and after it is taken in, in fp32.
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
    """Return the bytes of a micro-batch's logits as they are kept, and what the loss has beside them at most.

    That is their gradient and, unless the loss is compiled, the fp32 of a chunk twice; of many logits a part of the
    rows, with the gradients of hidden states and weight (`model.loss`). torch's own cross entropy over all logits in
    fp32 has the logarithms, their gradient and its product with the softmax; where DTensor shares the vocabulary, also
    the exponentials (`torch.distributed.tensor.parallel.loss`).
    """
    config, degrees = plan.config, plan.degrees
    logits = tokens_of(config, degrees) * config.model.padded_vocab_size // degrees.width
    width = DTYPE_BYTES[config.precision.compute_dtype]
    if accounting.fp32_logits:
        wide = 4 * logits * (4 if degrees.width > 1 else 3)
        if degrees.pp == 1:
            return 0, wide
        return width * logits, wide
    chunks, capped = loss_chunks(config, degrees, on_gpu(plan)), 1 if config.model.logit_cap else 0  # kept of tanh
    logits, hidden = chunks.at_once * chunks.width, config.model.hidden_size
    fused = plan.compiled and on_gpu(plan) and degrees.width == 1  # `parallel.tp.loss_sum_of`: nothing in fp32
    taken = logits * width + (0 if fused else 8 * min(logits, CHUNK_ELEMENTS["cuda" if on_gpu(plan) else "cpu"]))
    if config.precision.wgrad_dtype is not None and not on_gpu(plan):  # operands are widened, when the loss is taken
        taken = max(taken, 4 * (logits + chunks.at_once * hidden) - logits * width * capped)
    if chunks.number == 1:
        return logits * width * (1 + capped), taken
    # The gradients of hidden states and weight are there instead; of the weight a chunk's, and the sum of all.
    weight = chunks.width * hidden
    given = DTYPE_BYTES[config.precision.wgrad_dtype or config.precision.compute_dtype]
    return chunks.rows * hidden * width + weight * given, logits * width * (1 + capped) + taken + 4 * weight
