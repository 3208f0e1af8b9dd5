"""Sizes that tp and cp do not divide are reported with the arithmetic, all at once, before any process starts."""

import re
from itertools import product

import pytest

from lightning_llm.__main__ import main
from lightning_llm.base.errors import ConfigError
from lightning_llm.config.compose import compose_config
from lightning_llm.plan.check import check_config
from lightning_llm.plan.divisibility import ShardedAxis

WORDS = ["recipe=quickstart", "parallel=tp"]


def said(*words: str) -> str:
    with pytest.raises(ConfigError) as error:
        check_config(compose_config([*WORDS, *words]))
    return str(error.value)


@pytest.mark.parametrize(
    ("words", "texts"),
    [
        (["trainer.devices=3"], ["model.ffn_hidden_size = 512 (512 = 170 x 3 + 2)", "the padded vocabulary = 1024"]),
        (["trainer.devices=4", "model.num_kv_heads=2"], ["num_kv_heads = 2 (2 = 0 x 4 + 2): each rank takes whole"]),
        (["trainer.devices=2", "data.sequence_length=129"], ["is 129: 1 context-parallel rank(s) have 129"]),
        (
            ["parallel=fsdp_cp_tp", "trainer.devices=4", "data.sequence_length=130"],
            ["is 130, and cp=2 splits sequences into 2 x 2 chunks. Use a multiple of 4"],
        ),
        (
            ["parallel=fsdp_cp_tp", "trainer.devices=4", "data.sequence_length=128", "precision=fp8_subchannel"],
            [
                "parallel.tp: is 2: each part of the inputs of o_proj has length 192 / 2 = 96, not a multiple of 128",
                "each part of the outputs of q_proj, k_proj, v_proj has length 192 / 2 = 96",
                "which would split precision.fprop.w (blocks of 128x128), dgrad.dy (blocks of 1x128), dgrad.w",
                "Set parallel.tp=1, or model.head_dim to a multiple of 128.",
                "parallel.cp: is 2: each part of a sequence (two per rank) has length 128 / 4 = 32, not a multiple of",
                "which would split precision.wgrad.dy (blocks of 1x128), wgrad.x (blocks of 1x128). Set parallel.cp=1, "
                "or data.sequence_length to a multiple of 512.",
            ],
        ),
        (
            ["parallel=fsdp_cp_tp", "parallel.tp=4", "world=8", "data.sequence_length=132"],
            ["is 132: 2 context-parallel rank(s) have 66 tokens each, and tp=4 does", "Use a multiple of 8"],
        ),
        (  # along the sums of each product alone, and of them those that a rank has a part of
            ["trainer.devices=2", "model.ffn_hidden_size=96", "precision=mxfp8"],
            [
                "outputs of gate_proj, up_proj has length 96 / 2 = 48, not a multiple of 32, which would split "
                "precision.dgrad.dy (blocks of 1x32), dgrad.w (blocks of 1x32). Set",
                "inputs of down_proj has length 96 / 2 = 48, not a multiple of 32, which would split precision."
                "fprop.x (blocks of 1x32), fprop.w (blocks of 1x32). Set",
            ],
        ),
        (
            ["trainer.devices=2", "model.ffn_hidden_size=96", "precision=quartet"],
            [
                "precision.dgrad.dy (blocks of 1x32), dgrad.dy (rotations of 32), dgrad.w (blocks of 1x32), dgrad.w "
                "(rotations of 32). Set",
                "precision.fprop.x (blocks of 1x32), fprop.x (rotations of 32), fprop.w (blocks of 1x32), fprop.w "
                "(rotations of 32). Set",
            ],
        ),
        (["parallel.cp=2", "parallel.pp=2", "trainer.devices=4"], ["stages need whole sequences"]),
        (  # heads, tokens of either axis, and blocks at once
            ["parallel=fsdp_cp_tp", "parallel.tp=3", "world=12", "data.sequence_length=130", "precision=mxfp8",
             "model.num_kv_heads=1"],
            [
                "model.num_kv_heads = 1 (1 = 0 x 3 + 1)",
                "Use a multiple of 4",
                "2 context-parallel rank(s) have 65 tokens each, and tp=3 does not divide that",
                "the inputs of down_proj has length 512 / 3 = 170.667, not a multiple of 32",
                "or model.ffn_hidden_size to a multiple of 96",
            ],
        ),
    ],
)  # fmt: skip
def test_all_sizes_that_do_not_divide_are_reported(words, texts):
    message = said(*words)
    for text in texts:
        assert text in message


@pytest.mark.parametrize("recipe", ["fp8_subchannel", "fp8_subchannel_fp32scales", "mxfp4_sr", "mxfp4_rht_rne"])
def test_the_suggested_size_passes(recipe):
    """192 / 2 = 96 is no multiple of 128 or 64: the quickstart's model is too narrow for tp=2 and these recipes."""
    words = ["recipe=quickstart", "parallel=fsdp_pp_tp", "trainer.devices=8", f"precision={recipe}"]
    with pytest.raises(ConfigError) as error:
        check_config(compose_config(words))
    assert {problem.key for problem in error.value.problems} == {"parallel.tp"}
    (said,) = {str(problem).rpartition("or ")[2] for problem in error.value.problems}
    key, multiple = re.fullmatch(r"(model\.\w+) to a multiple of (\d+)\.", said).groups()
    check_config(compose_config([*words, f"{key}={multiple}"]))


@pytest.mark.parametrize(
    ("words", "keys"),
    [
        (["parallel=pp_interleaved", "parallel.dp_replicate=3", "trainer.devices=4"], ["parallel=pp_interleaved"]),
        (["parallel=fsdp_pp_tp", "trainer.devices=6"], ["parallel=fsdp_pp_tp"]),
        (
            ["parallel=fsdp_pp_tp", "trainer.devices=6", "model.num_kv_heads=1", "data.micro_batch_size=3",
             "parallel.schedule=zbv_zero_bubble"],
            ["data.global_batch_size", "parallel.schedule", "parallel.tp", "parallel=fsdp_pp_tp"],
        ),
    ],
)  # fmt: skip
def test_degrees_that_do_not_fit_give_no_misleading_problems(words, keys):
    with pytest.raises(ConfigError) as error:
        check_config(compose_config(["recipe=quickstart", *words]))
    assert sorted({problem.key for problem in error.value.problems}) == keys


def test_what_divides_passes():
    check_config(compose_config([*WORDS, "trainer.devices=2", "data.sequence_length=128"]))
    check_config(compose_config([*WORDS, "trainer.devices=1", "parallel.tp=1", "data.sequence_length=129"]))
    check_config(
        compose_config([*WORDS, "trainer.devices=2", "data.sequence_length=129", "parallel.sequence_parallel=false"])
    )


def test_indivisible_layouts_exit_with_2_before_starting_ranks(capsys):
    assert main(["train", "recipe=quickstart", "parallel=tp", "trainer.devices=3"]) == 2
    assert "Use a divisor of" in capsys.readouterr().err


@pytest.mark.parametrize(("times", "parts", "size"), product((1, 2, 6, 64), (2, 3, 4), (1, 16, 48)))
def test_the_suggested_multiple_is_the_least_that_passes(times, parts, size):
    axis = ShardedAxis("an axis", 0, parts, "tp", "a.key", times)
    expected = next(value for value in range(1, 10**4) if times * value % (parts * size) == 0)
    assert axis.passing(size) == expected
