"""The order in which a pipeline's rank runs forward and backward passes, and how many of them wait. Imports no torch.

`tests/plan/test_schedule_order.py` holds them against torch's own. Memory (`plan.memory.passes`) and time (`plan.time`)
both follow them.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from lightning_llm.config.schema import ParallelConfig

INTERLEAVED = "interleaved_1f1b"


class Pass(NamedTuple):
    """A pass of one micro-batch through stage `stage` of the whole pipeline: ranks take stages in turn."""

    forward: bool
    stage: int
    micro_batch: int


def passes_of(parallel: ParallelConfig, pp: int, pp_rank: int, micro_batches: int) -> list[Pass]:
    """Return the passes of the ranks at `pp_rank` in a step, in the order of torch.distributed.pipelining's schedules.

    1F1B (Narayanan et al. 2021, arXiv 2104.04473, section 2.2) runs as many forward passes ahead as there are stages
    behind it. Without a pipeline micro-batches pass one after the other.
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
    """Yield rounds of micro-batches through each stage of a rank in turn, backward from the last (section 2.2, too)."""
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
    """Return for each pipeline rank and each of its passes how many receives wait then: posted, their pass yet to come.

    The pass that runs is among them where it is given something. With one stage per rank a receive is posted right
    before its pass. For interleaved ones torch lays out all ranks' passes in one order, each rank in turn the next one
    whose input is sent by then, and posts each receive with its send (`schedules._add_send_recv`).
    """
    return _receives_waiting(parallel.schedule, parallel.virtual_stages, pp, micro_batches)


@lru_cache(maxsize=64)
def _receives_waiting(schedule: str, virtual_stages: int, pp: int, micro_batches: int) -> list[list[int]]:
    orders = [_passes_of(schedule, virtual_stages, pp, pp_rank, micro_batches) for pp_rank in range(pp)]
    if pp > 1 and schedule == INTERLEAVED:
        return _laid_out(orders, pp * virtual_stages - 1)
    return [[int(each.stage != (0 if each.forward else pp - 1)) for each in order] for order in orders]


def _laid_out(orders: list[list[Pass]], last: int) -> list[list[int]]:
    """Return it for the `orders` of interleaved stages, of which `last` is the last one."""
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
    """Return how many forward passes of one stage a rank at `pp_rank` keeps at most for their backward passes."""
    held = most = 0
    for each in passes_of(parallel, pp, pp_rank, micro_batches):
        held += 1 if each.forward else -1
        most = max(most, held)
    return most
