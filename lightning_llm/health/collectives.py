"""Collectives by message size: their time, bandwidths as nccl-tests defines them, and correctness of their results.

Sizes and bus bandwidths: https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md. A size is that of the
whole buffer that is reduced, gathered, scattered, or sent by a rank to all others together. Algorithm bandwidth is size
over time; bus bandwidth is algorithm bandwidth times the share of the data that each link carries.

Element i of rank r is `weight(r)` x `base(i)`, integers so small that sums over all ranks are exact in fp32. So every
rank knows the exact result of a collective.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_llm.health import collectives as pattern
from lightning_llm.health.ranks import Ranks, Timer
from lightning_llm.parallel.torch_private import all_gather, reduce_scatter

ELEMENT_BYTES = 4
BUS_FACTORS: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda ranks: 2 * (ranks - 1) / ranks,
    "all_gather": lambda ranks: (ranks - 1) / ranks,
    "reduce_scatter": lambda ranks: (ranks - 1) / ranks,
    "all_to_all": lambda ranks: (ranks - 1) / ranks,
}
"""Ratio of bus to algorithm bandwidth, by collective."""
SUMS = ("all_reduce", "reduce_scatter")
"""Collectives that sum, so that a wrong number does not identify its rank."""
LEAST_TIMES, MOST_TIMES = 3, 50
"""Minimum and maximum number of consecutive calls."""


@dataclass(frozen=True)
class WrongValues:
    """Errors found by a rank: `elements` of its result are wrong, the first at `index`; `sources`: senders, if
    known."""

    receiver: int
    elements: int
    index: int
    got: float
    expected: float
    sources: tuple[int, ...]


@dataclass(frozen=True)
class CollectiveTime:
    """One collective of `size_bytes` over `ranks`: mean seconds of a call, over calls and ranks."""

    collective: str
    size_bytes: int
    ranks: int
    seconds: float
    times: int

    @property
    def algorithm_gb_per_second(self) -> float:
        """Size over time, 10^9 bytes per second."""
        return self.size_bytes / self.seconds / 1e9

    @property
    def bus_gb_per_second(self) -> float:
        """Bandwidth of a link, 10^9 bytes per second, comparable over numbers of ranks."""
        return self.algorithm_gb_per_second * BUS_FACTORS[self.collective](self.ranks)


class Exchange:
    """One collective among `members` of `ranks`, with buffers of `size_bytes`, rounded to equal parts for all
    members."""

    def __init__(
        self,
        collective: str,
        size_bytes: int,
        ranks: Ranks,
        members: Sequence[int],
        group: dist.ProcessGroup | None,
        device: torch.device,
    ):
        """`group`: the group of `members`, in their order."""
        self.collective, self.members, self.ranks, self.group = collective, list(members), ranks, group
        count = len(self.members)
        self.block = max(1, size_bytes // ELEMENT_BYTES // count)
        self.size_bytes = self.block * count * ELEMENT_BYTES
        sent = self.block if collective == "all_gather" else self.block * count
        received = self.block if collective == "reduce_scatter" else self.block * count
        self.sent = torch.zeros(sent, device=device)
        # An all-reduce is in place.
        self.received = self.sent if collective == "all_reduce" else torch.zeros(received, device=device)

    def run(self) -> None:
        """Call the collective. Collective over the members."""
        if self.collective == "all_reduce":
            dist.all_reduce(self.sent, group=self.group)
        elif self.collective == "all_gather":
            all_gather(self.received, self.sent, self.group)
        elif self.collective == "reduce_scatter":
            reduce_scatter(self.received, self.sent, self.group)
        else:
            dist.all_to_all_single(self.received, self.sent, group=self.group)

    def wrong_after_run(self, salt: int) -> WrongValues | None:
        """Call it with known numbers; return the errors in the result. Collective over the members."""
        rank, own = self.ranks.rank, self.members.index(self.ranks.rank)
        first = own * self.block if self.collective == "all_gather" else 0
        self.sent.copy_(self._base(first, len(self.sent), salt) * pattern.weight(rank))
        self.run()
        unlike = (self.received != (expected := self._expected(own, salt))).nonzero()[:, 0]
        if not len(unlike):
            return None
        index = int(unlike[0])
        blocks = () if self.collective in SUMS else (unlike // self.block).unique().tolist()
        values = float(self.received[index]), float(expected[index])
        return WrongValues(rank, len(unlike), index, *values, tuple(self.members[each] for each in blocks))

    def silence(self) -> None:
        """Set all numbers to zero, so that repeated sums do not overflow."""
        self.sent.zero_()

    def _expected(self, own: int, salt: int) -> Tensor:
        if self.collective == "all_reduce":
            return self._base(0, len(self.received), salt) * pattern.total_weight(self.members)
        if self.collective == "reduce_scatter":
            return self._base(own * self.block, self.block, salt) * pattern.total_weight(self.members)
        each = pattern.weights(self.members, self.sent.device)  # one block per sender
        if self.collective == "all_to_all":  # the part of each sender for this rank
            return (self._base(own * self.block, self.block, salt) * each).flatten()
        return (self._base(0, len(self.received), salt).view(-1, self.block) * each).flatten()

    def _base(self, first: int, count: int, salt: int) -> Tensor:
        return pattern.base(first, count, self.ranks.world, salt, self.sent.device)


def time_collective(exchange: Exchange, timer: Timer, budget_seconds: float) -> CollectiveTime:
    """Return the time over as many consecutive calls as fit into `budget_seconds`. Collective."""
    ranks = exchange.ranks
    exchange.silence()
    slowest = max(ranks.share(timer.seconds(exchange.run)))
    times = max(LEAST_TIMES, min(MOST_TIMES, int(budget_seconds / max(slowest, 1e-9))))
    ranks.meet()
    every = ranks.share(timer.seconds(exchange.run, times))
    return CollectiveTime(exchange.collective, exchange.size_bytes, ranks.world, sum(every) / len(every), times)


LARGEST_EXACT = 2**24
"""Integers up to here are exact in fp32."""
WEIGHTS, MOST_BITS = 61, 7


def weights(members: Sequence[int], device: torch.device) -> Tensor:
    """Return fp32 [members, 1]: `weight` of each."""
    return torch.tensor([[weight(each)] for each in members], dtype=torch.float32, device=device)


def weight(rank: int) -> int:
    """Return the factor that distinguishes `rank`'s numbers from its neighbors'."""
    return 1 + rank % WEIGHTS


def total_weight(members: Sequence[int]) -> int:
    """Return the sum over `members`."""
    return sum(map(weight, members))


def base(first: int, count: int, world: int, salt: int, device: torch.device) -> Tensor:
    """Return fp32 [count], the elements from `first` on, for `world` ranks; another `salt` gives other numbers.

    Neighboring elements differ, so that misplaced data is detected (up to 60,000 ranks).
    """
    bits = min(MOST_BITS, max(0, (LARGEST_EXACT // (WEIGHTS * world)).bit_length() - 2))
    index = torch.arange(first + salt, first + salt + count, device=device)
    return index.mul_(40503).bitwise_right_shift_(3).bitwise_and_(2**bits - 1).add_(1).float()
