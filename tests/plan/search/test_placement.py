"""Placement against every order, the closed form against the simulated schedule, and files of links. 15 seconds."""

import json
import random
from itertools import permutations

import pytest
import yaml

from lightning_llm.__main__ import main
from lightning_llm.config.schema import ParallelConfig
from lightning_llm.plan.search.placement import PlacementProblem, anneal, critical_path_seconds
from lightning_llm.plan.stages import passes_of
from lightning_llm.plan.time.step import finish_times

GPUS = 8


def shuffled_matrix(seed: int, fast: float = 100.0, slow: float = 5.0) -> list[list[float]]:
    """Links of GPUs that are fast within hidden groups of two, and vary a little."""
    draw = random.Random(seed)
    group = list(range(GPUS))
    draw.shuffle(group)
    rates = [[0.0] * GPUS for _ in range(GPUS)]
    for one in range(GPUS):
        for other in range(one):
            rate = (fast if group[one] // 2 == group[other] // 2 else slow) * draw.uniform(0.5, 1.5)
            rates[one][other] = rates[other][one] = rate
    return rates


def problem_of(seed: int, pp: int, dp: int) -> PlacementProblem:
    rates = shuffled_matrix(seed)
    return PlacementProblem(
        seconds_per_byte=[[1e-9 / rate if rate else 0.0 for rate in row] for row in rates],
        pipelines=[tuple(stage * dp + each for stage in range(pp)) for each in range(dp)],
        rings=[(stage, 2e8, tuple(range(stage * dp, stage * dp + dp))) for stage in range(pp)] if dp > 1 else [],
        stages=[0.1] * pp,
        backward=[0.066] * pp,
        message_bytes=1e8,
        micro_batches=2 * pp,
    )


@pytest.mark.parametrize(
    ("pp", "dp"), [(4, 2), (2, 4), *(pytest.param(*each, marks=pytest.mark.full) for each in ((8, 1), (1, 8)))]
)
def test_annealing_finds_the_best_of_all_orders_of_eight_gpus(pp, dp):
    problem = problem_of(pp, pp, dp)
    found = anneal(problem.seconds, GPUS, problem.links_seconds)
    best = min(map(problem.seconds, permutations(range(GPUS))))
    assert problem.seconds(found) == pytest.approx(best)
    assert problem.seconds(found) < problem.seconds(range(GPUS))
    assert found == anneal(problem.seconds, GPUS, problem.links_seconds)  # seeded


def test_the_closed_form_is_near_the_simulated_schedule():
    draw = random.Random(0)
    for _ in range(100):
        pp = draw.randint(1, 8)
        micro_batches = draw.randint(pp, 4 * pp)
        forward, sends = [draw.uniform(0.5, 1.5) for _ in range(pp)], [draw.uniform(0, 1) for _ in range(pp)]
        orders = [passes_of(ParallelConfig(name="pp"), pp, rank, micro_batches) for rank in range(pp)]
        seconds = finish_times(orders, pp, lambda each, of=forward: of[each.stage] * (1 if each.forward else 2), sends)
        closed = critical_path_seconds([3 * each for each in forward], sends[: pp - 1], micro_batches)
        assert closed == pytest.approx(max(seconds), rel=0.16)


def test_sends_wait_for_as_many_micro_batches_as_are_in_flight():
    """Four equal stages, sends as long as passes: the pipeline fills, and then gives 4 micro-batches a round trip."""
    assert critical_path_seconds([3.0] * 4, [0.0] * 3, 16) == 12 + 15 * 3
    assert critical_path_seconds([3.0] * 4, [3.0] * 3, 16) == 30 + 15 * 30 / 4


SEARCH = [
    "plan", "model=llama_1b", "cluster=h100_dgx", "cluster.devices_per_node=2", "world=8", "parallel.tp=1",
    "parallel.cp=1", "parallel.pp=4", "data.global_batch_size=32", "data.sequence_length=2048", "parallel.zero_stage=1",
    "data.micro_batch_size=1", "parallel.activation_checkpoint=none", "--search", "--planner", "pipette", "--json",
]  # fmt: skip
CHAIN = [[0, 4, 40, 4], [4, 0, 4, 40], [40, 4, 0, 40], [4, 40, 40, 0]]
"""Machines that are fast in the order 0, 2, 3, 1."""


def test_a_plan_is_placed_where_its_pipeline_is_fast(tmp_path, capsys):
    file = tmp_path / "links.yaml"
    own = [[None if a == b else rate for b, rate in enumerate(row)] for a, row in enumerate(CHAIN)]
    file.write_text(yaml.safe_dump({"names": ["a", "b", "c", "d"], "gb_per_second": own}))
    assert main([*SEARCH, "--links", str(file)]) == 0
    best = json.loads(capsys.readouterr().out)["layouts"][0]
    assert best["placement"]["order"] in (["a", "c", "d", "b"], ["b", "d", "c", "a"])
    assert best["seconds"] < best["placement"]["given_seconds"]
    file.write_text(yaml.safe_dump([[40] * 4] * 4))  # all equal: nothing to gain
    assert main([*SEARCH, "--links", str(file)]) == 0
    alike = json.loads(capsys.readouterr().out)["layouts"][0]
    assert alike["placement"]["order"] == [f"machine {index}" for index in range(4)]
    assert alike["seconds"] == alike["placement"]["given_seconds"]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[[0, 1], [1, 0]]", "must have 4 rows, one per machine, or 8, one per device. It has 2"),
        ("{rates: 3}", "has no matrix"),
        ("[[0, 1, 1, 1], [1, 0, 1, -1], [1, 1, 0], [1, 1, 1, 0]]", "row 1 must have GB/s above 0. It has -1"),
        ("[[0, 1, 1, 1], [1, 0, 1, 1], [1, 1, 0], [1, 1, 1, 0]]", "row 2 must have 4 numbers, one per row. It has 3"),
        ("{names: abcd, gb_per_second: [[0,1,1,1],[1,0,1,1],[1,1,0,1],[1,1,1,0]]}", "4 different entries"),
        ("{names: [a, b, c, c], gb_per_second: [[0,1,1,1],[1,0,1,1],[1,1,0,1],[1,1,1,0]]}", "4 different entries"),
        ("[[", "neither YAML nor JSON"),
        (None, "cannot be read"),
    ],
)
def test_invalid_link_matrices_are_refused(text, told, tmp_path, capsys):
    file = tmp_path / "links.yaml"
    if text is not None:
        file.write_text(text)
    assert main([*SEARCH, "--links", str(file)]) == 2
    assert told in capsys.readouterr().err
