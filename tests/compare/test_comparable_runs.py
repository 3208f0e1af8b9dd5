"""Runs that `compare` accepts, by name; runs that cannot be used, or not together, are reported."""

import re
from pathlib import Path

import pytest

from lightning_llm.__main__ import main
from lightning_llm.base.errors import ConfigError
from lightning_llm.config.from_file import load_config
from lightning_llm.tracking.reading import read_run
from tests.compare.run_folders import NOISE, STEPS, curve, make_run, make_sweep, refusal, rewritten, verdicts

pytestmark = pytest.mark.usefixtures("undrawn")


def test_an_experiment_an_id_and_the_newest_sweep_name_the_same_runs(sweep, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("LIGHTNING_LLM_OUTPUTS", str(sweep.parents[1]))
    whole = verdicts(capsys, sweep)["verdicts"]
    assert verdicts(capsys, "exp")["verdicts"] == whole
    assert verdicts(capsys)["verdicts"] == whole
    assert verdicts(capsys, sweep.name)["verdicts"] == whole
    (sweep / "0" / "mlflow_run_id").write_text("ab" * 16 + "\n")
    found = verdicts(capsys, "ab" * 16, sweep / "3", "--output", tmp_path / "here")
    assert len(found["runs"]) == 2
    assert (tmp_path / "here" / "report.html").exists()


BAD = {
    "unfinished": (("precision=mxfp8", "seed=9"), {"summary": {"status": "stopped"}}, "is not finished: stopped"),
    "no baseline": (("precision=mxfp8", "seed=9"), {}, "has no run of bf16 at that seed"),
    "tokenizer": (("precision=mxfp8", "seed=0"), {"summary": {"validation_hash": "w" * 32}}, "not comparable"),
    "steps": (
        ("precision=fp32", "seed=0"),
        {"losses": {7: 4.0, 13: 3.5}},
        "no validation of 'val_loss' at a common step",
    ),
}


@pytest.mark.parametrize("kind", BAD)
def test_unusable_runs_are_reported_and_the_rest_judged(kind, tmp_path, capsys):
    words, more, said = BAD[kind]
    sweep = make_sweep(tmp_path / "s", {"precision=bf16": 0.0, "precision=mxfp4_sr": 0.001})
    make_run(sweep / "30", *words, **more)
    found = verdicts(capsys, sweep, expect=2)
    assert said in found["stderr"]
    assert [row["verdict"] for row in found["verdicts"]] == ["lossless"]
    assert said in (sweep / "compare" / "report.html").read_text().replace("&#39;", "'")


def test_mixes_of_data_are_compared_where_they_score_the_same_sequences(tmp_path, capsys):
    mixes = {f"data.sources.code.weight={weight}": 0.001 * weight for weight in (1, 3)}
    sweep = make_sweep(tmp_path / "s", dict.fromkeys(mixes, 0.0))
    for folder in sorted(sweep.iterdir())[3:]:  # of the second mix: other training data
        rewritten(folder, data_hash="e" * 32)
    found = verdicts(capsys, sweep)
    (row,) = found["verdicts"]
    assert (found["factor"], row["controlled"]) == ("data", True)
    for folder in sorted(sweep.iterdir())[3:6]:
        rewritten(folder, validation_hash="w" * 32)
    assert main(["compare", str(sweep)]) == 2
    assert "data.validation.weights" in capsys.readouterr().err


def test_without_hashes_the_configs_decide_what_is_comparable(tmp_path, capsys):
    sweep = tmp_path / "s"
    bare = {"summary": {"validation_hash": None, "data_hash": None}}
    make_run(sweep / "0", "precision=bf16", **bare)
    make_run(sweep / "1", "precision=mxfp8", "data.tokenizer.kind=bytes", **bare)
    make_run(sweep / "2", "precision=mxfp4_sr", "data.sources.code.weight=9", **bare)  # other sequences are scored
    assert main(["compare", str(sweep)]) == 2
    said = capsys.readouterr().err
    assert "data.tokenizer.kind" in said
    assert "data.sources.code.weight" in said


def test_nothing_to_compare_is_reported(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("LIGHTNING_LLM_OUTPUTS", str(tmp_path / "outputs"))
    make_run(tmp_path / "outputs" / "precision_study" / "alone", "precision=bf16")
    (tmp_path / "outputs" / "mlartifacts").mkdir()  # MLflow's: no experiment
    assert "no sweep in" in refusal(capsys)
    assert "Did you mean 'precision_study'?" in refusal(capsys, "precision_stud")
    assert "Known here: precision_study." in refusal(capsys, "zzz")
    assert "there is no run in this folder" in refusal(capsys, tmp_path / "outputs" / "mlartifacts")
    one = make_run(tmp_path / "one", "precision=bf16")
    assert "1 finished run: a verdict needs a baseline and another" in refusal(capsys, one)
    two = make_run(tmp_path / "two", "precision=bf16", "seed=1")
    assert "all 2 runs have the same config except for the seed. A verdict needs" in refusal(capsys, one, two)
    three = make_run(tmp_path / "three", "precision=mxfp8")
    assert "'fp23' is the level of no run. Known here" in refusal(capsys, one, three, "--baseline", "precision=fp23")
    assert "there is no group or key 'precison'" in refusal(capsys, one, three, "--baseline", "precison=bf16")
    assert "--baseline precision=NAME, one of mxfp8, nvfp4" in refusal(
        capsys, three, make_run(tmp_path / "four", "precision=nvfp4")
    )
    problems = refusal(capsys, one, three, "--margin", "-1", "--confidence", "1", "--tail", "1")
    assert all(word in problems for word in ("--margin", "--confidence", "--tail"))
    (three / "metrics.jsonl").write_text('{"step": 1}\nnonsense\n{"step": 2}\n')
    assert "line 2 is damaged" in refusal(capsys, one, three)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    assert "could not be asked" in refusal(capsys, "0" * 32)


def test_metrics_that_end_early_and_a_metric_that_no_run_has_are_named(tmp_path, capsys):
    sweep = make_sweep(tmp_path / "s", {"precision=bf16": 0.0, "precision=mxfp4_sr": 0.001})
    told = refusal(capsys, sweep, "--metric", "nosuch")
    assert "--metric: no run has a validation of 'nosuch'. Available: val_loss, val_loss/code" in told
    lines = (sweep / "4" / "metrics.jsonl").read_text().splitlines(keepends=True)
    (sweep / "4" / "metrics.jsonl").write_text("".join(lines[:60]))
    rewritten(sweep / "4")
    found = verdicts(capsys, sweep, expect=2)
    assert "metrics.jsonl ends at step 50 of 100" in found["stderr"]
    assert [row["pairs"] for row in found["verdicts"]] == [2]


def test_shared_machines_and_single_validation_tails_are_noted(tmp_path, capsys):
    once = {step: curve(step) for step in range(20, STEPS + 1, 20)}
    words = ("launcher.at_once=2",)
    for seed in range(2):
        for number, name in enumerate(("bf16", "mxfp8")):
            losses = {step: loss + NOISE[seed + number] for step, loss in once.items()}
            make_run(tmp_path / "s" / f"{number}{seed}", f"precision={name}", f"seed={seed}", *words, losses=losses)
    notes = " ".join(verdicts(capsys, tmp_path / "s")["notes"])
    assert "at once" not in notes  # each was started alone, with a config that a sweep's job had
    assert "The tail is one validation (step 100)" in notes
    assert "trainer.validate_every_steps=2" in notes
    assert "or use more of the existing validations (--tail 0.3)" in notes  # step 80 is there
    (tmp_path / "s" / "sweep.json").write_text('{"jobs": []}')
    found = verdicts(capsys, tmp_path / "s")
    assert "2 at once (launcher.at_once)" in " ".join(found["notes"])
    assert "launcher.at_once" not in found["verdicts"][0]["speed_confounders"]
    wide = verdicts(capsys, tmp_path / "s", "--tail", "0.5")
    assert "The tail is one validation" not in " ".join(wide["notes"])


@pytest.mark.parametrize("order", [("0", "9"), ("9", "0")])
def test_of_baseline_runs_made_again_the_newest_is_in_the_pair(tmp_path, capsys, order):
    """Whatever the folders' names: both were made in the same way, to other losses."""
    older, newer = order
    for name, noise, started in ((older, 0.5, "2026-11-20"), (newer, 0.0, "2026-11-22")):
        at = {"started_at": f"{started}T10:00:00+00:00"}
        make_run(tmp_path / "s" / name, "precision=bf16", "seed=0", noise=noise, summary=at)
    make_run(tmp_path / "s" / "5", "precision=mxfp8", "seed=0", noise=0.25)
    (row,) = verdicts(capsys, tmp_path / "s")["verdicts"]
    assert row["gap"] == pytest.approx(0.25)


def test_a_truncated_config_is_reported_and_no_other_recipe(tmp_path: Path) -> None:
    file = make_run(tmp_path / "run") / "config.yaml"
    text = file.read_text()
    file.write_text(text[: text.index("\nseed:") + 1])
    with pytest.raises(ConfigError, match=r"config\.yaml has no .*seed: it was truncated or changed"):
        read_run(file.parent)
    file.write_text(text[: text.index("\nprecision:") + 1])
    with pytest.raises(ConfigError, match=re.escape(f"{file}: is damaged or from another version: schedule: a value")):
        load_config(file, ["trainer.devices=1"])
