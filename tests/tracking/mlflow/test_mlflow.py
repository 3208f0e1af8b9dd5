"""The tracker with its real writing process: all is well, several at once, and everything that can be wrong."""

import json
import logging
import os
import sqlite3
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from lightning_llm.config.schema import Config
from lightning_llm.tracking.mlflow import tracker as mlflow_tracker
from lightning_llm.tracking.mlflow.tracker import MLflowTracker
from lightning_llm.train.run_folder import RunFolder
from tests.forked_writer import forked_writers
from tests.parallel.rank_group import forkserver, server_address, use_server
from tests.protocol_module import TinyModule, fit, make_config

pytestmark = pytest.mark.usefixtures("drawn")

FACTS = {"parameters": 123_456, "data_hash": "d00d"}


def summary(config: Config) -> dict[str, Any]:
    return json.loads(Path(config.run.dir, "summary.json").read_text())


def tracked(config: Config, **arguments: Any) -> tuple[RunFolder, MLflowTracker]:
    tracker = MLflowTracker(config, Path(config.run.dir), flush_seconds=0.1, **arguments)
    return RunFolder(Path(config.run.dir), [tracker], facts=FACTS), tracker


def history(store: MlflowClient, run_id: str, key: str) -> list[tuple[int, float]]:
    return [(point.step, point.value) for point in store.get_metric_history(run_id, key)]


@pytest.mark.usefixtures("own_writer")
def test_a_run_is_in_mlflow_as_it_is_in_its_folder(
    store: MlflowClient, config: Config, caplog: pytest.LogCaptureFixture
) -> None:
    module = TinyModule(config)
    folder, _ = tracked(config, close_seconds=60)
    fit(module, [folder])
    told = summary(config)
    assert told["mlflow"]["synced"] is True
    # Training does not wait for the writer's start.
    assert told["mlflow"]["blocked_seconds"] < told["mlflow"]["writer_start_cpu_seconds"]
    assert told["mlflow"]["writer_start_cpu_seconds"] > told["mlflow"]["writer_cpu_seconds"] > 0
    run = store.get_run(told["mlflow_run_id"])
    assert run.info.status == "FINISHED"
    assert run.data.params["parameters"] == "123456"
    assert run.data.params["precision"] == "fp32"
    assert run.data.tags["data_hash"] == "d00d"
    assert run.data.tags["run_dir"] == config.run.dir
    assert run.data.tags["version.torch"] == told["versions"]["torch"]
    assert run.data.tags["git_sha"] == told["git"]["sha"]
    assert len(run.data.tags["config_hash"]) == 16
    assert history(store, run.info.run_id, "loss") == list(enumerate(module.true_losses, start=1))
    assert history(store, run.info.run_id, "val_loss") == [(3, 2.97), (6, 2.94)]
    inputs = {(each.dataset.name, each.dataset.digest) for each in run.inputs.dataset_inputs}
    assert inputs == {("made_up/code", "d00d"), ("made_up/prose", "d00d")}
    assert {file.path for file in store.list_artifacts(run.info.run_id)} == {"loss.png", "summary.json"}
    assert "mlruns" not in os.listdir(config.run.dir)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING and "MLflow" in record.msg]


@pytest.mark.full
@pytest.mark.parametrize("processes", [2, 8])
def test_processes_that_start_at_once_on_a_fresh_database_are_all_recorded(tmp_path: Path, processes: int) -> None:
    started = []
    for number in range(processes):
        config = make_config(tmp_path, run={"name": f"r{number}", "dir": str(tmp_path / f"r{number}")})
        folder, tracker = tracked(config, close_seconds=120)
        folder.open("cpu")
        folder.write({"step": 1, "loss": float(number)})
        started.append((folder, tracker))
    for folder, tracker in started:
        folder.close("finished")
        assert tracker.summary_fields()["mlflow"]["synced"] is True
    store = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    runs = store.search_runs([store.get_experiment_by_name("trial").experiment_id])
    assert {(run.info.run_name, run.data.metrics["loss"]) for run in runs} == {
        (f"r{number}", float(number)) for number in range(processes)
    }
    assert {run.info.status for run in runs} == {"FINISHED"}


def check_that_training_went_on(config: Config, module: TinyModule, caplog: pytest.LogCaptureFixture) -> str:
    """Check losses and status, and that there is one warning on the way, which is returned, and one at the end."""
    told = summary(config)
    assert (told["status"], told["step"]) == ("finished", 6)
    assert told["mlflow"]["synced"] is False
    assert told["mlflow"]["problem"]
    lines = Path(config.run.dir, "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["loss"] for line in lines if '"loss"' in line] == module.true_losses
    *on_the_way, last = [record.getMessage() for record in caplog.records if "MLflow" in record.getMessage()]
    assert "is incomplete for this run" in last
    assert last.endswith(f"sync {Path(config.run.dir).absolute()}")
    assert len(on_the_way) <= 1
    return " ".join([*on_the_way, last])


@pytest.mark.parametrize(
    ("uri", "says"),
    [
        ("http://someone:secret@127.0.0.1:9", "MlflowException"),
        ("sqlite:////proc/nowhere/mlflow.db", "could not be started"),
    ],
)
def test_an_mlflow_that_is_not_there_is_one_warning(
    tmp_path: Path, uri: str, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = make_config(tmp_path, logger={"tracking_uri": uri})
    module = TinyModule(config)
    folder, _ = tracked(config, close_seconds=8)
    fit(module, [folder])
    warning = check_that_training_went_on(config, module, caplog)
    assert says in warning
    assert "logger=none" in warning
    assert "secret" not in warning
    assert "secret" not in Path(config.run.dir, "summary.json").read_text()


def test_a_locked_database_is_one_warning(
    store: MlflowClient, config: Config, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    module = TinyModule(config)
    folder, _ = tracked(config, close_seconds=4)
    with sqlite3.connect(tmp_path / "mlflow.db") as other:
        other.execute("BEGIN EXCLUSIVE")
        fit(module, [folder])  # while the lock is held
        other.rollback()
    other.close()
    assert "did not finish within 4 s" in summary(config)["mlflow"]["problem"]
    check_that_training_went_on(config, module, caplog)


@pytest.mark.full
def test_a_database_that_is_unlocked_in_time_has_it_all(store: MlflowClient, config: Config, tmp_path: Path) -> None:
    folder, tracker = tracked(config, close_seconds=60)
    with sqlite3.connect(tmp_path / "mlflow.db") as other:
        other.execute("BEGIN EXCLUSIVE")
        folder.open("cpu")
        folder.write({"step": 1, "loss": 3.5})

        def in_trouble() -> bool:
            tracker.record({})
            return "problem" in tracker.summary_fields()["mlflow"]

        wait_for(in_trouble)
        assert "locked" in tracker.summary_fields()["mlflow"]["problem"]
        other.rollback()
    other.close()
    folder.write({"step": 2, "loss": 3.0})
    folder.close("finished")
    told = summary(config)
    assert told["mlflow"]["synced"] is True
    assert "problem" not in told["mlflow"]
    assert history(store, told["mlflow_run_id"], "loss") == [(1, 3.5), (2, 3.0)]


@pytest.mark.usefixtures("own_writer")
def test_a_writer_that_dies_is_one_warning(config: Config, caplog: pytest.LogCaptureFixture) -> None:
    module = TinyModule(config)
    folder, tracker = tracked(config, close_seconds=12)
    tracker.command = [sys.executable, "-c", "print('no module named mlflow'); raise SystemExit(3)"]
    fit(module, [folder])
    assert "its writer ended: no module named mlflow" in check_that_training_went_on(config, module, caplog)


def train_until_killed(config: Config, folder: str, address: str, under_way: Any) -> None:
    """Track one step from a process of its own, whose writer is forked as that of the other tests is."""
    use_server(address)
    mlflow_tracker.subprocess = forked_writers
    os.chdir(folder)
    run, _ = tracked(config, close_seconds=60)
    run.open("cpu")
    run.write({"step": 1, "loss": 2.5})
    under_way.send(None)
    time.sleep(600)


def test_a_training_process_that_is_killed_leaves_a_killed_run(store: MlflowClient, config: Config) -> None:
    ours, theirs = forkserver.Pipe()
    training = forkserver.Process(target=train_until_killed, args=(config, os.getcwd(), server_address(), theirs))
    training.start()
    assert ours.poll(60)
    id_file = Path(config.run.dir, "mlflow_run_id")
    wait_for(id_file.exists)
    training.kill()
    training.join()
    run_id = id_file.read_text().strip()
    wait_for(lambda: store.get_run(run_id).info.status == "KILLED")
    run = store.get_run(run_id)
    assert run.data.metrics["loss"] == 2.5
    assert run.data.tags["status_detail"] == "the training process ended without recording a status"
    assert summary(config)["status"] == "running"


def wait_for(condition: Any, seconds: float = 60) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "waited too long"
        time.sleep(0.1)
