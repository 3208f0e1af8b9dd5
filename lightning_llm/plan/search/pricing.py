"""What a layout costs: whether it is legal, the bytes of the rank that holds most, the seconds of a step."""

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import cached_property

from lightning_llm.base.errors import Problem
from lightning_llm.config.schema import ClusterConfig, Config
from lightning_llm.plan.check import layout_rule_problems
from lightning_llm.plan.memory.fit import RESERVE, device_memory_bytes
from lightning_llm.plan.memory.rank_bytes import peak_memory
from lightning_llm.plan.resolve import Plan, Resolution
from lightning_llm.plan.search.bounds import Bounds
from lightning_llm.plan.search.space import Choice, Space
from lightning_llm.plan.time.step import StepTime, StepTimer, no_time


@dataclass(frozen=True)
class Placement:
    """The machines, or devices, in the order of ranks, and the seconds of a step in the order they were given in."""

    order: tuple[str, ...]
    given_seconds: float


@dataclass(frozen=True)
class Priced:
    """One layout: its plan, the bytes of the rank that holds most, and, where it fits, the time of a step.

    `placement`: where it was placed on measured links, which `time` is of then.
    """

    choice: Choice
    plan: Plan
    memory_bytes: int
    time: StepTime | None = None
    placement: Placement | None = None

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
        self.counts: Counter[str] = Counter()
        """How many layouts were `priced`, and `timed`."""
        self._no_time: dict[Hashable, str | None] = {}
        first = next(iter(space.choices()), None)
        self._capability = Resolution(space.config).capability
        self.bounds = Bounds(space, cluster, self._capability)
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

    def no_time(self, choice: Choice) -> str | None:
        """Return why a layout has no time (`plan.time.step.no_time`), found once for those of equal tp, cp and pp."""
        key = choice.tp, choice.cp, choice.pp
        if key not in self._no_time:
            self._no_time[key] = no_time(self.plan(self.space.config_of(choice)), self.cluster)
        return self._no_time[key]

    def plan(self, config: Config) -> Plan:
        """Return the plan of a layout that is legal."""
        return self._resolution(config).plan()

    def memory(self, choice: Choice, config: Config | None = None) -> Priced:
        """Return a layout with the bytes it holds; `config`: it with other keys than the choice's alone."""
        plan = self.plan(config or self.space.config_of(choice))
        self.counts["priced"] += 1
        return Priced(choice, plan, peak_memory(plan).total)

    def timed(self, priced: Priced) -> Priced:
        """Return a layout with the time of a step."""
        self.counts["timed"] += 1
        return replace(priced, time=StepTimer(priced.plan, self.cluster).time)

    def _resolution(self, config: Config) -> Resolution:
        return Resolution(config, self._capability)
