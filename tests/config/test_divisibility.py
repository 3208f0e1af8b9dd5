"""What tp and cp do not divide is said with the arithmetic, all of it at once, before any process starts."""

import pytest

from lightning_llm.__main__ import main
from lightning_llm.check import check_config
from lightning_llm.compose import compose_config
from lightning_llm.errors import ConfigError

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
        (["trainer.devices=2", "data.sequence_length=129"], ["is 129, of which 1 context-parallel rank(s) have 129"]),
        (
            ["parallel=fsdp_cp_tp", "trainer.devices=4", "data.sequence_length=130"],
            ["is 130, and cp=2 cuts sequences into 2 x 2 chunks; take a multiple of 4"],
        ),
        (
            ["parallel=fsdp_cp_tp", "trainer.devices=4", "data.sequence_length=128", "precision=fp8_subchannel"],
            [
                "precision.fprop.x: has blocks of 1x128, and each part of the inputs of o_proj (tp=2) is 192 / 2 = 96",
                "precision.fprop.w: has blocks of 128x128, and each part of the outputs of k_proj, q_proj, v_proj",
                "precision.wgrad.dy: has blocks of 1x128, and each part of a sequence (cp=2, two per rank) is 128 / 4",
            ],
        ),
        (["parallel.cp=2", "parallel.pp=2", "trainer.devices=4"], ["stages take whole sequences"]),
    ],
)  # fmt: skip
def test_everything_that_does_not_divide_is_said(words, texts):
    message = said(*words)
    for text in texts:
        assert text in message


def test_what_divides_passes():
    check_config(compose_config([*WORDS, "trainer.devices=2", "data.sequence_length=128"]))
    check_config(compose_config([*WORDS, "trainer.devices=1", "parallel.tp=1", "data.sequence_length=129"]))
    check_config(
        compose_config([*WORDS, "trainer.devices=2", "data.sequence_length=129", "parallel.sequence_parallel=false"])
    )


def test_it_ends_with_exit_code_2_and_starts_nothing(capsys):
    assert main(["train", "recipe=quickstart", "parallel=tp", "trainer.devices=3"]) == 2
    assert "Take a divisor of" in capsys.readouterr().err
