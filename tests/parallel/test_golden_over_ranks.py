"""Golden curves over ranks: parameters have the names and, where the layout sums in a tree, the bits of one rank."""

import json
from dataclasses import asdict

import pytest

from lightning_llm.__main__ import main
from lightning_llm.config.schema import Config
from lightning_llm.golden.curve import Curve
from lightning_llm.golden.measure import measure
from lightning_llm.plan.check import check_config


def curve_over_ranks(config: Config, nudge: int | None) -> dict:
    """Return the curve of the first two steps, on one of the ranks."""
    return asdict(Curve.of(measure(check_config(config), 2, nudge).figures))


@pytest.fixture
def curve(ranks, matrix_run):
    def of(layout: str, world: int, precision: str, *more: str, nudge: int | None = None) -> Curve:
        config = matrix_run(layout, world, 4, precision, *more)
        return Curve(**ranks(world).call(curve_over_ranks, config, nudge))

    return of


@pytest.mark.parametrize(
    ("layout", "precision", "nudge"),
    [
        ("zero3", "mxfp8", 5),  # which moves shards as it moves whole weights
        pytest.param("ddp", "bf16", None, marks=pytest.mark.full),
        pytest.param("zero1", "fp16", None, marks=pytest.mark.full),  # norms without the loss scale
        pytest.param("pp", "fp32", None, marks=pytest.mark.full),
    ],
)
def test_it_is_the_curve_of_one_rank(layout, precision, nudge, curve):
    alone, spread = curve("single", 1, precision, nudge=nudge), curve(layout, 2, precision, nudge=nudge)
    assert list(spread.gradient_norms) == list(alone.gradient_norms)
    assert spread == alone


@pytest.mark.parametrize(
    ("layout", "world"),
    [("tp", 2), pytest.param("cp", 2, marks=pytest.mark.full), pytest.param("fsdp_pp_tp", 8, marks=pytest.mark.full)],
)
def test_layouts_with_another_order_of_sums_have_equal_norms_up_to_rounding(layout, world, curve):
    heads = "model.num_heads=2", "model.num_kv_heads=2"
    alone, spread = curve("single", 1, "fp32", *heads), curve(layout, world, "fp32", *heads)
    assert list(spread.gradient_norms) == list(alone.gradient_norms)
    for name, its in alone.gradient_norms.items():
        assert spread.gradient_norms[name] == pytest.approx(its, rel=2e-5), name
    assert spread.loss == pytest.approx(alone.loss, rel=2e-6)


@pytest.mark.full
def test_parameters_of_an_interleaved_pipeline_stand_in_the_order_of_the_model(curve):
    layers = "model.num_layers=4"
    alone, spread = curve("single", 1, "fp32", layers), curve("pp_interleaved", 2, "fp32", layers)
    assert list(spread.gradient_norms) == list(alone.gradient_norms)


@pytest.mark.full
def test_ranks_are_started_and_repeats_have_processes_of_their_own(small_run, tmp_path, capsys):
    words = [*small_run(tmp_path), "--file", str(tmp_path / "mine.json")]
    assert main(["golden", "record", *words, "--steps", "2", "--repeats", "2"]) == 0
    told = capsys.readouterr().out
    assert "band    none: 3 runs gave the same bits: a check compares bits" in told
    assert main(["golden", "check", *words, "parallel=zero3", "trainer.devices=2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["outcome"] == "equal"
    assert found["differences"]["layout"] == {"parallel.dp_shard": [1, 2], "parallel.zero_stage": [0, 3]}
    assert not found["may_round_otherwise"]
    assert main(["golden", "check", *words, "parallel=zero3", "trainer.devices=2", "data.cache_dir=/proc/none"]) == 2
