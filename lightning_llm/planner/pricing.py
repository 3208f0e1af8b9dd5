"""What a layout costs: whether it is legal, the bytes of the rank that holds most, the seconds of a step."""

from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import cached_property

from lightning_llm.config.schema import ClusterConfig, Config
from lightning_llm.errors import Problem
from lightning_llm.optim.state_bytes import state_bytes
from lightning_llm.plan.check import layout_rule_problems
from lightning_llm.plan.fit import RESERVE, device_memory_bytes
from lightning_llm.plan.memory import peak_memory
from lightning_llm.plan.resolve import Plan, Resolution
from lightning_llm.plan.stages import split_layers, units_at
from lightning_llm.plan.time.step import StepTime, StepTimer
from lightning_llm.plan.units import shard_ranks, uses_fsdp
from lightning_llm.planner.space import Choice, Space

OF_MANY_MICRO_BATCHES = (
    "tree_gradients",
    "unsharded_gradients",
    "compute_copies",
    "weight_casts",
    "allocator_reserve",
)
"""Kinds of memory of which there is less where a step has fewer, larger micro-batches; of others there is as much at
least: a stage has as many tokens in flight, and messages of a step are as large together."""


@dataclass(frozen=True)
class Placement:
    """The machines, or devices, in the order of ranks, and the seconds of a step in the order they were given in."""

    order: tuple[str, ...]
    given_seconds: float


@dataclass(frozen=True)
class Priced:
    """One layout: its plan, the bytes of the rank that holds most, and, where it fits, the time of a step.

    `least_bytes`: what the same layout holds at least with any larger micro-batch.
    `placement`: where it was placed on measured links, which `time` is of then.
    """

    choice: Choice
    plan: Plan
    memory_bytes: int
    time: StepTime | None = None
    placement: Placement | None = None
    least_bytes: int = 0

    @property
    def seconds(self) -> float:
        """Seconds of a step. Raises ValueError where it was not timed: it does not fit."""
        if self.time is None:
            raise ValueError(f"{self.choice} was not timed")
        return self.time.total


class Pricer:
    """Prices the layouts of one space on one cluster.

    `limit_bytes` is what a layout may hold: what is given, or the device's memory less `fit.RESERVE`; None where
    nothing says how much there is.
    """

    def __init__(self, space: Space, cluster: ClusterConfig, limit_bytes: int | None = None):
        self.space, self.cluster, self._given_limit = space, cluster, limit_bytes
        self._state: dict[Hashable, int] = {}
        first = next(iter(space.choices()), None)
        self._capability = Resolution(space.config).capability
        self._resolved = None if first is None else self._resolution(space.config_of(first))

    @cached_property
    def limit_bytes(self) -> int | None:
        """Bytes that a rank may hold."""
        if self._given_limit is not None or self._resolved is None:
            return self._given_limit
        memory = device_memory_bytes(self._resolved.plan())
        return None if memory is None else int((1 - RESERVE) * memory)

    def problems(self, config: Config) -> list[Problem]:
        """Return why a layout cannot be."""
        return layout_rule_problems(self._resolution(config))

    def fits(self, held_bytes: int) -> bool:
        """Return whether a rank may hold so much."""
        return self.limit_bytes is None or held_bytes <= self.limit_bytes

    def least_bytes(self, choice: Choice) -> int:
        """Return what a rank holds at least: weights, gradients and the optimizer's state of its lightest parts.

        Of the last pipeline rank, whose blocks every other has as many of, or one fewer; made once for many layouts.
        """
        key = choice.tp, choice.pp, choice.virtual_stages, choice.zero_stage > 0 or None, choice.dp_shard, choice.cp
        if key not in self._state:
            config = self.space.config_of(choice)
            model, degrees = config.model, choice.degrees
            parts = split_layers(model, choice.pp * choice.virtual_stages)[choice.pp - 1 :: choice.pp]
            units = units_at(model, parts, choice.tp)
            native = config.parallel.model_copy(update={"reduction": "native"})  # shards at least as much
            ranks = shard_ranks(native, degrees) if uses_fsdp(native, degrees) and choice.zero_stage else 1
            held = state_bytes(units.shards(ranks), config.optim, config.chosen_algorithm, config.precision)
            self._state[key] = held.parameters + held.gradients + held.optimizer
        return self._state[key]

    def plan(self, config: Config) -> Plan:
        """Return the plan of a layout that is legal."""
        return self._resolution(config).plan()

    def memory(self, choice: Choice, config: Config | None = None) -> Priced:
        """Return a layout with the bytes it holds; `config`: it with other keys than the choice's alone."""
        plan = self.plan(config or self.space.config_of(choice))
        peak = peak_memory(plan)
        fewer = sum(peak.at_peak.get(kind, 0) for kind in OF_MANY_MICRO_BATCHES)
        return Priced(choice, plan, peak.total, least_bytes=peak.total - fewer)

    def timed(self, priced: Priced) -> Priced:
        """Return a layout with the time of a step."""
        return replace(priced, time=StepTimer(priced.plan, self.cluster).time)

    def _resolution(self, config: Config) -> Resolution:
        return Resolution(config, self._capability)
