"""Going on from a checkpoint gives the bits of a run that was never interrupted. 30 seconds."""

import shutil

import pytest

from lightning_llm.__main__ import main
from lightning_llm.model.decoder import Decoder
from lightning_llm.precision.cast import inductor
from lightning_llm.run.launch.lock import lock_run
from lightning_llm.tracking.files import summary_of, write_json
from lightning_llm.train.checkpoint.manifest import TENSORS
from tests.planted import infinite_gradient
from tests.run_metrics import curve, same_weights, steps_saved


@pytest.mark.parametrize("first_steps", [2, 3])
def test_stop_and_resume_gives_the_same_bits(whole, tmp_path, small_run, first_steps):
    short = ["schedule.total_steps=6", f"trainer.max_steps={first_steps}", "trainer.validate_every_steps=2"]
    assert main(["train", *small_run(tmp_path, *short)]) == 0
    assert main(["train", *small_run(tmp_path, "schedule.total_steps=6", "resume=auto")]) == 0
    resumed = {entry for entry in curve(tmp_path / "run") if entry[5] is None}
    assert resumed == {entry for entry in curve(whole) if entry[5] is None}
    assert curve(tmp_path / "run")[-1] == curve(whole)[-1]
    assert same_weights(tmp_path / "run", whole, 6)


def test_settings_changed_across_resumes_are_recorded(tmp_path, small_run):
    """A comparison must not take such a run for one that was made in one piece."""
    run = tmp_path / "run"
    assert main(["train", *small_run(tmp_path, "trainer.max_steps=3")]) == 0
    summary = summary_of(run)
    assert "earlier" not in summary
    write_json(run / "summary.json", {**summary, "code_hash": "another"})
    assert main(["train", *small_run(tmp_path, "data.micro_batch_size=1", "resume=auto")]) == 0
    first = {"trainer.max_steps": [3], "data.micro_batch_size": [2], "code_hash": ["another"]}
    assert summary_of(run)["earlier"] == first  # the learning rate had begun to fall
    words = ["trainer.max_steps=8", "schedule.total_steps=6"]
    assert main(["train", *small_run(tmp_path, "data.micro_batch_size=1", "resume=auto", *words)]) == 2
    moved = small_run(tmp_path, "trainer.max_steps=7", "resume=auto")
    assert main(["train", *moved]) == 0
    assert summary_of(run)["earlier"] == {
        "trainer.max_steps": [3, 6], "data.micro_batch_size": [2, 1], "code_hash": ["another"],
    }  # fmt: skip


def test_an_earlier_end_than_planned_is_reported(whole, tmp_path, small_run, capsys):
    shutil.copytree(whole, tmp_path / "run")
    summary = summary_of(tmp_path / "run")
    write_json(tmp_path / "run" / "summary.json", {**summary, "status": "stopped"})
    assert main(["train", *small_run(tmp_path, "resume=auto", "trainer.max_steps=5")]) == 2
    assert "trainer.max_steps=5: must be at least 6, the step of the checkpoint. Raise it." in capsys.readouterr().err
    assert main(["train", *small_run(tmp_path, "resume=auto")]) == 0
    assert "note   trainer.max_steps=6 is already reached" in capsys.readouterr().out
    assert summary_of(tmp_path / "run")["status"] == "finished"
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step=6")
    assert main(["train", *small_run(tmp_path, "resume=auto", "trainer.max_steps=5")]) == 0
    assert "note   trainer.max_steps changed from 6 to 5: the run ends at step 5" in capsys.readouterr().out


def test_a_damaged_summary_of_the_first_part_is_named(whole, tmp_path, small_run, capsys):
    shutil.copytree(whole, tmp_path / "first")
    (tmp_path / "first" / "summary.json").write_text('{"status": "fin')
    step = tmp_path / "first" / "checkpoints" / "step=4"
    assert main(["train", *small_run(tmp_path, f"resume={step}")]) == 2
    assert f"{tmp_path / 'first' / 'summary.json'} is damaged" in capsys.readouterr().err


def test_a_finished_run_without_its_checkpoints_is_not_begun_afresh(whole, tmp_path, small_run, capsys):
    shutil.copytree(whole, tmp_path / "run", ignore=shutil.ignore_patterns("checkpoints"))
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    assert main(["train", *small_run(tmp_path, "resume=auto")]) == 0
    assert "is finished at step 6" in capsys.readouterr().out
    assert main(["train", *small_run(tmp_path, "resume=auto", "trainer.max_steps=8")]) == 2
    assert "is finished at step 6 and its checkpoints were deleted" in capsys.readouterr().err
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before


def test_a_second_process_is_kept_away_before_the_first_has_written_anything(whole, tmp_path, small_run, capsys):
    lock = lock_run(tmp_path / "run")
    two_ranks = ["trainer.devices=2", "parallel=ddp"]
    for words in ([], ["resume=auto"], two_ranks):
        assert main(["train", *small_run(tmp_path, *words)]) == 2
        assert "another process is training in" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    beat = tmp_path / "run" / "ranks" / "0.json"
    beat.parent.mkdir(parents=True)
    beat.touch()
    shutil.copy(whole / "config.yaml", tmp_path / "run")
    assert main(["train", *small_run(tmp_path, *two_ranks, "resume=auto")]) == 2
    assert beat.exists()  # a sign of life of the other's ranks
    shutil.rmtree(tmp_path / "run")
    lock.release()
    assert main(["train", *small_run(tmp_path, "trainer.max_steps=1")]) == 0
    assert main(["train", *small_run(tmp_path, "trainer.max_steps=2", "resume=auto")]) == 0  # the claim was given back


def test_records_that_are_damaged_are_made_again_from_the_checkpoint_before(whole, tmp_path, small_run, capsys):
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join([*lines[:-2], '{"step": 6, "lo\n', lines[-1]]))
    words = ["resume=auto"]
    assert main(["train", *small_run(tmp_path, *words)]) == 0
    assert "skipped step=6, which is damaged: metrics.jsonl line 7 is damaged" in capsys.readouterr().out
    assert curve(run) == curve(whole)
    (run / "metrics.jsonl").write_text("nonsense\n" + (run / "metrics.jsonl").read_text())
    before = sorted(run.rglob("*"))
    assert main(["train", *small_run(tmp_path, *words)]) == 2
    assert "step=6/metrics.jsonl: line 1 is damaged" in capsys.readouterr().err
    assert sorted(run.rglob("*")) == before


def test_a_longer_run_that_changes_no_step_it_has_made_is_in_one_piece(tmp_path, small_run):
    words = ["schedule=constant"]
    assert main(["train", *small_run(tmp_path, *words, "trainer.max_steps=2")]) == 0
    assert main(["train", *small_run(tmp_path, *words, "trainer.max_steps=3", "resume=auto")]) == 0
    assert "earlier" not in summary_of(tmp_path / "run")


def test_a_torn_checkpoint_and_later_metrics_are_left_behind(whole, tmp_path, small_run):
    assert main(["train", *small_run(tmp_path)]) == 0
    run = tmp_path / "run"
    (tensors,) = (run / "checkpoints" / "step=6" / TENSORS).glob("*.distcp")
    tensors.write_bytes(tensors.read_bytes()[:-1])
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "loss": 1.0}\n{"step": 8, "lo')
    assert main(["train", *small_run(tmp_path, "resume=auto")]) == 0
    assert curve(run) == curve(whole)
    assert same_weights(run, whole, 6)


def test_auto_starts_afresh_where_nothing_is(whole, tmp_path, small_run):
    assert main(["train", *small_run(tmp_path, "resume=auto")]) == 0
    assert curve(tmp_path / "run") == curve(whole)


def test_from_a_path_into_a_new_folder(whole, tmp_path, small_run):
    assert main(["train", *small_run(tmp_path, f"resume={whole / 'checkpoints' / 'step=4'}")]) == 0
    assert curve(tmp_path / "run") == [entry for entry in curve(whole) if entry[0] > 4]
    assert same_weights(tmp_path / "run", whole, 6)


def test_a_run_begun_from_anothers_checkpoint_holds_its_own_start(whole, tmp_path, small_run, monkeypatch):
    """It may end before its own first checkpoint, and resumes from there and not from step 0."""
    monkeypatch.setattr(Decoder, "forward", infinite_gradient(Decoder.forward, lambda n: True))
    stop = "spikes.policy=stop"
    assert main(["train", *small_run(tmp_path, stop, f"resume={whole / 'checkpoints' / 'step=4'}")]) == 1
    assert steps_saved(tmp_path / "run") == [4]
    monkeypatch.undo()
    assert main(["train", *small_run(tmp_path, stop, "resume=auto")]) == 0
    assert curve(tmp_path / "run") == [entry for entry in curve(whole) if entry[0] > 4]
    assert same_weights(tmp_path / "run", whole, 6)


def test_from_an_earlier_step_of_its_own_folder_drops_the_later_ones(whole, tmp_path, small_run):
    words, run = ["schedule.total_steps=6", "checkpoint.keep_last=3"], tmp_path / "run"
    assert main(["train", *small_run(tmp_path, *words)]) == 0
    assert steps_saved(run) == [2, 4, 6]
    back = f"resume={run / 'checkpoints' / 'step=2'}"
    assert main(["train", *small_run(tmp_path, *words, back, "trainer.max_steps=3")]) == 0
    assert steps_saved(run) == [2, 3]
    assert curve(run) == [entry for entry in curve(whole) if entry[0] <= 3]
    assert main(["train", *small_run(tmp_path, *words, "resume=auto")]) == 0
    assert curve(run) == curve(whole)
    assert same_weights(run, whole, 6)


@pytest.mark.parametrize(
    "phase", [pytest.param("start: 0.0, end: 0.5", marks=pytest.mark.full), "start: 0.5, end: 0.84"]
)
def test_across_a_high_precision_phase(phase, tmp_path, small_run, monkeypatch):
    monkeypatch.setattr(inductor, "why_not", lambda device_type: "the test wants it so")  # eager: no compile time
    plain = ["precision=fp8_delayed", "checkpoint.keep_last=3"]
    words = [*plain, f"precision.phases=[{{{phase}}}]"]  # no slot named: high precision, for steps 1-3, or 4 and 5
    assert main(["train", *small_run(tmp_path / "uninterrupted", *words)]) == 0
    uninterrupted = tmp_path / "uninterrupted" / "run"
    for step in (2, 4):  # before and within the quantised phase; scales wait
        resume = f"resume={uninterrupted / 'checkpoints' / f'step={step}'}"
        assert main(["train", *small_run(tmp_path / str(step), *words, resume)]) == 0
        resumed = tmp_path / str(step) / "run"
        assert curve(resumed) == [entry for entry in curve(uninterrupted) if entry[0] > step]
        assert same_weights(resumed, uninterrupted, 6)
    assert main(["train", *small_run(tmp_path / "plain", *plain)]) == 0
    assert curve(tmp_path / "plain" / "run") != curve(uninterrupted)  # the phase did something
