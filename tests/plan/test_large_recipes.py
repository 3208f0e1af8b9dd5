"""Presets of published large runs: they compose, pass every check, and plan the published layouts."""

from itertools import pairwise

import pytest

from lightning_llm.base.errors import ConfigError
from lightning_llm.base.hardware import MEMORY_GIB
from lightning_llm.config.compose import compose_config
from lightning_llm.model.flops import count_parameters
from lightning_llm.plan.check import check_config
from lightning_llm.plan.memory import ACCOUNTINGS
from lightning_llm.plan.memory.rank_bytes import peak_memory
from lightning_llm.plan.report import plan_facts, render
from lightning_llm.plan.resolve import plan_of

GPU_BYTES = 80e9

# name: degrees (pp, dp_replicate, dp_shard, tp), parameters in billions, micro-batches per rank, tokens per step
PUBLISHED = {
    "llama3_8b_fsdp2": ((1, 1, 64, 1), 8.03, 1, 64 * 8192),
    "llama3_70b_2d": ((1, 1, 8, 8), 70.55, 1, 64 * 8192),
    "llama3_405b_3d": ((8, 1, 8, 8), 405.85, 8, 256 * 8192),
    "megatron_gpt3_175b": ((16, 8, 1, 8), 174.6, 192, 1536 * 2048),
    "cpt/swallow_8b": ((2, 1, 64, 2), 8.03, 16, 1024 * 8192),
    "cpt/swallow_70b": ((8, 1, 2, 4), 70.55, 512, 1024 * 8192),
}


# Of torchtitan's train_configs/llama3_8b.toml, llama3_70b.toml and llama3_405b.toml, which leave AdamW's betas and
# weight decay to its defaults (0.9, 0.95; 0.1) and decay linearly to 0 after the warm-up, and of Megatron-LM's
# examples/gpt3/train_gpt3_175b_distributed.sh (--lr-warmup-fraction .001 of --lr-decay-iters 430000).
# The two of Swallow: scripts of okoge-kaz/Megatron-LM, named in the recipes.
TITAN = {
    "optim": {"name": "adamw", "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "gradient_clip_norm": 1},
    "schedule": {"name": "wsd", "warmup_steps": 200, "decay_fraction": 0.8, "final_factor": 0, "total_steps": None},
    "trainer": {"max_steps": 1000},
    "data": {"sequence_length": 8192},
}
SWALLOW = {
    "optim": {"name": "adamw", "beta1": 0.9, "beta2": 0.95, "weight_decay": 0.1, "gradient_clip_norm": 1},
    "schedule": {"name": "cosine", "warmup_steps": 1000, "total_steps": None, "final_factor": None},
    "parallel": {"sequence_parallel": True, "zero_stage": 1, "schedule": "1f1b"},
    "trainer": {"validate_every_steps": 500},
    "data": {"sequence_length": 8192, "micro_batch_size": 1},
}
SETTINGS = {
    "llama3_8b_fsdp2": [
        TITAN,
        {"optim": {"learning_rate": 3e-4}, "precision": {"name": "bf16", "master_dtype": "fp32"}},
        {"parallel": {"activation_checkpoint": "selective", "zero_stage": 3}, "data": {"micro_batch_size": 1}},
    ],
    "llama3_70b_2d": [
        TITAN,
        {"optim": {"learning_rate": 1.5e-4}, "precision": {"name": "bf16", "master_dtype": "fp32"}},
        {"parallel": {"activation_checkpoint": "full", "zero_stage": 3}, "data": {"micro_batch_size": 8}},
    ],
    "llama3_405b_3d": [
        TITAN,
        {"optim": {"learning_rate": 8e-5}, "schedule": {"warmup_steps": 600}, "trainer": {"max_steps": 3000}},
        {"precision": {"name": "fp8_current", "compute_dtype": "bf16", "master_dtype": "fp32"}},
        {"parallel": {"activation_checkpoint": "full", "schedule": "interleaved_1f1b", "virtual_stages": 2}},
        {"data": {"micro_batch_size": 4}},
    ],
    "megatron_gpt3_175b": [
        {"optim": {"name": "adamw", "beta1": 0.9, "beta2": 0.95, "weight_decay": 0.1, "gradient_clip_norm": 1}},
        {"optim": {"learning_rate": 6e-5}, "trainer": {"max_steps": 500_000, "validate_every_steps": 1000}},
        {"schedule": {"name": "cosine", "warmup_steps": 430, "total_steps": 430_000, "final_factor": 0.1}},
        {"precision": {"name": "fp16", "master_dtype": "fp32"}, "checkpoint": {"every_steps": 10_000}},
        {"parallel": {"activation_checkpoint": "none", "schedule": "1f1b", "sequence_parallel": False}},
        {"model": {"num_layers": 96, "hidden_size": 12288, "num_heads": 96, "max_sequence_length": 2048}},
        {"model": {"init_std": 0.006}, "data": {"sequence_length": 2048, "micro_batch_size": 1}},
    ],
    "cpt/swallow_8b": [
        SWALLOW,
        {"optim": {"learning_rate": 2.5e-5}, "schedule": {"final_learning_rate": 2.5e-6}},
        {"trainer": {"max_steps": 30_000}, "precision": {"name": "bf16"}, "data": {"document_mask": True}},
        {"parallel": {"activation_checkpoint": "none"}, "model": {"max_sequence_length": 131_072}},
    ],
    "cpt/swallow_70b": [
        SWALLOW,
        {"optim": {"learning_rate": 1e-5}, "schedule": {"final_learning_rate": 1e-6}, "trainer": {"max_steps": 12_500}},
        {"precision": {"name": "fp8_delayed"}, "data": {"document_mask": False}},
        {"parallel": {"activation_checkpoint": "full"}},
        {"model": {"max_sequence_length": 8192, "rope_scaling": None, "rope_theta": 500_000}},
    ],
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_runs_settings_are_those_of_its_source(name):
    config = compose_config([f"recipe={name}"])
    wanted: dict[tuple[str, str], object] = {}
    for part in SETTINGS[name]:  # later ones win
        wanted |= {(group, key): value for group, keys in part.items() for key, value in keys.items()}
    assert {(group, key): getattr(getattr(config, group), key) for group, key in wanted} == wanted


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_run_is_checked_and_planned(name):
    config = compose_config([f"recipe={name}"])
    check_config(config)
    facts = plan_facts(plan_of(config))
    degrees, billions, micro_batches, tokens = PUBLISHED[name]
    layout = facts["layout"]
    assert tuple(layout[axis] for axis in ("pp", "dp_replicate", "dp_shard", "tp")) == degrees
    assert facts["parameters"] == pytest.approx(billions * 1e9, rel=1e-3)
    assert (facts["accumulation"], facts["step_tokens"]) == (micro_batches, tokens)
    assert facts["memory_bytes"]["total"] < GPU_BYTES
    assert f"{config.world} ranks" in render(facts)


# name: billions of parameters, as published to so many digits; tensor parallelism, pipeline, stages per rank, ranks
PLANNED = {
    "megatron_2021_1b7": (1.7, 1, 1, 1, 32), "megatron_2021_3b6": (3.6, 2, 1, 1, 64),
    "megatron_2021_7b5": (7.5, 4, 1, 1, 128), "megatron_2021_18b": (18.4, 8, 1, 1, 256),
    "megatron_2021_39b": (39.1, 8, 2, 1, 512), "megatron_2021_76b": (76.1, 8, 4, 3, 1024),
    "megatron_2021_145b": (145.6, 8, 8, 2, 1536), "megatron_2021_310b": (310.1, 8, 16, 2, 1920),
    "megatron_2021_530b": (529.6, 8, 35, 3, 2520), "megatron_2021_1t": (1008.0, 8, 64, 1, 3072),
    "frontier_22b": (22, 2, 4, 1, 64), "frontier_175b": (175, 4, 16, 1, 1024), "frontier_1t": (1008, 8, 64, 1, 3072),
    "nemotron4_340b": (341, 8, 12, 8, 6144),
}  # fmt: skip
SOON = ("megatron_2021_18b", "megatron_2021_530b", "frontier_22b", "nemotron4_340b")


@pytest.mark.parametrize(
    "name", [each if each in SOON else pytest.param(each, marks=pytest.mark.full) for each in PLANNED]
)
def test_a_run_to_plan_has_the_published_size_and_fits_its_device(name):
    config = compose_config([f"recipe={name}"])
    check_config(config)
    plan = plan_of(config)
    billions, tp, pp, stages, ranks = PLANNED[name]
    digits = len(str(billions).partition(".")[2])
    assert round(count_parameters(config.model).total / 1e9, digits) == pytest.approx(billions, abs=0.5 * 10**-digits)
    assert (plan.degrees.tp, plan.degrees.pp, config.parallel.virtual_stages) == (tp, pp, stages)
    assert (plan.degrees.world, config.world) == (ranks, ranks)
    device, ours = MEMORY_GIB[config.hardware] * 2**30, peak_memory(plan)
    assert peak_memory(plan, ACCOUNTINGS["megatron"]).total < device
    assert ours.total < device


def test_frontiers_tensor_parallel_groups_stay_within_a_node():
    """Of 8 devices, two dies of four MI250X: TP 16 would sum every block between nodes (arXiv 2312.12705)."""
    config = compose_config(["recipe=frontier_1t", "parallel.tp=16", "parallel.pp=32"])
    with pytest.raises(ConfigError, match=r"parallel\.tp: is 16, and a machine has 8 ranks \(trainer\.devices\)"):
        check_config(config)


def test_llama_405b_has_the_stages_and_the_bubble_of_its_schedule():
    pipeline = plan_facts(plan_of(compose_config(["recipe=llama3_405b_3d"])))["layout"]["pipeline"]
    counts = [last - first + 1 for first, last in (stage["layers"] for stage in pipeline["stages"])]
    assert counts == [7, *[8] * 14, 7]
    assert all(one["layers"][1] + 1 == other["layers"][0] for one, other in pairwise(pipeline["stages"]))
    assert pipeline["bubble_fraction"] == 7 / (2 * 8 + 7)


@pytest.mark.full
def test_the_bubbles_of_llama_405b_give_the_published_ratio_of_its_schedules():
    """128 against 100 tokens per second and GPU (torchtitan's table 5): as the parts of a step that ranks compute."""

    def busy(*words):
        config = compose_config(["recipe=llama3_405b_3d", *words])
        return 1 - plan_facts(plan_of(config))["layout"]["pipeline"]["bubble_fraction"]

    other = ["parallel.schedule=1f1b", "parallel.virtual_stages=1"]
    assert busy() / busy(*other) == pytest.approx(128 / 100, rel=0.02)


def test_a_published_run_on_too_few_ranks_says_the_arithmetic():
    with pytest.raises(ConfigError, match="needs a multiple of 64 ranks, and there are 100"):
        check_config(compose_config(["recipe=llama3_405b_3d", "world=100"]))
