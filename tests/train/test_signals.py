"""SIGINT and SIGTERM, before training and in a step: exit codes, saved state, resumes. 25 seconds."""

import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from lightning_llm.__main__ import main
from lightning_llm.cli import train as train_verb
from lightning_llm.train.checkpoint.checkpointing import StoppedBySignal
from lightning_llm.train.run_folder import RunFolder
from tests.forked_main import ForkedMain
from tests.run_metrics import curve, read_metrics, same_weights, steps_saved

AS_IT_IS = "no step was interrupted, and saved files are unchanged"
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("number", "code"), [pytest.param(signal.SIGINT, 130, marks=pytest.mark.full), (signal.SIGTERM, 143)]
)
def test_in_a_step_it_saves_and_resume_gives_the_same_bits(tmp_path, small_run, empty_store, number, code):
    common = ["schedule.total_steps=400", "checkpoint.every_steps=1000"]
    words = small_run(tmp_path / "stopped", *common, "trainer.max_steps=400", "logger=mlflow")
    stopped = tmp_path / "stopped" / "run"
    stopped.parent.mkdir()
    shutil.copy(empty_store, stopped.parent / "mlflow.db")
    with ForkedMain(["train", *words]) as process:
        metrics = stopped / "metrics.jsonl"
        deadline = time.monotonic() + 60
        while not (metrics.is_file() and metrics.read_text().count("\n") >= 5) and time.monotonic() < deadline:
            time.sleep(0.02)
        process.send_signal(number)
        _, told = process.communicate(timeout=60)
    assert process.returncode == code, told
    assert f"stopped by {number.name}, state saved at step" in told
    assert "resume=auto" in told
    assert told.count(f"{number.name}: stopping after this step, which is saved") == 1
    assert ("press Ctrl-C again to end at once without saving (no step is saved yet)" in told) == (
        number == signal.SIGINT
    )
    assert "Traceback" not in told
    assert json.loads((stopped / "summary.json").read_text())["status"] == "stopped"
    stopped_at = read_metrics(stopped)[-1]["step"]
    assert steps_saved(stopped) == [stopped_at]
    store = MlflowClient(f"sqlite:///{tmp_path / 'stopped' / 'mlflow.db'}")
    run_id = json.loads((stopped / "summary.json").read_text())["mlflow_run_id"]
    tracked = store.get_run(run_id)
    assert tracked.info.status == "KILLED"
    assert f"StoppedBySignal: stopped by {number.name}" in tracked.data.tags["status_detail"]
    last = stopped_at + 3
    assert main(["train", *words, "resume=auto", f"trainer.max_steps={last}"]) == 0
    assert main(["train", *small_run(tmp_path / "whole", *common, f"trainer.max_steps={last}")]) == 0
    assert curve(stopped) == curve(tmp_path / "whole" / "run")
    assert same_weights(stopped, tmp_path / "whole" / "run", last)
    tracked = store.get_run(run_id)
    assert (tracked.info.status, tracked.data.tags["status_detail"]) == ("FINISHED", "")
    assert [point.step for point in store.get_metric_history(run_id, "loss")] == list(range(1, last + 1))


@pytest.mark.full
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.full)]
)
def test_before_training_it_ends_without_a_traceback(tmp_path, small_run, number, code):
    words = small_run(tmp_path, "trainer.max_steps=400")
    command = [
        sys.executable,
        "-u",
        "-m",
        "lightning_llm",
        "train",
        *words,
    ]  # a new process: a forked one may train already by then
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            if line.startswith("plan "):
                break
        process.send_signal(number)
        _, told = process.communicate(timeout=60)
    assert process.returncode == code, told
    assert f"stopped by {number.name}, nothing was saved yet" in told
    assert "Traceback" not in told
    assert main(["train", *small_run(tmp_path, "resume=auto")]) == 0
    assert [record["step"] for record in read_metrics(tmp_path / "run") if "loss" in record] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("saved_step", [None, 3])
def test_a_stop_goes_from_rank_to_rank_whole(saved_step):
    """torch hands what ended one rank's part of a load or save to all of them."""
    stop = StoppedBySignal(signal.SIGTERM, saved_step)
    copy = pickle.loads(pickle.dumps(stop))
    assert (str(copy), copy.number, copy.saved_step) == (str(stop), signal.SIGTERM, saved_step)


def test_ctrl_c_while_the_config_is_read(small_run, tmp_path, monkeypatch, capsys):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(train_verb, "read_arguments", interrupted)
    assert main(["train", *small_run(tmp_path)]) == 130
    told = capsys.readouterr()
    assert told.err == f"stopped by SIGINT; {AS_IT_IS}\n"


def test_sigterm_before_the_run_has_taken_it_ends_in_words(small_run, tmp_path, monkeypatch, capsys):
    def terminated(*_, **__):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)

    before = signal.signal(signal.SIGTERM, terminated_by_default)
    monkeypatch.setattr(train_verb, "decide_start", terminated)
    try:
        assert main(["train", *small_run(tmp_path)]) == 143
        assert signal.getsignal(signal.SIGTERM) is terminated_by_default
    finally:
        signal.signal(signal.SIGTERM, before)
    assert capsys.readouterr().err == f"stopped by SIGTERM; {AS_IT_IS}\n"
    assert not (tmp_path / "run").exists()


def terminated_by_default(number, frame):
    raise AssertionError("the default action would have killed the process without a word")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_after_the_last_step_lets_the_run_end(small_run, tmp_path, monkeypatch, capfd, number):
    """Lightning has put the handlers of before back by then, while the folder is closed."""
    close = RunFolder.close

    def disturbed(*arguments, **keywords):
        os.kill(os.getpid(), number)
        close(*arguments, **keywords)

    monkeypatch.setattr(RunFolder, "close", disturbed)
    assert main(["train", *small_run(tmp_path)]) == 0
    assert f"{number.name}: the last step is completed and saved, and the run is about to end" in capfd.readouterr().err
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "finished"
    monkeypatch.undo()

    def stopped(*_, **__):
        os.kill(os.getpid(), number)

    monkeypatch.setattr("lightning_llm.run.inputs.open_corpus", stopped)
    assert main(["train", *small_run(tmp_path, "resume=auto", "trainer.max_steps=8")]) == 128 + number
    assert f"stopped by {number.name}, state saved at step 6; to resume: " in capfd.readouterr().err


@pytest.mark.parametrize("how", ["pipe", "full", "closed"])
def test_an_output_that_cannot_be_written_ends_no_run(how, small_run, tmp_path, monkeypatch):
    """As behind `| head -3`; Python gives such a write BrokenPipeError, from which rich makes SystemExit."""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer if how == "pipe" else "/dev/full", "w") as gone, (tmp_path / "errors").open("w") as errors:
        if how == "closed":
            gone.close()
        monkeypatch.setattr(sys, "stdout", gone)
        monkeypatch.setattr(sys, "stderr", errors)
        words = ["callbacks.progress._target_=lightning_llm.callbacks.progress.ProgressLine"]
        assert main(["train", *small_run(tmp_path, *words, "callbacks.progress.line_seconds=0.0")]) == 0
    monkeypatch.undo()
    assert (tmp_path / "errors").read_text().count("stdout can no longer be written") == 1
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "finished"


def test_a_hangup_saves_and_stops_as_sigterm_does_unless_it_is_ignored(tmp_path, small_run, monkeypatch, capfd):
    ended = RunFolder.on_train_batch_end

    def hung_up(self: RunFolder, *arguments: Any) -> None:
        os.kill(os.getpid(), signal.SIGHUP)
        ended(self, *arguments)

    monkeypatch.setattr(RunFolder, "on_train_batch_end", hung_up)
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        assert main(["train", *small_run(tmp_path, "logger=none")]) == 129
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
        assert steps_saved(tmp_path / "run") == [1]
        assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "stopped"
        assert "stopped by SIGHUP, state saved at step 1; to resume: " in capfd.readouterr().err
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # nohup
        assert main(["train", *small_run(tmp_path, "logger=none", "resume=auto")]) == 0
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "finished"


def test_a_sigterm_that_lightnings_handler_took_stops_the_run_as_ours_does(tmp_path, small_run, monkeypatch):
    """On a rank, which has no handler of the command's; between the moment that handler is in place and ours is."""
    setup, started = RunFolder.setup, RunFolder.on_train_start

    def on_a_rank(self: RunFolder, *arguments: Any, **named: Any) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        setup(self, *arguments, **named)

    def signalled(self: RunFolder, *arguments: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        started(self, *arguments)

    monkeypatch.setattr(RunFolder, "setup", on_a_rank)
    monkeypatch.setattr(RunFolder, "on_train_start", signalled)
    assert main(["train", *small_run(tmp_path, "logger=none")]) == 143
    assert steps_saved(tmp_path / "run") == [1]
