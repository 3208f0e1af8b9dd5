"""A dry run of a mixture of experts counts the bytes and collectives that the plan has."""

import pytest

from lightning_llm.__main__ import main

BLOCK = "model.blocks.moe.feed_forward"
KEYS = ["model=moe_tiny", "model.num_layers=2", f"{BLOCK}.router.bias_update_rate=0.001", f"{BLOCK}.shared_experts=1"]


@pytest.mark.parametrize(
    "layout",
    [
        ["parallel=zero3", "trainer.devices=2"],
        pytest.param(["parallel=ddp", "trainer.devices=2"], marks=pytest.mark.full),
        pytest.param(["parallel=pp", "trainer.devices=2"], marks=pytest.mark.full),
        pytest.param(["parallel=tp", "trainer.devices=2"], marks=pytest.mark.full),
    ],
    ids=lambda words: words[0],
)
def test_counted_bytes_are_the_planned_ones(layout, small_run, tmp_path, capsys):
    assert main(["plan", *small_run(tmp_path, *KEYS, *layout), "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "agrees  " in out, out
