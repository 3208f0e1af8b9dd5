"""Planted spikes in whole runs: detection, actions, and state that survives a stop. 15 seconds."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml

from lightning_llm.__main__ import main
from lightning_llm.config.schema import SpikesConfig
from lightning_llm.data.corpus import Corpus
from lightning_llm.model.decoder import Decoder
from tests.planted import corrupted, infinite_gradient
from tests.run_metrics import curve, read_metrics, read_tensors, same_weights, steps_saved

BAD = 40
"""The step with the planted fault: past the 32 that a decision needs."""
STEPS = BAD + 4
WORDS = [
    f"trainer.max_steps={STEPS}", f"schedule.total_steps={STEPS}", "trainer.validate_every_steps=null",
    "data.validation.fraction=0", "checkpoint.every_steps=null", "checkpoint.keep_last=10",
    "optim.learning_rate=1e-2", "schedule.warmup_steps=5",
    "+callbacks.spikes._target_=lightning_llm.callbacks.spikes.Spikes",
]  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def corrupt() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Corpus, "micro_batches", corrupted(BAD, micro_batch=1))
        yield


@pytest.fixture(scope="module")
def whole_runs(tmp_path_factory, small_run) -> dict[str, Path]:
    """The folders of two runs over the corrupted batch, by policy."""
    root = tmp_path_factory.mktemp("spikes")
    for policy in ("log", "skip"):
        assert main(["train", *small_run(root / policy, *WORDS, f"spikes.policy={policy}")]) == 0
    return {policy: root / policy / "run" for policy in ("log", "skip")}


def events(run: Path) -> list[tuple]:
    return [(each["step"], each["event"], each["event_action"]) for each in read_metrics(run) if "event" in each]


def record_of(run: Path, step: int) -> dict:
    return next(each for each in read_metrics(run) if each["step"] == step)


def progress(run: Path, step: int) -> dict:
    return json.loads((run / "checkpoints" / f"step={step}" / "progress.json").read_text())


def test_a_corrupted_batch_is_logged_with_its_text(whole_runs):
    run = whole_runs["log"]
    assert events(run) == [(BAD, "spike", "log")]
    record = record_of(run, BAD)
    assert record["event/spike"] == record["event/log"] == 1
    assert record["event/loss_score"] > 7
    assert record["update_norm"] > 0
    assert record["event_worst_micro_batch"] == 1
    assert record["event_worst_loss"] > record["loss"] > record["event/loss_level"] + 1
    assert record["event_samples"] == [4 * (BAD - 1), 4 * BAD - 1]
    assert [each["sample"] % 4 for each in record["event_documents"]] == [2, 3, 0, 1]  # two sequences a micro-batch
    text = (run / "events" / f"step={BAD}.txt").read_text()
    assert text.startswith(f"step {BAD}: spike: loss")
    assert json.loads((run / "summary.json").read_text())["event/spike"] == 1


def test_logging_changes_no_bit(whole_runs, tmp_path, small_run):
    deaf = ["spikes.loss_threshold=1e9", "spikes.grad_norm_threshold=1e9", "spikes.shift_limit=1e9"]
    assert main(["train", *small_run(tmp_path, *WORDS[:-1], *deaf)]) == 0
    assert events(tmp_path / "run") == []
    assert curve(tmp_path / "run") == curve(whole_runs["log"])
    assert same_weights(tmp_path / "run", whole_runs["log"], STEPS)


def test_skipping_leaves_the_update_out_and_survives_a_stop(whole_runs, tmp_path, small_run, capsys):
    whole, run = whole_runs["skip"], tmp_path / "run"
    assert events(whole) == [(BAD, "spike", "skip")]
    record = record_of(whole, BAD)
    assert record["skipped"] is True
    assert record["update_norm"] == 0
    assert record["event/skip"] == 1
    assert record_of(whole, BAD + 1)["lr"] == record["lr"] > record_of(whole, BAD + 2)["lr"]
    assert progress(whole, STEPS)["skipped_steps"] == 1
    skipping = small_run(tmp_path, *WORDS, "spikes.policy=skip")
    for last in (BAD - 1, BAD):
        assert main(["train", *skipping, f"trainer.max_steps={last}", "resume=auto"]) == 0
    before, after = (read_tensors(run / "checkpoints" / f"step={step}") for step in (BAD - 1, BAD))
    assert before.keys() == after.keys()  # weights and moments
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    assert main(["train", *skipping, "resume=auto"]) == 0
    assert curve(run) == curve(whole)
    assert events(run) == events(whole)
    assert same_weights(run, whole, STEPS)
    assert progress(run, STEPS)["spikes"] == progress(whole, STEPS)["spikes"]
    assert main(["train", *skipping, f"trainer.max_steps={STEPS + 1}", "spikes.policy=log", "resume=auto"]) == 2
    assert "spikes.policy: is 'log', but 'skip' in the run in" in capsys.readouterr().err


def test_stop_saves_before_the_update_and_resumes_under_any_policy(whole_runs, tmp_path, small_run, capsys):
    run = tmp_path / "run"
    assert main(["train", *small_run(tmp_path, *WORDS, "spikes.policy=stop")]) == 1
    told = capsys.readouterr().err
    assert f"step {BAD} is out of the ordinary (spike: loss" in told
    assert f"State saved at step {BAD - 1}" in told
    assert "Traceback" not in told
    assert steps_saved(run) == [BAD - 1]
    assert events(run) == [(BAD, "spike", "stop")]
    assert record_of(run, BAD)["event_worst_micro_batch"] == 1
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["status"], summary["step"], summary["event/spike"]) == ("failed", BAD - 1, 1)
    for policy, whole in whole_runs.items():
        shutil.copytree(run, tmp_path / policy / "run")
        words = small_run(tmp_path / policy, *WORDS, f"spikes.policy={policy}", "resume=auto")
        assert main(["train", *words]) == 0
        assert curve(tmp_path / policy / "run") == curve(whole)
        assert same_weights(tmp_path / policy / "run", whole, STEPS)
        assert events(tmp_path / policy / "run") == [(BAD, "spike", policy)]


@pytest.mark.parametrize("always", [False, True])
def test_a_gradient_that_is_not_finite_is_skipped_until_that_cannot_be_it(
    always, tmp_path, small_run, monkeypatch, capsys
):
    monkeypatch.setattr(Decoder, "forward", infinite_gradient(Decoder.forward, lambda n: always or n == 2 * 3))
    words = ["spikes.policy=skip", "spikes.max_consecutive_skips=3", "trainer.max_steps=6"]
    assert main(["train", *small_run(tmp_path, *WORDS, *words)]) == int(always)
    run = tmp_path / "run"
    if not always:
        assert events(run) == [(4, "non_finite", "skip")]
        assert record_of(run, 4)["grad_norm"] in ("nan", "inf")
        assert all(torch.isfinite(value).all() for value in read_tensors(run / "checkpoints/step=6").values())
        return
    assert "the 3 before it, which were skipped" in capsys.readouterr().err
    assert events(run) == [*((n, "non_finite", "skip") for n in (1, 2, 3)), (4, "non_finite", "stop")]
    assert steps_saved(run) == [3]


def test_a_learning_rate_too_large_is_divergence(tmp_path, small_run):
    words = ["optim.learning_rate=4", "schedule=constant", "schedule.warmup_steps=100", "trainer.max_steps=90"]
    assert main(["train", *small_run(tmp_path, *WORDS, *words)]) == 0
    first = {kind: step for step, kind, _ in reversed(events(tmp_path / "run"))}
    assert (
        32 < first["spike"] < first["plateau_shift"]
    )  # past the steps that a decision needs < first["divergence"] < 90


def test_the_yaml_file_is_the_schemas_defaults():
    file = Path(__file__).parents[2] / "conf" / "spikes" / "default.yaml"
    assert SpikesConfig(**yaml.safe_load(file.read_text())) == SpikesConfig()
