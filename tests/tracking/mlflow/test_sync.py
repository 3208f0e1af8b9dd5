"""`lightning-llm sync`: records that MLflow missed, from folders alone; and runs without a process."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from lightning_llm.__main__ import main
from lightning_llm.config.yaml_file import write_config
from lightning_llm.tracking.files import summary_of, write_json
from lightning_llm.tracking.mlflow.store import ORPHANED, mark_orphans
from lightning_llm.tracking.mlflow.sweep import parent_job, update
from lightning_llm.tracking.mlflow.sync import catch_up
from lightning_llm.tracking.mlflow.tracker import writer_job
from lightning_llm.tracking.mlflow.writer import RunWriter
from lightning_llm.tracking.provenance import process_mark
from lightning_llm.train.run_folder import RunFolder
from tests.messages import missing
from tests.protocol_module import make_config

pytestmark = pytest.mark.usefixtures("drawn")

GONE = " ".join([*process_mark().split()[:2], "1"])
"""The mark of a process that had this one's number long ago."""


def recorded(root: Path, name: str, status: Any = "finished", **changes: Any) -> Path:
    """Return the folder of a run that MLflow never heard of."""
    config = make_config(root, run={"name": name, "dir": str(root / "trial" / name)}, **changes)
    folder = RunFolder(Path(config.run.dir), facts={"parameters": 10, "data_hash": "d00d"})
    folder.open("cpu")
    for step in (1, 2, 3):
        folder.write({"step": step, "tokens": 8 * step, "loss": 4.0 - step})
    folder.write({"step": 3, "tokens": 24, "val_loss": 1.5})
    if status != "running":
        folder.close(status, "" if status == "finished" else "NonFiniteError: loss")
    write_config(config, folder.run_dir / "config.yaml")
    return folder.run_dir


def test_a_run_with_callbacks_of_an_unknown_config_dir_is_synced(store: MlflowClient, tmp_path: Path) -> None:
    own = {"own": {"_target_": "config_dir.callbacks.mine.Mine", "every": 2}}
    recorded(tmp_path, "mine", callbacks=own)
    assert main(["sync", str(tmp_path)]) == 0


def history(store: MlflowClient, run_id: str, key: str) -> list[tuple[int, float]]:
    return [(point.step, point.value) for point in store.get_metric_history(run_id, key)]


def test_runs_that_mlflow_missed_are_there_once_however_often_it_is_called(
    store: MlflowClient, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done, failed = recorded(tmp_path, "done"), recorded(tmp_path, "broken", "failed")
    for _ in range(2):
        assert main(["sync", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "2 of 2 runs are in MLflow" in said
    assert "{" not in said  # the writer's own words to a training process
    ids = {folder: summary_of(folder)["mlflow_run_id"] for folder in (done, failed)}
    runs = {folder: store.get_run(run_id) for folder, run_id in ids.items()}
    assert [runs[done].info.status, runs[failed].info.status] == ["FINISHED", "FAILED"]
    assert runs[failed].data.tags["status_detail"] == "NonFiniteError: loss"
    assert history(store, ids[done], "loss") == [(1, 3.0), (2, 2.0), (3, 1.0)]
    assert history(store, ids[done], "val_loss") == [(3, 1.5)]
    assert runs[done].data.metrics["final/val_loss"] == 1.5
    assert runs[done].data.params["parameters"] == "10"
    assert runs[done].data.tags["data_hash"] == "d00d"
    assert summary_of(done)["mlflow"]["synced"] is True
    assert len(store.search_runs([runs[done].info.experiment_id])) == 2


def test_what_a_run_logged_itself_is_gone_on_with(store: MlflowClient, tmp_path: Path) -> None:
    run_dir = recorded(tmp_path, "half")
    metrics = run_dir / "metrics.jsonl"
    lines = metrics.read_bytes().splitlines(keepends=True)
    metrics.write_bytes(b"".join(lines[:2]))
    config = make_config(tmp_path, run={"name": "half", "dir": str(run_dir)})
    before = RunWriter(writer_job(config, run_dir, summary_of(run_dir)))
    before.sync()
    metrics.write_bytes(b"".join(lines))
    assert main(["sync", str(run_dir)]) == 0
    assert summary_of(run_dir)["mlflow_run_id"] == before.run_id
    assert history(store, before.run_id, "loss") == [(1, 3.0), (2, 2.0), (3, 1.0)]


def test_a_run_whose_process_died_is_killed_and_one_that_lives_is_left_running(
    store: MlflowClient, tmp_path: Path
) -> None:
    dead, alive = recorded(tmp_path, "dead", "running"), recorded(tmp_path, "alive", "running")
    write_json(dead / "summary.json", {**summary_of(dead), "process": GONE})
    assert main(["sync", str(dead), str(alive)]) == 0
    assert (summary_of(dead)["status"], summary_of(dead)["detail"]) == ("stopped", ORPHANED)
    assert summary_of(alive)["status"] == "running"
    states = {
        folder.name: store.get_run((folder / "mlflow_run_id").read_text().strip()).info.status
        for folder in (dead, alive)
    }
    assert states == {"dead": "KILLED", "alive": "RUNNING"}


def test_a_later_start_marks_what_a_power_cut_left_running(store: MlflowClient, tmp_path: Path) -> None:
    experiment = store.create_experiment("trial")
    marks = {"dead": GONE, "alive": process_mark(), "elsewhere": "another-host 12 3", "unmarked": ""}
    runs = {
        name: store.create_run(experiment, run_name=name, tags={"process": mark} if mark else {}).info.run_id
        for name, mark in marks.items()
    }
    for name, there in (("silent", "node17 4 2"), ("namesake", "node17 5 2"), ("heard", "node17 4 2")):
        seen = recorded(tmp_path, name, "running")
        write_json(seen / "summary.json", {**summary_of(seen), "process": there})
        for file in seen.iterdir():
            os.utime(file, None if name == "heard" else (1e9, 1e9))
        tags = {"process": "node17 4 2", "run_dir": str(seen)}
        runs[name] = store.create_run(experiment, run_name=name, tags=tags).info.run_id
    run_dir = recorded(tmp_path, "later")
    config = make_config(tmp_path, run={"name": "later", "dir": str(run_dir)})
    RunWriter(writer_job(config, run_dir, summary_of(run_dir))).sync()
    states = {name: store.get_run(run_id).info.status for name, run_id in runs.items()}
    assert states == {
        "dead": "KILLED", "alive": "RUNNING", "elsewhere": "RUNNING", "unmarked": "RUNNING",
        "silent": "KILLED", "namesake": "RUNNING", "heard": "RUNNING",
    }  # fmt: skip
    assert mark_orphans(store, experiment, but="") == []


def test_a_sweep_gets_the_parent_it_could_not_have(store: MlflowClient, tmp_path: Path) -> None:
    for number in ("0", "1"):
        recorded(tmp_path, number)
    sweep = {
        "hash": "abc", "experiment": "trial", "recipe": None, "axes": {"seed": ["0", "1"]}, "mlflow_run_id": None,
        "jobs": [{"number": 0, "words": [], "key": "a"}, {"number": 1, "words": [], "key": "b"}],
    }  # fmt: skip
    write_json(tmp_path / "trial" / "sweep.json", sweep)
    assert main(["sync", str(tmp_path / "trial")]) == 0
    parent = json.loads((tmp_path / "trial" / "sweep.json").read_text())["mlflow_run_id"]
    assert store.get_run(parent).info.status == "FINISHED"
    assert store.get_run(parent).data.tags["axis.seed"] == "0,1"
    children = store.search_runs(["1"], f"tags.`mlflow.parentRunId` = '{parent}'")
    assert {run.info.run_name for run in children} == {"0", "1"}


def test_the_parent_of_a_sweep_under_way_is_left_to_it(store: MlflowClient, tmp_path: Path) -> None:
    recorded(tmp_path, "0")
    sweep = {
        "hash": "abc", "experiment": "trial", "recipe": None, "axes": {}, "mlflow_run_id": None,
        "jobs": [{"number": 0, "words": [], "key": "a"}, {"number": 1, "words": [], "key": "b"}],
    }  # fmt: skip
    folder = tmp_path / "trial"
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    parent = update(parent_job(folder, sweep, uri))
    assert update(parent_job(folder, sweep, uri)) == parent  # a start was killed before it could note it
    late = parent_job(folder, {**sweep, "hash": "0123"}, uri)
    with pytest.raises(RuntimeError, match="has ended"):  # of a start that was killed, and that no other took over
        update({**late, "tags": {**late["tags"], "process": GONE}})
    write_json(folder / "sweep.json", {**sweep, "mlflow_run_id": parent})
    assert main(["sync", str(folder)]) == 0  # the sweep's process is this one; its second job has not begun
    run = store.get_run(parent)
    assert (run.info.status, run.data.tags["process"]) == ("RUNNING", process_mark())
    store.set_tag(parent, "process", GONE)
    assert mark_orphans(store, run.info.experiment_id, but="") == [parent]
    assert store.get_run(parent).data.tags["status_detail"] == ORPHANED
    update(parent_job(folder, {**sweep, "mlflow_run_id": parent}, uri))  # started again
    run = store.get_run(parent)
    assert (run.info.status, "status_detail" in run.data.tags) == ("RUNNING", False)


@pytest.mark.full
def test_a_sweep_hands_in_what_its_jobs_could_not_in_time(store: MlflowClient, tmp_path: Path) -> None:
    late, done = recorded(tmp_path, "late"), recorded(tmp_path, "done")
    write_json(late / "summary.json", {**summary_of(late), "mlflow": {"synced": False, "problem": "too slow"}})
    write_json(done / "summary.json", {**summary_of(done), "mlflow": {"synced": True}})
    assert catch_up([late, done]) == ""
    run = store.get_run(summary_of(late)["mlflow_run_id"])
    assert (run.info.status, history(store, run.info.run_id, "loss")) == ("FINISHED", [(1, 3.0), (2, 2.0), (3, 1.0)])
    assert summary_of(late)["mlflow"] == {"synced": True, "experiment_id": run.info.experiment_id}
    assert "mlflow_run_id" not in summary_of(done)
    (late / "summary.json").write_text("")
    assert catch_up([late, done]) == ""  # nothing to do, and nothing starts


def test_a_run_that_ended_while_mlflow_was_away_is_not_called_killed(store: MlflowClient, tmp_path: Path) -> None:
    done = recorded(tmp_path, "done")
    write_json(done / "summary.json", {**summary_of(done), "process": GONE})
    experiment = store.create_experiment("trial")
    run_id = store.create_run(experiment, tags={"process": GONE, "run_dir": str(done)}).info.run_id
    assert mark_orphans(store, experiment, but="") == [run_id]
    assert store.get_run(run_id).info.status == "FINISHED"


def test_a_run_keeps_when_it_ended_and_the_mlflow_it_is_tracked_by(store: MlflowClient, tmp_path: Path) -> None:
    done = recorded(tmp_path, "done")
    write_json(done / "summary.json", {**summary_of(done), "ended_at": "2026-11-21T10:00:00+00:00"})
    assert main(["sync", str(done)]) == 0
    run_id = summary_of(done)["mlflow_run_id"]
    assert store.get_run(run_id).info.end_time == 1795255200000
    other = f"sqlite:///{tmp_path / 'other.db'}"
    for _ in range(2):
        assert main(["sync", str(done), "--tracking-uri", other]) == 0
    assert summary_of(done)["mlflow_run_id"] == run_id
    elsewhere = MlflowClient(other)
    (copy,) = elsewhere.search_runs([elsewhere.get_experiment_by_name("trial").experiment_id])
    assert history(elsewhere, copy.info.run_id, "loss") == [(1, 3.0), (2, 2.0), (3, 1.0)]


def test_a_run_is_named_as_others_name_it_and_a_damaged_one_does_not_stop_the_rest(
    store: MlflowClient, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LIGHTNING_LLM_OUTPUTS", str(tmp_path))
    done, damaged = recorded(tmp_path, "sweep/0"), recorded(tmp_path, "sweep/1")
    recorded(tmp_path, "other")
    (damaged / "summary.json").write_text('{"stat')
    assert main(["sync", "sweep/0"]) == 0
    assert f"{done}: finished" in capsys.readouterr().out
    assert main(["sync", "sweep"]) == 1
    told = capsys.readouterr()
    assert "1 of 2 runs are in MLflow" in told.out
    assert f"{damaged}: not logged: {damaged / 'summary.json'} is damaged" in told.err
    (damaged / "summary.json").unlink()
    (done / "mlflow_run_id").write_bytes(b"\xff")
    assert main(["sync", "sweep"]) == 1
    told = capsys.readouterr()
    assert f"{damaged / 'summary.json'} is missing, or has no device, git, host" in told.err
    assert f"{done}: finished, run {(done / 'mlflow_run_id').read_text().strip()}" in told.out
    write_json(done.parent / "sweep.json", {"jobs": 3})
    assert main(["sync", "sweep/0"]) == 1
    assert f"{done.parent / 'sweep.json'} cannot be read: it is damaged" in capsys.readouterr().err


def test_missing_runs_and_folders_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sync", str(tmp_path)]) == 2
    assert "there is no run" in capsys.readouterr().err
    assert main(["sync", str(tmp_path / "nowhere")]) == 2
    assert "is neither a folder nor an experiment, SWEEP or SWEEP/N" in capsys.readouterr().err


def test_an_unreachable_server_fails_all_runs_in_a_line_and_changes_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dirs = [recorded(tmp_path, "lonely"), recorded(tmp_path, "other")]
    before = [summary_of(run_dir) for run_dir in run_dirs]
    assert main(["sync", str(tmp_path), "--tracking-uri", "http://someone:s3cret@127.0.0.1:9"]) == 1
    told = capsys.readouterr()
    assert missing(told.err, "http://127.0.0.1:9 ", "its other runs are skipped") == []
    assert told.err.count("\n") == 1
    assert "0 of 2 runs are in MLflow" in told.out
    assert [summary_of(run_dir) for run_dir in run_dirs] == before


def test_a_server_that_hangs_is_asked_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one", "two", "three"):
        recorded(tmp_path, name)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts connections and never answers
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        assert main(["sync", str(tmp_path), "--tracking-uri", address]) == 1
        silent.setblocking(False)
        asked = 0
        with contextlib.suppress(BlockingIOError):
            while True:
                silent.accept()[0].close()
                asked += 1
    assert asked == 1
    told = capsys.readouterr()
    assert told.err == f"{address} does not answer: its other runs are skipped\n"
    assert "0 of 3 runs are in MLflow" in told.out


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """A real `mlflow server`, for some 15 seconds of starting."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1",
        "--backend-store-uri", f"sqlite:///{tmp_path}/server.db", "--artifacts-destination", str(tmp_path / "kept"),
    ]  # fmt: skip
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            url = f"http://127.0.0.1:{port}"
            await_server(process, url)
            yield url
        finally:
            process.terminate()


def await_server(process: subprocess.Popen[bytes], url: str, seconds: float = 300) -> None:
    deadline = time.monotonic() + seconds
    while True:
        assert process.poll() is None, "the server ended"
        assert time.monotonic() < deadline, "the server did not start"
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=2):
                return
        except OSError:
            time.sleep(0.3)


@pytest.mark.full
def test_a_real_server_takes_runs_over_http(server: str, tmp_path: Path) -> None:
    run_dir = recorded(tmp_path, "remote")
    assert main(["sync", str(run_dir), "--tracking-uri", server]) == 0
    store = MlflowClient(server)
    (run,) = store.search_runs([store.get_experiment_by_name("trial").experiment_id])
    assert "mlflow_run_id" not in summary_of(run_dir)  # which names the run where it is tracked, not each copy
    assert run.info.status == "FINISHED"
    assert history(store, run.info.run_id, "loss") == [(1, 3.0), (2, 2.0), (3, 1.0)]
    assert {file.path for file in store.list_artifacts(run.info.run_id)} == {"config.yaml", "loss.png", "summary.json"}
