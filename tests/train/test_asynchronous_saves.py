"""Saves that are written while training continues: the same files, and no failure or end of a run that loses one.

Nothing here depends on the duration of a write: each write is held until the event before it has happened. 12 seconds.
"""

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_llm.__main__ import main
from lightning_llm.base.errors import StorageError
from lightning_llm.base.integrity import unseal
from lightning_llm.config.compose import compose_config
from lightning_llm.config.config_hash import FREE_ON_RESUME, below, config_hash
from lightning_llm.tracking.files import summary_of
from lightning_llm.train.checkpoint import saver
from lightning_llm.train.checkpoint.verification import newest_verified
from tests.own_callbacks import Misbehaves
from tests.run_metrics import curve, read_metrics, steps_saved

ASYNCHRONOUS = ("checkpoint.asynchronous=true", "data.validation.fraction=0")
write = saver.write


def until(happened: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < deadline, "the event that the write waited for did not happen"
        time.sleep(0.002)


def has_step(run: Path, step: int) -> bool:
    return f'"step": {step},' in (run / "metrics.jsonl").read_text()


def files_of(run: Path, step: int) -> dict[str, dict]:
    """Return sizes and digests of all files of a checkpoint except its manifest, which has the run id."""
    return unseal((run / "checkpoints" / f"step={step}" / "manifest.json").read_bytes())["files"]


@pytest.fixture
def held(monkeypatch) -> Callable[[Callable], None]:
    """Return a function that registers a hook, called with (snapshot, whether to give up) before each write."""

    def hold(before: Callable) -> None:
        def held_write(folder, snapshot, run, config_hash, group, abandoned, check_folder):
            before(snapshot, abandoned)
            write(folder, snapshot, run, config_hash, group, abandoned, check_folder)

        monkeypatch.setattr(saver, "write", held_write)

    return hold


@pytest.mark.full
def test_asynchronous_saves_write_the_same_files_as_synchronous_ones(tmp_path, small_run, held, capsys):
    """Every write is held until the next step has changed weights, moments, averages and delayed scales."""
    words = ["precision=fp8_delayed", "precision.casts=eager", "checkpoint.every_steps=1", "checkpoint.keep_last=4"]
    words += [
        "trainer.max_steps=4",
        "+callbacks.own={_target_: tests.own_callbacks.Remembers}",
        "data.validation.fraction=0",
    ]
    mean = "+callbacks.mean={_target_: lightning.pytorch.callbacks.EMAWeightAveraging, decay: 0.5}"
    assert main(["train", *small_run(tmp_path / "sync", *words, mean)]) == 0
    capsys.readouterr()
    run, overtaken = tmp_path / "async" / "run", []

    def hold(snapshot, abandoned):
        if snapshot.copies is not None:
            until(lambda: has_step(run, snapshot.step + 1))
            overtaken.append(snapshot.step)

    held(hold)
    assert main(["train", *small_run(tmp_path / "async", *words, mean, "checkpoint.asynchronous=true")]) == 0
    assert overtaken == [1, 2, 3]  # the last one is waited for
    assert curve(run) == curve(tmp_path / "sync" / "run")
    for step in (1, 2, 3, 4):
        assert files_of(run, step) == files_of(tmp_path / "sync" / "run", step), step
    assert newest_verified(run / "checkpoints")[1] == ()
    told = capsys.readouterr().out
    assert told.count("step=1 was still being written when step=2 was due: training waited ") == 1
    assert told.count("was still being written") == 1


def test_a_failure_is_reported_after_the_next_step(tmp_path, small_run, monkeypatch, capsys):
    words = small_run(tmp_path, *ASYNCHRONOUS)
    start = saver._Write.start

    def start_and_end(self):
        start(self)
        self.join()

    def fail(folder, snapshot, *_):
        raise StorageError(f"the state of step {snapshot.step} was not saved: No space left on device")

    monkeypatch.setattr(saver._Write, "start", start_and_end)
    monkeypatch.setattr(saver, "write", fail)
    assert main(["train", *words]) == 1
    told = capsys.readouterr().err
    assert len(told.splitlines()) == 1, told
    assert told.startswith(
        "error: the state of step 2 was not saved: No space left on device; earlier checkpoints are intact"
    )
    assert [each["step"] for each in read_metrics(tmp_path / "run")] == [1, 2, 3]
    summary = summary_of(tmp_path / "run")
    assert summary["status"] == "failed"
    assert "the state of step 2 was not saved" in summary["detail"]


def test_sigterm_waits_for_the_one_under_way_and_saves_its_own(tmp_path, small_run, held, capsys):
    run = tmp_path / "run"

    def hold(snapshot, abandoned):
        if snapshot.step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
            until(lambda: has_step(run, 3))

    held(hold)
    words = small_run(tmp_path, *ASYNCHRONOUS, "checkpoint.keep_last=3", "trainer.max_steps=400")
    assert main(["train", *words]) == 143
    stopped = read_metrics(run)[-1]["step"]
    assert f"stopped by SIGTERM, state saved at step {stopped}" in capsys.readouterr().err
    assert {2, stopped} <= set(steps_saved(run))
    assert summary_of(run)["status"] == "stopped"
    assert newest_verified(run / "checkpoints")[1] == ()


def test_a_second_ctrl_c_breaks_the_write_off_and_leaves_nothing_of_it(tmp_path, small_run, held, capfd):
    def hold(snapshot, abandoned):
        os.kill(os.getpid(), signal.SIGINT)
        until(lambda: "Ctrl-C again" in capfd.readouterr().err)
        os.kill(os.getpid(), signal.SIGINT)
        until(abandoned.is_set)

    held(hold)
    assert main(["train", *small_run(tmp_path, *ASYNCHRONOUS, "trainer.max_steps=400")]) == 130
    assert "stopped by SIGINT, nothing was saved yet" in capfd.readouterr().err
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == []


@pytest.mark.parametrize("also", [False, True])
def test_an_exception_waits_for_the_write_and_hides_no_failure_of_it(
    tmp_path, small_run, held, monkeypatch, also, capfd
):
    """`also`: the write fails, too; exit code and summary report the run's own error."""
    run = tmp_path / "run"

    def hold(snapshot, abandoned):
        until(lambda: json.loads((run / "summary.json").read_text())["status"] == "failed")
        if also:
            raise StorageError(f"the state of step {snapshot.step} was not saved: No space left on device")

    def fail_after_two(self, trainer, pl_module, *_):
        if pl_module.completed_steps == 3:
            raise ValueError("of the callback")

    held(hold)
    monkeypatch.setattr(Misbehaves, "on_train_batch_end", fail_after_two)
    words = small_run(
        tmp_path, *ASYNCHRONOUS, "+callbacks.bad={_target_: tests.own_callbacks.Misbehaves, what: nothing}"
    )
    assert main(["train", *words]) == 1
    told = capfd.readouterr().err
    assert "ValueError: of the callback" in told
    assert ("note   the state of step 2 was not saved: No space left on device" in told) == also
    assert steps_saved(run) == ([] if also else [2])
    assert "of the callback" in summary_of(run)["detail"]
    assert not list((run / "checkpoints").glob(".*")) if not also else True


def test_how_a_run_is_saved_is_not_what_it_is(tmp_path, small_run):
    plain = compose_config(small_run(tmp_path))
    assert plain.checkpoint.asynchronous is None
    more = ["checkpoint.asynchronous=true", "checkpoint.keep_every=4", "checkpoint.keep_best=2"]
    assert config_hash(compose_config(small_run(tmp_path, *more))) == config_hash(plain)
    assert all(below(word.partition("=")[0], FREE_ON_RESUME) for word in more)
