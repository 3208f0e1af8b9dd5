"""What a check found, the same on every rank: as objects, and as data."""

from dataclasses import asdict, dataclass
from typing import Any

from lightning_llm.config.schema import ClusterConfig
from lightning_llm.health.collectives import BUS_FACTORS, CollectiveTime
from lightning_llm.health.disk import DiskReport
from lightning_llm.health.links import LinkReport
from lightning_llm.health.outliers import ALPHA, SlowRank

P2P = "p2p"


@dataclass(frozen=True)
class RankFigures:
    """What one rank's device does: `tflops`, and the data sheet's `peaks`, by number format; bytes of its memory."""

    rank: int
    host: str
    device: str
    device_type: str
    tflops: dict[str, float]
    peaks: dict[str, float | None]
    copy_gb_per_second: float
    free_bytes: int
    total_bytes: int
    verified_bytes: int

    @property
    def where(self) -> str:
        """The rank and its machine, for a reader."""
        return f"rank {self.rank} ({self.host})"


@dataclass(frozen=True)
class Figure:
    """One figure that a threshold may name: the higher the better; `peak`: what the device is sold for, if known."""

    name: str
    value: float
    where: str
    peak: float | None = None


@dataclass(frozen=True)
class HealthReport:
    """All that was found. `wrong`: numbers that are not what they must be, in words, each with who is at fault."""

    ranks: list[RankFigures]
    collectives: list[CollectiveTime]
    links: LinkReport | None
    disks: dict[str, DiskReport]
    wrong: list[str]
    slow: list[SlowRank]
    least_slowdown: float

    def slow_lines(self) -> list[str]:
        """Return a line for each slow rank and kind of work."""
        limit = 1 + self.least_slowdown
        return [
            f"{self.ranks[each.rank].where} takes {each.factor:.2f} times what the others do for {each.work}: more "
            f"than {limit:g} times in {each.slow_rounds} of {each.rounds} rounds (chance {each.p_value:.0e})"
            for each in self.slow
        ]

    def figures(self, cluster: ClusterConfig | None = None) -> list[Figure]:
        """Return every figure that thresholds go by; of collectives the largest size's, of a pair of ranks each way.

        `cluster`: whose figures are the peaks of memory and links.
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
        """Return what --json prints."""
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
    """Return what a device sends to others on `hosts` together, 10^9 bytes per second, as `cluster` has it."""
    if cluster is None:
        return None
    return (cluster.within_node if len(hosts) == 1 else cluster.between_nodes).gb_per_second
