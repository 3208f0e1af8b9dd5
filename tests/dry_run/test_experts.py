"""A dry run of a mixture of experts counts the bytes and collectives that the plan has."""

import pytest

from lightning_llm.__main__ import main

BLOCK = "model.blocks.moe.feed_forward"
KEYS = [
    "model=moe_tiny",
    "model.num_layers=2",
    f"{BLOCK}.router.bias_update_rate=0.001",
    f"{BLOCK}.shared_experts=1",
    "model.num_kv_heads=2",
]


LAYOUTS = ["zero3", "ddp", "pp", "tp"]


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
def test_counted_bytes_are_the_planned_ones(layout, small_run, tmp_path, capsys):
    assert main(["plan", *small_run(tmp_path, *KEYS, f"parallel={layout}", "trainer.devices=2"), "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "agrees  " in out, out
