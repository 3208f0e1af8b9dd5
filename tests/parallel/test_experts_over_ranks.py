"""A mixture of experts trains to the bits of one rank wherever a dense model does, and to its losses elsewhere."""

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_llm.config.schema import Config
from tests.parallel.layout_matrix import Case
from tests.parallel.traced_run import traced_run
from tests.run_metrics import read_metrics

BLOCK = "model.blocks.moe.feed_forward"
MOE = [
    "model=moe_tiny", "model.num_layers=2", "model.layers=[attention, moe]", f"{BLOCK}.ffn_hidden_size=32",
    f"{BLOCK}.balance_loss=0.1", f"{BLOCK}.shared_experts=1", f"{BLOCK}.router.bias_update_rate=0.01",
]  # fmt: skip
LATENT = [
    "model.blocks.moe.mixer={kind: mla, q_rank: 64, kv_rank: 96, nope_dim: 16, rope_dim: 32, value_dim: 32}",
    "model.layers=[moe]",
]
EQUAL = [
    (Case("zero3", 2, 4, "fp8_delayed", "full"), []),
    (Case("pp", 2, 4, "bf16", "selective"), []),
    pytest.param(Case("hsdp", 4, 4, "fp32"), [], marks=pytest.mark.full),
    pytest.param(Case("zero1", 2, 4, "fp32"), ["optim=muon"], marks=pytest.mark.full),
    *(
        pytest.param(Case(layout, 2, 4, precision), [], marks=pytest.mark.full)
        for layout in ("ddp", "zero1", "zero2", "pp")
        for precision in ("fp32", "bf16", "nvfp4", "mxfp4_sr")
    ),
    pytest.param(Case("pp_interleaved", 2, 4, "bf16"), ["model.num_layers=4"], marks=pytest.mark.full),
    *(pytest.param(Case(layout, 2, 4, "mxfp8"), LATENT, marks=pytest.mark.full) for layout in ("zero3", "pp")),
]

ZAYA = ["model=zaya_tiny", "model.num_layers=2", "model.layers=[first, moe]"]
WITH_STATES = [
    pytest.param(Case("zero3", 2, 4, "bf16", "full"), [], []),
    pytest.param(Case("zero3", 2, 4, "mxfp8"), ["data.document_mask=true"], [], marks=pytest.mark.full),
    *(pytest.param(Case("ddp", 2, 4, each), [], [], marks=pytest.mark.full) for each in ("fp32", "nvfp4", "bf16")),
    pytest.param(Case("zero2", 4, 4, "bf16"), [], ["parallel.ep=2"], marks=pytest.mark.full),
]
"""Of routers that pass a state between blocks, and convolved attention."""


@pytest.mark.parametrize(("case", "more", "ours"), WITH_STATES, ids=str)
def test_states_between_blocks_have_the_bits_of_one_rank(case, more, ours, to_the_bits):
    to_the_bits(case, *ZAYA, "trainer.max_steps=3", *more, ours=ours)


@pytest.mark.parametrize(("case", "more"), EQUAL, ids=str)
def test_a_layout_trains_to_the_bits_of_one_rank(case, more, to_the_bits):
    """Losses, gradients with those of the balance loss, weights, and biases of the routers."""
    to_the_bits(case, *MOE, "trainer.max_steps=3", *more)


CLOSE = [
    ("tp", 2, ["parallel.sequence_parallel=false"]),
    ("cp", 2, ["parallel.ep=2", f"{BLOCK}.capacity_factor=1.25"]),
    *(
        pytest.param(*case, marks=pytest.mark.full)
        for case in (
            ("tp", 2, []), ("pp_tp", 4, []), ("fsdp_tp", 4, []), ("fsdp_cp_tp", 4, []), ("fsdp_cp", 4, []),
            ("cp", 2, [f"{BLOCK}.capacity_factor=1", f"{BLOCK}.drop=position", "data.micro_batch_size=2"]),
            ("ddp", 4, ["parallel.cp=2"]), ("cp", 4, ["parallel.zero_stage=2", "parallel.ep=2"]),
        )
    ),
]  # fmt: skip


@pytest.mark.parametrize(("layout", "world", "more"), CLOSE, ids=str)
def test_ranks_that_share_experts_have_the_gradients_of_one(layout, world, more, ranks, matrix_run):
    keys = [*MOE, "trainer.max_steps=2", "model.num_heads=2", "model.num_kv_heads=2"]
    alike = [each for each in more if not each.startswith("parallel.")]
    one = ranks(1).call(moe_run, matrix_run("single", 1, 4, "fp32", *keys, *alike))
    found = ranks(world).call(moe_run, matrix_run(layout, world, 4, "fp32", *keys, *more))
    assert found["records"] == [pytest.approx(record, rel=1e-5) for record in one["records"]]
    assert one["records"][0]["moe/load_max"] > 1
    check_gradients(found, one, atol=2e-6)


def check_gradients(found, one, atol):
    for ours, theirs in zip(found["trace"]["gradients"], one["trace"]["gradients"], strict=True):
        assert ours.keys() == theirs.keys()
        for name, gradient in ours.items():
            torch.testing.assert_close(
                gradient, theirs[name], rtol=1e-3, atol=atol, msg=lambda text, n=name: f"{n} {text}"
            )


COMPILED = [
    ("single", 1, "selective", []), ("tp", 2, "full", ["model.num_heads=2", "model.num_kv_heads=2"]),
    ("zero3", 2, "full", []), ("zero2", 2, "full", ["parallel.ep=2"]),
    ("ddp", 2, "none", ["parallel.ep=2"]), ("pp", 2, "none", []), ("zero3", 2, "none", ["parallel.ep=2", *LATENT]),
]  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize(("layout", "world", "mode", "more"), COMPILED, ids=str)
def test_blocks_compiled_around_experts_train_as_eager_ones_do(layout, world, mode, more, ranks, matrix_run):
    keys = [*MOE, "trainer.max_steps=2", *(word for word in more if not word.startswith("parallel"))]
    one = ranks(1).call(moe_run, matrix_run("single", 1, 4, "fp32", *keys))
    how = ["parallel.compile=true", f"parallel.activation_checkpoint={mode}"]
    found = ranks(world).call(moe_run, matrix_run(layout, world, 4, "fp32", *keys, *more, *how))
    ranks(world).close()  # so many graphs of one function are one process's
    assert found["records"] == [pytest.approx(record, rel=1e-4) for record in one["records"]]
    check_gradients(found, one, atol=1e-5)


def moe_run(config: Config) -> dict[str, Any]:
    """Return the trace of a run, and the entries of its step metrics about routers."""
    trace = traced_run(config, saves=False)
    kept = ("auxiliary/", "moe/")
    steps = [record for record in read_metrics(Path(config.run.dir)) if "loss" in record]
    return {"trace": trace, "records": [{k: v for k, v in each.items() if k.startswith(kept)} for each in steps]}
