"""Whole runs through the command line's entry: the folder they leave, determinism, refusals. 14 seconds."""

import json

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from lightning_llm.__main__ import main
from tests.run_metrics import curve, read_metrics, same_weights, steps_saved, weights


def test_the_folder_has_the_documented_files(whole):
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
    assert {file.name for file in whole.iterdir()} >= {"config.yaml", "metrics.jsonl", "summary.json"}
    assert steps_saved(whole) == [4, 6]


def test_the_first_loss_is_that_of_guessing(whole):
    first = read_metrics(whole)[0]["loss"]
    assert abs(first - torch.log(torch.tensor(300.0)).item()) < 0.8


def test_losses_read_back_to_the_same_fp32_bits(whole):
    for record in read_metrics(whole):
        if "loss" in record:
            assert torch.tensor(record["loss"], dtype=torch.float32).double().item() == record["loss"]


def test_a_config_file_repeats_a_run_in_the_folder_of_its_new_name(whole):
    root = whole.parent
    assert main(["train", "--config", str(whole / "config.yaml"), "run.name=again"]) == 0
    assert curve(root / "default" / "again") == curve(whole)
    assert same_weights(root / "default" / "again", whole, 6)


def test_micro_batch_size_changes_only_the_order_of_sums(whole, tmp_path, small_run):
    assert main(["train", *small_run(tmp_path, "data.micro_batch_size=4")]) == 0
    for ours, theirs in zip(curve(tmp_path / "run"), curve(whole), strict=True):
        assert ours[:2] == theirs[:2]
        if ours[2] is not None:
            assert ours[2] == pytest.approx(theirs[2], rel=2e-6)


def test_asked_to_be_deterministic_a_run_has_the_same_bits_and_fills_no_buffers(whole, tmp_path, small_run):
    assert not torch.are_deterministic_algorithms_enabled()  # unless asked for
    try:
        assert main(["train", *small_run(tmp_path, "trainer.deterministic=true")]) == 0
        assert torch.are_deterministic_algorithms_enabled()
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            torch.empty(64)
        assert "aten::fill_" not in {event.key for event in seen.key_averages()}
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = True
    assert curve(tmp_path / "run") == curve(whole)


def test_another_attention_kernel_is_reported_and_learns_the_same(whole, tmp_path, small_run, capsys):
    assert main(["train", *small_run(tmp_path, "trainer.attention_kernel=math")]) == 0
    assert "kernel attention: math (trainer.attention_kernel=math)" in capsys.readouterr().out.splitlines()
    for ours, theirs in zip(curve(tmp_path / "run"), curve(whole), strict=True):
        if ours[2] is not None:
            assert ours[2] == pytest.approx(theirs[2], rel=2e-6)
    assert main(["train", *small_run(tmp_path, "trainer.attention_kernel=efficient", "run.name=other")]) == 2
    assert "trainer.attention_kernel: is efficient, a CUDA kernel, and the device is cpu" in capsys.readouterr().err


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
    assert "already contains a run" in capsys.readouterr().err
    assert main(["train", *config, "resume=auto", "optim.learning_rate=5.0", "seed=9"]) == 2
    told = capsys.readouterr().err
    assert "optim.learning_rate" in told
    assert "seed" in told
    assert main(["train", *config, "resume=/nowhere"]) == 2
    assert main(["train", *config, "resume=auto"]) == 0  # reports that it is finished
    assert "is finished at step 6" in capsys.readouterr().out
    assert files() == before


def test_a_folder_of_other_files_is_never_touched(tmp_path, small_run, capsys):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").write_text("years of work")
    for resume in ("null", "auto"):
        assert main(["train", *small_run(tmp_path, f"resume={resume}")]) == 2
    assert [file.name for file in (tmp_path / "run").iterdir()] == ["thesis.tex"]
