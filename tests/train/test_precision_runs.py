"""Every shipped precision recipe through whole runs: it learns, it is not fp32, and it resumes to the same bits."""

import json
from pathlib import Path

import pytest
import torch
from run_metrics import read_metrics
from safetensors.torch import load_file

from lightning_llm.__main__ import main
from lightning_llm.compose import compose_config
from lightning_llm.precision import inductor
from lightning_llm.train.quantisation import Quantisation

RECIPES = sorted(file.stem for file in (Path(__file__).parents[2] / "conf" / "precision").glob("*.yaml"))
SHAPE = [
    "model.hidden_size=128", "model.num_heads=2", "model.num_kv_heads=1", "model.ffn_hidden_size=192",
    "model.num_layers=3", "optim.learning_rate=3e-3",
]  # fmt: skip


@pytest.fixture(autouse=True)
def eager(monkeypatch):
    """Run casts eagerly: the same bits as compiled ones (tested in tests/precision), without minutes of compiling."""
    monkeypatch.setattr(inductor, "why_not", lambda device_type: "the test wants it so")


def losses(folder: Path) -> list[float]:
    return [record["loss"] for record in read_metrics(folder) if "loss" in record]


def train(small_run, folder: Path, *words: str) -> int:
    return main(["train", *small_run(folder, *SHAPE, *words)])


@pytest.fixture(scope="module")
def fp32_losses(tmp_path_factory, small_run):
    folder = tmp_path_factory.mktemp("fp32")
    assert train(small_run, folder, "trainer.max_steps=50", "trainer.validate_every_steps=null") == 0
    return losses(folder / "run")


@pytest.mark.parametrize("recipe", [name for name in RECIPES if name != "fp32"])
def test_fifty_steps_fall_and_are_not_fp32(recipe, small_run, fp32_losses, tmp_path):
    words = [f"precision={recipe}", "trainer.max_steps=50", "trainer.validate_every_steps=null"]
    assert train(small_run, tmp_path, *words) == 0
    ours = losses(tmp_path / "run")
    assert all(torch.isfinite(torch.tensor(ours)))
    assert sum(ours[-5:]) / 5 < ours[0] - 0.6 * (fp32_losses[0] - sum(fp32_losses[-5:]) / 5)
    assert ours != fp32_losses
    assert ours[0] == pytest.approx(fp32_losses[0], rel=0.05)


def stop_and_resume(small_run, tmp_path: Path, *words: str) -> None:
    """Train 5 steps at once, and 3 then 2; compare losses and weights bit for bit."""
    common = [*words, "schedule.total_steps=5", "trainer.validate_every_steps=null"]
    assert train(small_run, tmp_path / "whole", *common, "trainer.max_steps=5") == 0
    assert train(small_run, tmp_path / "parts", *common, "trainer.max_steps=3") == 0
    assert train(small_run, tmp_path / "parts", *common, "trainer.max_steps=5", "resume=auto") == 0
    assert losses(tmp_path / "parts" / "run") == losses(tmp_path / "whole" / "run")
    for slot in ("model", "precision"):
        whole, parts = (
            load_file(tmp_path / k / "run/checkpoints/step=5" / f"{slot}.safetensors") for k in ("whole", "parts")
        )
        assert whole.keys() == parts.keys()
        assert all(torch.equal(whole[name], parts[name]) for name in whole)
    if "precision=fp8_delayed" in words:
        assert any(name.endswith("amax_history") for name in whole)


@pytest.mark.parametrize("recipe", ["fp8_delayed", "mxfp4_sr", "nvfp4", "fp16", "quartet", "bf16_true"])
def test_resume_gives_the_same_bits(recipe, small_run, tmp_path):
    stop_and_resume(small_run, tmp_path, f"precision={recipe}")


@pytest.mark.parametrize("recipe", ["fp8_delayed", "mxfp4_sr", "quartet"])
def test_recomputation_gives_the_same_bits(recipe, small_run, tmp_path):
    for folder, kind in ((tmp_path / "a", "none"), (tmp_path / "b", "full")):
        assert train(small_run, folder, f"precision={recipe}", f"parallel.activation_checkpoint={kind}") == 0
    assert losses(tmp_path / "a" / "run") == losses(tmp_path / "b" / "run")


def test_validation_has_two_views_where_the_forward_pass_is_quantised(small_run, tmp_path):
    assert train(small_run, tmp_path / "a", "precision=mxfp8") == 0
    record = [each for each in read_metrics(tmp_path / "a" / "run") if "val_loss" in each][-1]
    assert record["val_loss"] != record["val_loss_high_precision"]
    assert record["val_loss"] == pytest.approx(record["val_loss_high_precision"], rel=0.02)
    assert train(small_run, tmp_path / "b", "precision=mxfp4_sr") == 0  # its forward pass is bf16's
    assert "val_loss_high_precision" not in read_metrics(tmp_path / "b" / "run")[-1]


def test_an_fp16_overflow_skips_the_update_and_holds_the_schedule(small_run, tmp_path):
    words = ["precision=fp16", "precision.loss_scaling.init_scale=1e38", "precision.loss_scaling.backoff_factor=1e-17"]
    assert train(small_run, tmp_path, *words, "schedule.warmup_steps=4") == 0
    records = [record for record in read_metrics(tmp_path / "run") if "loss" in record]
    skipped = [record for record in records if record.get("skipped")]
    assert records[0]["skipped"] is True
    assert 1 <= len(skipped) <= 3
    made = [record for record in records if not record.get("skipped")]
    assert made[0]["lr"] == records[0]["lr"]  # the first update made has the first update's learning rate
    assert made[1]["lr"] > made[0]["lr"]
    assert made[0]["loss_scale"] < records[0]["loss_scale"]
    assert made[0]["loss"] == pytest.approx(records[0]["loss"], abs=0.3)  # the weights had not moved


def test_an_overflow_that_saturation_hides_is_found_in_the_operands():
    config = compose_config(["precision=fp16_mxfp8"]).precision
    layer = torch.nn.Sequential(torch.nn.Linear(32, 32, bias=False))
    quantisation = Quantisation(config, seed=0, max_steps=1)
    layer = torch.nn.ModuleDict({"layers": torch.nn.ModuleDict({"0": layer})})
    quantisation.swap(layer, num_layers=1, device_type="cpu")
    quantisation.watch_overflow(layer)
    linear = layer["layers"]["0"][0]
    gradient = torch.ones(32, 32, dtype=torch.float16)
    for planted, seen in ((1.0, False), (float("inf"), True), (1.0, False)):
        x = torch.ones(32, 32, dtype=torch.float16, requires_grad=True)
        gradient[3, 5] = planted
        quantisation.begin_step(layer, 0)
        linear(x).backward(gradient)
        assert torch.isfinite(linear.weight.grad).all()  # the cast made a number of Inf
        assert quantisation.take_overflow() is seen


def test_a_phase_takes_over_at_its_step(small_run, tmp_path):
    phase = "precision.phases=[{start: 0.5}]"  # no slot named: high precision from half of the run on
    assert train(small_run, tmp_path / "a", "precision=mxfp8", phase) == 0
    assert train(small_run, tmp_path / "b", "precision=mxfp8") == 0
    ours, plain = losses(tmp_path / "a" / "run"), losses(tmp_path / "b" / "run")
    assert ours[:3] == plain[:3]
    assert ours[3] != plain[3]


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["precision=fp8_delayed", "precision.modules.first_blocks_high=1"], "precision.modules.first_blocks_high"),
        (["precision=mxfp4_sr", "model.ffn_hidden_size=200"], "precision.dgrad.dy.hadamard.size"),
        (["precision=mxfp8", "precision.backend=native"], "precision.backend"),
        (["precision=mxfp8", "trainer.compile=true"], "parallel.compile"),
        (["precision=mxfp8", "precision.fprop.x.format=e4m4"], "precision.fprop.x.format"),
        (["precision=fp8_current", "precision.modules.last_blocks_high=9"], "precision.modules"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_starts(words, key, small_run, tmp_path, capsys):
    assert train(small_run, tmp_path, *words) == 2
    assert key in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_the_plan_shows_the_six_slots(small_run, tmp_path, capsys):
    assert main(["plan", "--json", *small_run(tmp_path, "precision=mxfp4_sr", *SHAPE)]) == 0
    facts = json.loads(capsys.readouterr().out)
    slots = facts["precision"]["slots"]
    assert list(slots) == ["fprop.x", "fprop.w", "dgrad.dy", "dgrad.w", "wgrad.dy", "wgrad.x"]
    assert slots["fprop.x"]["format"] == "bf16"
    assert slots["dgrad.dy"]["runs"] == "emulated"
    assert slots["dgrad.dy"]["hadamard"] == {"size": 64, "signs": "random", "round_to": "bf16"}
    assert facts["parameters"] > 0
    assert facts["flops_per_token"] > 0
    assert facts["memory_bytes"]["optimizer"] == 2 * facts["memory_bytes"]["parameters"]
