"""Price of a layout: legality, peak bytes of a rank, seconds of a step; and lower bounds of bytes and seconds.

Bounds come from tables that many layouts share. A search skips layouts by their bounds without pricing them. This does
not change its result, since no bound exceeds the price.
"""

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

from lightning_llm.base.errors import Problem
from lightning_llm.config.schema import ClusterConfig, Config
from lightning_llm.plan.check import layout_rule_problems
from lightning_llm.plan.memory.activations import block_bytes
from lightning_llm.plan.memory.fit import RESERVE, device_memory_bytes
from lightning_llm.plan.memory.rank_bytes import ALLOCATOR_RESERVE, held_throughout, peak_memory
from lightning_llm.plan.resolve import DerivedConfig, Plan
from lightning_llm.plan.search.space import Choice, Space
from lightning_llm.plan.stages import StagePart, block_kinds, chunks_in_flight, split_layers
from lightning_llm.plan.time.operations import Passes
from lightning_llm.plan.time.stage import ends_of
from lightning_llm.plan.time.step import StepTime, StepTimer, no_time
from lightning_llm.precision.native.decide import Capability

OF_MICRO_BATCHES = ("tree_gradients", "weight_casts")
"""Kinds of buffers that depend on the number of micro-batches."""


@dataclass(frozen=True)
class Blocks:
    """Seconds and saved bytes of one micro-batch, cumulative over blocks; and seconds of embedding and head."""

    forward: list[float]
    backward: list[float]
    kept: list[int]
    least_backward: int
    embedding: tuple[float, float]
    head: tuple[float, float]


class Bounds:
    """Lower bounds of step time and memory of the layouts in `space` on `cluster`, to skip layouts unpriced.

    The time bound requires native casts on `capability`.
    """

    def __init__(self, space: Space, cluster: ClusterConfig, capability: Capability):
        self.space, self.cluster, self.capability = space, cluster, capability
        self._blocks: dict[Hashable, Blocks] = {}
        self._held: dict[Choice, int] = {}
        self._counts: dict[Hashable, int] = {}
        self._parts: dict[int, list[StagePart]] = {}
        self.reserve = 1 + (ALLOCATOR_RESERVE if capability.compute_capability is not None else 0)

    def seconds(self, choice: Choice) -> float:
        """Return a lower bound of a step's seconds: passes only, without FSDP's gathers, reductions and the update.

        Rank r of a pipeline starts after the first micro-batch has passed all earlier stages, and finishes before these
        stages run the backward pass of the last one. Raises NoTimeError if casts are emulated.
        """
        blocks, pp, parts = self.blocks(choice, timed=True), choice.pp, self.parts(choice)
        both = []
        for part in parts:
            low, high = part.layers.start, part.layers.stop
            own = blocks.forward[high] - blocks.forward[low] + blocks.backward[high] - blocks.backward[low]
            both.append(own + part.first * sum(blocks.embedding) + part.last * sum(blocks.head))
        before = [0.0, *accumulate(both)]
        return max(before[rank] + self.micro_batches(choice) * sum(both[rank::pp]) for rank in range(pp))

    def held_bytes(self, choice: Choice) -> int:
        """Return a lower bound of the bytes of a pipeline's first rank at the start of its first backward pass.

        It includes state, buffers, activations of the micro-batches in flight, and temporary bytes of one block's pass.
        """
        blocks, parts = self.blocks(choice, timed=False), self.parts(choice)[:: choice.pp]
        kept = min(blocks.kept[part.layers.stop] - blocks.kept[part.layers.start] for part in parts)
        in_flight = self._in_flight(choice)
        return self._throughout(choice) + int(self.reserve * (kept * in_flight + blocks.least_backward))

    def _in_flight(self, choice: Choice) -> int:
        """Return the largest number of forward passes that the first rank has in flight."""
        if choice.pp == 1:
            return 1
        key = choice.pp, choice.schedule, choice.virtual_stages, self.micro_batches(choice)
        if key not in self._counts:
            parallel = self.space.config_of(choice).parallel
            self._counts[key] = chunks_in_flight(parallel, choice.pp, 0, self.micro_batches(choice))
        return self._counts[key]

    def _throughout(self, choice: Choice) -> int:
        """Return the bytes that the first rank has in all passes, except those that depend on micro-batches."""
        alike = choice._replace(activation_checkpoint="none", micro_batch_size=1, schedule="")
        if alike not in self._held:
            plan = DerivedConfig(self.space.config_of(choice), self.capability).plan()
            persistent, throughout = held_throughout(plan, self.parts(choice)[:: choice.pp])
            buffers = sum(size for kind, size in throughout.items() if kind not in OF_MICRO_BATCHES)
            self._held[alike] = sum(persistent.values()) + int(self.reserve * buffers)
        return self._held[alike]

    def parts(self, choice: Choice) -> list[StagePart]:
        """Return the stages of a layout."""
        stages = choice.pp * choice.virtual_stages
        if stages not in self._parts:
            self._parts[stages] = split_layers(self.space.config.model, stages)
        return self._parts[stages]

    def micro_batches(self, choice: Choice) -> int:
        """Return the micro-batches per rank and step."""
        return self.space.config.data.global_batch_size // (choice.data_ranks * choice.micro_batch_size)

    def blocks(self, choice: Choice, *, timed: bool) -> Blocks:
        """Return lower bounds of the blocks' seconds (`timed`) or bytes, from a table that many layouts share.

        Layouts with the same tp, cp, ep, further axes, micro-batch size and recomputation share a table. It is computed
        for the one among them with the fewest casts, sums and kept bytes: everything is sharded, without a pipeline.
        """
        shape = choice.tp, choice.cp, choice.ep, choice.further
        key = *shape, choice.micro_batch_size, choice.activation_checkpoint, timed
        if key not in self._blocks:
            rest = choice.pp * choice.dp_replicate * choice.dp_shard
            alike = choice._replace(pp=1, dp_replicate=1, dp_shard=rest, zero_stage=3, schedule="1f1b")
            self._blocks[key] = self._table(self.space.config_of(alike._replace(virtual_stages=1)), timed)
        return self._blocks[key]

    def _table(self, config: Config, timed: bool) -> Blocks:
        plan = DerivedConfig(config, self.capability).plan()
        layers = range(config.model.num_layers)
        if not timed:
            kinds = list(block_kinds(config, layers))
            first = {kind: kinds.index(kind) for kind in kinds}
            alike = {kind: block_bytes(plan, index) for kind, index in first.items()}
            every = [alike[kind] for kind in kinds]
            kept = [0, *accumulate(each.kept for each in every)]
            return Blocks([], [], kept, min(each.backward for each in every), (0, 0), (0, 0))
        operations = StepTimer(plan, self.cluster).operations
        passes = [operations.block(index) for index in layers]
        again = [config.parallel.checkpointing_of(index) != "none" for index in layers]
        backward = [each.backward.total + more * each.again.total for each, more in zip(passes, again, strict=True)]
        embedding, head = map(_both, ends_of(operations))
        forward = [0.0, *accumulate(each.forward.total for each in passes)]
        return Blocks(forward, [0.0, *accumulate(backward)], [], 0, embedding, head)


def _both(passes: Passes) -> tuple[float, float]:
    return passes.forward.total, passes.backward.total


@dataclass(frozen=True)
class Placement:
    """Machines or devices in rank order, and the seconds of a step in the order of the matrix."""

    order: tuple[str, ...]
    given_seconds: float


@dataclass(frozen=True)
class Priced:
    """One layout: its plan, the peak bytes of a rank, and, if it fits, the time of a step.

    `placement`: its place on measured links, if any; `time` is then for that placement.
    """

    choice: Choice
    plan: Plan
    memory_bytes: int
    time: StepTime | None = None
    placement: Placement | None = None

    @property
    def seconds(self) -> float:
        """Seconds of a step. Raises ValueError if the layout was not timed because it does not fit."""
        if self.time is None:
            raise ValueError(f"{self.choice} was not timed")
        return self.time.total


class Pricer:
    """Prices the layouts of one space on one cluster.

    `limit_bytes` is the largest allowed size of a rank: the given limit, or the device's memory less `fit.RESERVE`;
    None if the memory is unknown.
    """

    def __init__(self, space: Space, cluster: ClusterConfig, limit_bytes: int | None = None):
        self.space, self.cluster, self._given_limit = space, cluster, limit_bytes
        self.counts: Counter[str] = Counter()
        """Number of layouts `priced` and `timed`."""
        self._no_time: dict[Hashable, str | None] = {}
        first = next(iter(space.choices()), None)
        self._capability = DerivedConfig(space.config).capability
        self.bounds = Bounds(space, cluster, self._capability)
        self._resolved = None if first is None else self._resolution(space.config_of(first))

    @cached_property
    def limit_bytes(self) -> int | None:
        """Largest allowed bytes of a rank; None if unknown."""
        if self._given_limit is not None or self._resolved is None:
            return self._given_limit
        memory = device_memory_bytes(self._resolved.plan())
        return None if memory is None else int((1 - RESERVE) * memory)

    def problems(self, config: Config) -> list[Problem]:
        """Return the problems of a layout."""
        return layout_rule_problems(self._resolution(config))

    def fits(self, held_bytes: int) -> bool:
        """Return whether `held_bytes` are within the limit."""
        return self.limit_bytes is None or held_bytes <= self.limit_bytes

    def no_time(self, choice: Choice) -> str | None:
        """Return why a layout has no time (`plan.time.step.no_time`), cached by tp, cp, pp and further axes."""
        key = choice.tp, choice.cp, choice.pp, choice.further
        if key not in self._no_time:
            self._no_time[key] = no_time(self.plan(self.space.config_of(choice)), self.cluster)
        return self._no_time[key]

    def plan(self, config: Config) -> Plan:
        """Return the plan of a legal layout."""
        return self._resolution(config).plan()

    def memory(self, choice: Choice, config: Config | None = None) -> Priced:
        """Return a layout with its bytes; `config`: the layout's config, if it has keys beyond the choice's."""
        plan = self.plan(config or self.space.config_of(choice))
        self.counts["priced"] += 1
        return Priced(choice, plan, peak_memory(plan).total)

    def timed(self, priced: Priced) -> Priced:
        """Return a layout with the time of a step."""
        self.counts["timed"] += 1
        return replace(priced, time=StepTimer(priced.plan, self.cluster).time)

    def _resolution(self, config: Config) -> DerivedConfig:
        return DerivedConfig(config, self._capability)
