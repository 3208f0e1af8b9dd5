"""Recipes of published large runs: they compose, pass every check, and plan what was published."""

from itertools import pairwise

import pytest

from lightning_llm.check import check_config
from lightning_llm.compose import compose_config
from lightning_llm.errors import ConfigError
from lightning_llm.plan import plan_facts, render

GPU_BYTES = 80e9

# name: degrees (pp, dp_replicate, dp_shard, tp), parameters in billions, micro-batches per rank, tokens per step
PUBLISHED = {
    "llama3_8b_fsdp2": ((1, 1, 64, 1), 8.03, 1, 64 * 8192),
    "llama3_70b_2d": ((1, 1, 8, 8), 70.55, 1, 64 * 8192),
    "llama3_405b_3d": ((8, 1, 8, 8), 405.85, 32, 256 * 8192),
    "megatron_gpt3_175b": ((16, 8, 1, 8), 174.6, 192, 1536 * 2048),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_run_is_checked_and_planned(name):
    config = compose_config([f"recipe={name}"])
    check_config(config)
    facts = plan_facts(config)
    degrees, billions, micro_batches, tokens = PUBLISHED[name]
    layout = facts["layout"]
    assert tuple(layout[axis] for axis in ("pp", "dp_replicate", "dp_shard", "tp")) == degrees
    assert facts["parameters"] == pytest.approx(billions * 1e9, rel=1e-3)
    assert (facts["accumulation"], facts["step_tokens"]) == (micro_batches, tokens)
    assert sum(facts["memory_bytes"].values()) < GPU_BYTES
    assert f"{config.world} ranks" in render(facts)


def test_llama_405b_has_the_stages_and_the_bubble_of_its_schedule():
    pipeline = plan_facts(compose_config(["recipe=llama3_405b_3d"]))["layout"]["pipeline"]
    counts = [last - first + 1 for first, last in (stage["layers"] for stage in pipeline["stages"])]
    assert counts == [7, *[8] * 14, 7]
    assert all(one["layers"][1] + 1 == other["layers"][0] for one, other in pairwise(pipeline["stages"]))
    assert pipeline["bubble_fraction"] == 7 / (2 * 32 + 7)


def test_a_published_run_on_too_few_ranks_says_the_arithmetic():
    with pytest.raises(ConfigError, match="needs a multiple of 64 ranks, and there are 100"):
        check_config(compose_config(["recipe=llama3_405b_3d", "world=100"]))
