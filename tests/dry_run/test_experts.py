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


LAYOUTS = [
    *(([f"parallel={layout}", "trainer.devices=2"]) for layout in ("zero3", "ddp", "pp", "tp")),
    ["parallel=zero3", "trainer.devices=4", "parallel.ep=2", "data.global_batch_size=16"],
    ["parallel=zero2", "trainer.devices=4", "parallel.ep=4", "parallel.activation_checkpoint=full"],
    ["parallel=ddp", "trainer.devices=4", "parallel.ep=2", "data.global_batch_size=16"],
    ["parallel=cp", "trainer.devices=2", "model.blocks.moe.feed_forward.capacity_factor=1.5"],
    ["parallel=fsdp_cp", "trainer.devices=4", "parallel.ep=4", "parallel.activation_checkpoint=full"],
    ["parallel=ddp", "parallel.cp=4", "trainer.devices=8", "parallel.ep=2", "data.global_batch_size=16"],
    ["parallel=ddp", "parallel.cp=2", "trainer.devices=8", "parallel.ep=4", "data.global_batch_size=16"],
    ["parallel=hsdp", "trainer.devices=8", "parallel.dp_shard=4", "parallel.ep=2"],
]


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS, ids=" ".join)
def test_counted_bytes_are_the_planned_ones(layout, small_run, tmp_path, capsys):
    words = ["data.micro_batch_size=1", "data.global_batch_size=8", *layout]
    assert main(["plan", *small_run(tmp_path, *KEYS, *words), "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "agrees  " in out, out
