"""Messages between all pairs of ranks: a matrix of bandwidths, latencies of small messages, and correctness.

If each rank has its own device, disjoint pairs send at the same time (the circle method of round-robin tournaments).
Ranks that share CPU cores take turns.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median, median_low

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_llm.health import collectives as pattern
from lightning_llm.health.collectives import ELEMENT_BYTES, WrongValues
from lightning_llm.health.ranks import Ranks, Timer

LATENCY_ROUNDS = 5


@dataclass(frozen=True)
class LinkReport:
    """`gb_per_second` [from][to], 10^9 bytes per second; `latency_seconds` [from][to], one way; 0 on the diagonal.

    `by_round` [rounds][ranks]: seconds of a rank's messages to and from the peer of its median link.
    """

    size_bytes: int
    gb_per_second: list[list[float]]
    latency_seconds: list[list[float]]
    by_round: list[list[float]]


def pairings(world: int) -> Iterator[list[tuple[int, int]]]:
    """Yield sets of disjoint pairs; each pair occurs once."""
    places: list[int | None] = [*range(world), *([None] if world % 2 else [])]
    for _ in range(len(places) - 1):
        half = len(places) // 2
        pairs = zip(places[:half], reversed(places[half:]), strict=True)
        yield [(min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None]
        places = [places[0], places[-1], *places[1:-1]]


class Messages:
    """Messages of `size_bytes` between this rank and any other."""

    def __init__(self, size_bytes: int, ranks: Ranks, timer: Timer):
        self.ranks, self.timer = ranks, timer
        count = max(1, size_bytes // ELEMENT_BYTES)
        self.base = pattern.base(0, count, ranks.world, 0, timer.device)
        self.sent = self.base * pattern.weight(ranks.rank)
        self.received = torch.zeros_like(self.sent)
        self.ready = torch.zeros(1, device=timer.device)
        self.wrong: dict[int, WrongValues] = {}

    def receive_seconds(self, peer: int) -> float:
        """Receive from `peer` and send to it, the higher rank first; return the seconds of receiving. Collective.

        Timed from this rank's ready signal to the end of the message. Values are verified.
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
        expected = self.base * pattern.weight(peer)
        if peer in self.wrong or torch.equal(received, expected):
            return
        unlike = (received != expected).nonzero()[:, 0]
        index = int(unlike[0])
        values = float(received[index]), float(expected[index])
        self.wrong[peer] = WrongValues(self.ranks.rank, len(unlike), index, *values, (peer,))


def measure_links(
    messages: Messages, small: Messages, rounds: int, shares_cores: bool
) -> tuple[LinkReport, list[WrongValues]]:
    """Return (matrix, errors found by each rank). Collective."""
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
