"""Degrees of the mesh axes, the groups of ranks, and the micro-batches of each rank. Imports no torch."""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from lightning_llm.base.errors import ConfigError, Problem
from lightning_llm.config.schema import ParallelConfig
from lightning_llm.plan.axes.axis import AXES, Dimension


class PerAxis:
    """A number per mesh axis, outermost first, available as attributes by axis name. Immutable and hashable."""

    default: int
    """Value of an axis that is not given."""

    def __init__(self, **numbers: int):
        if unknown := numbers.keys() - AXES.every().keys():
            raise TypeError(f"unknown mesh axis {', '.join(sorted(unknown))}. Known axes: {', '.join(AXES.every())}")
        self.__dict__["by_axis"] = by_axis = {axis: numbers.get(axis, self.default) for axis in AXES}
        self.__dict__["folded"] = folded = {axis: numbers.get(axis, self.default) for axis in AXES.folded}
        self.__dict__.update(by_axis, **folded)

    by_axis: dict[str, int]
    folded: dict[str, int]
    """The number per axis that divides ranks of others (`MeshAxis.folds`)."""

    if TYPE_CHECKING:

        def __getattr__(self, axis: str) -> int: ...

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"{type(self).__name__} are immutable")

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return False
        return (self.by_axis, self.folded) == (other.by_axis, other.folded)

    def __hash__(self) -> int:
        return hash((*self.by_axis.values(), *self.folded.values()))

    def __repr__(self) -> str:
        numbers = self.by_axis | {axis: number for axis, number in self.folded.items() if number != self.default}
        return f"{type(self).__name__}({', '.join(f'{axis}={number}' for axis, number in numbers.items())})"


class Coordinates(PerAxis):
    """A rank's coordinate on each axis, from 0."""

    default = 0


class Degrees(PerAxis):
    """Ranks per axis."""

    default = 1

    @property
    def world(self) -> int:
        """Total number of ranks."""
        return math.prod(self.by_axis.values())

    def over(self, *dimensions: Dimension) -> int:
        """Return the product of the degrees of all axes that divide any of `dimensions`."""
        return self.ranks(*AXES.cutting(*dimensions))

    def ranks(self, *axes: str) -> int:
        """Return the size of a group over `axes`."""
        return math.prod(getattr(self, axis) for axis in axes)

    @property
    def with_experts(self) -> tuple[str, str]:
        """Axes of the ranks that share experts: dp_shard (dp_replicate if nothing is sharded), and within it cp."""
        return "dp_shard" if self.by_axis["dp_shard"] > 1 else "dp_replicate", "cp"

    @property
    def of_experts(self) -> "Degrees":
        """Degrees of the ranks that hold the same experts: without the `ep` ranks that hold different ones.

        Those are neighbors: context-parallel ranks first, then the data-parallel ranks around them.
        """
        data, within = self.with_experts[0], math.gcd(self.folded["ep"], self.by_axis["cp"])
        outside = self.by_axis[data] // (self.folded["ep"] // within)
        return Degrees(**self.by_axis | {data: outside, "cp": self.by_axis["cp"] // within})

    @property
    def edp(self) -> int:
        """Ranks of `with_experts` that hold the same experts; also a name for their groups."""
        return self.ranks(*self.with_experts) // self.folded["ep"]

    @property
    def ecp(self) -> int:
        """Those of them that share sequences; also a name for their groups."""
        return self.of_experts.by_axis["cp"]

    @property
    def dp(self) -> int:
        """Data-parallel ranks: ranks with different micro-batches."""
        return self.over("data")

    @property
    def fsdp(self) -> int:
        """Ranks that FSDP2 can shard one copy of the parameters over, including those that share sequences."""
        return self.over("parameters")

    @property
    def sequence(self) -> int:
        """Context-parallel ranks: each has a part of a sequence's tokens."""
        return self.over("sequence")

    @property
    def width(self) -> int:
        """Tensor-parallel ranks: each has a part of every layer's width."""
        return self.over("width")

    def coordinates(self, rank: int) -> Coordinates:
        """Return the coordinate of `rank` (0 .. world - 1) on each axis, from 0."""
        coordinates = {}
        for axis, degree in reversed(self.by_axis.items()):
            rank, coordinates[axis] = divmod(rank, degree)
        return Coordinates(**coordinates)

    def number(self, rank: int, *axes: str) -> int:
        """Return the index of `rank` within its group over `axes`, from 0, in rank order."""
        own, number = self.coordinates(rank).by_axis, 0
        for axis in self.by_axis:
            if axis in axes:
                number = number * self.by_axis[axis] + own[axis]
        return number

    def first_group(self, *axes: str) -> list[int]:
        """Return the ranks of rank 0's group over `axes`, in order."""
        ranks, stride = [0], 1
        for axis, degree in reversed(self.by_axis.items()):
            if axis in axes:
                ranks = [place * stride + rank for place in range(degree) for rank in ranks]
            stride *= degree
        return ranks

    def groups(self, *axes: str) -> list[list[int]]:
        """Return the groups over `axes`: lists of ranks that differ only in their coordinates on `axes`."""
        if axes in (("ep",), ("edp",), ("ecp",)):
            each, groups = self.folded["ep"], self.groups(*(("cp",) if axes == ("ecp",) else self.with_experts))
            if axes == ("ep",):
                return [group[start : start + each] for group in groups for start in range(0, len(group), each)]
            each = min(each, len(groups[0]))
            return [group[start::each] for group in groups for start in range(each)]
        alike = self.first_group(*axes)
        return [[first + rank for rank in alike] for first in self.first_group(*self.by_axis.keys() - set(axes))]


def replica_axes() -> tuple[str, ...]:
    """Return the axes that divide micro-batches but not parameters."""
    return tuple(axis for axis in AXES.cutting("data") if "parameters" not in AXES[axis].cuts)


def shard_axes() -> tuple[str, ...]:
    """Return the axes over which FSDP2 shards parameters."""
    return AXES.cutting("parameters")


def resolve_degrees(config: ParallelConfig, world: int) -> Degrees:
    """Return the degrees of `config` on `world` ranks. A null degree becomes the number of remaining ranks.

    Raises:
        ConfigError: more than one is null, or the product is not `world`, with the arithmetic.
    """
    given = {axis: getattr(config, axis) for axis in AXES}
    open_axes = [axis for axis, degree in given.items() if degree is None]
    known = math.prod(degree for degree in given.values() if degree is not None)
    if len(open_axes) > 1:
        text = f"and parallel.{', parallel.'.join(open_axes[1:])} are null; only one may be. Set the others."
        raise ConfigError(Problem(f"parallel.{open_axes[0]}", text))
    if world % known or (not open_axes and world != known):
        raise ConfigError(Problem(f"parallel={config.name}", _arithmetic(given, known, world, bool(open_axes))))
    folded = {axis: getattr(config, axis) or 1 for axis in AXES.folded}
    return Degrees(**{axis: world // known if degree is None else degree for axis, degree in given.items()}, **folded)


def given_degrees(config: ParallelConfig) -> Degrees:
    """Return the degrees of `config`, with 1 for null. Used in checks if the degrees do not fit the number of ranks."""
    return Degrees(**{axis: getattr(config, axis) or 1 for axis in AXES.every()})


def _arithmetic(given: dict[str, int | None], known: int, world: int, has_rest: bool) -> str:
    product_of = " x ".join(f"{axis}={degree}" for axis, degree in given.items() if degree not in (None, 1))
    wanted = f"a multiple of {known}" if has_rest else f"{known}"
    return (
        f"has {product_of or 'every degree 1'}, which needs {wanted} ranks, and there are {world}. "
        f"Set trainer.devices (or world) to {wanted}, change a degree, or use a layout that adapts: ddp, zero3, ..."
    )


def micro_batches_of(degrees: Degrees, zero_stage: int, rank: int, count: int) -> list[int]:
    """Return the global indices of the `count` micro-batches that `rank` computes in one step, in its order.

    Indices are assigned so that one binary tree over all of them fits every layout. If gradients are reduced after each
    micro-batch (ZeRO-2 and 3), the ranks of a shard group take neighboring indices: the lowest levels of the tree are
    sums over these ranks, the next levels sums over micro-batches. If gradients are reduced over ranks once per step
    (DDP, ZeRO-1, the replicas of HSDP), each rank takes consecutive indices.
    """
    if zero_stage < 2:
        first = degrees.number(rank, *AXES.cutting("data")) * count
        return list(range(first, first + count))
    sharing = [axis for axis in AXES.cutting("data") if axis not in replica_axes()]
    shards = degrees.ranks(*sharing)
    first = degrees.number(rank, *replica_axes()) * shards * count + degrees.number(rank, *sharing)
    return list(range(first, first + shards * count, shards))


def bitwise_problem(degrees: Degrees, zero_stage: int, count: int) -> str | None:
    """Return why the layout's tree sum differs in order from a single rank's; None if the orders are equal.

    `count`: micro-batches per rank and step.

    A group's sum is a node of the tree if the micro-batches below it are a power of two, or all of them.
    """
    replicas, ep = degrees.ranks(*replica_axes()), degrees.ranks(*AXES.folded)
    shards = degrees.dp // replicas
    if not _is_power_of_two(ep) and count * degrees.dp > ep:
        return f"ep={ep} is not a power of two"
    once = replicas if zero_stage >= 2 else degrees.dp  # groups that are reduced once per step
    below = count * degrees.dp // once
    if zero_stage >= 2 and not _is_power_of_two(shards) and count * replicas > 1:
        return f"dp_shard={shards} is not a power of two"
    if zero_stage == 1 and replicas > 1 and not _is_power_of_two(count * shards):
        return f"{count * shards} micro-batches below each replica are not a power of two"
    if once > 1 and not _is_power_of_two(below):
        return f"{below} micro-batches below each of {once} ranks are not a power of two"
    return None


def _is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0


def checkpointing_problems(config: ParallelConfig, num_layers: int) -> Iterator[Problem]:
    """Yield why `activation_checkpoint_layers` does not fit `num_layers` blocks and the other checkpointing keys."""
    modes, key = config.activation_checkpoint_layers, "parallel.activation_checkpoint_layers"
    if modes is None:
        return
    if len(modes) != num_layers:
        text = f"has {len(modes)} entries: must have one per block, model.num_layers={num_layers}. Fix it, or set null."
        yield Problem(key, text)
    if config.activation_checkpoint != "none" or config.activation_checkpoint_every != 1:
        text = (
            f"is set, and so are activation_checkpoint={config.activation_checkpoint} and "
            f"activation_checkpoint_every={config.activation_checkpoint_every}. Omit those (none, 1), or this."
        )
        yield Problem(key, text)


def fit_problems(fitted: Degrees | ConfigError) -> Iterator[Problem]:
    """Yield the problems of `fitted`, a layout's degrees or the error of resolving them."""
    if isinstance(fitted, ConfigError):
        yield from fitted.problems
