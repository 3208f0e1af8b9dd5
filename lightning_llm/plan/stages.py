"""Pipeline stages: split of a decoder, order of passes on each rank, idle time of a schedule. Imports no torch.

`tests/plan/test_schedule_order.py` compares the order with torch's. Memory (`plan.memory.rank_bytes`) and time
(`plan.time`) both follow it.
"""

from bisect import bisect_left
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from lightning_llm.config.schema import Config, ModelConfig, ParallelConfig
from lightning_llm.model.structure import Same, for_layers
from lightning_llm.plan.degrees import Degrees
from lightning_llm.plan.memory.units import Units, units_of

INTERLEAVED = "interleaved_1f1b"


class Pass(NamedTuple):
    """A pass of one micro-batch through stage `stage` of the pipeline; stages are assigned to ranks in turn."""

    forward: bool
    stage: int
    micro_batch: int


def passes_of(parallel: ParallelConfig, pp: int, pp_rank: int, micro_batches: int) -> list[Pass]:
    """Return the passes of the ranks at `pp_rank` in a step, in the order of torch.distributed.pipelining's schedules.

    1F1B (Narayanan et al. 2021, arXiv 2104.04473, section 2.2) runs as many forward passes ahead as stages follow.
    Without a pipeline, micro-batches run one after the other.
    """
    return _passes_of(parallel.schedule, parallel.virtual_stages, pp, pp_rank, micro_batches)


@lru_cache(maxsize=256)  # memory and time follow the same order
def _passes_of(schedule: str, virtual_stages: int, pp: int, pp_rank: int, micro_batches: int) -> list[Pass]:
    if pp > 1 and schedule == INTERLEAVED:
        return list(_interleaved(pp, virtual_stages, micro_batches, pp_rank))
    ahead = micro_batches if pp > 1 and schedule == "gpipe" else min(pp - pp_rank, micro_batches)
    passes = [Pass(True, pp_rank, each) for each in range(ahead)]
    for each in range(micro_batches):
        passes.append(Pass(False, pp_rank, each))
        if each + ahead < micro_batches:
            passes.append(Pass(True, pp_rank, each + ahead))
    return passes


def _interleaved(pp: int, virtual_stages: int, micro_batches: int, pp_rank: int) -> Iterator[Pass]:
    """Yield rounds of micro-batches through each stage of a rank in turn, backward from the last (same section)."""
    rounds = max(1, micro_batches // pp)
    per_round, total = micro_batches // rounds, virtual_stages * micro_batches
    ahead = min((virtual_stages - 1) * per_round + 2 * (pp - 1 - pp_rank), total)
    done = {True: [0] * virtual_stages, False: [0] * virtual_stages}

    def next_pass(forward: bool, number: int) -> Pass:
        chunk = number // per_round % virtual_stages
        chunk = chunk if forward else virtual_stages - 1 - chunk
        micro_batch = done[forward][chunk]
        done[forward][chunk] += 1
        return Pass(forward, chunk * pp + pp_rank, micro_batch)

    for number in range(ahead):
        yield next_pass(True, number)
    for number in range(total):
        if ahead + number < total:
            yield next_pass(True, ahead + number)
        yield next_pass(False, number)


def receives_waiting(parallel: ParallelConfig, pp: int, micro_batches: int) -> list[list[int]]:
    """Return [pipeline rank][pass]: the number of receives posted, during that pass, for passes that have not finished.

    The count includes the running pass itself if it receives its input. With one stage per rank, a receive is posted
    right before its pass. For interleaved stages, torch puts all ranks' passes in one order: each rank in turn takes
    its next pass once the input has been sent, and each receive is posted with its send (`schedules._add_send_recv`).
    """
    return _receives_waiting(parallel.schedule, parallel.virtual_stages, pp, micro_batches)


@lru_cache(maxsize=64)
def _receives_waiting(schedule: str, virtual_stages: int, pp: int, micro_batches: int) -> list[list[int]]:
    orders = [_passes_of(schedule, virtual_stages, pp, pp_rank, micro_batches) for pp_rank in range(pp)]
    if pp > 1 and schedule == INTERLEAVED:
        return _laid_out(orders, pp * virtual_stages - 1)
    return [[int(each.stage != (0 if each.forward else pp - 1)) for each in order] for order in orders]


def _laid_out(orders: list[list[Pass]], last: int) -> list[list[int]]:
    """Return `receives_waiting` for the `orders` of interleaved stages; `last`: the last stage."""
    pp = len(orders)
    found: list[list[int]] = [[] for _ in orders]
    posted, waiting = set[Pass](), [0] * pp
    while any(len(done) < len(order) for done, order in zip(found, orders, strict=True)):
        for pp_rank, order in enumerate(orders):
            if len(found[pp_rank]) == len(order):
                continue
            each = order[len(found[pp_rank])]
            given = each.stage != (0 if each.forward else last)
            if given and each not in posted:
                continue
            found[pp_rank].append(waiting[pp_rank])
            waiting[pp_rank] -= given
            if each.stage != (last if each.forward else 0):
                after = each._replace(stage=each.stage + (1 if each.forward else -1))
                posted.add(after)
                waiting[after.stage % pp] += 1
    return found


def chunks_in_flight(parallel: ParallelConfig, pp: int, pp_rank: int, micro_batches: int) -> int:
    """Return the most forward passes that a rank at `pp_rank` keeps at once for their backward passes."""
    held = most = 0
    for each in passes_of(parallel, pp, pp_rank, micro_batches):
        held += 1 if each.forward else -1
        most = max(most, held)
    return most


@dataclass(frozen=True)
class StagePart:
    """Stage `index` of a pipeline: blocks `layers` by global index, embedding if `first`, norm and head if `last`."""

    index: int
    layers: range
    first: bool
    last: bool


def split_layers(model: ModelConfig, stages: int) -> list[StagePart]:
    """Return the contiguous split into `stages` of at least one block that minimizes the heaviest stage.

    A stage's weight is its number of parameters, proportional to its FLOPs except for the embedding. The first stage
    counts the embedding and the last the head, even if they are tied, since both stages keep the tensor. Ties are
    broken by evenness (least squares), then by giving more to later stages, which keep fewer micro-batches.

    Raises:
        ValueError: there are fewer blocks than stages.
    """
    return list(_split(Same(model), stages))


@lru_cache(maxsize=256)
def _split(same: Same, stages: int) -> tuple[StagePart, ...]:
    model = same.model
    if model.num_layers < stages:
        raise ValueError(f"{model.num_layers} blocks cannot be split into {stages} stages")
    table = model.padded_vocab_size * model.hidden_size
    positions = model.max_sequence_length * model.hidden_size if model.position == "learned" else 0
    layers = range(model.num_layers)
    blocks = tuple(for_layers(model, layers, lambda index: units_of(model, [index]).blocks[0].shard(1)))
    ends = _even_split(blocks, stages, table + positions, table)
    return tuple(
        StagePart(stage, range(start, end), first=stage == 0, last=stage == stages - 1)
        for stage, (start, end) in enumerate(zip((0, *ends), ends, strict=False))
    )


@lru_cache(maxsize=1024)
def _even_split(blocks: tuple[int, ...], stages: int, first: int, last: int) -> tuple[int, ...]:
    """Return the end of each stage given the weights of `blocks` and the extra weights of the first and last stage."""
    sums = [0, *accumulate(blocks)]
    own = [first, *[0] * (stages - 2), last] if stages > 1 else [first + last]
    limit = _lightest_maximum(sums, own)
    # best[start] = (least sum of squares of the stages from `stage` on over blocks[start:], end of stage `stage`).
    best: dict[int, tuple[int, int]] = {len(blocks): (0, 0)}
    table = []
    for stage in reversed(range(stages)):
        found: dict[int, tuple[int, int]] = {}
        for start in range(stage, len(blocks) - (stages - 1 - stage)):
            for end in range(start + 1, len(sums)):
                weight = own[stage] + sums[end] - sums[start]
                if weight > limit:
                    break
                if end in best and (start not in found or weight**2 + best[end][0] < found[start][0]):
                    found[start] = weight**2 + best[end][0], end
        table.append(found)
        best = found
    ends = [0]
    for found in reversed(table):
        ends.append(found[ends[-1]][1])
    return tuple(ends[1:])


def _lightest_maximum(sums: list[int], own: list[int]) -> int:
    """Return the least possible weight of the heaviest stage, by bisection."""

    def kept(limit: int) -> bool:
        end = 0
        for stage, weight in enumerate(own):
            start, most = end, len(sums) - (len(own) - stage)  # leave a block for each later stage
            while end < most and weight + sums[end + 1] - sums[start] <= limit:
                end += 1
            if end == start:
                return False
        return end == len(sums) - 1

    return bisect_left(range(sums[-1] + sum(own)), True, key=kept)


def parts_of(model: ModelConfig, parallel: ParallelConfig, degrees: Degrees, pp_rank: int) -> list[StagePart]:
    """Return the stages of the ranks at `pp_rank` (0 .. pp - 1) of the pipeline, earliest first.

    With virtual stages a rank holds every pp-th (Narayanan et al. 2021, arXiv 2104.04473, section 2.2).
    """
    return split_layers(model, degrees.pp * parallel.virtual_stages)[pp_rank :: degrees.pp]


def units_at(model: ModelConfig, parts: list[StagePart], degrees: Degrees) -> Units:
    """Return the FSDP2 units of a rank with stages `parts`; see `units_of`."""
    return units_of(model, layers_of(parts), parts[0].first, parts[-1].last, degrees.width, degrees.ranks("ep"))


def layers_of(parts: list[StagePart]) -> list[int]:
    """Return the blocks of a rank's stages, by global index."""
    return [index for part in parts for index in part.layers]


def stage_kind(config: Config, part: StagePart) -> Hashable:
    """Return a key of a stage's structure: stages with equal keys need the same memory and time per micro-batch."""
    return tuple(block_kinds(config, part.layers)), part.first, part.last


def block_kinds(config: Config, layers: Iterable[int]) -> Iterator[Hashable]:
    """Yield a key for each block of `layers`: blocks with equal keys need the same memory and time."""
    parallel, quantizes = config.parallel, config.precision.quantizes
    for index in layers:  # with quantization, the index decides the casts of its linears
        yield config.model.layer_name(index), parallel.checkpointing_of(index), index if quantizes else 0


def rank_kind(config: Config, parts: list[StagePart]) -> Hashable:
    """Return a key of a pipeline rank's structure, from its stages `parts`, earliest first."""
    return tuple(stage_kind(config, part) for part in parts)


def bubble_fraction(pp: int, micro_batches: int, virtual_stages: int = 1) -> float:
    """Return the idle fraction of a step if all stages take equally long: (p - 1) / (v m + p - 1).

    v = 1 for GPipe and 1F1B. Narayanan et al. 2021 (section 2.2) give idle over ideal time instead: (p - 1) / (v m).
    """
    return (pp - 1) / (virtual_stages * micro_batches + pp - 1)
