"""Mesh arithmetic: published groups, the rest, every message."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_llm.base.errors import ConfigError
from lightning_llm.config.schema import ParallelConfig
from lightning_llm.plan.degrees import Degrees, bitwise_problem, micro_batches_of, resolve_degrees

POWERS = st.sampled_from([1, 2, 4])


def layout(**keys) -> ParallelConfig:
    return ParallelConfig(name="test", **keys)


def test_groups_of_two_nodes_equal_the_published_ones():
    """Megatron-LM `parallel_state.initialize_model_parallel`: 16 GPUs, TP 2, PP 4, hence DP 2."""
    degrees = resolve_degrees(layout(tp=2, pp=4, dp_shard=None, zero_stage=1), 16)
    assert degrees == Degrees(pp=4, dp_replicate=1, dp_shard=2, cp=1, tp=2)
    assert degrees.groups("tp") == [[rank, rank + 1] for rank in range(0, 16, 2)]
    assert degrees.groups("dp_shard") == [
        [0, 2], [1, 3], [4, 6], [5, 7], [8, 10], [9, 11], [12, 14], [13, 15]
    ]  # fmt: skip
    assert sorted(degrees.groups("pp")) == [[0, 4, 8, 12], [1, 5, 9, 13], [2, 6, 10, 14], [3, 7, 11, 15]]


@given(POWERS, POWERS, POWERS, POWERS, POWERS)
def test_every_rank_has_one_place_and_one_group_per_axis(pp, replicate, shard, cp, tp):
    degrees = Degrees(pp=pp, dp_replicate=replicate, dp_shard=shard, cp=cp, tp=tp)
    coordinates = [degrees.coordinates(rank) for rank in range(degrees.world)]
    assert len(set(coordinates)) == degrees.world
    for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp"):
        groups = degrees.groups(axis)
        assert sorted(rank for group in groups for rank in group) == list(range(degrees.world))
        assert {len(group) for group in groups} == {getattr(degrees, axis)}


def tree(leaves: list) -> object:
    """The tree over any leaves, as nested sets: neighbours pair up, one without a partner moves up."""
    while len(leaves) > 1:
        pairs = [frozenset(leaves[i : i + 2]) for i in range(0, len(leaves) - 1, 2)]
        leaves = [*pairs, *leaves[2 * len(pairs) :]]
    return leaves[0]


@given(POWERS, st.integers(1, 6), st.integers(1, 6), st.sampled_from([1, 2, 3]))
def test_micro_batches_are_dealt_once_and_bitwise_means_one_tree(replicate, shard, count, stage):
    """Adds up a layout's partial sums as it does: per turn over shards, then turns, then replicas (or turns first)."""
    degrees = Degrees(dp_replicate=replicate, dp_shard=shard)
    dealt = [micro_batches_of(degrees, stage, rank, count) for rank in range(degrees.world)]
    assert sorted(index for mine in dealt for index in mine) == list(range(degrees.world * count))
    by_replica = [dealt[i * shard : (i + 1) * shard] for i in range(replicate)]
    if stage >= 2:
        replicas = [tree([tree(list(turn)) for turn in zip(*ranks, strict=True)]) for ranks in by_replica]
    else:
        replicas = [tree([tree(mine) for mine in ranks]) for ranks in by_replica]
    if bitwise_problem(degrees, stage, count) is None:
        assert tree(replicas) == tree(list(range(degrees.world * count)))


@pytest.mark.parametrize(
    ("keys", "world", "message"),
    [
        ({"dp_replicate": 2, "dp_shard": 2, "zero_stage": 3}, 6, "dp_replicate=2 x dp_shard=2, which needs 4 ranks"),
        ({"dp_replicate": 2, "tp": 2}, 8, "dp_replicate=2 x tp=2, which needs 4 ranks, and there are 8"),
        ({"dp_replicate": 4, "dp_shard": None}, 6, "needs a multiple of 4 ranks, and there are 6"),
        ({"dp_replicate": None, "dp_shard": None}, 4, "only one may be"),
    ],
)
def test_degrees_that_do_not_multiply_to_the_world_are_refused_with_the_arithmetic(keys, world, message):
    with pytest.raises(ConfigError, match=message):
        resolve_degrees(layout(**keys), world)
