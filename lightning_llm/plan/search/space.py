"""Search space of layouts: varied keys, their bounds, and keys fixed on the command line."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any, NamedTuple

from lightning_llm.base.errors import Problem
from lightning_llm.config.overrides import parse_overrides
from lightning_llm.config.schema import Config
from lightning_llm.plan.axes.axis import AXES, BUILT_IN, FOLDED, divisors
from lightning_llm.plan.axes.ep import folding_problem
from lightning_llm.plan.degrees import Degrees
from lightning_llm.plan.divisibility import sharding_problems
from lightning_llm.plan.nodes import ranks_per_node
from lightning_llm.plan.stages import INTERLEAVED

LARGEST_MICRO_BATCH = 16
"""Largest micro-batch in a search, in sequences: Megatron's (Narayanan et al. 2021, arXiv 2104.04473, table 1)."""
VIRTUAL_STAGES = (2, 3, 4, 6, 8)
CHECKPOINTING = ("none", "selective", "full")
MICRO_BATCH = "data.micro_batch_size"


class Choice(NamedTuple):
    """One layout: values of the keys that a search varies, all in `parallel` except `data.micro_batch_size`."""

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
    further: tuple[tuple[str, int], ...] = ()
    """Degrees of axes that packages add, outermost first."""
    ep: int = 1

    @property
    def degrees(self) -> Degrees:
        """Degrees of the mesh axes."""
        return Degrees(**{axis: getattr(self, axis) for axis in (*BUILT_IN, *FOLDED)}, **dict(self.further))

    @property
    def data_ranks(self) -> int:
        """Ranks with different micro-batches."""
        own = self.dp_replicate * self.dp_shard
        return own * Degrees(**dict(self.further)).dp if self.further else own

    def values(self) -> dict[str, Any]:
        """Return the choice as {field, or name of a further axis: value}, without folded axes of one rank."""
        values = self._asdict()
        values = {key: value for key, value in values.items() if key not in FOLDED or value > 1}
        return values | dict(values.pop("further"))

    def overrides(self) -> dict[str, Any]:
        """Return the choice as {key: value}."""
        values = self.values()
        return {MICRO_BATCH: values.pop("micro_batch_size")} | {f"parallel.{key}": each for key, each in values.items()}


def further_axes() -> list[str]:
    """Return the registered axes that are not built in, outermost first."""
    return [axis for axis in AXES if axis not in BUILT_IN]


def key_of(field: str) -> str:
    """Return the dotted key of a field of `Choice`, or of a further axis."""
    return MICRO_BATCH if field == "micro_batch_size" else f"parallel.{field}"


def typed_values(overrides: Sequence[str], config: Config) -> dict[str, Any]:
    """Return the fields of `Choice` and further axes that `overrides` set, with their values in `config`.

    A field set to null is left out, so the search varies it. A list of recomputation per block fixes
    `activation_checkpoint`.
    """
    given = {each.key_or_group for each in parse_overrides(overrides)}
    values = config.parallel.model_dump() | {"micro_batch_size": config.data.micro_batch_size}
    fields = [field for field in Choice._fields if field != "further"] + further_axes()
    typed = {field: values[field] for field in fields if key_of(field) in given}
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
        axes = further_axes()
        for degrees in product(*(self._degrees(axis, self.world) for axis in axes)):
            further = Degrees(**dict(zip(axes, degrees, strict=True)))
            if self.world % further.world == 0:
                yield from self._beside(further, self.world // further.world)

    def config_of(self, choice: Choice) -> Config:
        """Return the config with the keys of `choice`. A list of recomputation per block stays only if it was given."""
        values = dict.fromkeys(FOLDED, 1) | choice.values()
        data = self.config.data.model_copy(update={"micro_batch_size": values.pop("micro_batch_size")})
        if "activation_checkpoint" not in self.typed:
            values["activation_checkpoint_layers"] = None
        parallel = self.config.parallel.model_copy(update=values)
        return self.config.model_copy(update={"data": data, "parallel": parallel, "world": self.world})

    def _beside(self, further: Degrees, ranks: int) -> Iterator[Choice]:
        """Yield the layouts of `ranks` ranks over the built-in axes, combined with the degrees of `further` axes."""
        for tp, cp in product(self._degrees("tp", ranks), self._degrees("cp", ranks)):
            if ranks % (tp * cp):
                continue
            rest = ranks // (tp * cp)
            for pp in self._degrees("pp", rest):
                if rest % pp == 0 and self._shards(Degrees(**further.by_axis | {"tp": tp, "cp": cp, "pp": min(pp, 2)})):
                    yield from self._with_degrees(further, tp, cp, pp, rest // pp)

    def _with_degrees(self, further: Degrees, tp: int, cp: int, pp: int, dp: int) -> Iterator[Choice]:
        added = tuple((axis, further.by_axis[axis]) for axis in further_axes())
        ranks, shared = dp * further.dp, cp * further.fsdp
        for zero_stage, shard in product(self._values("zero_stage", lambda: range(4)), divisors(dp)):
            replicate, sharded = dp // shard, shard * shared > 1
            if (zero_stage == 0 and shard > 1) or (zero_stage > 0 and not sharded):
                continue
            if self._differs("dp_shard", shard) or self._differs("dp_replicate", replicate):
                continue
            chosen = {"dp_shard", "dp_replicate"} & self.typed.keys()
            if zero_stage and not chosen and shard not in (dp, self._within_machine(dp, tp * cp)):
                continue
            folded = Degrees(dp_replicate=replicate, dp_shard=shard, cp=cp)
            shares = folded.ranks(*folded.with_experts) if tp == 1 else 1
            possible = AXES.folded["ep"].search_degrees(self._whole, shares)
            experts = [each for each in self._degrees("ep", shares) if each in possible]
            if cp > 1:
                layouts = ((each, Degrees(**folded.by_axis, ep=each)) for each in experts)
                sharded = zero_stage > 0 or self.config.parallel.reduction != "tree"
                experts = [each for each, fold in layouts if folding_problem(fold, sharded=sharded) is None]
            for size in self._values("micro_batch_size", lambda: _powers_of_two(LARGEST_MICRO_BATCH)):
                batch = self.config.data.global_batch_size
                if batch % (ranks * size):
                    continue
                for schedule, stages in self._schedules(pp, batch // (ranks * size)):
                    for mode in self._values("activation_checkpoint", lambda: CHECKPOINTING):
                        for ep in experts:
                            own = pp, replicate, shard, cp, tp, zero_stage, schedule, stages, mode, size
                            yield Choice(*own, added, ep)

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

    def _degrees(self, axis: str, ranks: int) -> Sequence[int]:
        return self._values(axis, lambda: AXES.every()[axis].search_degrees(self._whole, ranks))

    def _within_machine(self, dp: int, inner: int) -> int:
        """Return the largest divisor of `dp` that fits on one machine with `inner` ranks each."""
        return max((each for each in divisors(dp) if each * inner <= self._per_node), default=1)

    def _shards(self, degrees: Degrees) -> bool:
        return not list(sharding_problems(self.config, degrees))

    @cached_property
    def _whole(self) -> Config:
        """The config with this number of ranks."""
        return self.config.model_copy(update={"world": self.world})

    @cached_property
    def _per_node(self) -> int:
        return ranks_per_node(self._whole)


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
        Problem(key_of(field), _sentence(space, field, [each for each in blamed if each != field]), space.typed[field])
        for field in blamed
    ]


def _impossible(space: Space, field: str) -> Iterator[Problem]:
    """Yield the problems of a fixed value that no layout has: sizes it does not divide, or else a general one."""
    value = space.typed[field]
    if field in AXES.every() and space.world % value == 0:
        found = list(sharding_problems(space.config, Degrees(**{field: value})))
        if found:
            yield from found
            return
    yield Problem(key_of(field), _sentence(space, field, []), value)


def _contradicting(space: Space) -> list[str]:
    """Return a minimal set of fields that together allow no layout."""
    kept = list(space.typed)
    for field in space.typed:
        fewer = [each for each in kept if each != field]
        kept = kept if _any(_with(space, fewer)) else fewer
    return kept


def _sentence(space: Space, field: str, others: list[str]) -> str:
    value, world = space.typed[field], f"world={space.world}"
    if field in AXES.every() and space.world % value:
        text = f"must divide {world}"
    else:
        beside = ", ".join(f"{key_of(other)}={space.typed[other]}" for other in others)
        text = f"no layout of {world} has it{f' with {beside}' if others else ''}"
    allowed = sorted({choice.values().get(field, 1) for choice in _with(space, others).choices()})
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
