"""Seconds of a pipeline stage's passes: blocks, embedding, head, and exposed FSDP communication. No torch."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from lightning_llm.model.spec import LinearSpec, Size, hidden
from lightning_llm.model.structure import norm_of
from lightning_llm.optim.kinds import DTYPE_BYTES
from lightning_llm.plan.gradient_codes import scatter_kind, scattered_bytes
from lightning_llm.plan.memory.activations import loss_chunks, recomputed_layers
from lightning_llm.plan.memory.buffers import gathered_units
from lightning_llm.plan.memory.units import Unit, reduces_once, shard_ranks, sums_in_tree, uses_fsdp
from lightning_llm.plan.stages import StagePart
from lightning_llm.plan.time.operations import Cost, Operations, Passes
from lightning_llm.plan.traffic import Sent, shards

LOSS_BYTES = (14, 20)
"""Bytes moved by `model.loss` per logit, forward and backward: cast to fp32, log-softmax (4 + 4, 4 + 2); softmax (2 +
4), subtract one at the label, scale, and cast back (8 + 6)."""
VOCABULARY_LOSS_BYTES = (30, 36)
"""Bytes moved per logit by `parallel.tp`'s loss, forward and backward, if ranks split the vocabulary: amax (2), cast
(6), subtract (8), exponential (8), sum and gather (6); cast (6), subtract (8), exponential (8), scale (8), cast back
(6)."""


@dataclass
class Item:
    """Costs of one FSDP2 group of a stage, or of a part of the stage without sharded parameters."""

    passes: Passes
    gather: float = 0.0
    """Seconds of the all-gather before its forward pass, and, for blocks, before its backward pass."""
    reduction: float = 0.0
    """Seconds of the reduction after its backward pass."""
    gathered_again: bool = False
    copies: Passes = field(default_factory=Passes)
    """Cost of FSDP2's copies around gathers (forward) and reductions (backward)."""


@dataclass
class StageTimes:
    """Costs of a pipeline stage's passes over one micro-batch.

    The first forward pass and the last backward pass of a step have their own costs, because FSDP may gather only in
    the first one and reduce only in the last one.
    """

    first_forward: Cost
    forward: Cost
    backward: Cost
    last_backward: Cost


def stage_times(operations: Operations, part: StagePart, summed_once: float = 0.0) -> StageTimes:
    """Return the costs of a stage's passes over one micro-batch.

    `summed_once`: seconds of the sums in the last backward pass, over replicas and over ranks that share sequences.
    """
    config, items = operations.config, _items(operations, part)
    zero_stage, overlap = config.parallel.zero_stage, operations.device.cluster.overlap
    sharded = uses_fsdp(config.parallel, operations.degrees)
    every, each_reduction = zero_stage == 3, zero_stage >= 2
    once = reduces_once(config.parallel, operations.degrees)  # else FSDP reduces after each backward pass
    shards = sum(item.reduction for item in items)
    tail = 0.5 if sums_in_tree(config.parallel) else 0.0  # `GradientSync` waits after every second micro-batch

    def forward(gathers: bool) -> Cost:
        cost = _sum(item.passes.forward for item in items)
        if gathers and sharded:
            cost += _sum(item.copies.forward for item in items)
            timeline = [(item.gather, item.passes.forward.total) for item in items]
            cost.spend("gathers", exposed_forward(timeline, overlap))
            cost += _sent_gathers(operations, part)
        return cost

    def backward(reduces: bool, last: bool) -> Cost:
        cost = _sum(item.passes.backward for item in items)
        timeline = []
        for item in reversed(items):
            gather = item.gather if every and item.gathered_again else 0.0
            reduction = item.reduction if reduces else 0.0
            if last and summed_once:
                reduction += summed_once * (item.reduction / shards if shards else 1 / len(items))
            timeline.append((gather, item.passes.backward.total, reduction))
        if sharded:
            if every:
                cost += _sum(item.copies.forward for item in items if item.gathered_again)
            if reduces or not once:
                cost += _sum(item.copies.backward for item in items)
            cost += _sent_backward(operations, part, every, reduces)
        gathers, reductions = exposed_backward(timeline, overlap, 1.0 if last else tail)
        cost.spend("gathers", gathers)
        cost.spend("reductions", reductions)
        return cost

    return StageTimes(
        first_forward=forward(gathers=True),
        forward=forward(gathers=every),
        backward=backward(reduces=each_reduction, last=False),
        last_backward=backward(reduces=True, last=True),
    )


def exposed_forward(timeline: list[tuple[float, float]], overlap: bool) -> float:
    """Return the seconds that computation waits for all-gathers, given (all-gather, computation) pairs in order.

    FSDP2 issues the next all-gather when it has queued a group's computation, so it starts together with that
    computation, on a separate stream (torch.distributed.fsdp, "implicit prefetching").
    """
    if not overlap:
        return sum(gather for gather, _ in timeline)
    computed, link, begun = 0.0, 0.0, 0.0
    for gather, seconds in timeline:
        link = max(link, begun) + gather
        begun = max(computed, link)
        computed = begun + seconds
    return computed - sum(seconds for _, seconds in timeline)


def exposed_backward(timeline: list[tuple[float, float, float]], overlap: bool, tail: float) -> tuple[float, float]:
    """Return the seconds that computation waits for gathers, and for reductions still running at its end.

    `timeline` has (all-gather, computation, reduction) in backward order. The gather of the next group starts with a
    group, its reduction starts at its end; both share one link, one after another. `tail`: fraction of the reductions
    still running at the end that is waited for.
    """
    if not overlap:
        return sum(each[0] for each in timeline), sum(each[2] for each in timeline)
    computed, waited, link = 0.0, 0.0, timeline[0][0] if timeline else 0.0
    ready = link
    for index, (_, seconds, reduction) in enumerate(timeline):
        begun = max(computed, ready)
        waited += begun - computed
        if index + 1 < len(timeline):
            ahead = timeline[index + 1][0]
            link = ready = max(link, begun) + ahead if ahead else link
            ready = ready if ahead else 0.0
        computed = begun + seconds
        if reduction:
            link = max(link, computed) + reduction
    return waited, tail * max(0.0, link - computed)


def _items(operations: Operations, part: StagePart) -> list[Item]:
    config, degrees = operations.config, operations.degrees
    units = gathered_units(config, [part], degrees)
    again = set(recomputed_layers(config, [part]))
    none = Unit((), cast=False)
    experts = dict(zip(part.layers, units.experts or [none] * len(part.layers), strict=True))
    items = [_item(operations, Passes(), units.root)]
    if part.first:
        items.append(_item(operations, _embedding(operations), units.embedding))
    for index, unit in zip(part.layers, units.blocks, strict=True):
        passes = operations.block(index)
        if index in again:
            passes = Passes(passes.forward, passes.backward + passes.again)
        item = _item(operations, passes, unit)
        item.gathered_again = True
        items.append(item)
        if experts[index].parameters:
            items.append(_item(operations, Passes(), experts[index]))
            items[-1].gathered_again = True
    if part.last:
        items.append(_item(operations, _head(operations), units.head))
    return items


def _item(operations: Operations, passes: Passes, unit: Unit) -> Item:
    """Return an FSDP2 group with its gather, its reduction, and the copies in and out of their buffers."""
    config, degrees = operations.config, operations.degrees
    if not uses_fsdp(config.parallel, degrees) or not unit.parameters:
        return Item(passes)
    shard, recipe = unit.shard(shard_ranks(config.parallel, degrees)), config.precision
    ranks, axes = unit.over(shard_ranks(config.parallel, degrees)), _axes_of(unit)
    width = DTYPE_BYTES[recipe.gather_dtype if unit.cast else recipe.master_dtype]
    gradient, master = DTYPE_BYTES[recipe.main_grad_dtype], DTYPE_BYTES[recipe.master_dtype]
    gathered = unit.gathered_bytes(ranks * unit.ep, width)
    gather = operations.links.seconds("all_gather", axes, gathered * (ranks - 1))
    reduction = operations.links.seconds(scatter_kind(config), axes, scattered_bytes(config, shard) * (ranks - 1))
    written = (width + 1) * unit.code_bytes(ranks)  # codes are converted to numbers
    copied_in = operations.memory(master * shard + gathered + (2 * gathered + written) * ranks, 2)
    copied_out = operations.memory((width + gradient) * shard * ranks + 3 * gradient * shard, 2)
    if sums_in_tree(config.parallel):  # and the sum of the received parts
        copied_out += operations.memory(3 * gradient * shard * (ranks - 1), max(1, ranks.bit_length() - 1))
    return Item(passes, gather, reduction, copies=Passes(copied_in, copied_out))


def ends_of(operations: Operations) -> tuple[Passes, Passes]:
    """Return (passes of the embedding, passes of the last norm, head and loss)."""
    return _embedding(operations), _head(operations)


def _embedding(operations: Operations) -> Passes:
    """Return the cost of looking up and casting rows; backward zeroes a table and adds rows to it."""
    config, degrees, model = operations.config, operations.degrees, operations.config.model
    master = DTYPE_BYTES[config.precision.master_dtype]
    hidden_elements = operations.tokens * model.hidden_size
    table = master * model.padded_vocab_size // degrees.tp * model.hidden_size
    passes = Passes(
        operations.memory((3 * master + operations.width) * hidden_elements, 2),
        operations.memory(table + (operations.width + 3 * master) * hidden_elements, 3),
    )
    if (tp := degrees.tp) > 1:
        sent = (tp - 1) * master * hidden_elements // tp
        passes += _entered(operations, sent, backwards=True)
    return passes


def _head(operations: Operations) -> Passes:
    """Return the cost of the last norm, the head and the loss."""
    degrees, model = operations.degrees, operations.config.model
    tokens, tp, width = operations.tokens, degrees.tp, operations.width
    rows = Size(model.padded_vocab_size, "model.vocab_size", 1, "model.vocab_size")
    passes = operations.passes_of(norm_of(model).memory_passes(model, width, operations.compiled))
    passes += operations.linear("head", LinearSpec("head", "vocabulary", rows, hidden(model), bias=False))
    logits = tokens * model.padded_vocab_size // tp
    forward, backward = VOCABULARY_LOSS_BYTES if tp > 1 else LOSS_BYTES
    if model.logit_cap:  # divide by the cap, tanh, multiply by the cap
        forward, backward = forward + 6 * width, backward + 9 * width
    passes += Passes(operations.memory(forward * logits, 3), operations.memory(backward * logits, 4))
    chunks = loss_chunks(operations.config, degrees, operations.device.cluster.hardware != "cpu")
    if chunks.number > 1:  # each chunk adds the weight's gradient to an fp32 sum
        added = (8 + width) * chunks.width * model.hidden_size
        passes.backward += operations.memory(added * chunks.number, chunks.number)
    if tp > 1:
        passes += _entered(operations, (tp - 1) * width * tokens * model.hidden_size // tp, backwards=False)
        three = 2 * (3 * 4 * tokens) * (tp - 1) // tp
        passes.forward += operations.collective("tensor_parallel", "all_reduce", "tp", three, 2)
    return passes


def _entered(operations: Operations, sent: int, *, backwards: bool) -> Passes:
    """Return the cost of gathering hidden states in a tensor-parallel group, or of scattering them (`backwards`)."""
    if operations.config.parallel.sequence_parallel:
        gather = operations.collective("tensor_parallel", "all_gather", "tp", sent)
        scatter = operations.collective("tensor_parallel", "reduce_scatter", "tp", sent)
        return Passes(scatter, gather) if backwards else Passes(gather, scatter)
    reduced = operations.collective("tensor_parallel", "all_reduce", "tp", 2 * sent)
    return Passes(reduced, Cost()) if backwards else Passes(Cost(), reduced)


def _sent_gathers(operations: Operations, part: StagePart) -> Cost:
    units = gathered_units(operations.config, [part], operations.degrees)
    return Cost(sent=_gathered(operations, units.dense()) + _gathered(operations, units.experts))


def _sent_backward(operations: Operations, part: StagePart, gathers: bool, reduces: bool) -> Cost:
    config, degrees = operations.config, operations.degrees
    units, ranks = gathered_units(config, [part], degrees), shard_ranks(config.parallel, degrees)
    sent = _gathered(operations, units.of_blocks()) if gathers else Counter()
    for unit in units.each() if reduces else ():
        scattered = scattered_bytes(config, unit.shard(ranks))
        sent[scatter_kind(config), _axes_of(unit)] += scattered * (unit.over(ranks) - 1)
    return Cost(sent=sent)


def _gathered(operations: Operations, units: Iterable[Unit]) -> Sent:
    recipe, ranks = operations.config.precision, shard_ranks(operations.config.parallel, operations.degrees)
    sent: Sent = Counter()
    for unit in units:
        width = DTYPE_BYTES[recipe.gather_dtype if unit.cast else recipe.master_dtype]
        sent["all_gather", _axes_of(unit)] += unit.gathered_bytes(ranks, width) * (unit.over(ranks) - 1)
    return sent


def _axes_of(unit: Unit) -> str:
    return "edp" if unit.ep > 1 else shards()


def _sum(costs: Iterable[Cost]) -> Cost:
    return sum(costs, start=Cost())
