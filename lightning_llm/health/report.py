"""Report of a health check, the same on every rank: as objects, JSON data, tables, and files that `plan` reads.

The files are `cluster=measured` and the matrix of links for `--links`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import yaml
from rich.table import Table

from lightning_llm.base.hardware import planned_hardware
from lightning_llm.base.terminal import new_console
from lightning_llm.config.schema import ClusterConfig
from lightning_llm.config.workspace import command
from lightning_llm.health.communication import BUS_FACTORS, CollectiveTime, LinkReport
from lightning_llm.health.devices import DiskReport
from lightning_llm.health.outliers import ALPHA, SlowRank
from lightning_llm.plan.cluster import write_cluster

P2P = "p2p"


@dataclass(frozen=True)
class RankFigures:
    """Measurements of one rank's device."""

    rank: int
    host: str
    device: str
    device_type: str
    tflops: dict[str, float]
    """Measured GEMM speed by number format, 10^12 FLOP/s."""
    peaks: dict[str, float | None]
    """The same by the data sheet; None if it is unknown."""
    copy_gb_per_second: float
    """Bytes read plus bytes written by a memory copy, 10^9 per second."""
    free_bytes: int
    total_bytes: int
    verified_bytes: int
    """Bytes of memory that were written and read back."""

    @property
    def where(self) -> str:
        """The rank and its machine, for messages: "rank 3 (node1)"."""
        return f"rank {self.rank} ({self.host})"


@dataclass(frozen=True)
class Figure:
    """One measured value that a threshold of `--fail-below` can name; higher is better."""

    name: str
    """Dotted name, such as "gemm.bf16.tflops"."""
    value: float
    where: str
    """Ranks or folder that it was measured on, for messages."""
    peak: float | None = None
    """Value by the device's specification; None if it is unknown."""


@dataclass(frozen=True)
class HealthReport:
    """All results of a health check, the same on every rank."""

    ranks: list[RankFigures]
    collectives: list[CollectiveTime]
    links: LinkReport | None
    """None if links were not measured."""
    disks: dict[str, DiskReport]
    """Disk measurements by machine."""
    wrong: list[str]
    """A description of each wrong result, with the rank at fault."""
    slow: list[SlowRank]
    least_slowdown: float
    """The share by which a rank must be slower than the others to be in `slow`."""

    def slow_lines(self) -> list[str]:
        """Return one line of text for each slow rank and kind of work."""
        limit = 1 + self.least_slowdown
        return [
            f"{self.ranks[each.rank].where} takes {each.factor:.2f} times as long as the others for {each.work}: more "
            f"than {limit:g} times in {each.slow_rounds} of {each.rounds} rounds (chance {each.p_value:.0e})"
            for each in self.slow
        ]

    def figures(self, cluster: ClusterConfig | None = None) -> list[Figure]:
        """Return every measured value that a threshold can name, for each rank, pair of ranks or machine.

        Collectives count at their largest size, pairs in both directions. `cluster`: description of the cluster with
        the specified speeds of memory and links; None: these are unknown.
        """
        found = []
        memory = None if cluster is None else cluster.memory_gb_per_second
        for each in self.ranks:
            gemms = each.tflops.items()
            found += [Figure(f"gemm.{name}.tflops", tflops, each.where, each.peaks[name]) for name, tflops in gemms]
            found.append(Figure("memory.gb_per_second", each.copy_gb_per_second, each.where, memory))
            found.append(Figure("memory.free_bytes", each.free_bytes, each.where))
        for name in BUS_FACTORS:
            sizes = [each for each in self.collectives if each.collective == name]
            if sizes:
                last = max(sizes, key=lambda each: each.size_bytes)
                where = f"{len(self.ranks)} ranks, {last.size_bytes:,} bytes"
                peak = _link_peak(cluster, {each.host for each in self.ranks})
                found.append(Figure(f"{name}.bus_gb_per_second", last.bus_gb_per_second, where, peak))
        if self.links is not None:
            rates = self.links.gb_per_second
            pairs = [(a, b) for a in range(len(rates)) for b in range(len(rates)) if a != b]
            for a, b in pairs:
                one, other = self.ranks[a], self.ranks[b]
                peak = _link_peak(cluster, {one.host, other.host})
                found.append(Figure(f"{P2P}.gb_per_second", rates[a][b], f"{one.where} to {other.where}", peak))
        for host, disk in self.disks.items():
            where = f"{disk.folder} of {host}"
            names = "write_gb_per_second", "read_gb_per_second", "fsyncs_per_second", "free_bytes"
            found += [Figure(f"disk.{name}", float(getattr(disk, name)), where) for name in names]
        return found

    def as_data(self) -> dict[str, Any]:
        """Return the report as JSON data, as `health --json` prints it."""
        return {
            "ranks": [asdict(each) for each in self.ranks],
            "collectives": [
                {
                    **asdict(each),
                    "algorithm_gb_per_second": each.algorithm_gb_per_second,
                    "bus_gb_per_second": each.bus_gb_per_second,
                }
                for each in self.collectives
            ],
            "p2p": self.links and {key: value for key, value in asdict(self.links).items() if key != "by_round"},
            "disks": {host: asdict(each) for host, each in self.disks.items()},
            "wrong": self.wrong,
            "slow": [asdict(each) for each in self.slow],
            "rule": {"least_slowdown": self.least_slowdown, "false_alarm_rate": ALPHA},
        }


def _link_peak(cluster: ClusterConfig | None, hosts: set[str]) -> float | None:
    """Return the specified bandwidth of a device to others on `hosts`, 10^9 bytes per second, from `cluster`."""
    if cluster is None:
        return None
    return (cluster.within_node if len(hosts) == 1 else cluster.between_nodes).gb_per_second


MOST_ROWS = 16
"""Above this number of ranks, the matrix of pairs is only written to its file."""
WIDEST = 1000


def print_report(report: HealthReport) -> None:
    """Print the report as tables (ranks, collectives, links, disks) to stdout; empty tables are left out."""
    tables = [each for each in (_ranks(report), _collectives(report), _links(report), _disks(report)) if each.row_count]
    width = max(new_console(width=WIDEST).measure(each).maximum for each in tables)
    console = new_console(width=max(width, new_console().width))  # without a terminal width, nothing is truncated
    for table in tables:
        console.print(table)
        console.print()


def verdict_lines(report: HealthReport, failing: Sequence[str]) -> Iterator[str]:
    """Yield the verdict as lines: one for each wrong result, slow rank and line in `failing`, or "healthy".

    `failing`: lines about values below their threshold (`thresholds.failing_lines`).
    """
    faults = [("wrong", each) for each in report.wrong] + [("slow", each) for each in report.slow_lines()]
    faults += [("below", each) for each in failing]
    yield from (f"{word:<11}{text}" for word, text in faults or [("healthy", "values are right, and no rank is slow")])


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for place, name in enumerate(columns):
        table.add_column(name, justify="right" if place else "left", no_wrap=True)
    return table


def _ranks(report: HealthReport) -> Table:
    formats = list(report.ranks[0].tflops)
    memory = "copy GB/s", "free GiB", "all GiB", "verified GiB"
    table = _table("rank", *(f"{name} TFLOP/s" for name in formats), *memory, "device")
    for each in report.ranks:
        speeds = [_of_peak(each.tflops[name], each.peaks[name]) for name in formats if name in each.tflops]
        sizes = [f"{size / 2**30:.2f}" for size in (each.free_bytes, each.total_bytes, each.verified_bytes)]
        table.add_row(f"{each.rank} {each.host}", *speeds, f"{each.copy_gb_per_second:.1f}", *sizes, each.device)
    return table


def _of_peak(tflops: float, peak: float | None) -> str:
    return f"{tflops:.3g}" if peak is None else f"{tflops:.3g} ({tflops / peak:.0%})"


def _collectives(report: HealthReport) -> Table:
    table = _table("collective", "bytes", "microseconds", "algorithm GB/s", "bus GB/s", "calls")
    for each in report.collectives:
        speeds = [f"{speed:.3g}" for speed in (each.algorithm_gb_per_second, each.bus_gb_per_second)]
        row = f"{each.size_bytes:,}", f"{each.seconds * 1e6:.1f}", *speeds, str(each.times)
        table.add_row(each.collective, *row)
    return table


def _links(report: HealthReport) -> Table:
    links = report.links
    if links is None or len(report.ranks) > MOST_ROWS:
        return _table("p2p")
    table = _table(f"p2p GB/s, {links.size_bytes:,} bytes", *(f"to {each.rank}" for each in report.ranks))
    for row, each in zip(links.gb_per_second, report.ranks, strict=True):
        rates = ["-" if to == each.rank else f"{rate:.3g}" for to, rate in enumerate(row)]
        table.add_row(f"from {each.rank} {each.host}", *rates)
    return table


def _disks(report: HealthReport) -> Table:
    table = _table("disk", "write GB/s", "read GB/s", "fsync ms", "free GiB", "folder")
    for host, disk in report.disks.items():
        speeds = f"{disk.write_gb_per_second:.3g}", f"{disk.read_gb_per_second:.3g}", f"{disk.fsync_seconds * 1e3:.3g}"
        table.add_row(host, *speeds, f"{disk.free_bytes / 2**30:.1f}", disk.folder)
    return table


LINKS_FILE = "links.yaml"
HOW = "These machines by the clock, by `lightning-llm health`."


def write_measured(report: HealthReport, devices_per_node: int, folder: Path) -> list[str]:
    """Write measured links and speeds as files for `plan`; return lines about them to print.

    `folder`/links.yaml has a row of bandwidths per device, `folder`/cluster/measured.yaml is `cluster=measured`.

    The latency of a collective is the fastest of the smallest ones. The latency of a hop between machines is that of a
    message between machines minus that of one within a machine.
    """
    links = report.links
    if links is None:
        return []
    folder.mkdir(parents=True, exist_ok=True)
    matrix = {
        "names": [f"{each.host} rank {each.rank}" for each in report.ranks],
        "gb_per_second": [[float(f"{rate:.4g}") for rate in row] for row in links.gb_per_second],
    }
    text = yaml.safe_dump(matrix, sort_keys=False, default_flow_style=None)
    (folder / LINKS_FILE).write_text(f"# {HOW}\n{text}", encoding="utf-8")
    lines = [f"written    {folder / LINKS_FILE}, for plan --search --planner pipette --links FILE"]
    first = report.ranks[0]
    hardware = "cpu" if first.device_type == "cpu" else planned_hardware(first.device)
    if hardware is None or {each.device for each in report.ranks} != {first.device}:
        return [*lines, f"note       no cluster file: hardware= has no {first.device}, or ranks have unlike devices"]
    pairs = [(a.rank, b.rank) for a in report.ranks for b in report.ranks if a.rank != b.rank]
    within = [(a, b) for a, b in pairs if report.ranks[a].host == report.ranks[b].host] or pairs
    between = [(a, b) for a, b in pairs if report.ranks[a].host != report.ranks[b].host] or within

    def middle(matrix: list[list[float]], pairs: list[tuple[int, int]]) -> float:
        return median(matrix[a][b] for a, b in pairs)

    hop = max(0.0, middle(links.latency_seconds, between) - middle(links.latency_seconds, within))
    values = {
        "hardware": hardware,
        "devices_per_node": devices_per_node,
        "memory_gb_per_second": _middle(report, lambda each: each.copy_gb_per_second),
        "within_node": {"gb_per_second": middle(links.gb_per_second, within), "latency_microseconds": 0.0},
        "between_nodes": {"gb_per_second": middle(links.gb_per_second, between), "latency_microseconds": hop * 1e6},
        "start_microseconds": min(each.seconds for each in report.collectives) * 1e6,
        "overlap": hardware != "cpu",
        "peak_tflops": {name: _middle(report, lambda each, name=name: each.tflops[name]) for name in first.tflops},
    }
    file = write_cluster(folder, values, HOW)
    return [*lines, f"written    {file}, for {command('plan', '--config-dir', str(folder), 'cluster=measured')}"]


def _middle(report: HealthReport, figure: Callable[..., float]) -> float:
    """Return the median over ranks."""
    return median(map(figure, report.ranks))
