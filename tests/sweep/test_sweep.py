"""`train -m` with children that train, all checked before the first."""

import getpass
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from mlflow import MlflowClient

from lightning_llm.__main__ import main
from lightning_llm.sweep.ending import print_where_to_judge
from tests.run_metrics import read_metrics, steps_saved

ROOT = Path(__file__).parents[2]


def job_folders(root: Path) -> list[Path]:
    """Return the folders of the one sweep under `root`, in the order of its jobs."""
    (sweep,) = (root / "default").iterdir()
    assert {each.name for each in sweep.iterdir() if not each.name.isdigit()} == {".claims", "sweep.json"}
    return sorted((each for each in sweep.iterdir() if each.name.isdigit()), key=lambda each: int(each.name))


def status(folder: Path) -> str:
    return json.loads((folder / "summary.json").read_text())["status"]


@pytest.mark.usefixtures("forked_jobs")
def test_every_combination_runs_under_one_parent_and_is_not_run_again(tmp_path, small_run, empty_store, capfd):
    shutil.copy(empty_store, tmp_path / "mlflow.db")
    words = [*small_run(tmp_path, "trainer.max_steps=1", "schedule.name=constant", "seed=3,4"), "logger=mlflow"]
    assert main(["train", "-m", *words]) == 0
    told = capfd.readouterr().out
    folders = job_folders(tmp_path)
    assert [folder.name for folder in folders] == ["0", "1"]
    assert f"2 of 2 jobs finished, in {folders[0].parent}" in told
    assert (told.count("plan   "), told.count("resume none"), told.count("curves ")) == (2, 0, 1)
    assert told.index("job    0 seed=3: starts, 1 of 2") < told.index("job    1 seed=4: starts, 2 of 2")
    for folder in folders:
        assert status(folder) == "finished"
        assert steps_saved(folder) == [1]
        assert (folder / "config.yaml").is_file()
    assert read_metrics(folders[0])[0]["loss"] != read_metrics(folders[1])[0]["loss"]

    store = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    runs = store.search_runs([store.get_experiment_by_name("default").experiment_id])
    about = json.loads((folders[0].parent / "sweep.json").read_text())
    (parent,) = [run for run in runs if run.info.run_id == about["mlflow_run_id"]]
    children = [run for run in runs if run.data.tags.get("mlflow.parentRunId") == parent.info.run_id]
    assert {run.info.status for run in runs} == {"FINISHED"}
    assert {run.data.params["seed"] for run in children} == {"3", "4"}
    assert {run.info.run_name for run in children} == {"0 seed=3", "1 seed=4"}
    assert parent.data.metrics == {
        "jobs/finished": 2.0, "jobs/diverged": 0.0, "jobs/failed": 0.0, "jobs/total": 2.0
    }  # fmt: skip
    assert parent.data.tags["axis.seed"] == "3,4"
    assert f"compare {folders[0].parent}`" in parent.data.tags["mlflow.note.content"]
    assert {run.data.tags["mlflow.user"] for run in runs} == {getpass.getuser()}
    assert not [run for run in runs if "resumed_from_step" in run.data.tags]
    page = f"http://localhost:5000/#/experiments/{parent.info.experiment_id}?workflowType=machine_learning"
    assert page in told
    assert parent.data.tags["sweep_hash"] == about["hash"]

    written = {file: file.stat().st_mtime_ns for file in tmp_path.glob("default/*/*/metrics.jsonl")}
    assert main(["train", "-m", *words]) == 0
    told = capfd.readouterr().out
    assert "0 seed=3: finished, skipped" in told
    assert "nothing left to do" in told
    assert {file: file.stat().st_mtime_ns for file in tmp_path.glob("default/*/*/metrics.jsonl")} == written


@pytest.mark.full
def test_eight_jobs_at_once_on_a_fresh_database_are_all_recorded(tmp_path, small_run, capfd):
    words = small_run(tmp_path, "trainer.max_steps=1", "schedule.name=constant", "seed=0,1,2,3,4,5,6,7")
    assert main(["train", "-m", *words, "logger=mlflow", "launcher.at_once=8"]) == 0
    assert "note   8 jobs at a time shared this machine" in capfd.readouterr().out
    store = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    runs = store.search_runs([store.get_experiment_by_name("default").experiment_id])
    (about,) = [json.loads(file.read_text()) for file in tmp_path.glob("default/*/sweep.json")]
    children = [run for run in runs if run.data.tags.get("mlflow.parentRunId") == about["mlflow_run_id"]]
    losses = {}
    for file in tmp_path.glob("default/*/*/config.yaml"):
        assert json.loads((file.parent / "summary.json").read_text())["mlflow"]["synced"] is True
        losses[file.parent.name] = next(each["loss"] for each in read_metrics(file.parent) if "loss" in each)
    assert {run.info.run_name: run.data.metrics["loss"] for run in children} == {
        f"{number} seed={number}": losses[str(number)] for number in range(8)
    }
    assert {run.info.status for run in runs} == {"FINISHED"}


@pytest.mark.usefixtures("forked_jobs")
def test_a_job_that_diverges_is_a_result_and_is_not_run_again(tmp_path, small_run, capfd):
    words = small_run(tmp_path, "trainer.max_steps=3", "optim.gradient_clip_norm=null", "optim.learning_rate=1e30,1e-3")
    assert main(["train", "-m", *words]) == 0
    diverged, finished = job_folders(tmp_path)
    assert (status(diverged), status(finished)) == ("failed", "finished")  # of the run, and it alone, it is a failure
    told = capfd.readouterr()
    assert "1 of 2 jobs finished, 1 diverged" in told.out
    assert "job    0 optim.learning_rate=1e+30: diverged after" in told.out
    assert f"diverged: {diverged} (optim.learning_rate=1e+30): NonFiniteError" in told.err
    assert main(["train", "-m", *words]) == 0
    told = capfd.readouterr().out
    assert f"0 optim.learning_rate=1e+30: diverged, skipped, a result (to rerun it, remove {diverged})" in told
    assert "nothing left to do" in told
    assert json.loads((diverged / "summary.json").read_text())["starts"] == 1


@pytest.mark.parametrize(
    ("word", "key"),
    [
        ("optim.learning_rate=1e-3,fast", "optim.learning_rate"),
        ("data.micro_batch_size=2,3", "data.global_batch_size"),
        ("precision=fp32,fp33", "precision"),
        ("seed=interval(0,3)", "seed"),
        ("run.name=a,b seed=0,1", "run.name"),
        ("logger=none,mlflow logger.tracking_uri=ftp://x", "logger.tracking_uri"),
    ],
)
@pytest.mark.filterwarnings("error")
def test_one_bad_job_stops_all_before_any_starts(word, key, tmp_path, small_run, capsys):
    assert main(["train", "-m", *small_run(tmp_path, *word.split())]) == 2
    assert re.search(rf"^  - {re.escape(key)}[:=]", capsys.readouterr().err, re.MULTILINE)
    assert list(tmp_path.iterdir()) == []


def test_a_resolved_config_is_no_sweep(tmp_path, capsys):
    assert main(["train", "-m", "--config", str(tmp_path / "config.yaml"), "seed=0,1"]) == 2
    assert "--config: is one resolved run" in capsys.readouterr().err


@pytest.mark.full  # in one process: test_interrupted.py
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
    assert "stopped in job 0; 2 of 2 jobs are left; to resume: " in told
    assert "Traceback" not in told


def test_the_verdicts_command_is_named_once_there_is_something_to_judge(tmp_path, capsys):
    job = SimpleNamespace(folder=tmp_path / "0")
    whole = SimpleNamespace(folder=tmp_path, jobs=(job,), axes={"precision": ["bf16", "mxfp8"], "seed": ["0"]})
    print_where_to_judge(whole)
    assert capsys.readouterr().out == ""
    job.folder.mkdir()
    (job.folder / "summary.json").write_text('{"status": "finished"}')
    print_where_to_judge(whole)
    assert f"lightning-llm compare {tmp_path}" in capsys.readouterr().out
    whole.axes = {"seed": ["0", "1"]}
    print_where_to_judge(whole)
    assert capsys.readouterr().out == ""  # nothing to compare
