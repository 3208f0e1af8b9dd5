"""`train -m` with its real child processes: one after another, all checked before the first. 40 seconds."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from run_metrics import read_metrics, steps_saved

from lightning_llm.__main__ import main

ROOT = Path(__file__).parents[2]


def job_folders(root: Path) -> list[Path]:
    """Return the folders of the one sweep under `root`, in the order of its jobs; files beside them fail the test."""
    (sweep,) = (root / "default").iterdir()
    return sorted(sweep.iterdir(), key=lambda each: int(each.name))


def status(folder: Path) -> str:
    return json.loads((folder / "summary.json").read_text())["status"]


def test_every_combination_runs_in_a_folder_of_its_own(tmp_path, small_run):
    words = small_run(tmp_path, "trainer.max_steps=1", "schedule.name=constant", "seed=3,4")
    done = subprocess.run([sys.executable, "-m", "lightning_llm", "train", "-m", *words], cwd=ROOT, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    told = done.stdout.decode()
    folders = job_folders(tmp_path)
    assert [folder.name for folder in folders] == ["0", "1"]
    assert f"2 of 2 jobs finished, in {folders[0].parent}" in told
    assert told.index("job    1/2") < told.index("job    2/2")
    for folder in folders:
        assert status(folder) == "finished"
        assert steps_saved(folder) == [1]
        assert (folder / "config.yaml").is_file()
    assert read_metrics(folders[0])[0]["loss"] != read_metrics(folders[1])[0]["loss"]


def test_a_job_that_fails_does_not_keep_the_others_from_running(tmp_path, small_run, capfd):
    words = small_run(tmp_path, "trainer.max_steps=3", "optim.gradient_clip_norm=null", "optim.learning_rate=1e30,1e-3")
    assert main(["train", "-m", *words]) == 1
    failed, finished = job_folders(tmp_path)
    assert (status(failed), status(finished)) == ("failed", "finished")
    told = capfd.readouterr()
    assert "1 of 2 jobs finished" in told.out
    assert f"exit code 1: {failed}" in told.err


@pytest.mark.parametrize(
    ("word", "key"),
    [
        ("optim.learning_rate=1e-3,fast", "optim.learning_rate"),
        ("data.micro_batch_size=2,3", "data.global_batch_size"),
        ("precision=fp32,fp33", "precision"),
        ("seed=interval(0,3)", "seed"),
    ],
)
def test_one_bad_job_stops_all_before_any_starts(word, key, tmp_path, small_run, capsys):
    assert main(["train", "-m", *small_run(tmp_path, word)]) == 2
    assert f"  - {key}: " in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_resolved_config_is_no_sweep(tmp_path, capsys):
    assert main(["train", "-m", "--config", str(tmp_path / "config.yaml"), "seed=0,1"]) == 2
    assert "--config: is one resolved run" in capsys.readouterr().err


def test_ctrl_c_saves_the_job_under_way_and_starts_no_other(tmp_path, small_run):
    words = small_run(tmp_path, "trainer.max_steps=4000", "checkpoint.every_steps=9000", "seed=0,1")
    command = [sys.executable, "-m", "lightning_llm", "train", "-m", *words]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and process.poll() is None:
            if any(file.read_text().count("\n") >= 3 for file in tmp_path.glob("default/*/0/metrics.jsonl")):
                break
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to every process of the foreground group
        _, told = process.communicate(timeout=60)
    assert process.returncode == 130, told
    (only,) = job_folders(tmp_path)
    assert status(only) == "stopped"
    assert steps_saved(only) == [read_metrics(only)[-1]["step"]]
    assert "stopped in job 1 of 2" in told
    assert "Traceback" not in told
