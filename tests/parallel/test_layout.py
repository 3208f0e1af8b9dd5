"""The process groups and micro-batches of a rank by its place in the mesh. 5 seconds."""

import pytest
import torch

from lightning_llm.config.schema import ParallelConfig
from lightning_llm.parallel import layout as layout_module
from lightning_llm.parallel.layout import Layout
from lightning_llm.plan.degrees import Degrees
from tests.parallel.traced_run import layout_here


def seconds_to_wait(parallel: ParallelConfig) -> list[float]:
    """Return the timeout of every group that the layout made."""
    cpu = torch.device("cpu")
    layout = layout_here(parallel)
    return [group._get_backend(cpu).options._timeout.total_seconds() for group in layout.own_groups()]


def test_every_group_has_the_timeout_of_the_config(ranks):
    """Those of the axes and those of two axes together; of themselves they would wait half an hour."""
    keys = {"dp_replicate": 2, "dp_shard": 2, "cp": 2, "zero_stage": 3}
    assert ranks(8).call(seconds_to_wait, ParallelConfig(name="test", timeout_seconds=7, **keys)) == [7.0] * 5


@pytest.mark.parametrize(
    ("degrees", "zero_stage"),
    [
        (Degrees(dp_shard=1024), 3),
        (Degrees(dp_replicate=16, dp_shard=32, tp=2), 2),
        (Degrees(pp=2, dp_replicate=4, dp_shard=16, cp=2, tp=4), 3),
        (Degrees(pp=2, dp_replicate=512), 0),
        (Degrees(dp_replicate=2, dp_shard=512), 1),
    ],
)
def test_micro_batches_are_ordered_without_asking_every_rank_again(degrees, zero_stage, monkeypatch):
    """Each step gathers the losses of all micro-batches: what depends on the world's size is worked out once."""
    count, asked = 3, []
    keys = {axis: getattr(degrees, axis) for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp")}
    config, rank = ParallelConfig(name="big", zero_stage=zero_stage, **keys), degrees.world - 5
    dealt = layout_module.micro_batches_of
    (mine,) = (ranks for ranks in degrees.groups("dp_replicate", "dp_shard") if rank in ranks)
    indices = torch.tensor([float(index) for each in mine for index in dealt(degrees, zero_stage, each, count)])

    def counted(*arguments):
        asked.append(arguments)
        return dealt(*arguments)

    monkeypatch.setattr(layout_module, "micro_batches_of", counted)
    monkeypatch.setattr(Degrees, "groups", lambda *_: pytest.fail("the world was looked through"))
    monkeypatch.setattr(Layout, "group", lambda *_: object())
    monkeypatch.setattr(layout_module, "all_gather", lambda out, values, group: out.copy_(indices))
    layout = Layout(config, degrees, rank)
    first = layout.gather_micro_batches(torch.zeros(count))
    asked.clear()
    assert torch.equal(layout.gather_micro_batches(torch.zeros(count)), first)
    assert torch.equal(first, torch.arange(degrees.dp * count, dtype=torch.float32))
    assert asked == []


def test_ranks_are_numbered_by_the_data_that_they_train_on():
    degrees = Degrees(pp=2, dp_replicate=3, dp_shard=2, cp=2, tp=2)
    config = ParallelConfig(name="m", zero_stage=3, pp=2, dp_replicate=3, dp_shard=2, cp=2, tp=2)
    for group in degrees.groups("dp_replicate", "dp_shard"):
        assert [Layout(config, degrees, rank).dp_rank for rank in group] == list(range(6))


@pytest.mark.parametrize(
    ("degrees", "zero_stage", "per_node", "sizes"),
    [
        (Degrees(dp_replicate=6), 0, 2, {("dp_replicate",): (3, 2)}),
        (Degrees(dp_replicate=8, tp=2), 0, 8, {("dp_replicate",): (2, 4)}),
        (Degrees(pp=2, dp_replicate=2, dp_shard=12, tp=2), 3, 8, {("dp_shard", "cp"): (3, 4)}),
        (Degrees(dp_replicate=3, dp_shard=4, cp=4, tp=2), 2, 8, {("dp_shard", "cp"): (4, 4)}),
        (Degrees(pp=3, dp_replicate=16, dp_shard=2), 3, 8, {("dp_replicate",): (4, 4)}),
        (Degrees(dp_replicate=2, dp_shard=8), 3, 8, {}),  # shards within a machine, replicas one on each
    ],
)
def test_machines_are_summed_within_and_then_between_however_many_of_each(
    degrees, zero_stage, per_node, sizes, monkeypatch
):
    """The numbers of machines and of ranks per machine differ, so that a swap of the two is noticed."""
    monkeypatch.setattr(
        layout_module, "init_device_mesh", lambda device, shape, mesh_dim_names: (shape, mesh_dim_names)
    )
    keys = {axis: getattr(degrees, axis) for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp")}
    config = ParallelConfig(name="m", zero_stage=zero_stage, reduction="tree", **keys)
    machines = layout_module._machines(config, degrees, torch.device("cpu"), per_node)
    found = {}
    for axes, (shape, names) in machines.items():
        ranks = torch.arange(degrees.world).view(shape)
        groups = {}
        for name in (layout_module.BETWEEN, layout_module.WITHIN):
            place = names.index(name)
            groups[name] = sorted(ranks.movedim(place, -1).reshape(-1, shape[place]).tolist())
        nodes, together = (len(groups[name][0]) for name in (layout_module.BETWEEN, layout_module.WITHIN))
        found[axes] = nodes, together
        whole = degrees.groups(*axes)
        assert groups[layout_module.WITHIN] == sorted(
            group[first : first + together] for group in whole for first in range(0, len(group), together)
        )
        assert groups[layout_module.BETWEEN] == sorted(
            group[first::together] for group in whole for first in range(together)
        )
        assert all(len({rank // per_node for rank in group}) == 1 for group in groups[layout_module.WITHIN])
    assert found == sizes
