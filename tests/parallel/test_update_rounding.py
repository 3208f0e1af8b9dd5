"""Rounded updates of bf16 weights under layouts: the bits of one rank, and of every way to cut a weight. 6 seconds."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

from lightning_llm.plan.memory.rank_bytes import memory_bytes
from lightning_llm.plan.resolve import plan_of
from lightning_llm.train.weight_rounding import WeightRounding
from tests.parallel.test_optimizers import KEYS, SHAPE, measured_run
from tests.parallel.traced_run import difference


def rounded(weight: nn.Parameter) -> torch.Tensor:
    rounding = WeightRounding("stochastic", [("layers.0.x.weight", weight)], 3, lambda: 7)
    rounding.update(weight, {}, lambda part, rows: part + 2**-9)
    return weight.detach()


def cut_and_whole_differ() -> list[tuple[int, ...]]:
    """Return the cuts of a [13, 6] weight and a [13] vector with rounded values that differ from the whole's."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    wrong = []
    for shape, cuts in (((13, 6), [(0,), (1,), (0, 0), (0, 1), (1, 0)]), ((13,), [(0,), (0, 0)])):
        start = torch.linspace(0.5, 2, torch.Size(shape).numel()).bfloat16().reshape(shape)
        whole = rounded(nn.Parameter(start.clone()))
        assert not torch.equal(whole, start)
        for cut in cuts:
            over = mesh if len(cut) == 2 else mesh["a"]
            part = nn.Parameter(distribute_tensor(start.clone(), over, [Shard(axis) for axis in cut]))
            if not torch.equal(rounded(part).full_tensor(), whole):
                wrong.append(cut)
    return wrong


def test_every_cut_of_a_weight_draws_the_bits_of_the_whole(ranks):
    assert ranks(4).call(cut_and_whole_differ) == []


CASES = [("stochastic", "adamw", "zero2", 2), ("kahan", "muon", "ddp", 2)]
MORE = [
    ("stochastic", "muon", "zero3", 4),
    ("stochastic", "adamw8bit", "hsdp", 4),
    ("stochastic", "adamw", "pp", 2),
    ("kahan", "adamw", "zero3", 4),
    ("kahan", "adamw8bit", "zero1", 2),
]


@pytest.mark.parametrize(
    ("rounding", "kind", "layout", "world"), [*CASES, *(pytest.param(*case, marks=pytest.mark.full) for case in MORE)]
)
def test_bits_are_those_of_one_rank_and_state_is_as_planned(rounding, kind, layout, world, ranks, matrix_run):
    precision = {"stochastic": "bf16_sr", "kahan": "bf16_kahan"}[rounding]

    def run(layout: str, world: int) -> tuple[Any, Any]:
        config = matrix_run(layout, world, 4, precision, f"optim={kind}", *KEYS.get(kind, []), *SHAPE)
        return config, ranks(world).call(measured_run, config)

    config, ours = run(layout, world)
    assert difference(ours, run("single", 1)[1]) is None
    assert ours["state_bytes"] == memory_bytes(plan_of(config))["optimizer"]
