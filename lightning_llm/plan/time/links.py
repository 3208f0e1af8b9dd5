"""Seconds of collectives on a cluster's links, as given or measured between each pair. Imports no torch."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, permutations
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from lightning_llm.base.errors import ConfigError, Problem
from lightning_llm.config.schema import ClusterConfig
from lightning_llm.config.schema.run import LinkConfig
from lightning_llm.plan.degrees import Degrees
from lightning_llm.plan.nodes import TREE_SCATTER, nodes_of_groups, ranks_together, share_between_nodes


@dataclass(frozen=True)
class Span:
    """Extent of one group: number of ranks, of machines, and whether all ranks share a package."""

    ranks: int
    nodes: int
    packaged: bool

    @property
    def per_node(self) -> int:
        """Largest number of ranks per machine."""
        return -(-self.ranks // self.nodes)


class Links:
    """The links between the ranks of a layout, with ranks assigned to machines in order."""

    def __init__(self, cluster: ClusterConfig, degrees: Degrees, per_node: int):
        self.cluster, self.degrees, self.per_node = cluster, degrees, per_node
        self._spans: dict[str, Span] = {}
        self._shares: dict[tuple[str, str], float] = {}

    def seconds(self, kind: str, axes: str, sent_bytes: float, times: float = 1) -> float:
        """Return the seconds of `times` collectives over `axes` ("dp_shard cp") with `sent_bytes` per rank in total.

        Every hop within a machine carries all bytes that the rank sends. Between machines there is one ring per rank of
        the group on a machine, each through its own device's link, so a rank sends only its share there. Transfers
        within and between machines run at once, so the longer one counts, except that the tree's two all-to-alls run
        one after another. The latency of a hop counts for each step of a ring, or of a tree for an all-reduce. A send
        is one hop; it is between machines if most neighbors on the axis are on different machines.
        """
        span = self.span(axes)
        if span.ranks == 1 or not times or not sent_bytes:
            return 0.0
        within = self._package if span.packaged else self.cluster.within_node
        seconds = sent_bytes / (within.gb_per_second * 1e9) if span.per_node > 1 else 0.0
        if span.nodes > 1:
            share = round(self._share(kind, axes)) if kind == "send" else self._share(kind, axes)
            if kind in ("all_to_all", TREE_SCATTER):  # bytes for other machines do not use the links within
                seconds *= 1 - share
            outside = share * sent_bytes / (self.between_gb_per_second(kind, axes) * 1e9)
            seconds = seconds + outside if self._in_two(kind, axes) else max(seconds, outside)
            times *= 1 + self._in_two(kind, axes)
        return seconds + times * self.latency(kind, span)

    def send_seconds(self, sent_bytes: int) -> list[float]:
        """Return the seconds of a message from each pipeline rank to the next; the last entry: from the last to the
        first."""
        return [self.seconds("send", "pp", sent_bytes)] * self.degrees.pp

    def span(self, axes: str) -> Span:
        """Return the extent of a group over `axes`: of the group that spans the most machines."""
        if axes not in self._spans:
            package, several = self.cluster.devices_per_package, tuple(axes.split())
            ranks = self.degrees.ranks(*several)
            packaged = package > 1 and all(
                group[0] // package == group[-1] // package for group in self.degrees.groups(*several)
            )
            self._spans[axes] = Span(ranks, nodes_of_groups(self.degrees, several, self.per_node), packaged)
        return self._spans[axes]

    def _share(self, kind: str, axes: str) -> float:
        if (kind, axes) not in self._shares:
            self._shares[kind, axes] = share_between_nodes(self.degrees, axes.split(), kind, self.per_node)
        return self._shares[kind, axes]

    def _in_two(self, kind: str, axes: str) -> bool:
        return kind == TREE_SCATTER and ranks_together(self.degrees, axes.split(), self.per_node) > 1

    @cached_property
    def _package(self) -> LinkConfig:
        return self.cluster.within_package or self.cluster.within_node

    def between_gb_per_second(self, kind: str, axes: str) -> float:
        """Return the bandwidth per device to other machines in collectives of `kind` over `axes`, in GB/s."""
        return self.cluster.between_nodes.gb_per_second

    def latency(self, kind: str, span: Span) -> float:
        """Return the latency of one collective of `kind` in seconds: its time for no bytes."""
        within = (self._package if span.packaged else self.cluster.within_node).latency_microseconds
        between, inside = self.cluster.between_nodes.latency_microseconds, span.per_node - 1
        outside = span.nodes - 1
        if kind in ("send", "all_to_all", TREE_SCATTER):  # one hop, or all hops at once
            hops = between if outside else within
        elif kind == "all_reduce":  # down a tree and back up: NVIDIA/nccl, src/graph/tuning.cc
            hops = 2 * (inside * within + math.ceil(math.log2(span.nodes)) * between)
        else:
            hops = (span.ranks - 1 - outside) * within + outside * between
        return (self.cluster.start_microseconds + hops) * 1e-6


FORMAT = "a mapping with gb_per_second, one row per machine or per device, and optionally names, one per row"


@dataclass(frozen=True)
class LinkMatrix:
    """Bandwidth from each unit (machine or device) to each other one, in 10^9 bytes per second per device."""

    names: tuple[str, ...]
    gb_per_second: tuple[tuple[float, ...], ...]

    @cached_property
    def seconds_per_byte(self) -> list[list[float]]:
        """Seconds per byte of each pair in the slower direction, since messages go both ways; 0 on the diagonal."""
        rows, count = self.gb_per_second, range(len(self.names))
        return [[0.0 if a == b else 1e-9 / min(rows[a][b], rows[b][a]) for b in count] for a in count]

    @property
    def median_gb_per_second(self) -> float:
        """The median over all pairs; for a single unit its own entry."""
        pairs = [rate for a, row in enumerate(self.gb_per_second) for b, rate in enumerate(row) if a != b]
        return median(pairs or self.gb_per_second[0])


def uniform_links(machines: int, gb_per_second: float) -> LinkMatrix:
    """Return equal links between all machines."""
    names = tuple(f"machine {index}" for index in range(machines))
    return LinkMatrix(names, ((gb_per_second,) * machines,) * machines)


def read_links(file: Path, machines: int, devices: int) -> LinkMatrix:
    """Return the matrix in `file`, YAML or JSON, for `machines` machines or `devices` devices.

    Raises:
        ConfigError: with all problems of the file.
    """
    try:
        text = file.read_text(encoding="utf-8")
        values = json.loads(text) if file.suffix == ".json" else yaml.safe_load(text)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(Problem("--links", f"cannot be read: {error}.", file)) from error
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(Problem("--links", f"is neither YAML nor JSON. Give {FORMAT}.", file)) from error
    rows: Any = values.get("gb_per_second") if isinstance(values, Mapping) else values
    names: Any = values.get("names") if isinstance(values, Mapping) else None
    if problems := list(_matrix_problems(file, rows, names, machines, devices)):
        raise ConfigError(problems)
    what = "machine" if len(rows) == machines else "device"
    given = tuple(str(name) for name in names) if names else tuple(f"{what} {index}" for index in range(len(rows)))
    return LinkMatrix(given, tuple(_rates(index, row) for index, row in enumerate(rows)))


def _matrix_problems(file: Path, rows: Any, names: Any, machines: int, devices: int) -> list[Problem]:
    if not isinstance(rows, Sequence) or not rows or not all(isinstance(row, Sequence) for row in rows):
        return [Problem("--links", f"has no matrix. Give {FORMAT}.", file)]
    texts, count = [], len(rows)
    if count not in (machines, devices):
        texts.append(f"must have {machines} rows, one per machine, or {devices}, one per device. It has {count}.")
    for index, row in enumerate(rows):
        if isinstance(row, str) or len(row) != count:
            texts.append(f"row {index} must have {count} numbers, one per row. It has {len(row)}.")
        elif bad := [rate for other, rate in enumerate(row) if other != index and not _is_rate(rate)]:
            texts.append(f"row {index} must have GB/s above 0. It has {bad[0]!r}.")
    if names is not None and (
        isinstance(names, str)
        or not isinstance(names, Sequence)
        or len(names) != count
        or len(set(map(str, names))) != count
    ):
        texts.append(f"names must have {count} different entries, one per row.")
    return [Problem("--links", text, file) for text in texts]


def _rates(own: int, row: Sequence[Any]) -> tuple[float, ...]:
    """Return a row as numbers, with 0 on the diagonal."""
    return tuple(0.0 if other == own else float(rate) for other, rate in enumerate(row))


def _is_rate(rate: Any) -> bool:
    return isinstance(rate, int | float) and not isinstance(rate, bool) and 0 < rate <= 1e6


class PlacedLinks(Links):
    """The links between ranks with the units of a matrix, machines or devices, in a given order.

    A collective is as fast as the slowest link of its ring, or of its all-to-all exchange, in any group. A send is as
    slow as the slowest pipeline between the same stages.
    """

    def __init__(
        self, cluster: ClusterConfig, degrees: Degrees, per_node: int, matrix: LinkMatrix, order: Sequence[int]
    ):
        super().__init__(cluster, degrees, per_node)
        self.matrix, self.order = matrix, order
        self.unit_ranks = degrees.world // len(order)
        self._slowest: dict[tuple[str, bool], float] = {}

    def seconds(self, kind: str, axes: str, sent_bytes: float, times: float = 1) -> float:
        """Return the seconds of collectives, as `Links.seconds`."""
        if self.unit_ranks > 1:
            return super().seconds(kind, axes, sent_bytes, times)
        span = self.span(axes)
        if span.ranks == 1 or not times or not sent_bytes:
            return 0.0
        return sent_bytes * self._slowest_of(kind, axes) + times * self.latency(kind, span)

    def between_gb_per_second(self, kind: str, axes: str) -> float:
        return 1e-9 / self._slowest_of(kind, axes)

    def send_seconds(self, sent_bytes: int) -> list[float]:
        """Return the seconds of a message between each rank of a pipeline and the next, in the slowest pipeline."""
        pipelines = self.degrees.groups("pp")
        usual = self.seconds("send", "pp", sent_bytes)
        if len(pipelines[0]) == 1:
            return [usual]
        latency, within = self.latency("send", self.span("pp")), self.cluster.within_node.gb_per_second * 1e9
        found = []
        for edge in range(self.degrees.pp):
            ends = [(ranks[edge], ranks[(edge + 1) % self.degrees.pp]) for ranks in pipelines]
            found.append(max(self._rate(*each) or 1 / within for each in ends) * sent_bytes + latency)
        return found

    def _slowest_of(self, kind: str, axes: str) -> float:
        key = axes, kind in ("all_to_all", TREE_SCATTER)
        if key not in self._slowest:
            rates = []
            for ranks in self.degrees.groups(*axes.split()):
                units = list(dict.fromkeys(rank // self.unit_ranks for rank in ranks))
                pairs = permutations(units, 2) if key[1] else pairwise([*units, units[0]])
                rates += [self.matrix.seconds_per_byte[self.order[a]][self.order[b]] for a, b in pairs]
            self._slowest[key] = max(rates)
        return self._slowest[key] or 1e-9 / self.cluster.within_node.gb_per_second

    def _rate(self, rank: int, other: int) -> float:
        one, two = self.order[rank // self.unit_ranks], self.order[other // self.unit_ranks]
        return self.matrix.seconds_per_byte[one][two]
