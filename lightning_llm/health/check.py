"""The check of all ranks of a run, part by part; every rank comes to the same report."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

import torch

from lightning_llm.hardware import device_name
from lightning_llm.health.blame import blamed_pairs, blamed_ranks
from lightning_llm.health.collectives import BUS_FACTORS, SUMS, CollectiveTime, Exchange, WrongValues, time_collective
from lightning_llm.health.disk import DiskReport, measure_disk
from lightning_llm.health.extent import Extent
from lightning_llm.health.links import LinkReport, Messages, measure_links
from lightning_llm.health.memory import memory_bytes, wrong_words
from lightning_llm.health.outliers import LEAST_SLOWDOWN, rounds_for, slow_ranks
from lightning_llm.health.products import formats_of, peak_tflops
from lightning_llm.health.ranks import Ranks
from lightning_llm.health.report import HealthReport, RankFigures
from lightning_llm.health.speeds import COPY, device_seconds, gemm, shares_cores
from lightning_llm.health.timer import Timer

MESSAGES = "messages to and from other ranks"
SALTS = (1, 7)
"""Of the numbers that a collective is called with before and after it is timed."""
LARGEST_SHARE_VERIFIED = 0.5
"""Of a device's free memory, or of a rank's part of the machine's."""


def check_health(
    ranks: Ranks,
    device: torch.device,
    extent: Extent,
    folder: Path | None = None,
    least_slowdown: float = LEAST_SLOWDOWN,
) -> HealthReport:
    """Measure everything on all ranks, and return the report, the same on each. Collective.

    Args:
        ranks: who takes part.
        device: this rank's.
        extent: how much.
        folder: whose disk is measured, once on each machine.
        least_slowdown: the share by which a rank must be slower than the others to be named.

    Raises:
        UnhealthyError: a rank did not come to a part within the ranks' timeout.
    """
    timer = Timer(device, 0.9 * ranks.timeout_seconds)  # before NCCL's own watchdog, which ends the process
    wrong: list[str] = []
    free, total = memory_bytes(device)
    collectives = list(_collectives(ranks, device, timer, extent, wrong)) if ranks.world > 1 else []
    formats = formats_of(device)
    tests = ranks.world * (len(formats) + 1 + (extent.link_bytes is not None and ranks.world > 2))
    with ranks.part("GEMMs and memory copies"):
        every = device_seconds(ranks, device, timer, extent, rounds_for(tests), wrong)
    rounds = {name: list(zip(*(each[name] for each in every), strict=True)) for name in every[0]}
    links = None
    if extent.link_bytes is not None and ranks.world > 1:
        with ranks.part("messages between two ranks"):
            links = _links(ranks, timer, extent.link_bytes, rounds_for(tests), wrong)
        if ranks.world > 2:  # of two, both have the same link
            rounds[MESSAGES] = links.by_round
    slow = [each for name, its in rounds.items() for each in slow_ranks(name, its, tests, least_slowdown)]
    with ranks.part("memory"):
        verified = _verify_memory(ranks, device, extent, wrong)
    disks: dict[str, DiskReport] = {}
    if folder is not None and extent.disk_bytes is not None:
        with ranks.part("the disk"):
            disks = _disks(ranks, folder, extent.disk_bytes, wrong)
    mine = {name: median(seconds) for name, seconds in every[ranks.rank].items()}
    here = RankFigures(
        rank=ranks.rank,
        host=ranks.hosts[ranks.rank],
        device=device_name(device),
        device_type=device.type,
        tflops={name: 2 * extent.product_side**3 / mine[gemm(name)] / 1e12 for name in formats},
        peaks={name: peak_tflops(device, name) for name in formats},
        copy_gb_per_second=2 * extent.copy_bytes / mine[COPY] / 1e9,  # read and written
        free_bytes=free,
        total_bytes=total,
        verified_bytes=verified,
    )
    with ranks.part("the report"):
        return HealthReport(ranks.share(here), collectives, links, disks, wrong, slow, least_slowdown)


def _collectives(
    ranks: Ranks, device: torch.device, timer: Timer, extent: Extent, wrong: list[str]
) -> Iterator[CollectiveTime]:
    """Yield the time of each collective and size; add to `wrong` what is. Collective."""
    for name in BUS_FACTORS:
        for size in extent.sizes_bytes:
            what = f"{name} of {size:,} bytes"
            with ranks.part(what):
                exchange = Exchange(name, size, ranks, range(ranks.world), ranks.group, device)
                found = [exchange.wrong_after_run(SALTS[0])]
                timed = time_collective(exchange, timer, extent.size_seconds)
                found.append(exchange.wrong_after_run(SALTS[1]))
                if faults := [each for its in ranks.share(found) for each in its if each is not None]:
                    at_fault = _contributors(ranks, name, size, device) if name in SUMS else None
                    wrong.append(f"{what}: {at_fault or blamed_pairs(faults, ranks.hosts)}; {_example(faults)}")
            yield timed


def _contributors(ranks: Ranks, name: str, size: int, device: torch.device) -> str:
    """Return whose part of a sum is wrong, where that can be told. Collective."""

    def are_right(groups: Sequence[Sequence[int]]) -> list[bool]:
        found: list[WrongValues | None] = []
        with ranks.groups(groups) as made:
            for members, group in zip(groups, made, strict=True):
                if ranks.rank in members:
                    exchange = Exchange(name, size, ranks, members, group, device)
                    found = [exchange.wrong_after_run(salt) for salt in SALTS]
            right = ranks.share(not any(found))
        return [all(right[each] for each in members) for members in groups]

    named, suspects = blamed_ranks(ranks.world, are_right)
    if named:
        return "wrong by what " + " and ".join(ranks.name(each) for each in named) + " adds"
    if suspects:
        return "wrong by what one of " + ", ".join(ranks.name(each) for each in suspects) + " adds"
    return "wrong among all ranks, and right once more or in smaller groups, so that no rank can be named"


def _example(faults: Sequence[WrongValues]) -> str:
    first = min(faults, key=lambda each: each.receiver)
    count = f"{first.elements} element{'s' if first.elements > 1 else ''}"
    values = f"{first.got:.9g} and must be {first.expected:.9g}"
    return f"{count} on rank {first.receiver}: the first, {first.index}, is {values}"


def _links(ranks: Ranks, timer: Timer, size_bytes: int, rounds: int, wrong: list[str]) -> LinkReport:
    """Return the matrix of links; add to `wrong` what is. Collective."""
    messages, small = (Messages(size, ranks, timer) for size in (size_bytes, 1))
    report, faults = measure_links(messages, small, rounds, shares_cores(ranks, timer.device))
    if faults:
        wrong.append(f"messages: {blamed_pairs(faults, ranks.hosts)}; {_example(faults)}")
    return report


def _verify_memory(ranks: Ranks, device: torch.device, extent: Extent, wrong: list[str]) -> int:
    """Return the bytes that were written and read on this rank; add what was wrong on any. Collective."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    free = memory_bytes(device)[0] // (1 if device.type == "cuda" else ranks.local_world)
    ranks.meet()  # before others take theirs
    verified = min(extent.verify_bytes, int(LARGEST_SHARE_VERIFIED * free)) // 8 * 8
    for rank, count in enumerate(ranks.share(wrong_words(verified, device))):
        if count:
            wrong.append(f"memory: {count} words of 8 bytes on {ranks.name(rank)} were not read as they were written")
    return verified


def _disks(ranks: Ranks, folder: Path, size_bytes: int, wrong: list[str]) -> dict[str, DiskReport]:
    """Return what each machine's disk does, measured by its first rank; add what was wrong. Collective."""
    here: DiskReport | str | None = None
    if ranks.local_rank == 0:
        try:
            here = measure_disk(folder, size_bytes)
        except OSError as error:
            here = f"{folder} cannot be written: {error.strerror or error}"
    found = {}
    for rank, its in enumerate(ranks.share(here)):
        if isinstance(its, DiskReport):
            found[ranks.hosts[rank]] = its
            its = f"{its.folder} gave other bytes back than it was given" if its.wrong else None
        if its is not None:
            wrong.append(f"disk of {ranks.hosts[rank]}: {its}")
    return found
