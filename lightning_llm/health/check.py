"""Health check of all ranks of a run, part by part; names the ranks at fault. Every rank gets the same report."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import TypeVar

import torch

from lightning_llm.base.hardware import device_name
from lightning_llm.health.communication import (
    BUS_FACTORS,
    SUMS,
    CollectiveTime,
    Exchange,
    LinkReport,
    Messages,
    WrongValues,
    measure_links,
    time_collective,
)
from lightning_llm.health.devices import (
    COPY,
    DiskReport,
    Extent,
    device_seconds,
    formats_of,
    gemm,
    measure_disk,
    memory_bytes,
    peak_tflops,
    shares_cores,
    wrong_words,
)
from lightning_llm.health.outliers import LEAST_SLOWDOWN, SlowRank, rounds_for, slow_ranks
from lightning_llm.health.ranks import Ranks, Timer
from lightning_llm.health.report import HealthReport, RankFigures

MESSAGES = "messages to and from other ranks"
SALTS = (1, 7)
"""Salts of the known numbers with which a collective is called before and after timing."""
LARGEST_SHARE_VERIFIED = 0.5
"""Share of a device's free memory (on a CPU: of the rank's part of the machine's) that is verified at most."""
SECOND_LOOK_SECONDS = 1.0
"""Seconds until ranks that seem slow are measured again, so that a temporary disturbance is not blamed on them."""
Measured = TypeVar("Measured")
Rounds = Mapping[str, Sequence[Sequence[float]]]
"""Kind of work -> seconds [rounds][ranks]."""


def check_health(
    ranks: Ranks,
    device: torch.device,
    extent: Extent,
    folder: Path | None = None,
    least_slowdown: float = LEAST_SLOWDOWN,
) -> HealthReport:
    """Measure devices, memory, links, collectives and disks of all ranks; return the report, the same on each.
    Collective.

    Args:
        ranks: the participating ranks.
        device: device of this rank.
        extent: amount of work; parts of it may be left out.
        folder: run folder; its disk is measured, by the first rank of each machine. None: disks are not measured.
        least_slowdown: a rank counts as slow only if it is slower than the others by more than this share.

    Raises:
        UnhealthyError: a rank did not reach a part within the ranks' timeout.
    """
    return _Check(ranks, device, extent, least_slowdown).report(folder)


class _Check:
    """One check; `wrong` and `slow` collect its findings. All methods are collective."""

    def __init__(self, ranks: Ranks, device: torch.device, extent: Extent, least_slowdown: float):
        self.ranks, self.device, self.extent, self.least_slowdown = ranks, device, extent, least_slowdown
        self.timer = Timer(device, 0.9 * ranks.timeout_seconds)  # before NCCL's watchdog, which ends the process
        self.links = extent.link_bytes if ranks.world > 1 else None
        self.formats = formats_of(device)
        # With two ranks, both share the only link.
        kinds = len(self.formats) + 1 + (self.links is not None and ranks.world > 2)
        self.tests = ranks.world * kinds
        self.wrong: list[str] = []
        self.slow: list[SlowRank] = []

    def report(self, folder: Path | None) -> HealthReport:
        ranks, device, side = self.ranks, self.device, self.extent.product_side
        free, total = memory_bytes(device)
        collectives = list(self._collectives()) if ranks.world > 1 else []
        seconds = self._twice_if_slow(self._device_speeds)
        links = self._twice_if_slow(self._links) if self.links is not None else None
        verified = self._verify_memory()
        disks = self._disks(folder, self.extent.disk_bytes) if folder and self.extent.disk_bytes else {}
        here = RankFigures(
            rank=ranks.rank,
            host=ranks.hosts[ranks.rank],
            device=device_name(device),
            device_type=device.type,
            tflops={name: 2 * side**3 / seconds[gemm(name)] / 1e12 for name in self.formats},
            peaks={name: peak_tflops(device, name) for name in self.formats},
            copy_gb_per_second=2 * self.extent.copy_bytes / seconds[COPY] / 1e9,  # bytes read plus bytes written
            free_bytes=free,
            total_bytes=total,
            verified_bytes=verified,
        )
        with ranks.part("the report"):
            every, wrong = ranks.share(here), list(dict.fromkeys(self.wrong))
        return HealthReport(every, collectives, links, disks, wrong, self.slow, self.least_slowdown)

    def _twice_if_slow(self, look: Callable[[], tuple[Measured, Rounds]]) -> Measured:
        """Return the measurement of `look`; ranks that are slow in it and in a repetition are added to `slow`."""
        measured, rounds = look()
        if slow := self._slow_in(rounds):
            time.sleep(SECOND_LOOK_SECONDS)
            again = {(each.rank, each.work) for each in self._slow_in(look()[1])}
            self.slow += [each for each in slow if (each.rank, each.work) in again]
        return measured

    def _slow_in(self, rounds: Rounds) -> list[SlowRank]:
        found = (slow_ranks(work, its, self.tests, self.least_slowdown) for work, its in rounds.items())
        return [each for its in found for each in its]

    def _collectives(self) -> Iterator[CollectiveTime]:
        """Yield the time of each collective and size."""
        ranks = self.ranks
        for name in BUS_FACTORS:
            for size in self.extent.sizes_bytes:
                what = f"{name} of {size:,} bytes"
                with ranks.part(what):
                    exchange = Exchange(name, size, ranks, range(ranks.world), ranks.group, self.device)
                    found = [exchange.wrong_after_run(SALTS[0])]
                    timed = time_collective(exchange, self.timer, self.extent.size_seconds)
                    found.append(exchange.wrong_after_run(SALTS[1]))
                    if faults := [each for its in ranks.share(found) for each in its if each is not None]:
                        at_fault = self._contributors(name, size) if name in SUMS else None
                        at_fault = at_fault or blamed_pairs(faults, ranks.hosts)
                        self.wrong.append(f"{what}: {at_fault}; {_example(faults)}")
                yield timed

    def _contributors(self, name: str, size: int) -> str:
        """Return the ranks that contributed wrong numbers to a sum, as far as that can be determined."""
        ranks = self.ranks

        def are_right(groups: Sequence[Sequence[int]]) -> list[bool]:
            found: list[WrongValues | None] = []
            with ranks.groups(groups) as made:
                for members, group in zip(groups, made, strict=True):
                    if ranks.rank in members:
                        exchange = Exchange(name, size, ranks, members, group, self.device)
                        found = [exchange.wrong_after_run(salt) for salt in SALTS]
                right = ranks.share(not any(found))
            return [all(right[each] for each in members) for members in groups]

        named, suspects = blamed_ranks(ranks.world, are_right)
        if named:
            return "wrong contribution of " + " and ".join(ranks.name(each) for each in named)
        if suspects:
            return "wrong contribution of one of " + ", ".join(ranks.name(each) for each in suspects)
        return "wrong among all ranks, and right once more or in smaller groups, so that no rank can be named"

    def _device_speeds(self) -> tuple[dict[str, float], Rounds]:
        """Return this rank's median seconds by kind of work, and all ranks' rounds."""
        with self.ranks.part("GEMMs and memory copies"):
            rounds = rounds_for(self.tests)
            every = device_seconds(self.ranks, self.device, self.timer, self.extent, rounds, self.wrong)
        mine = {work: median(its) for work, its in every[self.ranks.rank].items()}
        return mine, {work: list(zip(*(its[work] for its in every), strict=True)) for work in mine}

    def _links(self) -> tuple[LinkReport, Rounds]:
        """Return the matrix of links, and the seconds of each rank's messages by round."""
        ranks = self.ranks
        with ranks.part("messages between two ranks"):
            messages, small = (Messages(size, ranks, self.timer) for size in (self.links or 0, 1))
            report, faults = measure_links(messages, small, rounds_for(self.tests), shares_cores(ranks, self.device))
        if faults:
            self.wrong.append(f"messages: {blamed_pairs(faults, ranks.hosts)}; {_example(faults)}")
        return report, {MESSAGES: report.by_round} if ranks.world > 2 else {}

    def _verify_memory(self) -> int:
        """Return the bytes of memory written and read on this rank."""
        ranks, on_cuda = self.ranks, self.device.type == "cuda"
        if on_cuda:
            torch.cuda.empty_cache()
        free = memory_bytes(self.device)[0] // (1 if on_cuda else ranks.local_world)
        verified = min(self.extent.verify_bytes, int(LARGEST_SHARE_VERIFIED * free)) // 8 * 8
        with ranks.part("memory"):
            ranks.meet()  # before other ranks allocate their memory
            for rank, count in enumerate(ranks.share(wrong_words(verified, self.device))):
                if count:
                    text = f"{count} 8-byte words on {ranks.name(rank)} were read with other values than written"
                    self.wrong.append(f"memory: {text}")
        return verified

    def _disks(self, folder: Path, size_bytes: int) -> dict[str, DiskReport]:
        """Return the measurements of each machine's disk, made by its first rank."""
        here: DiskReport | str | None = None
        found = {}
        with self.ranks.part("the disk"):
            if self.ranks.local_rank == 0:
                try:
                    here = measure_disk(folder, size_bytes)
                except OSError as error:
                    here = f"{folder} cannot be written: {error.strerror or error}"
            every = self.ranks.share(here)
        for host, its in zip(self.ranks.hosts, every, strict=True):
            if isinstance(its, DiskReport):
                found[host] = its
                its = f"{its.folder} returned other bytes than were written" if its.wrong else None
            if its is not None:
                self.wrong.append(f"disk of {host}: {its}")
        return found


def _example(faults: Sequence[WrongValues]) -> str:
    first = min(faults, key=lambda each: each.receiver)
    count = f"{first.elements} element{'s' if first.elements > 1 else ''}"
    values = f"{first.got:.9g}, must be {first.expected:.9g}"
    return f"{count} on rank {first.receiver}: the first, at index {first.index}, is {values}"


def blamed_pairs(found: Iterable[WrongValues], hosts: Sequence[str]) -> str:
    """Return a text that names the ranks at fault for wrong numbers that each have one known sender.

    A rank that all its peers blame is named alone, any other fault as a pair of sender and receiver. For messages and
    for collectives that do not sum. `hosts`: the machine of each rank.
    """
    pairs = {(source, each.receiver) for each in found for source in each.sources}
    everyone = range(len(hosts))
    sending, receiving = (
        [rank for rank in everyone if len(hosts) > 2 and {each[end] for each in pairs if each[1 - end] == rank}
         >= set(everyone) - {rank}]
        for end in (1, 0)
    )  # fmt: skip
    named = [f"data sent by rank {rank} ({hosts[rank]})" for rank in sending]
    named += [f"data received by rank {rank} ({hosts[rank]})" for rank in receiving]
    left = sorted((a, b) for a, b in pairs if a not in sending and b not in receiving)
    named += [f"data sent from rank {a} ({hosts[a]}) to rank {b} ({hosts[b]})" for a, b in left]
    return f"wrong: {', '.join(named)}"


def blamed_ranks(world: int, are_right: Callable[[Sequence[Sequence[int]]], list[bool]]) -> tuple[list[int], list[int]]:
    """Find the ranks that contribute wrong numbers to a sum; return (ranks at fault, suspects).

    One of the suspects is at fault if it cannot be identified; then the first list is empty. Both are empty if every
    smaller group sums correctly. Groups of ranks sum separately: a correct sum clears the ranks of the group, other
    groups are halved. The remaining ranks are paired with a cleared one.

    Args:
        world: number of ranks.
        are_right: lets disjoint groups sum separately and returns whether each sum is correct.
    """
    cleared: set[int] = set()
    suspects: list[int] = []
    groups = [list(range(world))]
    while groups:
        halves = []
        for group, right in zip(groups, are_right(groups), strict=True):
            middle = (len(group) + 1) // 2
            if right:
                cleared |= set(group)
            elif len(group) == 2:
                suspects += group
            else:
                halves += [group[:middle], group[middle:]]
        suspects += [group[0] for group in halves if len(group) == 1]
        groups = [group for group in halves if len(group) > 1]
    suspects.sort()
    if not cleared and len(suspects) > 2:  # if one of three ranks is wrong, one pair is right
        cleared = set(next((pair for pair in combinations(suspects[:3], 2) if are_right([pair])[0]), ()))
    if not cleared:
        return [], suspects
    reference = min(cleared)
    return [each for each in suspects if each not in cleared and not are_right([sorted((reference, each))])[0]], []
