"""A run rolls back before planted spikes and skips their samples as if from the start. 9 CPU seconds."""

import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from lightning_llm.__main__ import main
from lightning_llm.base.signals import exit_code
from lightning_llm.compare.runs.differences import meaningful
from lightning_llm.config.from_file import load_config
from lightning_llm.data.corpus import Corpus
from lightning_llm.model.decoder import Decoder
from lightning_llm.run.resume.rollback import Rollback, read_rollbacks, write_rollbacks
from lightning_llm.tracking.reading import read_run
from lightning_llm.train.spikes import SpikePolicy, SpikeRollback
from tests.planted import corrupted_samples, infinite_gradient
from tests.run_metrics import curve, read_metrics, same_weights, steps_saved

BATCH, BAD = 4, 40
"""Samples per step, and the step with bad samples, after the 32 steps that a decision needs."""
STEPS = BAD + 4
SPOILT = [(BAD - 2) * BATCH, BAD * BATCH - 1]
"""The samples of the step before, too."""
WORDS = [
    f"trainer.max_steps={STEPS}", f"schedule.total_steps={STEPS}", "trainer.validate_every_steps=null",
    "data.validation.fraction=0", "checkpoint.every_steps=10", "checkpoint.keep_last=10",
    "optim.learning_rate=1e-2", "schedule.warmup_steps=5", "spikes.policy=rollback",
    "+callbacks.spikes._target_=lightning_llm.callbacks.spikes.Spikes",
]  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def corrupt() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Corpus, "micro_batches", corrupted_samples((BAD - 1) * BATCH, BAD * BATCH - 1))
        yield


@pytest.fixture(scope="module")
def told(tmp_path_factory, small_run) -> Path:
    """The folder of a run that skips the samples from the start."""
    root = tmp_path_factory.mktemp("told")
    assert main(["train", *small_run(root, *WORDS, f"data.skip_samples=[{SPOILT}]")]) == 0
    return root / "run"


def same(run: Path, told: Path) -> bool:
    names = ("skipped_steps", "spikes", "skipped_samples")
    ours, theirs = (json.loads((each / f"checkpoints/step={STEPS}/progress.json").read_text()) for each in (run, told))
    assert [ours[name] for name in names] == [theirs[name] for name in names]
    return curve(run) == curve(told) and same_weights(run, told, STEPS)


def test_a_rolled_back_run_equals_a_run_that_skips_the_samples(told, tmp_path, small_run, capsys):
    assert main(["train", *small_run(tmp_path, *WORDS)]) == 0
    run, said = tmp_path / "run", capsys.readouterr().err
    assert f"back   step {BAD} is out of the ordinary (spike: loss" in said
    assert f"to step 30, skipping the samples {SPOILT[0]} to {SPOILT[1]} (rollback 1 of at most 3" in said
    assert same(run, told)
    assert not any("event" in record for record in read_metrics(run))
    (made,) = read_rollbacks(run)
    assert (made.record["step"], made.record["event"], list(made.skipped)) == (BAD, "spike", SPOILT)
    assert made.record["event_samples"] == [(BAD - 1) * BATCH, BAD * BATCH - 1]
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["status"], summary["starts"], summary["resumed_from_step"]) == ("finished", 2, 30)
    assert summary["rollbacks"] == [{"step": BAD, "event": "spike", "skipped": SPOILT}]
    assert meaningful(read_run(run), read_run(told)) == {}
    assert load_config(run / "config.yaml", []).data.skip_samples is None
    assert steps_saved(run) == [10, 20, 30, 40, STEPS]


def test_a_run_goes_back_behind_a_gradient_that_is_not_finite(tmp_path, small_run, monkeypatch):
    """Its record, with NaN in it, is kept among the rollbacks."""
    monkeypatch.setattr(Decoder, "forward", infinite_gradient(Decoder.forward, lambda n: n == 8))
    assert main(["train", *small_run(tmp_path, "spikes.policy=rollback")]) == 0
    run = tmp_path / "run"
    (made,) = read_rollbacks(run)
    assert (made.record["event"], made.record["grad_norm"], list(made.skipped)) == ("non_finite", "nan", [12, 19])
    assert (read_run(run).unverified, read_run(run).last_step, read_run(run).spikes) == ("", 6, 0)


@pytest.mark.full
def test_one_that_is_asked_to_stop_in_the_step_that_spikes_stops(told, tmp_path, small_run, monkeypatch, capsys):
    judge = SpikePolicy.judge

    def stopped(self, *arguments, **keywords):
        try:
            return judge(self, *arguments, **keywords)
        except SpikeRollback:
            os.kill(os.getpid(), signal.SIGTERM)
            raise

    words = small_run(tmp_path, *WORDS)
    with monkeypatch.context() as patch:
        patch.setattr(SpikePolicy, "judge", stopped)
        assert main(["train", *words]) == exit_code(signal.SIGTERM)
    assert "state saved at step 30" in capsys.readouterr().err
    assert main(["train", *words, "resume=auto"]) == 0
    assert same(tmp_path / "run", told)


@pytest.mark.parametrize(
    ("every", "back_to"), [("10", "step 20"), pytest.param("null", "step 0", marks=pytest.mark.full)]
)
def test_a_run_killed_during_a_rollback_continues_it(every, back_to, told, tmp_path, small_run, capsys):
    """The rollback file written before the search for a checkpoint decides: all later checkpoints are skipped."""
    words = small_run(tmp_path, *WORDS, f"checkpoint.every_steps={every}", "spikes.rollback_skip_steps=2")
    assert main(["train", *words, "trainer.max_steps=39"]) == 0
    run = tmp_path / "run"
    shutil.rmtree(run / "checkpoints/step=30", ignore_errors=True)
    write_rollbacks(run, [Rollback({"step": BAD, "event": "spike"}, (SPOILT[0], SPOILT[1]))])
    capsys.readouterr()
    assert main(["train", *words, "resume=auto"]) == 0
    said = capsys.readouterr().out
    assert "skipped step=39, which was trained on some of the samples 152 to 159, which are skipped now" in said
    assert (f"resume from {back_to}" in said) == (every == "10")
    assert same(run, told)


def test_a_fault_that_is_not_the_datas_ends_the_run(tmp_path, small_run, monkeypatch, capsys):
    monkeypatch.setattr(Corpus, "micro_batches", corrupted_samples((BAD - 1) * BATCH, 10**9))
    words = ["spikes.max_rollbacks=2", "checkpoint.every_steps=30", "spikes.rollback_skip_steps=1"]
    assert main(["train", *small_run(tmp_path, *WORDS, *words)]) == 1
    said, run = capsys.readouterr().err, tmp_path / "run"
    assert "the run rolled back 2 times already (spikes.max_rollbacks): this is not the data" in said
    assert [made.record["step"] for made in read_rollbacks(run)] == [BAD, BAD]
    assert [list(made.skipped) for made in read_rollbacks(run)] == [[156, 159], [160, 163]]
    assert steps_saved(run)[-1] == BAD - 1


def test_skipped_samples_must_be_ahead_of_the_run(told, tmp_path, small_run, capsys):
    """An earlier checkpoint can be gone on from without samples; a run's own past is not thrown away for it."""
    run = tmp_path / "run"
    shutil.copytree(told, run)
    words = small_run(tmp_path, *WORDS)
    assert main(["train", *words, "resume=auto", "data.skip_samples=[[0,3]]"]) == 2
    said = capsys.readouterr().err
    assert "checkpoints" in said
    assert "was trained on some of the samples 0 to 3, which are skipped now" in said
    assert main(["train", *words, f"resume={run}/checkpoints/step=40", "data.skip_samples=[[9,3]]"]) == 2
    assert "data.skip_samples: [9, 3] ends before it begins" in capsys.readouterr().err
    assert main(["train", *words, f"resume={run}/checkpoints/step=40", "data.skip_samples=null"]) == 2
    assert "was trained without the samples 152 to 159" in capsys.readouterr().err
    assert same(run, told)
    later = f"data.skip_samples=[{SPOILT},[172,175]]"
    assert main(["train", *words, f"resume={run}/checkpoints/step=40", later, f"run.dir={tmp_path}/later"]) == 0
    assert curve(tmp_path / "later")[0][0] == 41


@pytest.mark.parametrize(
    ("step", "skip_steps", "skipped", "expected"),
    [
        (5, 1, (), (16, 19)),
        (5, 2, (), (12, 19)),
        (1, 2, (), (0, 3)),  # there is no step before the first
        (2, 9, (), (0, 7)),
        (5, 2, ((0, 3), (14, 15)), (18, 25)),  # samples in the order of the config, in which some are left out already
    ],
)
def test_a_rollback_leaves_out_the_samples_of_its_step_and_those_before(step, skip_steps, skipped, expected):
    config = SimpleNamespace(
        data=SimpleNamespace(global_batch_size=BATCH), spikes=SimpleNamespace(rollback_skip_steps=skip_steps)
    )
    assert Rollback.from_record({"step": step}, config, skipped).skipped == expected
