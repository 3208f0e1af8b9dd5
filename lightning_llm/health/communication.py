"""Health of communication: collectives by message size and messages between pairs of ranks, timed and verified.

Sizes and bandwidths of collectives are defined as by nccl-tests
(https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md). A size is that of the whole buffer that is
reduced, gathered, scattered, or sent by a rank to all others together. Algorithm bandwidth is size over time; bus
bandwidth is algorithm bandwidth times the share of the data that each link carries.

Messages between all pairs give a matrix of bandwidths and latencies. If each rank has its own device, disjoint pairs
send at the same time (the circle method of round-robin tournaments). Ranks that share CPU cores take turns.

The numbers sent are known: element i of rank r is `weight(r)` x `base(i)`, integers so small that sums over all ranks
are exact in fp32. So every rank knows the exact result of a collective.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median, median_low

import torch
import torch.distributed as dist
from torch import Tensor

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
    """Wrong numbers that one rank received in a collective or a message."""

    receiver: int
    """The rank that received them."""
    elements: int
    """Number of wrong elements."""
    index: int
    """Index of the first wrong element."""
    got: float
    """Its value."""
    expected: float
    """The value that it must have."""
    sources: tuple[int, ...]
    """The ranks that sent the wrong elements; empty for sums, where the wrong term is unknown."""


@dataclass(frozen=True)
class CollectiveTime:
    """Measured time of one collective at one size."""

    collective: str
    """Name, a key of `BUS_FACTORS`."""
    size_bytes: int
    ranks: int
    """Number of ranks that took part."""
    seconds: float
    """Mean seconds of a call, over calls and ranks."""
    times: int
    """Number of calls."""

    @property
    def algorithm_gb_per_second(self) -> float:
        """Size over time, 10^9 bytes per second."""
        return self.size_bytes / self.seconds / 1e9

    @property
    def bus_gb_per_second(self) -> float:
        """Bandwidth of a link, 10^9 bytes per second, comparable over numbers of ranks."""
        return self.algorithm_gb_per_second * BUS_FACTORS[self.collective](self.ranks)


class Exchange:
    """One collective among the ranks `members`, with buffers to call it again and again.

    Buffers have `size_bytes`, rounded down to equal parts for all members.
    """

    def __init__(
        self,
        collective: str,
        size_bytes: int,
        ranks: Ranks,
        members: Sequence[int],
        group: dist.ProcessGroup | None,
        device: torch.device,
    ):
        """`group`: process group of `members`, in their order; None: the group of all ranks."""
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
        """Call the collective once with the present content of the buffers. Every member must call this."""
        if self.collective == "all_reduce":
            dist.all_reduce(self.sent, group=self.group)
        elif self.collective == "all_gather":
            all_gather(self.received, self.sent, self.group)
        elif self.collective == "reduce_scatter":
            reduce_scatter(self.received, self.sent, self.group)
        else:
            dist.all_to_all_single(self.received, self.sent, group=self.group)

    def wrong_after_run(self, salt: int) -> WrongValues | None:
        """Call the collective with known numbers; return the errors in this rank's result, None if there are none.

        Every member must call this. `salt`: selects the numbers; two salts give different ones.
        """
        rank, own = self.ranks.rank, self.members.index(self.ranks.rank)
        first = own * self.block if self.collective == "all_gather" else 0
        self.sent.copy_(self._base(first, len(self.sent), salt) * weight(rank))
        self.run()
        unlike = (self.received != (expected := self._expected(own, salt))).nonzero()[:, 0]
        if not len(unlike):
            return None
        index = int(unlike[0])
        blocks = () if self.collective in SUMS else (unlike // self.block).unique().tolist()
        values = float(self.received[index]), float(expected[index])
        return WrongValues(rank, len(unlike), index, *values, tuple(self.members[each] for each in blocks))

    def silence(self) -> None:
        """Set the numbers to send to zero, so that repeated sums do not overflow."""
        self.sent.zero_()

    def _expected(self, own: int, salt: int) -> Tensor:
        if self.collective == "all_reduce":
            return self._base(0, len(self.received), salt) * total_weight(self.members)
        if self.collective == "reduce_scatter":
            return self._base(own * self.block, self.block, salt) * total_weight(self.members)
        each = weights(self.members, self.sent.device)  # one block per sender
        if self.collective == "all_to_all":  # the part of each sender for this rank
            return (self._base(own * self.block, self.block, salt) * each).flatten()
        return (self._base(0, len(self.received), salt).view(-1, self.block) * each).flatten()

    def _base(self, first: int, count: int, salt: int) -> Tensor:
        return base(first, count, self.ranks.world, salt, self.sent.device)


def time_collective(exchange: Exchange, timer: Timer, budget_seconds: float) -> CollectiveTime:
    """Return the mean time of a collective over as many consecutive calls as fit into `budget_seconds`. Collective."""
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
    """Return the `weight` of each of `members` as fp32 [members, 1] on `device`."""
    return torch.tensor([[weight(each)] for each in members], dtype=torch.float32, device=device)


def weight(rank: int) -> int:
    """Return the integer by which all numbers of `rank` are multiplied, so that ranks send different numbers."""
    return 1 + rank % WEIGHTS


def total_weight(members: Sequence[int]) -> int:
    """Return the sum of the `weight`s of `members`: the factor of a correct sum over them."""
    return sum(map(weight, members))


def base(first: int, count: int, world: int, salt: int, device: torch.device) -> Tensor:
    """Return elements `first` to `first + count` of the known numbers, fp32 [count], before the factor of a rank.

    They are small enough for exact sums over `world` ranks, and another `salt` gives other numbers. Neighboring
    elements differ, so that misplaced data is detected (up to 60,000 ranks).
    """
    bits = min(MOST_BITS, max(0, (LARGEST_EXACT // (WEIGHTS * world)).bit_length() - 2))
    index = torch.arange(first + salt, first + salt + count, device=device)
    return index.mul_(40503).bitwise_right_shift_(3).bitwise_and_(2**bits - 1).add_(1).float()


LATENCY_ROUNDS = 5


@dataclass(frozen=True)
class LinkReport:
    """Measured bandwidth and latency of messages between all pairs of ranks."""

    size_bytes: int
    """Size of the messages by which bandwidth was measured."""
    gb_per_second: list[list[float]]
    """Bandwidth in 10^9 bytes per second, [from rank][to rank]; 0 on the diagonal."""
    latency_seconds: list[list[float]]
    """One-way latency of a small message, [from rank][to rank]; 0 on the diagonal."""
    by_round: list[list[float]]
    """Seconds of a rank's messages to and from the peer of its median link, [round][rank]."""


def pairings(world: int) -> Iterator[list[tuple[int, int]]]:
    """Yield lists of disjoint pairs of ranks (lower, higher); over all lists each pair occurs exactly once."""
    places: list[int | None] = [*range(world), *([None] if world % 2 else [])]
    for _ in range(len(places) - 1):
        half = len(places) // 2
        pairs = zip(places[:half], reversed(places[half:]), strict=True)
        yield [(min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None]
        places = [places[0], places[-1], *places[1:-1]]


class Messages:
    """Buffers of `size_bytes` for verified messages between this rank and any other; `wrong` collects errors by
    peer."""

    def __init__(self, size_bytes: int, ranks: Ranks, timer: Timer):
        self.ranks, self.timer = ranks, timer
        count = max(1, size_bytes // ELEMENT_BYTES)
        self.base = base(0, count, ranks.world, 0, timer.device)
        self.sent = self.base * weight(ranks.rank)
        self.received = torch.zeros_like(self.sent)
        self.ready = torch.zeros(1, device=timer.device)
        self.wrong: dict[int, WrongValues] = {}

    def receive_seconds(self, peer: int) -> float:
        """Receive a message from `peer` and send one to it; return the seconds of receiving. `peer` must call this,
        too.

        The higher rank receives first. The time is from this rank's ready signal to the end of the message. Received
        values are verified; errors go to `wrong`.
        """
        seconds = 0.0
        for receives in (self.ranks.rank > peer, self.ranks.rank < peer):
            if receives:
                seconds = self.timer.seconds(lambda: self._receive(peer))
                dist.send(self.ready, peer, group=self.ranks.group)
            else:
                dist.recv(self.ready, peer, group=self.ranks.group)
                dist.send(self.sent, peer, group=self.ranks.group)
                dist.recv(self.ready, peer, group=self.ranks.group)  # confirms arrival, not only sending
        self.timer.wait()
        self._look(self.received, peer)
        return seconds

    def _receive(self, peer: int) -> None:
        dist.send(self.ready, peer, group=self.ranks.group)
        dist.recv(self.received, peer, group=self.ranks.group)

    def _look(self, received: Tensor, peer: int) -> None:
        expected = self.base * weight(peer)
        if peer in self.wrong or torch.equal(received, expected):
            return
        unlike = (received != expected).nonzero()[:, 0]
        index = int(unlike[0])
        values = float(received[index]), float(expected[index])
        self.wrong[peer] = WrongValues(self.ranks.rank, len(unlike), index, *values, (peer,))


def measure_links(
    messages: Messages, small: Messages, rounds: int, shares_cores: bool
) -> tuple[LinkReport, list[WrongValues]]:
    """Measure the links between all pairs of ranks; return the matrices and the errors found by all ranks. Collective.

    Args:
        messages: large messages, for bandwidth.
        small: messages of a few bytes, for latency.
        rounds: number of bandwidth measurements per pair, of which the median counts.
        shares_cores: ranks share CPU cores, so only one pair may send at a time.
    """
    ranks, world = messages.ranks, messages.ranks.world
    visit = _turns if shares_cores else _together
    large = [visit(messages) for _ in range(rounds)]
    tiny = [visit(small) for _ in range(LATENCY_ROUNDS)]

    def medians(rounds: list[dict[int, float]]) -> list[float]:
        return [median(each[peer] for each in rounds) if peer != ranks.rank else 0.0 for peer in range(world)]

    middle = [median_low(each.values()) for each in large]
    found = ranks.share((medians(large), medians(tiny), middle, list(messages.wrong.values())))
    size = messages.sent.numel() * ELEMENT_BYTES
    # Each rank measures its receives: a column of the matrix.
    rates = [
        [size / found[to][0][source] / 1e9 if to != source else 0.0 for to in range(world)] for source in range(world)
    ]
    delays = [[found[to][1][source] / 2 for to in range(world)] for source in range(world)]
    by_round = [list(each) for each in zip(*(middle for _, _, middle, _ in found), strict=True)]
    return LinkReport(size, rates, delays, by_round), [wrong for *_, its in found for wrong in its]


def _together(messages: Messages) -> dict[int, float]:
    return _visits(messages, lambda pairs: [pairs])


def _turns(messages: Messages) -> dict[int, float]:
    return _visits(messages, lambda pairs: [[pair] for pair in pairs])


def _visits(
    messages: Messages, at_once: Callable[[list[tuple[int, int]]], list[list[tuple[int, int]]]]
) -> dict[int, float]:
    """Return the seconds of receiving once from each peer, by peer."""
    seconds, rank = {}, messages.ranks.rank
    for pairing in pairings(messages.ranks.world):
        for pairs in at_once(pairing):
            messages.ranks.meet()
            for a, b in pairs:
                if rank in (a, b):
                    peer = b if rank == a else a
                    seconds[peer] = messages.receive_seconds(peer)
    return seconds
