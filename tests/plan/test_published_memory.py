"""Plans of runs with published memory, against docs/reference/published_runs.md; 15 seconds."""

import sys
from pathlib import Path

import pytest

from lightning_llm.__main__ import main
from lightning_llm.config.compose import compose_config
from lightning_llm.model.flops import count_parameters
from lightning_llm.plan.memory import ACCOUNTINGS
from lightning_llm.plan.memory.rank_bytes import peak_memory
from lightning_llm.plan.resolve import plan_of

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
from benchmarks.plan_memory import PUBLISHED  # noqa: E402

ROWS = {row.name: row for row in PUBLISHED}
SOON = [
    "T1 8B, FSDP 8, selective", "T2 8B, FSDP 1 x CP 8, 256K tokens, full", "T4 70B, FSDP 32 x TP 8, full",
    "Megatron te_tp1_pp1, distributed optimizer", "Megatron te_tp2_pp2, plain",
]  # fmt: skip
MARKED = [name if name in SOON else pytest.param(name, marks=pytest.mark.full) for name in ROWS]


@pytest.mark.parametrize("name", MARKED)
def test_the_plan_is_within_the_tolerance_of_a_published_figure(name):
    row = ROWS[name]
    assert row.is_met(row.planned())


def test_the_document_marks_rows_that_are_not_met():
    """`docs/generate.py --check` compares the table itself."""
    text = (ROOT / "docs" / "reference" / "published_runs.md").read_text(encoding="utf-8")
    assert "**no**" not in text


def test_interleaving_holds_less_than_1f1b_where_a_stage_ends_before_the_other():
    """torchtitan's table 5, 72.7 GiB against 82.5: 8 micro-batches over 8 ranks are one round of each stage."""
    one, two = (ROWS[name].peak() for name in ("T5 405B, FSDP 8 x TP 8 x PP 8, 1F1B", "T5, interleaved"))
    assert two.largest["activations"] > one.largest["activations"]
    assert two.largest["unsharded_gradients"] == pytest.approx(one.largest["unsharded_gradients"] / 2, rel=0.05)
    assert two.total < one.total


def test_megatrons_distributed_optimizer_is_met_to_its_padding():
    row = ROWS["Megatron te_tp1_pp1, distributed optimizer"]
    assert 0 < row.size - row.planned() < 5000


def held(*words: str) -> tuple[int, int]:
    """Return (bytes that persist by Megatron's accounting, parameters with the vocabulary's padding)."""
    config = compose_config(["recipe=nemotron4_340b", "parallel.pp=1", "parallel.tp=1", *words])
    config = config.model_copy(update={"parallel": config.parallel.model_copy(update={"schedule": "1f1b"})})
    largest = peak_memory(plan_of(config), ACCOUNTINGS["megatron"]).largest
    return sum(largest[kind] for kind in ("parameters", "gradients", "optimizer")), count_parameters(
        config.model, padded=True
    ).total


def test_a_model_of_340_billion_parameters_holds_6120_gb():
    """18 bytes per parameter: bf16 weight, fp32 gradient, master and two moments; 6 + 12/d with d ranks that share."""
    whole, parameters = held("world=1", "parallel.zero_stage=0", "parallel.virtual_stages=1")
    assert whole == 18 * parameters
    assert 340e9 * whole / parameters == 6120e9
    shared, _ = held("world=64", "parallel.virtual_stages=1")
    assert shared == pytest.approx((6 + 12 / 64) * parameters, rel=1e-9)


@pytest.mark.parametrize("many", [["--matrix"], ["-m", "seed=0,1"]])
def test_another_accounting_is_of_one_run(many, capsys):
    assert main(["plan", *many, "--accounting", "megatron"]) == 2
    assert f"--accounting: needs a single run, but {many[0]} covers several" in capsys.readouterr().err


def test_plan_prints_another_accounting(capsys):
    words = ["plan", "model=llama_1b", "parallel=zero1", "world=8", "hardware=h100", "data.global_batch_size=32"]
    assert main([*words, "--accounting", "megatron"]) == 0
    assert ", for megatron, estimated" in capsys.readouterr().out
    with pytest.raises(SystemExit) as stop:
        main([*words, "--accounting", "deepspeed"])
    assert stop.value.code == 2
    assert "invalid choice: 'deepspeed' (choose from" in capsys.readouterr().err
