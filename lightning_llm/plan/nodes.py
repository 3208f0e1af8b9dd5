"""Ranks per machine, the order of gradient sums, and the share of traffic between machines. Imports no torch."""

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

from lightning_llm.config.schema import Config
from lightning_llm.plan.axes.axis import AXES
from lightning_llm.plan.degrees import Degrees, replica_axes, shard_axes
from lightning_llm.plan.memory.units import micro_batches_per_rank, tree_buffers

TREE_SCATTER = "tree_scatter"
"""Kind of the tree's reduce-scatters: two all-to-alls if machines hold subtrees (`ranks_together`), else one."""
ASSUMED_RANKS_PER_NODE = 8
"""GPUs per machine of most clusters (DGX, HGX), for a plan that gives only the number of ranks."""


def ranks_per_node(config: Config) -> int:
    """Return the ranks per machine: trainer.devices, or the cluster's; 8 if only `world` is above 1."""
    world, devices = config.world or config.trainer.devices, config.trainer.devices
    otherwise = config.cluster.devices_per_node if config.cluster else ASSUMED_RANKS_PER_NODE
    return min(world, devices if devices > 1 else otherwise)


def nodes_are_assumed(config: Config) -> bool:
    """Return whether `ranks_per_node` is an assumption, because only the world size was given."""
    return config.cluster is None and config.trainer.devices == 1 and (config.world or 1) > ASSUMED_RANKS_PER_NODE


def ranks_together(degrees: Degrees, axes: Sequence[str], per_node: int) -> int:
    """Return how many ranks of a group over `axes` sum within their machine before anything is sent to other machines.

    The sum of these ranks must be a node of the tree: a power of two of neighbors, the same number on every machine. If
    that is not possible the result is 1: sums keep the tree's order, but each rank sends its own part to other
    machines.
    """
    return _ranks_together(degrees, tuple(axes), per_node)


@lru_cache(maxsize=4096)
def _ranks_together(degrees: Degrees, axes: tuple[str, ...], per_node: int) -> int:
    groups = degrees.groups(*axes)
    on_node = {count for ranks in groups for count in Counter(rank // per_node for rank in ranks).values()}
    together = min(on_node)
    subtrees = len(on_node) == 1 and together & (together - 1) == 0
    return together if subtrees and together < len(groups[0]) else 1


def share_between_nodes(degrees: Degrees, axes: Sequence[str], kind: str, per_node: int) -> float:
    """Return the fraction (0 to 1) of the bytes of collectives of `kind` over `axes` that go to another machine."""
    return _share_between_nodes(degrees, tuple(axes), kind, per_node)


@lru_cache(maxsize=4096)  # a search calls it for few degrees with many batches and schedules
def _share_between_nodes(degrees: Degrees, axes: tuple[str, ...], kind: str, per_node: int) -> float:
    groups = degrees.groups(*axes)
    together = _ranks_together(degrees, axes, per_node) if kind == TREE_SCATTER else 1
    crossing, sent = 0, 0
    for ranks in groups:
        size, on_node = len(ranks), Counter(rank // per_node for rank in ranks)
        if together > 1:  # a machine sends its sum once
            sent += size * (size - 1)
            crossing += size * (size // together - 1)
        elif kind in ("all_to_all", TREE_SCATTER):  # the same amount to each other rank
            sent += size * (size - 1)
            crossing += sum(here * (size - here) for here in on_node.values())
        elif kind == "send":  # to the next stage, and to the one before
            sent += size - 1
            crossing += sum(one // per_node != other // per_node for one, other in pairwise(ranks))
        else:  # around a ring that enters each machine once
            sent += size
            crossing += len(on_node) if len(on_node) > 1 else 0
    return crossing / sent if sent else 0.0


def data_parallel_nodes(config: Config, degrees: Degrees) -> int:
    """Return the number of machines over which gradients are summed: the largest over all groups that sum."""
    return nodes_of_groups(degrees, AXES.cutting("data", "parameters"), ranks_per_node(config))


@lru_cache(maxsize=4096)
def nodes_of_groups(degrees: Degrees, axes: tuple[str, ...], per_node: int) -> int:
    """Return the number of machines that a group over `axes` spans: the largest over all such groups."""
    return max(len({rank // per_node for rank in ranks}) for ranks in degrees.groups(*axes))


def with_reduction(config: Config, degrees: Degrees) -> Config:
    """Return `config` with parallel.reduction=auto replaced by tree or native.

    If gradients are summed within a machine, it becomes tree. Over several machines it becomes tree if one all-to-all
    sends no more bytes between machines than the library's rings and no partial sums have to wait, otherwise native.
    Two all-to-alls (`ranks_together`) would send no more bytes either, but one after the other, which has not been
    measured. The `cluster` of a plan is ignored, since it is not in the config hash and `train` with the same keys must
    give the same bits.
    """
    if config.parallel.reduction != "auto":
        return config
    run = config.model_copy(update={"cluster": None})
    dearer = tree_factor(run, degrees, "all_to_all") > 1 or tree_buffers(micro_batches_per_rank(run, degrees)) > 0
    crosses = degrees.dp > 1 and data_parallel_nodes(run, degrees) > 1
    coded = config.precision.gradient_reduction is not None  # which the library cannot sum
    chosen = "native" if crosses and dearer and not coded else "tree"
    return config.model_copy(update={"parallel": config.parallel.model_copy(update={"reduction": chosen})})


def tree_factor(config: Config, degrees: Degrees, scatter: str = TREE_SCATTER) -> float:
    """Return the gradient bytes that the tree sends between machines relative to rings; 1 if neither sends any.

    One all-to-all (`scatter`) sends parts of the sum from each rank of a machine to each rank elsewhere. A ring, and
    two all-to-alls, send only the sum of a machine's ranks. The bytes are equal if a machine has one rank of each
    group. They are counted in units of a rank's shard: gradients are scattered per micro-batch (ZeRO-2 and 3) or once
    per step, then summed over replicas and sent back.
    """
    per_node, parallel, shards = ranks_per_node(config), config.parallel, shard_axes()
    ranks = degrees.fsdp if parallel.zero_stage else 1
    scattered = (ranks - 1) * (micro_batches_per_rank(config, degrees) if parallel.zero_stage >= 2 else 1)

    def between(axes: Sequence[str], kind: str) -> float:
        return share_between_nodes(degrees, axes, kind, per_node)

    tree, native = scattered * between(shards, scatter), scattered * between(shards, "reduce_scatter")
    for axis in replica_axes():
        replicas = degrees.ranks(axis)
        summed, rings = (replicas - 1) / replicas, between((axis,), "all_gather")
        tree += summed * (between((axis,), scatter) + rings)
        native += 2 * summed * rings
    return tree / native if native else 1.0


def reduction_note(config: Config, degrees: Degrees) -> str | None:
    """Return a note on the effect of parallel.reduction between machines; None if gradients stay within one."""
    nodes, per_node = data_parallel_nodes(config, degrees), ranks_per_node(config)
    if degrees.dp == 1 or nodes == 1:
        return None
    times = f"{tree_factor(config, degrees):.3g}"
    much = "as much" if times == "1" else f"{times} times as much"
    machines = f"{nodes} machines of {per_node} ranks{' (assumed)' if nodes_are_assumed(config) else ''}"
    how = _stages_note(config, degrees)
    if (sent := config.precision.gradient_reduction) is not None:
        codes = f"{sent.format} codes of {sent.cast.stored_bits:.4g} bits with scales (precision.gradient_reduction)"
        return f"note   gradients are summed over {machines}, sent in one stage as {codes}"
    if config.parallel.reduction == "native":
        waiting = tree_buffers(micro_batches_per_rank(config, degrees))
        kept = f", and keep {waiting} partial sum{'s' if waiting > 1 else ''}" if waiting else ""
        return (
            f"note   gradients are summed by the library over {machines} (parallel.reduction=native); tree, with sums "
            f"that do not depend on the number of ranks, would send {much} of them between machines{how}{kept}"
        )
    return (
        f"note   gradients are summed over {machines} in the tree's order (parallel.reduction=tree), which sends "
        f"{much} of them between machines as parallel.reduction=native{how}"
    )


def _stages_note(config: Config, degrees: Degrees) -> str:
    """Return how the tree sums groups that have several ranks on each of several machines; "" if there are none."""
    per_node, together = ranks_per_node(config), []
    for axes in (shard_axes() if config.parallel.zero_stage else (), *((axis,) for axis in replica_axes())):
        groups = degrees.groups(*axes) if axes else []
        several = any(1 < len({rank // per_node for rank in ranks}) < len(ranks) for ranks in groups)
        together += [ranks_together(degrees, axes, per_node)] if several else []
    if not together:
        return ""
    if min(together) == 1:
        return " (the ranks of a group are not a power of two on every machine, so each sends its own to the others)"
    return f" (in two stages: {max(together)} ranks on a machine first, then between machines)"
