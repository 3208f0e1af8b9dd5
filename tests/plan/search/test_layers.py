"""The dynamic programme over blocks against every combination; recomputation by block on a real plan. 15 seconds."""

import random
from itertools import product

import pytest

from lightning_llm.config.compose import compose_config
from lightning_llm.plan.memory.rank_bytes import memory_bytes
from lightning_llm.plan.resolve import plan_of
from lightning_llm.plan.search import cheapest_modes, search
from lightning_llm.plan.search.pricing import Pricer
from lightning_llm.plan.search.space import Space, typed_values
from lightning_llm.plan.time.step import StepTimer


@pytest.mark.parametrize("seed", range(8))
def test_six_layers_of_four_ways_are_as_fast_as_the_best_of_all_combinations(seed):
    draw = random.Random(seed)
    seconds = [[draw.uniform(0, 1) for _ in range(4)] for _ in range(6)]
    sizes = [[draw.randint(0, 100) for _ in range(4)] for _ in range(6)]
    budget = draw.randint(60, 400)
    found = cheapest_modes(seconds, sizes, budget)
    costs = [
        sum(seconds[layer][way] for layer, way in enumerate(ways))
        for ways in product(range(4), repeat=6)
        if sum(sizes[layer][way] for layer, way in enumerate(ways)) <= budget
    ]
    if not costs:
        assert found is None
        return
    assert found is not None
    assert sum(seconds[layer][way] for layer, way in enumerate(found)) == pytest.approx(min(costs))
    assert sum(sizes[layer][way] for layer, way in enumerate(found)) <= budget


def test_a_coarse_budget_is_never_exceeded():
    sizes = [[0, 777_777_777]] * 9
    found = cheapest_modes([[1.0, 0.0]] * 9, sizes, 3_000_000_000, units=64)
    assert found is not None
    assert 2 <= sum(found) <= 3
    assert found is not None


def test_a_negative_budget_allows_no_mode():
    assert cheapest_modes([[1.0]], [[1]], -1) is None
    assert cheapest_modes([[1.0]], [[2]], 1) is None


WORDS = [
    "model=llama_3b", "cluster=h100_dgx", "world=2", "data.sequence_length=4096", "data.global_batch_size=8",
    "data.micro_batch_size=4", "parallel.tp=1", "parallel.cp=1", "parallel.zero_stage=3", "parallel.pp=1",
]  # fmt: skip


def test_a_real_plan_recomputes_as_little_as_fits():
    """Its blocks are equal: only the number of each mode matters, and every split is tried."""
    config = compose_config(WORDS)
    pricer = Pricer(Space(config, 2, typed_values(WORDS, config)), config.cluster)
    (best,) = search(pricer, by_block=True).fitting
    modes = best.plan.config.parallel.activation_checkpoint_layers
    assert best.choice.activation_checkpoint == "by block"
    assert modes is not None
    assert memory_bytes(best.plan)["total"] == best.memory_bytes <= pricer.limit_bytes
    layers, times = config.model.num_layers, []
    for none in range(layers + 1):
        for selective in range(layers + 1 - none):
            split = ("none",) * none + ("selective",) * selective + ("full",) * (layers - none - selective)
            parallel = best.plan.config.parallel.model_copy(update={"activation_checkpoint_layers": split})
            plan = plan_of(best.plan.config.model_copy(update={"parallel": parallel}))
            if memory_bytes(plan)["total"] <= pricer.limit_bytes:
                times.append((none, selective, plan))
    # Of as many blocks without recomputation the most selective ones are the fastest: only those are timed.
    fastest = {}
    for none, selective, plan in times:
        fastest[none] = max(fastest.get(none, (-1, plan)), (selective, plan), key=lambda each: each[0])
    best_of_all = min(StepTimer(plan, config.cluster).time.total for _, plan in fastest.values())
    assert best.seconds == pytest.approx(best_of_all, rel=1e-3)
    assert best.seconds >= best_of_all * (1 - 1e-9)
