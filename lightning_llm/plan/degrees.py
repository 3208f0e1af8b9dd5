"""Ranks per axis of the mesh, the groups they share, and the micro-batches they compute. Imports no torch."""

import math
from collections.abc import Iterator
from dataclasses import astuple, dataclass, fields
from itertools import product

from lightning_llm.base.errors import ConfigError, Problem
from lightning_llm.config.schema import ParallelConfig


@dataclass(frozen=True)
class Degrees:
    """Ranks per axis, outermost first: neighbours in rank share a tensor-parallel group, stages lie farthest apart.

    A node then holds whole TP groups, which talk most, and pipeline stages, which talk least, lie across nodes
    (Narayanan et al. 2021, arXiv 2104.04473, section 3; Megatron-LM's order "tp-cp-dp-pp").
    """

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1

    @property
    def world(self) -> int:
        """Ranks in all."""
        return math.prod(astuple(self))

    @property
    def dp(self) -> int:
        """Ranks that train on different micro-batches."""
        return self.dp_replicate * self.dp_shard

    @property
    def fsdp(self) -> int:
        """Ranks that share the shards of one copy of the parameters: those that share a sequence hold the same."""
        return self.dp_shard * self.cp

    def coordinates(self, rank: int) -> "Degrees":
        """Return the coordinate of `rank` (0 .. world - 1) on each axis, from 0."""
        coordinates = []
        for degree in reversed(astuple(self)):
            rank, coordinate = divmod(rank, degree)
            coordinates.append(coordinate)
        return Degrees(*reversed(coordinates))

    def groups(self, *axes: str) -> list[list[int]]:
        """Return the ranks that differ in their coordinates on `axes` alone, one list per group."""
        shared: dict[tuple[int, ...], list[int]] = {}
        for rank, coordinates in enumerate(product(*(range(degree) for degree in astuple(self)))):
            others = tuple(coordinate for name, coordinate in zip(AXES, coordinates, strict=True) if name not in axes)
            shared.setdefault(others, []).append(rank)
        return list(shared.values())


AXES = tuple(field.name for field in fields(Degrees))


def resolve_degrees(config: ParallelConfig, world: int) -> Degrees:
    """Return the degrees of `config` on `world` ranks; the one that is null takes the rest.

    Raises:
        ConfigError: more than one is null, or the product is not `world`, with the arithmetic.
    """
    given = {axis: getattr(config, axis) for axis in AXES}
    open_axes = [axis for axis, degree in given.items() if degree is None]
    known = math.prod(degree for degree in given.values() if degree is not None)
    if len(open_axes) > 1:
        text = f"and parallel.{', parallel.'.join(open_axes[1:])} are null; only one may take the rest. Set the others."
        raise ConfigError(Problem(f"parallel.{open_axes[0]}", text))
    if world % known or (not open_axes and world != known):
        raise ConfigError(Problem(f"parallel={config.name}", _arithmetic(given, known, world, bool(open_axes))))
    return Degrees(**{axis: world // known if degree is None else degree for axis, degree in given.items()})


def given_degrees(config: ParallelConfig) -> Degrees:
    """Return the degrees of `config`, 1 for those that are null: what is known where no number of ranks fits."""
    return Degrees(**{axis: getattr(config, axis) or 1 for axis in AXES})


def _arithmetic(given: dict[str, int | None], known: int, world: int, has_rest: bool) -> str:
    product_of = " x ".join(f"{axis}={degree}" for axis, degree in given.items() if degree not in (None, 1))
    wanted = f"a multiple of {known}" if has_rest else f"{known}"
    return (
        f"has {product_of or 'every degree 1'}, which needs {wanted} ranks, and there are {world}. "
        f"Set trainer.devices (or world) to {wanted}, change a degree, or take a layout that spreads: ddp, zero3, ..."
    )


def micro_batches_of(degrees: Degrees, zero_stage: int, rank: int, count: int) -> list[int]:
    """Return the global indices of the `count` micro-batches that `rank` computes in one step, in its order.

    They are dealt so that one binary tree over all indices fits every layout. Where shards are reduced after each
    micro-batch (ZeRO-2, 3) the ranks of a shard group take neighbours: the tree's low levels lie across ranks, the next
    are sums of shards. Where ranks are reduced once per step (DDP, ZeRO-1, and the replicas of HSDP) each takes a run.
    """
    own = degrees.coordinates(rank)
    if zero_stage >= 2:
        shards, first = degrees.dp_shard, own.dp_replicate * degrees.dp_shard * count
        return [first + micro_batch * shards + own.dp_shard for micro_batch in range(count)]
    first = (own.dp_replicate * degrees.dp_shard + own.dp_shard) * count
    return list(range(first, first + count))


def bitwise_problem(degrees: Degrees, zero_stage: int, count: int) -> str | None:
    """Return why this layout's tree of `count` micro-batches per rank is not the one of a single rank; None if it is.

    A group's sum is a node of the tree where the micro-batches below it are a power of two, or the tree's whole.
    """
    once = degrees.dp_replicate if zero_stage >= 2 else degrees.dp  # groups that meet once per step
    below = count * degrees.dp // once
    if zero_stage >= 2 and not _is_power_of_two(degrees.dp_shard) and count * degrees.dp_replicate > 1:
        return f"dp_shard={degrees.dp_shard} is no power of two"
    if zero_stage == 1 and degrees.dp_replicate > 1 and not _is_power_of_two(count * degrees.dp_shard):
        return f"{count * degrees.dp_shard} micro-batches below each replica are no power of two"
    if once > 1 and not _is_power_of_two(below):
        return f"{below} micro-batches below each of {once} ranks are no power of two"
    return None


def _is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0


def checkpointing_problems(config: ParallelConfig, num_layers: int) -> Iterator[Problem]:
    """Yield why the list of what each block recomputes is none for `num_layers` blocks."""
    modes, key = config.activation_checkpoint_layers, "parallel.activation_checkpoint_layers"
    if modes is None:
        return
    if len(modes) != num_layers:
        text = f"has {len(modes)} words, and model.num_layers is {num_layers}. Give one for each block, or null."
        yield Problem(key, text)
    if config.activation_checkpoint != "none" or config.activation_checkpoint_every != 1:
        text = (
            f"says what each block recomputes, and so do activation_checkpoint={config.activation_checkpoint} and "
            f"activation_checkpoint_every={config.activation_checkpoint_every}. Leave those out (none, 1), or this."
        )
        yield Problem(key, text)


def layout_problems(config: ParallelConfig, fitted: Degrees | ConfigError) -> Iterator[Problem]:
    """Yield what is wrong with a layout; `fitted` is its degrees, or why there are none."""
    if isinstance(fitted, ConfigError):
        yield from fitted.problems
    degrees = fitted if isinstance(fitted, Degrees) else given_degrees(config)
    if config.zero_stage == 0 and degrees.dp_shard > 1:
        text = f"is 0, and dp_shard={degrees.dp_shard} shards. Set it to 1, 2 or 3, or use dp_replicate."
        yield Problem("parallel.zero_stage", text)
