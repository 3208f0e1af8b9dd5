"""Search space of layouts: varied keys, their bounds, and keys fixed on the command line."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from itertools import product
from typing import Any, NamedTuple

from lightning_llm.base.errors import Problem
from lightning_llm.config.overrides import parse_overrides
from lightning_llm.config.schema import Config
from lightning_llm.plan.axes.axis import AXES, BUILT_IN
from lightning_llm.plan.degrees import Degrees
from lightning_llm.plan.divisibility import sharding_problems
from lightning_llm.plan.nodes import ranks_per_node
from lightning_llm.plan.stages import INTERLEAVED

LARGEST_MICRO_BATCH = 16
"""Sequences; Megatron's largest (Narayanan et al. 2021, arXiv 2104.04473, table 1)."""
LEAST_TOKENS = 2048
"""Minimum tokens of a sequence per context-parallel rank; shorter parts make inefficient GEMMs and attention."""
VIRTUAL_STAGES = (2, 3, 4, 6, 8)
CHECKPOINTING = ("none", "selective", "full")
MICRO_BATCH = "data.micro_batch_size"


class Choice(NamedTuple):
    """One layout: the values of the varied keys, all of `parallel` except `data.micro_batch_size`."""

    pp: int
    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int
    zero_stage: int
    schedule: str
    virtual_stages: int
    activation_checkpoint: str
    micro_batch_size: int

    @property
    def degrees(self) -> Degrees:
        """Degrees of the mesh axes."""
        return Degrees(**{axis: getattr(self, axis) for axis in BUILT_IN})

    def overrides(self) -> dict[str, Any]:
        """Return the choice as {key: value}."""
        values = self._asdict()
        return {MICRO_BATCH: values.pop("micro_batch_size")} | {f"parallel.{key}": each for key, each in values.items()}


def key_of(field: str) -> str:
    """Return the dotted key of a field of `Choice`."""
    return MICRO_BATCH if field == "micro_batch_size" else f"parallel.{field}"


def typed_values(overrides: Sequence[str], config: Config) -> dict[str, Any]:
    """Return the fields of `Choice` that `overrides` set, with their values in `config`, composed from them.

    Null leaves a field open. A list of recomputation per block fixes `activation_checkpoint`.
    """
    given = {each.key_or_group for each in parse_overrides(overrides)}
    values = config.parallel.model_dump() | {"micro_batch_size": config.data.micro_batch_size}
    typed = {field: values[field] for field in Choice._fields if key_of(field) in given}
    if "parallel.activation_checkpoint_layers" in given and config.parallel.activation_checkpoint_layers is not None:
        typed["activation_checkpoint"] = "none"
    return {field: value for field, value in typed.items() if value is not None}


@dataclass(frozen=True)
class Space:
    """All layouts of `config` on `world` ranks within this module's bounds, with the fields of `typed` fixed.

    Fixed values may exceed the bounds. Layouts that another dominates by construction are excluded: GPipe if 1F1B has
    enough micro-batches, ZeRO on a single rank.
    """

    config: Config
    world: int
    typed: dict[str, Any]

    def choices(self) -> Iterator[Choice]:
        """Yield every layout with degrees that divide the world and micro-batches that divide the batch."""
        for tp, cp in product(self._values("tp", self._tensor_parallel), self._values("cp", self._context_parallel)):
            if self.world % (tp * cp):
                continue
            rest = self.world // (tp * cp)
            for pp in self._values("pp", partial(self._stages, rest)):
                if rest % pp == 0 and self._shards(tp, cp, pp):
                    yield from self._with_degrees(tp, cp, pp, rest // pp)

    def config_of(self, choice: Choice) -> Config:
        """Return the config with the keys of `choice`. A list of recomputation per block stays only if it was given."""
        values = choice._asdict()
        data = self.config.data.model_copy(update={"micro_batch_size": values.pop("micro_batch_size")})
        if "activation_checkpoint" not in self.typed:
            values["activation_checkpoint_layers"] = None
        parallel = self.config.parallel.model_copy(update=values)
        return self.config.model_copy(update={"data": data, "parallel": parallel, "world": self.world})

    def _with_degrees(self, tp: int, cp: int, pp: int, dp: int) -> Iterator[Choice]:
        for zero_stage, shard in product(self._values("zero_stage", lambda: range(4)), divisors(dp)):
            replicate, sharded = dp // shard, shard * cp > 1
            if (zero_stage == 0 and shard > 1) or (zero_stage > 0 and not sharded):
                continue
            if self._differs("dp_shard", shard) or self._differs("dp_replicate", replicate):
                continue
            chosen = {"dp_shard", "dp_replicate"} & self.typed.keys()
            if zero_stage and not chosen and shard not in (dp, self._within_machine(dp, tp * cp)):
                continue
            for size in self._values("micro_batch_size", lambda: _powers_of_two(LARGEST_MICRO_BATCH)):
                batch = self.config.data.global_batch_size
                if batch % (dp * size):
                    continue
                for schedule, stages in self._schedules(pp, batch // (dp * size)):
                    for mode in self._values("activation_checkpoint", lambda: CHECKPOINTING):
                        yield Choice(pp, replicate, shard, cp, tp, zero_stage, schedule, stages, mode, size)

    def _schedules(self, pp: int, micro_batches: int) -> Iterator[tuple[str, int]]:
        """Yield (schedule, stages per rank) for a pipeline of `pp` ranks."""
        if pp == 1:
            open_keys = not self._differs("virtual_stages", 1)
            yield from [(self.typed.get("schedule", "1f1b"), 1)] if open_keys else []
            return
        several = [each for each in VIRTUAL_STAGES if each == 2 or self.config.model.num_layers % (pp * each) == 0]
        found = [("1f1b" if micro_batches >= pp else "gpipe", 1)]
        found += [(INTERLEAVED, each) for each in several if micro_batches % pp == 0]
        if self.typed.keys() & {"schedule", "virtual_stages"}:
            stages = [self.typed["virtual_stages"]] if "virtual_stages" in self.typed else [1, *several]
            names = [self.typed["schedule"]] if "schedule" in self.typed else ["1f1b", INTERLEAVED]
            found = [each for each in product(names, stages) if (each[0] == INTERLEAVED) == (each[1] > 1)]
        yield from (each for each in found if pp * each[1] <= self.config.model.num_layers)

    def _values(self, field: str, otherwise: Callable[[], Sequence[Any]]) -> Sequence[Any]:
        return [self.typed[field]] if field in self.typed else otherwise()

    def _differs(self, field: str, value: Any) -> bool:
        return field in self.typed and self.typed[field] != value

    def _tensor_parallel(self) -> list[int]:
        """Return the degrees that fit within a machine (arXiv 2104.04473, section 3.2)."""
        return [each for each in divisors(self.world) if each <= self._per_node]

    def _context_parallel(self) -> list[int]:
        length = self.config.data.sequence_length
        return [each for each in divisors(self.world) if each == 1 or length // each >= LEAST_TOKENS]

    def _stages(self, ranks: int) -> list[int]:
        return [each for each in divisors(ranks) if each <= self.config.model.num_layers]

    def _within_machine(self, dp: int, inner: int) -> int:
        """Return the largest divisor of `dp` that fits on one machine with `inner` ranks each."""
        return max((each for each in divisors(dp) if each * inner <= self._per_node), default=1)

    def _shards(self, tp: int, cp: int, pp: int) -> bool:
        return not list(sharding_problems(self.config, Degrees(tp=tp, cp=cp, pp=min(pp, 2))))

    @cached_property
    def _per_node(self) -> int:
        return ranks_per_node(self.config.model_copy(update={"world": self.world}))


@lru_cache(maxsize=1024)
def divisors(number: int) -> tuple[int, ...]:
    """Return the divisors of `number` in order."""
    return tuple(each for each in range(1, number + 1) if number % each == 0)


def _powers_of_two(largest: int) -> list[int]:
    return [1 << power for power in range(largest.bit_length())]


def no_layout_problems(space: Space) -> list[Problem]:
    """Return why `space` has no layout: problems of fixed keys that allow none, alone or together.

    If no fixed key is the cause, the problem is reported for `world`. Empty if the space has layouts.
    """
    if _any(space):
        return []
    open_space = replace(space, typed={})
    if not _any(open_space):
        return [Problem("world", _of_world(space))]
    alone = [field for field in space.typed if not _any(_with(space, [field]))]
    if alone:
        return [problem for field in alone for problem in _impossible(space, field)]
    blamed = _contradicting(space)
    return [
        Problem(key_of(field), _sentence(space, field, [each for each in blamed if each != field])) for field in blamed
    ]


def _impossible(space: Space, field: str) -> Iterator[Problem]:
    """Yield the problems of a fixed value that no layout has: sizes it does not divide, or else a general one."""
    value = space.typed[field]
    if field in AXES and space.world % value == 0:
        found = list(sharding_problems(space.config, Degrees(**{field: value})))
        if found:
            yield from found
            return
    yield Problem(key_of(field), _sentence(space, field, []))


def _contradicting(space: Space) -> list[str]:
    """Return a minimal set of fields that together allow no layout."""
    kept = list(space.typed)
    for field in space.typed:
        fewer = [each for each in kept if each != field]
        kept = kept if _any(_with(space, fewer)) else fewer
    return kept


def _sentence(space: Space, field: str, others: list[str]) -> str:
    value, world = space.typed[field], f"world={space.world}"
    if field in AXES and space.world % value:
        text = f"is {value}: must divide {world}"
    else:
        beside = ", ".join(f"{key_of(other)}={space.typed[other]}" for other in others)
        text = f"is {value}, and no layout of {world} has that{f' with {beside}' if others else ''}"
    allowed = sorted({getattr(choice, field) for choice in _with(space, others).choices()})
    change = f"Set it to {'one of ' if len(allowed) > 1 else ''}{', '.join(map(str, allowed))}, omit it"
    return f"{text}. {change}, or change {'one of the others' if others else 'the number of ranks'}."


def _of_world(space: Space) -> str:
    batch, layers = space.config.data.global_batch_size, space.config.model.num_layers
    fitting = [each for each in divisors(space.world) if batch % each == 0]
    return (
        f"is {space.world}, and no layout has that many ranks: tp, cp and pp (of {layers} layers) must leave "
        f"a number of data-parallel ranks that divides data.global_batch_size={batch}, which "
        f"{', '.join(map(str, fitting))} do{'es' if len(fitting) == 1 else ''}. Set it to a multiple of "
        f"{space.world}, or change the number of ranks."
    )


def _with(space: Space, fields: list[str]) -> Space:
    typed: dict[str, Any] = {field: space.typed[field] for field in fields}
    return replace(space, typed=typed)


def _any(space: Space) -> bool:
    return next(space.choices(), None) is not None
