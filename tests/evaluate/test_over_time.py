"""`evaluate RUN --all-checkpoints`: every checkpoint once, despite interruptions, and a curve for `compare`."""

import json
import shutil
from pathlib import Path

import pytest
import torch

import lightning_llm
from lightning_llm.__main__ import main
from lightning_llm.cli import evaluate as verb
from lightning_llm.evaluate.over_time import Trend
from lightning_llm.evaluate.validation import standard_errors
from lightning_llm.tracking.evaluations import read_evaluations
from lightning_llm.tracking.files import read_records
from lightning_llm.tracking.reading import read_run


@pytest.fixture
def run(trained, tmp_path):
    """A copy of the run, without the evaluations that other tests have made."""
    return shutil.copytree(trained, tmp_path / "run", ignore=shutil.ignore_patterns("evaluation"))


def over_time(capsys, run, *words, expect=0):
    capsys.readouterr()
    assert main(["evaluate", str(run), "--all-checkpoints", "--json", *map(str, words)]) == expect
    out, err = capsys.readouterr()
    return json.loads(out), err


def test_every_checkpoint_has_the_runs_own_losses_and_is_evaluated_once(run, capsys):
    own = {each["step"]: each["val_loss"] for each in read_records(run / "metrics.jsonl") if "val_loss" in each}
    found, _ = over_time(capsys, run)
    assert {each["step"]: each["metrics"]["val_loss"]["value"] for each in found["steps"]} == own
    assert [each["evaluated"] for each in found["steps"]] == [True, True]
    assert all(each["metrics"]["val_loss"]["stderr"] > 0 for each in found["steps"])
    again = lightning_llm.evaluate(run, all_checkpoints=True)
    assert again.evaluated == ()
    assert {step: each["val_loss"]["value"] for step, each in again.metrics.items()} == own
    out, said = capsys.readouterr()
    assert "already evaluated by this request: steps 2, 4" in said
    assert [line.split()[0] for line in out.splitlines()] == ["step", "2", "4"]
    assert "<svg" in (run / "evaluation" / "trend.svg").read_text()
    assert read_run(run).validations["eval/val_loss"] == own  # what `compare --metric eval/val_loss` compares
    text = run.parent / "other.jsonl"
    text.write_text(
        "".join(json.dumps({"text": f"Another text, number {number}. " * 9}) + "\n" for number in range(60))
    )
    other, _ = over_time(capsys, run, "--data", f"jsonl={text}")
    assert [each["evaluated"] for each in other["steps"]] == [True, True]
    back, _ = over_time(capsys, run)  # its values were replaced by those of the other text
    assert [each["evaluated"] for each in back["steps"]] == [True, True]


def test_an_interrupted_evaluation_continues(run, capsys, monkeypatch):
    evaluate_models = verb.evaluate_models

    def interrupted(request, output):
        if request.subjects[0].step == 4:
            raise KeyboardInterrupt
        return evaluate_models(request, output)

    monkeypatch.setattr(verb, "evaluate_models", interrupted)
    assert main(["evaluate", str(run), "--all-checkpoints"]) == 130
    monkeypatch.setattr(verb, "evaluate_models", evaluate_models)
    found, _ = over_time(capsys, run)
    assert {each["step"]: each["evaluated"] for each in found["steps"]} == {2: False, 4: True}


def test_deleted_and_damaged_checkpoints_are_named(run, capsys):
    config = (run / "config.yaml").read_text()
    assert "every_steps: 2" in config
    over_time(capsys, run)
    shutil.rmtree(run / "checkpoints" / "step=2")
    found, said = over_time(capsys, run)
    assert found["deleted"] == [2]
    assert "deleted by retention, so not evaluated: steps 2" in said
    assert [each["step"] for each in found["steps"]] == [2, 4]  # its results are still there
    shutil.copytree(run / "checkpoints" / "step=4", run / "checkpoints" / "step=3")
    (run / "checkpoints" / "step=99").mkdir()
    found, said = over_time(capsys, run, expect=2)
    assert "step=3" in said
    assert found["deleted"] == [2]  # the steps up to 99 were never saved


def test_notes_name_few_steps():
    trend = Trend(Path(), 1, (), {}, (), (), tuple(range(100, 100_000, 100)), {})
    assert "steps 100, 200, 300, 400, 500, 600, 700, ..., 99900 (999 in all)." in trend.notes[0]


@pytest.mark.full
def test_values_of_other_data_are_no_points_of_a_curve(run, capsys):
    """A checkpoint was evaluated on another text, then deleted; its values stay in the run's folder."""
    text = run.parent / "other.jsonl"
    text.write_text("".join(json.dumps({"text": f"Another text, {number}. " * 9}) + "\n" for number in range(60)))
    over_time(capsys, run, "--data", f"jsonl={text}")
    shutil.rmtree(run / "checkpoints" / "step=2")
    found, _ = over_time(capsys, run)
    assert [each["step"] for each in found["steps"]] == [4]
    assert list(read_run(run).validations["eval/val_loss"]) == [4]
    again, _ = over_time(capsys, run, "--data", f"jsonl={text}")
    assert [each["step"] for each in again["steps"]] == [2, 4]
    assert list(read_run(run).validations["eval/val_loss"]) == [2, 4]


def test_a_checkpoint_with_a_changed_byte_is_named_and_the_others_are_evaluated(run, capsys):
    file = next((run / "checkpoints" / "step=2").glob("tensors/*.distcp"))
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    found, said = over_time(capsys, run, expect=2)
    assert [each["step"] for each in found["steps"]] == [4]
    assert f"{run / 'checkpoints' / 'step=2'}: " in said


def test_arguments_that_do_not_go_together_are_refused(run, capsys):
    words = ["--all-checkpoints", "--output", "x.json", "--average", str(run)]
    assert main(["evaluate", str(run / "checkpoints" / "step=2"), *words]) == 2
    said = capsys.readouterr().err
    assert "needs the folder of a run as PATH" in said
    assert "--output" in said
    assert "--average" in said


def test_standard_errors_are_those_of_a_ratio_over_batches():
    """Against the delete-one jackknife, in fp64; equal to first order, so for many batches."""
    generator = torch.Generator().manual_seed(0)
    counts = torch.randint(50, 64, (400, 1, 2, 1), generator=generator).double()
    losses = counts * (3 + 0.3 * torch.randn(400, 1, 2, 1, generator=generator, dtype=torch.float64))
    parts = torch.zeros(400, 2, 2, 2, dtype=torch.float64)
    parts[:, :1] = torch.cat([losses, counts], -1)
    found = standard_errors(parts, ["a", "b"], ["b"])
    own = parts[:, 0, 0]
    without = (own.sum(0) - own).T
    ratios = without[0] / without[1]
    jackknife = ((len(ratios) - 1) * ratios.var(correction=0)).sqrt().item()
    assert found["val_loss"] == found["val_loss/a"] == pytest.approx(jackknife, rel=1e-3)
    assert sorted(found) == ["val_loss", "val_loss/a", "val_loss/b"]


def test_results_of_earlier_releases_are_read(run, capsys):
    (run / "evaluation").mkdir()
    (run / "evaluation" / "step=2.json").write_text('{"step": 2, "metrics": {"t/acc": {"value": 0.5}}}')
    found, _ = over_time(capsys, run)
    assert [each["evaluated"] for each in found["steps"]] == [True, True]
    assert read_evaluations(run)[2]["t/acc"]["value"] == 0.5
