"""Whole runs through the command line's entry: the folder they leave, determinism, resume, signals, refusals."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from run_metrics import read_metrics
from safetensors.torch import load_file

from lightning_llm.__main__ import main

ROOT = Path(__file__).parents[2]


def curve(folder: Path) -> list[tuple]:
    """Return what must be equal bit for bit between runs that are the same."""
    keys = ("step", "tokens", "loss", "grad_norm", "lr", "val_loss", "val_loss/jsonl")
    return [tuple(record.get(key) for key in keys) for record in read_metrics(folder)]


def weights(folder: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(folder / "checkpoints" / f"step={step}" / "model.safetensors")


@pytest.fixture(scope="module")
def whole(tmp_path_factory, small_run):
    """A run of six steps, never interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    assert main(["train", *small_run(folder)]) == 0
    return folder / "run"


def test_the_folder_holds_what_the_contract_says(whole):
    steps = [record for record in read_metrics(whole) if "loss" in record]
    validations = [record for record in read_metrics(whole) if "val_loss" in record]
    assert [record["step"] for record in steps] == [1, 2, 3, 4, 5, 6]
    assert [record["step"] for record in validations] == [3, 6]
    assert all(record["tokens"] == 128 * record["step"] for record in steps)
    assert steps[-1]["loss"] < steps[0]["loss"]
    assert all(record["grad_norm"] > 0 for record in steps)
    assert validations[0]["val_loss"] == validations[0]["val_loss/jsonl"]
    summary = json.loads((whole / "summary.json").read_text())
    assert summary["status"] == "finished"
    assert {file.name for file in whole.iterdir()} >= {"config.yaml", "metrics.jsonl", "summary.json", "loss.png"}
    assert sorted(path.name for path in (whole / "checkpoints").iterdir()) == ["step=4", "step=6"]


def test_the_first_loss_is_that_of_guessing(whole):
    first = read_metrics(whole)[0]["loss"]
    assert abs(first - torch.log(torch.tensor(300.0)).item()) < 0.8


def test_losses_read_back_to_the_same_fp32_bits(whole):
    for record in read_metrics(whole):
        if "loss" in record:
            assert torch.tensor(record["loss"], dtype=torch.float32).double().item() == record["loss"]


def test_twice_the_same_bits_and_config_file_repeats_a_run(whole, tmp_path):
    assert main(["train", "--config", str(whole / "config.yaml"), f"run.dir={tmp_path / 'again'}"]) == 0
    assert curve(tmp_path / "again") == curve(whole)
    for name, value in weights(whole, 6).items():
        assert torch.equal(value, weights(tmp_path / "again", 6)[name])


@pytest.mark.parametrize("first_steps", [2, 3])
def test_stop_and_resume_gives_the_same_bits(whole, tmp_path, small_run, first_steps):
    short = ["schedule.total_steps=6", f"trainer.max_steps={first_steps}"]
    assert main(["train", *small_run(tmp_path, *short)]) == 0
    assert main(["train", *small_run(tmp_path, "schedule.total_steps=6", "resume=auto")]) == 0
    resumed = {entry for entry in curve(tmp_path / "run") if entry[5] is None}
    assert resumed == {entry for entry in curve(whole) if entry[5] is None}
    assert curve(tmp_path / "run")[-1] == curve(whole)[-1]
    for name, value in weights(whole, 6).items():
        assert torch.equal(value, weights(tmp_path / "run", 6)[name])


def test_a_torn_checkpoint_and_later_metrics_are_left_behind(whole, tmp_path, small_run):
    assert main(["train", *small_run(tmp_path)]) == 0
    run = tmp_path / "run"
    (run / "checkpoints" / "step=6" / "optimizer.safetensors").write_bytes(b"torn")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "loss": 1.0}\n{"step": 8, "lo')
    assert main(["train", *small_run(tmp_path, "resume=auto")]) == 0
    assert curve(run) == curve(whole)


def test_micro_batch_size_changes_only_the_order_of_sums(whole, tmp_path, small_run):
    assert main(["train", *small_run(tmp_path, "data.micro_batch_size=4")]) == 0
    for ours, theirs in zip(curve(tmp_path / "run"), curve(whole), strict=True):
        assert ours[:2] == theirs[:2]
        if ours[2] is not None:
            assert ours[2] == pytest.approx(theirs[2], rel=2e-6)


@pytest.mark.parametrize("change", ["parallel.activation_checkpoint=full", "trainer.validate_every_steps=null"])
def test_what_must_not_change_a_bit(whole, tmp_path, small_run, change):
    assert main(["train", *small_run(tmp_path, change)]) == 0
    expected = [entry for entry in curve(whole) if entry[5] is None]
    assert [entry for entry in curve(tmp_path / "run") if entry[5] is None] == expected
    assert read_metrics(tmp_path / "run")[-1]["val_loss"] == read_metrics(whole)[-1]["val_loss"]


def test_bf16_is_close_to_fp32_and_not_equal(whole, tmp_path, small_run):
    assert main(["train", *small_run(tmp_path, "precision=bf16")]) == 0
    ours, theirs = curve(tmp_path / "run"), curve(whole)
    assert ours[0][2] == pytest.approx(theirs[0][2], rel=2e-3)
    assert ours[0][2] != theirs[0][2]
    assert all(tensor.dtype == torch.float32 for tensor in weights(tmp_path / "run", 6).values())


def test_refusals_change_nothing(whole, capsys):
    def files() -> dict[str, float]:
        return {str(file): file.stat().st_mtime_ns for file in whole.rglob("*")}

    before = files()
    config = ["--config", str(whole / "config.yaml")]
    assert main(["train", *config]) == 2
    assert "already holds a run" in capsys.readouterr().err
    assert main(["train", *config, "resume=auto", "optim.learning_rate=5.0", "seed=9"]) == 2
    told = capsys.readouterr().err
    assert "optim.learning_rate" in told
    assert "seed" in told
    assert main(["train", *config, "resume=/nowhere"]) == 2
    assert main(["train", *config, "resume=auto"]) == 0  # finished: says so
    assert "is finished at step 6" in capsys.readouterr().out
    assert files() == before


def test_a_folder_of_other_files_is_never_touched(tmp_path, small_run, capsys):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").write_text("years of work")
    for resume in ("null", "auto"):
        assert main(["train", *small_run(tmp_path, f"resume={resume}")]) == 2
    assert [file.name for file in (tmp_path / "run").iterdir()] == ["thesis.tex"]


def test_resume_auto_starts_afresh_where_nothing_is(whole, tmp_path, small_run):
    assert main(["train", *small_run(tmp_path, "resume=auto")]) == 0
    assert curve(tmp_path / "run") == curve(whole)


def test_resume_from_a_path_into_a_new_folder(whole, tmp_path, small_run):
    assert main(["train", *small_run(tmp_path, f"resume={whole / 'checkpoints' / 'step=4'}")]) == 0
    assert curve(tmp_path / "run") == [entry for entry in curve(whole) if entry[0] > 4]


def test_a_loss_that_is_not_finite_fails_before_it_reaches_the_weights(tmp_path, small_run, capsys):
    assert main(["train", *small_run(tmp_path, "optim.learning_rate=1e30", "optim.gradient_clip_norm=null")]) == 1
    assert "Lower optim.learning_rate" in capsys.readouterr().err
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "failed"
    for folder in (tmp_path / "run" / "checkpoints").glob("step=*"):
        assert all(torch.isfinite(value).all() for value in load_file(folder / "model.safetensors").values())


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_and_resume_gives_the_same_bits(tmp_path, small_run, number, code):
    words = small_run(tmp_path, "trainer.max_steps=400", "checkpoint.every_steps=1000")
    command = [sys.executable, "-m", "lightning_llm", "train", *words]
    with subprocess.Popen(command, cwd=ROOT, env=os.environ, stderr=subprocess.PIPE, text=True) as process:
        metrics = tmp_path / "run" / "metrics.jsonl"
        deadline = time.monotonic() + 60
        while not (metrics.is_file() and metrics.read_text().count("\n") >= 5) and time.monotonic() < deadline:
            time.sleep(0.02)
        process.send_signal(number)
        _, told = process.communicate(timeout=60)
    assert process.returncode == code, told
    assert "resume=auto" in told
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "stopped"
    stopped_at = read_metrics(tmp_path / "run")[-1]["step"]
    assert (tmp_path / "run" / "checkpoints" / f"step={stopped_at}" / "manifest.json").is_file()
    more = ["schedule.total_steps=400", f"trainer.max_steps={stopped_at + 3}"]
    resumed = small_run(tmp_path, *more, "resume=auto")
    assert main(["train", *resumed]) == 2  # schedule.total_steps is part of the run, and was null
    assert main(["train", *words, "resume=auto", f"trainer.max_steps={stopped_at + 3}"]) == 0
    steps = [record["step"] for record in read_metrics(tmp_path / "run") if "loss" in record]
    assert steps == list(range(1, stopped_at + 4))
