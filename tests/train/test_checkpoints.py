"""Times at which a run saves, state that it never saves, and checkpoints that it rejects. 9 seconds."""

import json
import shutil

import torch
from mlflow import MlflowClient

from lightning_llm.__main__ import main
from lightning_llm.base.integrity import seal, unseal
from lightning_llm.model.decoder import Decoder
from lightning_llm.train.checkpoint.manifest import VERSION
from tests.run_metrics import curve, read_metrics, same_weights, steps_saved, weights

MICRO_BATCHES_PER_STEP = 2


def test_without_validation_data_it_saves_at_the_due_steps(whole, tmp_path, small_run):
    words = ["data.validation.fraction=0", "checkpoint.every_steps=3", "trainer.validate_every_steps=3"]
    assert main(["train", *small_run(tmp_path, *words)]) == 0
    assert steps_saved(tmp_path / "run") == [3, 6]
    assert [record["step"] for record in read_metrics(tmp_path / "run")] == [1, 2, 3, 4, 5, 6]
    assert not any("val_loss" in record for record in read_metrics(tmp_path / "run"))


def test_a_checkpoint_of_another_version_is_rejected(whole, tmp_path, capsys):
    copy = tmp_path / "copy"
    shutil.copytree(whole, copy)
    manifest = copy / "checkpoints" / "step=6" / "manifest.json"
    manifest.write_bytes(seal({**unseal(manifest.read_bytes()), "version": 99}))
    config = ["--config", str(copy / "config.yaml"), f"run.dir={copy}", "trainer.max_steps=7"]
    for resume in ("auto", copy, manifest.parent):
        assert main(["train", *config, f"resume={resume}"]) == 2
        told = capsys.readouterr().err
        assert f"{manifest}: has version 99: this release reads {VERSION}." in told
        assert "Traceback" not in told
    assert curve(copy) == curve(whole)


def test_a_loss_that_is_not_finite_fails_before_it_reaches_the_weights(tmp_path, small_run, empty_store, capsys):
    shutil.copy(empty_store, tmp_path / "mlflow.db")
    words = ["optim.learning_rate=1e30", "optim.gradient_clip_norm=null", "logger=mlflow"]
    assert main(["train", *small_run(tmp_path, *words)]) == 1
    assert "Lower optim.learning_rate" in capsys.readouterr().err
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "failed"
    tracked = MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}").get_run(summary["mlflow_run_id"])
    assert tracked.info.status == "FAILED"
    assert "NonFiniteError" in tracked.data.tags["status_detail"]
    for step in steps_saved(tmp_path / "run"):
        assert all(torch.isfinite(value).all() for value in weights(tmp_path / "run", step).values())


def test_a_gradient_norm_that_is_not_finite_leaves_the_last_checkpoint(whole, tmp_path, small_run, monkeypatch, capsys):
    forward, micro_batches = Decoder.forward, iter(range(10**6))

    def poisoned(self, *arguments, **keywords):
        logits = forward(self, *arguments, **keywords)
        if logits.requires_grad and next(micro_batches) == 4 * MICRO_BATCHES_PER_STEP:  # in step 5: the loss is fine
            logits.register_hook(lambda gradient: gradient * float("inf"))
        return logits

    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(Decoder, "forward", poisoned)
        assert main(["train", *small_run(tmp_path, "checkpoint.every_steps=4")]) == 1
    told = capsys.readouterr().err
    assert "the gradient norm of step 5 is nan" in told
    assert "Traceback" not in told
    summary = json.loads((run / "summary.json").read_text())
    assert summary["status"] == "failed"
    assert "gradient norm of step 5" in summary["detail"]
    assert steps_saved(run) == [4]
    assert same_weights(run, whole, 4)
    assert curve(run)[:-1] == [entry for entry in curve(whole) if entry[0] <= 4]
    last = read_metrics(run)[-1]
    assert (last["step"], last["grad_norm"], last["event"], last["event_action"]) == (5, "nan", "non_finite", "stop")
    assert main(["train", *small_run(tmp_path, "checkpoint.every_steps=4", "resume=auto")]) == 0
    assert curve(run) == curve(whole)
    assert same_weights(run, whole, 6)
