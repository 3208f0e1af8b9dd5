"""Whole runs with native linears (Transformer Engine's stand-in) against emulated ones: the same bits. 12 seconds."""

import json

import pytest
import torch
from safetensors.torch import load_file

from lightning_llm.__main__ import main
from lightning_llm.callbacks.quantisation_health import QuantisationHealth
from lightning_llm.config.compose import compose_config
from lightning_llm.config.config_hash import config_hash
from lightning_llm.precision.native.decide import Capability
from tests.parallel.traced_run import run_with
from tests.run_metrics import curve, same_weights

SHAPE = [
    "model.hidden_size=128", "model.num_heads=2", "model.num_kv_heads=2", "model.ffn_hidden_size=256",
    "model.num_layers=3", "precision.casts=eager", "data.sequence_length=48",
    "trainer.compile=false",  # the default of the GPU these runs pretend to have; it costs 10 seconds a run here
]  # fmt: skip


def train(small_run, folder, *words):
    return main(["train", *small_run(folder, *SHAPE, *words)])


@pytest.mark.parametrize(
    ("recipe", "more"),
    [
        ("fp8_delayed", ("parallel.activation_checkpoint=full", "model.bias=true")),
        pytest.param("fp8_subchannel", ("parallel=zero3",), marks=pytest.mark.full),
        pytest.param("fp8_current", ("model=moe_tiny",), marks=pytest.mark.full),
    ],
)
def test_a_native_run_is_the_emulated_run(recipe, more, small_run, tmp_path, hopper, capsys):
    words = [f"precision={recipe}", "trainer.max_steps=3", "checkpoint.every_steps=3", *more]
    assert train(small_run, tmp_path / "native", *words) == 0
    said = capsys.readouterr().out
    assert f"{recipe} native |" in said
    assert "native (Transformer Engine 2.20.2, " in said
    summary = json.loads((tmp_path / "native/run/summary.json").read_text())
    assert summary["precision"]["runs"] == "native"
    assert train(small_run, tmp_path / "emulated", *words, "precision.backend=emulated") == 0
    said = capsys.readouterr().out
    assert "emulated, eager (precision.casts=eager)" in said
    assert "not native: precision.backend=emulated asks for it" in said
    assert curve(tmp_path / "native/run") == curve(tmp_path / "emulated/run")
    assert same_weights(tmp_path / "native/run", tmp_path / "emulated/run", 3)


@pytest.mark.full
def test_health_of_a_native_run_is_that_of_the_emulated_run(small_run, tmp_path, hopper):
    """Figure by figure, over micro-batches, recomputation and delayed scales; and who looks changes no bit."""
    words = [*SHAPE, "precision=fp8_delayed", "parallel.activation_checkpoint=full", "trainer.max_steps=2"]
    words += ["checkpoint.every_steps=null", "trainer.validate_every_steps=null"]
    for name, backend, callbacks in (
        ("native", "native", [QuantisationHealth(every_steps=2)]),
        ("emulated", "emulated", [QuantisationHealth(every_steps=2)]),
        ("bare", "native", []),
    ):
        config = compose_config(small_run(tmp_path / name, *words, f"precision.backend={backend}"))
        run_with(config, *callbacks)
    files = [
        tmp_path / name / "run" / file for name in ("native", "emulated") for file in ("health.jsonl", "health.txt")
    ]
    native, table, emulated, its_table = (file.read_text() for file in files)
    assert [json.loads(line)["step"] for line in native.splitlines()] == [1, 2]
    assert {row[1] for row in json.loads(native.splitlines()[0])["rows"]} == {
        "fprop.x", "fprop.w", "dgrad.dy", "dgrad.w", "wgrad.dy", "wgrad.x"
    }  # fmt: skip
    assert (native, table) == (emulated, its_table)
    assert curve(tmp_path / "native/run") == curve(tmp_path / "bare/run")


@pytest.mark.full
def test_a_run_resumes_with_the_other_backend(small_run, tmp_path, hopper):
    common = ["precision=fp8_delayed", "schedule.total_steps=3", "trainer.validate_every_steps=null"]
    common += ["trainer.max_steps=3", "checkpoint.every_steps=3"]
    assert train(small_run, tmp_path / "whole", *common) == 0
    for steps, backend, more in ((1, "native", ()), (2, "emulated", ("resume=auto",)), (3, "auto", ("resume=auto",))):
        words = [*common, f"trainer.max_steps={steps}", f"precision.backend={backend}", *more]
        assert train(small_run, tmp_path / "parts", *words) == 0
    whole, parts = ([each for each in curve(tmp_path / part / "run") if each[2]] for part in ("whole", "parts"))
    assert [each[0] for each in whole] == [1, 2, 3]
    assert parts == whole
    folders = [tmp_path / part / "run/checkpoints/step=3" for part in ("whole", "parts")]
    states = [load_file(folder / "precision.safetensors") for folder in folders]
    assert states[0].keys() == states[1].keys()
    assert any(name.endswith("amax_history") for name in states[0])
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


def test_the_backend_is_not_in_the_config_hash():
    words = ["precision=mxfp8", "run.name=x"]
    one, other = (compose_config([*words, f"precision.backend={each}"]) for each in ("auto", "native"))
    assert config_hash(one) == config_hash(other)
    assert one.precision.recipe_hash == other.precision.recipe_hash


def test_auto_falls_back_and_says_why(small_run, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("lightning_llm.plan.resolve.capability_here", lambda accelerator: Capability.of_gpu(9, 0))
    assert train(small_run, tmp_path, "precision=mxfp8", "trainer.max_steps=3") == 0
    assert "not native: MXFP8BlockScaling needs compute capability >= 10.0" in capsys.readouterr().out
    assert "refused" not in json.loads((tmp_path / "run/summary.json").read_text())["precision"]["runs"]


@pytest.mark.parametrize(
    ("here", "said"),
    [
        (Capability("cpu", problem="no CUDA device"), ["no CUDA device"]),
        (Capability.of_gpu(8, 0), ["needs compute capability >= 9.0", "sm_80 has compute capability 8.0"]),
        (Capability.of_gpu(9, 0, cuda=(12, 6)), ["needs CUDA >= 12.9, torch has 12.6"]),
        (Capability("sm_90", (9, 0), (13, 0), None, None, "Transformer Engine is not installed"), ["not installed"]),
    ],
)
def test_an_impossible_native_backend_is_exit_code_2(here, said, small_run, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("lightning_llm.plan.resolve.capability_here", lambda accelerator: here)
    words = ["precision=fp8_subchannel", "precision.backend=native", "model.ffn_hidden_size=200"]
    assert train(small_run, tmp_path, *words) == 2
    error = capsys.readouterr().err
    assert all(each in error for each in said)
    assert "model.ffn_hidden_size: is 200, not a multiple of 128" in error
    assert not (tmp_path / "run").exists()


def test_the_plan_shows_what_this_machine_would_do(small_run, tmp_path, monkeypatch, capsys):
    seen = {}
    for here, backend in ((Capability.of_gpu(9, 0), "auto"), (Capability.of_gpu(8, 0), "native")):
        monkeypatch.setattr("lightning_llm.plan.resolve.capability_here", lambda accelerator, here=here: here)
        words = small_run(tmp_path, *SHAPE, "precision=fp8_current", f"precision.backend={backend}")
        assert main(["plan", "--json", *words]) == 0
        seen[backend] = json.loads(capsys.readouterr().out)["precision"]
    assert {each["runs"] for each in seen["auto"]["slots"].values()} == {"native"}
    assert {each["runs"] for each in seen["native"]["slots"].values()} == {"refused"}
    assert "8.0" in seen["native"]["reason"]
    assert main(["plan", "--matrix", *words]) == 0
    assert "fp8_current_e4m3" in capsys.readouterr().out


@pytest.mark.parametrize(("backend", "runs"), [("auto", "native"), ("emulated", "emulated")])
def test_native_linears_and_emulated_ones_go_with_compiled_blocks(small_run, tmp_path, hopper, capsys, backend, runs):
    words = ["precision=fp8_current", "trainer.compile=true", f"precision.backend={backend}"]
    assert main(["plan", "--json", *small_run(tmp_path, *SHAPE, *words)]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["layout"]["compile"]
    assert {each["runs"] for each in facts["precision"]["slots"].values()} == {runs}
