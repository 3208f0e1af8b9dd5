"""How long collectives take on a cluster's links. Imports no torch."""

import math
from dataclasses import dataclass
from functools import cached_property

from lightning_llm.config.schema import ClusterConfig
from lightning_llm.config.schema.cluster import LinkConfig
from lightning_llm.plan.degrees import Degrees
from lightning_llm.plan.nodes import TREE_SCATTER, nodes_of_groups, ranks_together, share_between_nodes


@dataclass(frozen=True)
class Span:
    """The ranks of one group: how many, on how many machines, and whether they all share a package."""

    ranks: int
    nodes: int
    packaged: bool

    @property
    def per_node(self) -> int:
        """Ranks on a machine, at most."""
        return -(-self.ranks // self.nodes)


class Links:
    """The links between the ranks of a layout, which lie on machines in their order."""

    def __init__(self, cluster: ClusterConfig, degrees: Degrees, per_node: int):
        self.cluster, self.degrees, self.per_node = cluster, degrees, per_node
        self._spans: dict[str, Span] = {}
        self._shares: dict[tuple[str, str], float] = {}

    def seconds(self, kind: str, axes: str, sent_bytes: float, times: float = 1) -> float:
        """Return the time of `times` collectives over `axes` ("dp_shard cp") in which a rank sends `sent_bytes` in all.

        Every hop within a machine carries what the rank sends. Between machines rings are as many as the group's ranks
        on one, each through its own device's link, so that a rank sends its share there; both at once, so the longer
        of the two; but the tree's two all-to-alls go one behind the other. A hop's latency counts for each step of a
        ring, of a tree for an all-reduce. A send is one hop, between machines if most of the axis' neighbours lie on
        two.
        """
        span = self.span(axes)
        if span.ranks == 1 or not times or not sent_bytes:
            return 0.0
        within = self._package if span.packaged else self.cluster.within_node
        seconds = sent_bytes / (within.gb_per_second * 1e9) if span.per_node > 1 else 0.0
        if span.nodes > 1:
            share = round(self._share(kind, axes)) if kind == "send" else self._share(kind, axes)
            if kind in ("all_to_all", TREE_SCATTER):  # what goes to other machines does not take the links within, too
                seconds *= 1 - share
            outside = share * sent_bytes / (self.between_gb_per_second(kind, axes) * 1e9)
            seconds = seconds + outside if self._in_two(kind, axes) else max(seconds, outside)
            times *= 1 + self._in_two(kind, axes)
        return seconds + times * self.latency(kind, span)

    def send_seconds(self, sent_bytes: int) -> list[float]:
        """Return what a message takes between each rank of a pipeline and the next, from the last to the first."""
        return [self.seconds("send", "pp", sent_bytes)] * self.degrees.pp

    def span(self, axes: str) -> Span:
        """Return where the groups over `axes` lie: the one on most machines."""
        if axes not in self._spans:
            package, several = self.cluster.devices_per_package, tuple(axes.split())
            ranks = math.prod(getattr(self.degrees, axis) for axis in several)
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
        """Return what a device sends to another machine in collectives of `kind` over `axes`: here whichever it is."""
        return self.cluster.between_nodes.gb_per_second

    def latency(self, kind: str, span: Span) -> float:
        """Return the seconds of one collective without any bytes."""
        within = (self._package if span.packaged else self.cluster.within_node).latency_microseconds
        between, inside = self.cluster.between_nodes.latency_microseconds, span.per_node - 1
        outside = span.nodes - 1
        if kind in ("send", "all_to_all", TREE_SCATTER):  # one hop, or all at once
            hops = between if outside else within
        elif kind == "all_reduce":  # down a tree and up again: NVIDIA/nccl, src/graph/tuning.cc
            hops = 2 * (inside * within + math.ceil(math.log2(span.nodes)) * between)
        else:
            hops = (span.ranks - 1 - outside) * within + outside * between
        return (self.cluster.start_microseconds + hops) * 1e-6
