"""The groups of a rank's place in the mesh. 5 seconds."""

import torch
from traced_run import leave_groups

from lightning_llm.parallel.layout import Layout
from lightning_llm.schema import ParallelConfig


def seconds_to_wait(parallel: ParallelConfig) -> list[float]:
    """Return the timeout of every group that the layout made."""
    cpu = torch.device("cpu")
    layout = Layout.of(parallel, cpu)
    found = [group._get_backend(cpu).options._timeout.total_seconds() for group in layout.own_groups()]
    leave_groups(layout)
    return found


def test_every_group_waits_as_long_as_the_config_says(ranks):
    """Those of the axes and those of two axes together; of themselves they would wait half an hour."""
    keys = {"dp_replicate": 2, "dp_shard": 2, "cp": 2, "zero_stage": 3}
    assert ranks(8).call(seconds_to_wait, ParallelConfig(name="test", timeout_seconds=7, **keys)) == [7.0] * 5
