"""Every shipped precision recipe through whole runs: it learns, it is not fp32, and it resumes to the same bits."""

import functools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from safetensors.torch import load_file

from lightning_llm.__main__ import main
from lightning_llm.config.compose import compose_config
from lightning_llm.precision.cast import inductor
from lightning_llm.tracking.final_figures import stalled
from lightning_llm.tracking.reading import read_run
from lightning_llm.tracking.run_state import state_of
from lightning_llm.train.quantization import Quantization
from lightning_llm.train.spikes import SpikePolicy, SpikeStop
from tests.parallel.traced_run import run_with
from tests.run_metrics import read_metrics, read_tensors, same_weights

RECIPES = sorted(file.stem for file in (Path(__file__).parents[2] / "conf" / "precision").glob("*.yaml"))
SHAPE = [
    "model.hidden_size=128", "model.num_heads=2", "model.num_kv_heads=1", "model.ffn_hidden_size=192",
    "model.num_layers=3", "optim.learning_rate=3e-3",
]  # fmt: skip


def losses(folder: Path) -> list[float]:
    return [record["loss"] for record in read_metrics(folder) if "loss" in record]


def train(small_run, folder: Path, *words: str) -> int:
    """Train with eager casts unless `words` say otherwise: the same bits, without minutes of compiling."""
    return main(["train", *small_run(folder, *SHAPE, "precision.casts=eager", *words)])


LEARNING = ["trainer.max_steps=25", "trainer.validate_every_steps=null", "data.micro_batch_size=4"]
LEARNING += ["checkpoint.every_steps=null"]  # and one micro-batch per step: what these runs show is their losses


@pytest.fixture(scope="module")
def fp32_losses(tmp_path_factory, small_run):
    folder = tmp_path_factory.mktemp("fp32")
    assert train(small_run, folder, *LEARNING) == 0
    return losses(folder / "run")


QUICK = ("fp8_delayed",)
"""In `make test`, where tests/golden holds the first steps of every recipe bit for bit."""
OTHERS = [pytest.param(name, marks=pytest.mark.full) for name in RECIPES if name not in ("fp32", *QUICK)]


@pytest.mark.parametrize("recipe", [*QUICK, *OTHERS])
def test_losses_fall_and_are_not_fp32s(recipe, small_run, fp32_losses, tmp_path):
    assert train(small_run, tmp_path, f"precision={recipe}", *LEARNING) == 0
    ours = losses(tmp_path / "run")
    assert all(torch.isfinite(torch.tensor(ours)))
    assert sum(ours[-5:]) / 5 < ours[0] - 0.6 * (fp32_losses[0] - sum(fp32_losses[-5:]) / 5)
    assert ours != fp32_losses
    assert ours[0] == pytest.approx(fp32_losses[0], rel=0.05)


UNSAVED = "checkpoint.every_steps=null"
THREE_STEPS = ["trainer.max_steps=3", "schedule.total_steps=3", "trainer.validate_every_steps=null"]


@pytest.fixture(scope="module")
def whole(small_run, tmp_path_factory) -> Callable[..., Path]:
    """Return the folder of three steps of a recipe at once, with eager casts, made once for each."""

    @functools.cache
    def trained(*words: str) -> Path:
        folder = tmp_path_factory.mktemp("whole")
        assert train(small_run, folder, *words, *THREE_STEPS) == 0
        return folder / "run"

    return trained


def stop_and_resume(small_run, whole, tmp_path: Path, *words: str) -> None:
    """Train 3 steps at once, and 2 then 1; compare losses, weights and the state of casts bit for bit."""
    assert train(small_run, tmp_path, *words, *THREE_STEPS, "trainer.max_steps=2") == 0
    assert train(small_run, tmp_path, *words, *THREE_STEPS, "resume=auto") == 0
    runs = (whole(*words), tmp_path / "run")
    assert losses(runs[1]) == losses(runs[0])
    folders = [run / "checkpoints" / "step=3" for run in runs]
    for read in (read_tensors, lambda folder: load_file(folder / "precision.safetensors")):
        at_once, parts = (read(folder) for folder in folders)
        assert at_once.keys() == parts.keys()
        assert all(torch.equal(at_once[name], parts[name]) for name in parts)
    if "precision=fp8_delayed" in words:
        assert any(name.endswith("amax_history") for name in parts)


@pytest.mark.parametrize(
    "recipe",
    [
        "fp8_delayed",
        "mxfp4_sr",
        *(pytest.param(n, marks=pytest.mark.full) for n in ("fp16", "nvfp4", "quartet", "bf16_true")),
    ],
)
def test_resume_gives_the_same_bits(recipe, small_run, whole, tmp_path):
    stop_and_resume(small_run, whole, tmp_path, f"precision={recipe}")


@pytest.mark.full
def test_layers_with_casts_of_their_own_resume_to_the_same_bits(small_run, whole, tmp_path, capsys):
    """Delayed scales together with an unquantized block, MXFP8 and bf16: each layer has the state of its casts."""
    rules = '[{names: ["*.o_proj"], recipe: mxfp8}, {names: ["*.down_proj"], high: true}]'
    mixed = [
        "precision=fp8_delayed",
        "precision.modules.first_blocks_high_precision=1",
        f"precision.modules.casts={rules}",
    ]
    stop_and_resume(small_run, whole, tmp_path, *mixed)
    told = capsys.readouterr().out
    assert "casts  12 of 22 linear layers quantized, in 2 of 3 blocks, emulated, eager (precision.casts=eager)" in told
    assert "7 high (modules.first_blocks_high_precision=1); 2 high (modules.casts.1 keeps it high)" in told
    state = load_file(next((tmp_path).rglob("precision.safetensors")))
    scaled = {name.removesuffix(".scale") for name in state if name.endswith(".scale")}
    parts = (
        "attention.q_proj",
        "attention.k_proj",
        "attention.v_proj",
        "feed_forward.gate_proj",
        "feed_forward.up_proj",
    )
    assert scaled == {f"layers.{index}.{part}" for index in (1, 2) for part in parts}


@pytest.mark.parametrize(
    "recipe", ["fp8_delayed", *(pytest.param(name, marks=pytest.mark.full) for name in ("mxfp4_sr", "quartet"))]
)
def test_recomputation_gives_the_same_bits(recipe, small_run, whole, tmp_path):
    """With a validation between the steps, which the other run has not."""
    words = [f"precision={recipe}", *THREE_STEPS, "trainer.validate_every_steps=2"]
    assert train(small_run, tmp_path, *words, "parallel.activation_checkpoint=full") == 0
    assert losses(tmp_path / "run") == losses(whole(f"precision={recipe}"))


def broken_compiler(folder: Path) -> dict[str, str]:
    """Return an environment with a C++ compiler that reports its version and fails at anything else."""
    folder.mkdir()
    script = folder / "g++"
    asked = f'case "$1" in --version|-dumpversion) exec {shutil.which("g++")} "$@";; esac'
    script.write_text(f'#!/bin/sh\n{asked}\necho "x.h: error: broken" >&2\nexit 1\n')
    script.chmod(0o755)
    return {**os.environ, "CXX": str(script), "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache")}


@pytest.mark.full
@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
def test_a_failing_compiler_is_reported_and_not_used(small_run, tmp_path):
    words = small_run(tmp_path, *SHAPE, "precision=mxfp8", "trainer.max_steps=3")
    command = [sys.executable, "-m", "lightning_llm", "train", *words]
    done = subprocess.run(command, env=broken_compiler(tmp_path / "bin"), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "emulated, eager (precision.casts=auto)" in done.stdout
    assert "the compiler fails (x.h: error: broken)" in done.stdout
    assert len(losses(tmp_path / "run")) == 3


def test_casts_that_must_be_compiled_and_cannot_be_are_an_error(small_run, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(inductor, "why_not", lambda device_type: "planted")
    assert train(small_run, tmp_path, "precision=mxfp8", "precision.casts=compiled") == 2
    assert "precision.casts=compiled: is not possible here: planted" in capsys.readouterr().err


def test_validation_of_a_quantising_recipe_has_two_views(small_run, tmp_path):
    steps = ["trainer.max_steps=3", "trainer.validate_every_steps=2", UNSAVED]
    assert train(small_run, tmp_path / "a", "precision=mxfp8", *steps) == 0
    record = [each for each in read_metrics(tmp_path / "a" / "run") if "val_loss" in each][-1]
    assert record["val_loss"] != record["val_loss_high_precision"]
    assert record["val_loss"] == pytest.approx(record["val_loss_high_precision"], rel=0.02)
    assert train(small_run, tmp_path / "b", "precision=mxfp4_sr", *steps) == 0  # its forward pass is bf16's
    record = [each for each in read_metrics(tmp_path / "b" / "run") if "val_loss" in each][-1]
    assert record["val_loss"] == record["val_loss_high_precision"]


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


def test_an_fp16_overflow_at_the_floor_of_the_scale_ends_the_run(small_run, tmp_path, capsys):
    words = ["precision=fp16", "precision.loss_scaling.init_scale=1e38", "precision.loss_scaling.min_scale=1e38"]
    assert train(small_run, tmp_path / "a", *words) == 1
    assert "gradient norm of step 1 is" in capsys.readouterr().err
    assert train(small_run, tmp_path / "b", *words, "spikes.policy=skip", "spikes.max_consecutive_skips=2") == 1
    assert [record["event_action"] for record in read_metrics(tmp_path / "b" / "run")] == ["skip", "skip", "stop"]
    low = ["precision=fp16", "precision.loss_scaling.init_scale=0.5"]
    assert train(small_run, tmp_path / "c", *low) == 2
    assert "init_scale 0.5 is below min_scale 1" in capsys.readouterr().err


def test_a_run_that_skips_every_update_fails_and_resuming_it_does_not_finish_it(small_run, tmp_path, capsys):
    slow = ["precision=fp16", "precision.loss_scaling.init_scale=1e38", "precision.loss_scaling.backoff_factor=0.99"]
    assert train(small_run, tmp_path, *slow, "precision.loss_scaling.min_scale=null") == 1
    assert "all 6 updates up to step 6 were skipped" in capsys.readouterr().err
    run = tmp_path / "run"
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["status"], summary["step"]) == ("failed", 6)
    assert "precision=bf16" in summary["detail"]
    assert (read_run(run).diverged, state_of(run)) == (True, "diverged")
    assert train(small_run, tmp_path, *slow, "precision.loss_scaling.min_scale=null", "resume=auto") == 1
    assert json.loads((run / "summary.json").read_text())["status"] == "failed"


def test_the_last_max_10_or_1_percent_of_steps_must_make_an_update():
    assert [stalled(steps, skipped) for steps, skipped in ((0, 0), (1, 0), (1, 1), (6, 5), (6, 6))] == [
        False, False, True, False, True
    ]  # fmt: skip
    assert [stalled(900, 9), stalled(900, 10), stalled(5000, 49), stalled(5000, 50)] == [False, True, False, True]


def test_an_overflow_that_saturation_hides_is_found_in_the_operands():
    # The scale of a tensor with an Inf is 1, and the Inf becomes 448. (MXFP8's is 2^127, and 448 * 2^127 is Inf again.)
    dy = [f"precision.{gemm}.dy.{key}" for gemm in ("dgrad", "wgrad") for key in ("block=tensor", "scale=fp32")]
    config = compose_config(["precision=fp16_mxfp8", "precision.casts=eager", *dy]).precision
    layer = torch.nn.Sequential(torch.nn.Linear(32, 32, bias=False))
    quantization = Quantization(config, seed=0, max_steps=1)
    layer = torch.nn.ModuleDict({"layers": torch.nn.ModuleDict({"0": layer})})
    quantization.swap(layer, num_layers=1, device_type="cpu")
    quantization.watch_overflow(layer)
    linear = layer["layers"]["0"][0]
    gradient = torch.ones(32, 32, dtype=torch.float16)
    for planted, seen in ((1.0, False), (float("inf"), True), (1.0, False)):
        x = torch.ones(32, 32, dtype=torch.float16, requires_grad=True)
        gradient[3, 5] = planted
        quantization.begin_step(layer, 0)
        linear(x).backward(gradient)
        assert torch.isfinite(linear.weight.grad).all()  # the cast made a number of Inf
        assert bool(quantization.take_overflow()) is seen


class DelayedState(pl.Callback):
    """Keeps the state of delayed scaling after each step."""

    def __init__(self):
        self.states = []

    def on_train_batch_end(self, trainer, pl_module, *_):
        self.states.append(pl_module.quantization.state(pl_module.model))


def rows_of(state):
    """Return how many amaxes each layer's history has, of all three tensors."""
    return {int((tensor > 0).all(1).sum()) for name, tensor in state.items() if name.endswith("amax_history")}


def test_scales_update_with_every_micro_batch_if_the_recipe_says_so(small_run, tmp_path):
    """Two per step: also where activations are recomputed, through a resumption, and when a step is run again."""
    words = [*SHAPE, "precision.casts=eager", "trainer.validate_every_steps=null", "schedule.total_steps=3"]
    words += ["parallel.activation_checkpoint=full"]
    kept = {}
    for name in ("fp8_delayed", "fp8_delayed_micro_batch"):
        kept[name] = DelayedState()
        more = [f"precision={name}", "trainer.max_steps=3"]
        trainer = run_with(compose_config(small_run(tmp_path / name, *words, *more)), kept[name], saves=False)
    assert [rows_of(each) for each in kept["fp8_delayed"].states] == [{1}, {2}, {3}]
    assert [rows_of(each) for each in kept["fp8_delayed_micro_batch"].states] == [{2}, {4}, {6}]
    before = {name: tensor.clone() for name, tensor in kept["fp8_delayed_micro_batch"].states[-1].items()}
    quantization, model = trainer.lightning_module.quantization, trainer.lightning_module.model
    quantization.undo_step()
    now = quantization.state(model)
    was = kept["fp8_delayed_micro_batch"].states[1]
    assert all(torch.equal(was[name], now[name]) for name in was if name.endswith("scale"))
    assert any(not torch.equal(before[name], now[name]) for name in was if name.endswith("scale"))
    plain = [word for word in words if "checkpoint=full" not in word]
    for steps, more in ((2, ()), (3, ("resume=auto",))):
        config = small_run(
            tmp_path / "parts", *plain, "precision=fp8_delayed_micro_batch", f"trainer.max_steps={steps}"
        )
        assert main(["train", *config, *more]) == 0
    assert losses(tmp_path / "parts" / "run") == losses(tmp_path / "fp8_delayed_micro_batch" / "run")


@pytest.mark.full
def test_a_run_that_ends_by_a_spike_is_saved_with_the_scales_from_before_the_step(small_run, tmp_path, monkeypatch):
    words = [*SHAPE, "precision=fp8_delayed_micro_batch", "trainer.validate_every_steps=null", "schedule.total_steps=3"]
    words += ["trainer.max_steps=3", "checkpoint.every_steps=null", "precision.casts=eager"]
    assert main(["train", *small_run(tmp_path / "whole", *words)]) == 0

    def judge(self, record):
        if record["step"] == 3:
            raise SpikeStop("step 3 is out of the ordinary", record)
        return False

    with monkeypatch.context() as patch:
        patch.setattr(SpikePolicy, "judge", judge)
        assert main(["train", *small_run(tmp_path / "stopped", *words)]) == 1
    assert main(["train", *small_run(tmp_path / "stopped", *words, "resume=auto")]) == 0
    assert losses(tmp_path / "stopped" / "run") == losses(tmp_path / "whole" / "run")
    assert same_weights(tmp_path / "stopped" / "run", tmp_path / "whole" / "run", 3)


def test_scales_that_move_with_every_micro_batch_do_not_go_with_a_pipeline(small_run, tmp_path, capsys):
    words = ["precision=fp8_delayed_micro_batch", "parallel=pp", "trainer.devices=2"]
    assert train(small_run, tmp_path, *words) == 2
    said = capsys.readouterr().err
    assert "parallel.pp: is 2, and the recipe updates delayed scales after every micro-batch" in said
    assert "Set 1, or update: step." in said


def test_a_phase_takes_over_at_its_step(small_run, tmp_path):
    phase = "precision.phases=[{start: 0.5}]"  # no slot named: high precision from half of the run on
    steps = ["trainer.max_steps=4", "trainer.validate_every_steps=null", UNSAVED]
    assert train(small_run, tmp_path / "a", "precision=mxfp8", phase, *steps) == 0
    assert train(small_run, tmp_path / "b", "precision=mxfp8", *steps) == 0
    ours, plain = losses(tmp_path / "a" / "run"), losses(tmp_path / "b" / "run")
    assert ours[:2] == plain[:2]
    assert ours[2] != plain[2]


def test_rotations_need_not_divide_a_width(small_run, tmp_path):
    words = ["precision=mxfp4_sr", "precision.casts=eager", "model.ffn_hidden_size=200", "trainer.max_steps=2"]
    assert train(small_run, tmp_path / "a", *words, "trainer.validate_every_steps=null", UNSAVED) == 0
    assert all(0 < loss < 10 for loss in losses(tmp_path / "a" / "run"))


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["precision=mxfp8", "precision.dgrad.dy.format=e5m2"], "precision.dgrad.dy.format"),
        (["precision=mxfp4_sr", "precision.dgrad.dy.hadamard.size=48"], "precision.dgrad.dy.hadamard"),
        (["precision=mxfp8", "precision.backend=native"], "precision.backend"),
        (["precision=mxfp8", "precision.fprop.x.format=e4m4"], "precision.fprop.x.format"),
        (["precision=fp8_current", "precision.modules.last_blocks_high_precision=9"], "precision.modules"),
    ],
)
def test_configs_that_cannot_run_are_rejected_before_the_start(words, key, small_run, tmp_path, capsys):
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
