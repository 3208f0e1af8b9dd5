"""The writing process, run in this process against a real SQLite store."""

import json
import math
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from lightning_llm.tracking.files import cut_back, encode
from lightning_llm.tracking.mlflow.store import open_store
from lightning_llm.tracking.mlflow.tracker import compared_parameters, tracking_uri
from lightning_llm.tracking.mlflow.writer import RUN_ID_FILE, RunWriter, points
from tests.protocol_module import make_config


def job(tmp_path: Path, **changes: Any) -> dict[str, Any]:
    run_dir = tmp_path / "run"
    run_dir.mkdir(exist_ok=True)
    made = {
        "run_dir": str(run_dir),
        "tracking_uri": f"sqlite:///{tmp_path}/mlflow.db",
        "experiment": "trial",
        "run_name": "first",
        "params": {"precision": "bf16", "trainer.max_steps": "6"},
        "tags": {"git_sha": "abc"},
        "resumed_from_step": None,
    }
    return made | changes


def write(tmp_path: Path, *records: dict[str, Any]) -> None:
    with (tmp_path / "run" / "metrics.jsonl").open("ab") as file:
        for record in records:
            file.write(encode({"time": time.time(), **record}))


def history(store: MlflowClient, run_id: str, key: str) -> list[tuple[int, float]]:
    return [(point.step, point.value) for point in store.get_metric_history(run_id, key)]


def test_the_run_holds_what_the_folder_holds(store: MlflowClient, tmp_path: Path) -> None:
    writer = RunWriter(job(tmp_path))
    (tmp_path / "run" / "config.yaml").write_text("seed: 7\n")
    write(tmp_path, {"step": 1, "loss": 3.5, "lr": 0.1, "skipped": True, "timing_warmup": True})
    writer.sync()
    run = store.get_run(writer.run_id)
    assert (run.info.status, run.info.run_name) == ("RUNNING", "first")
    assert store.get_experiment(run.info.experiment_id).name == "trial"
    assert run.data.params == {"precision": "bf16", "trainer.max_steps": "6"}
    assert run.data.tags["git_sha"] == "abc"
    assert run.data.metrics == {"loss": 3.5, "lr": 0.1, "skipped": 1.0}
    assert [file.path for file in store.list_artifacts(writer.run_id)] == ["config.yaml"]

    write(tmp_path, {"step": 2, "loss": 3.25}, {"step": 2, "val_loss": 3.0, "val_loss/c++": 2.0})
    (tmp_path / "run" / "loss.png").write_bytes(b"picture")
    (tmp_path / "run" / "events").mkdir()
    (tmp_path / "run" / "events" / "step=2.txt").write_text("what the batch held")
    writer.finish("finished", "", {"loss": 3.25, "val_loss": math.nan})
    run = store.get_run(writer.run_id)
    assert run.info.status == "FINISHED"
    assert history(store, writer.run_id, "loss") == [(1, 3.5), (2, 3.25)]
    assert history(store, writer.run_id, "val_loss/c__") == [(2, 2.0)]
    assert run.data.metrics["final/loss"] == 3.25
    assert run.data.metrics["nonfinite/final/val_loss"] == 1.0
    assert "final/val_loss" not in run.data.metrics
    assert [file.path for file in store.list_artifacts(writer.run_id)] == ["config.yaml", "events", "loss.png"]
    kept = tmp_path / "mlartifacts" / writer.run_id / "artifacts" / "events" / "step=2.txt"
    assert kept.read_text() == "what the batch held"
    assert Path(tmp_path / "mlartifacts" / writer.run_id / "artifacts" / "loss.png").read_bytes() == b"picture"


def test_a_copied_folder_gets_a_new_mlflow_run_and_a_moved_one_keeps_its_run(
    store: MlflowClient, tmp_path: Path
) -> None:
    def run_in(folder: Path) -> str:
        writer = RunWriter(job(tmp_path, run_dir=str(folder), tags={"run_dir": str(folder)}))
        writer.connect()
        return writer.run_id

    original = tmp_path / "run"
    original.mkdir()
    first = run_in(original)
    copied = Path(shutil.copytree(original, tmp_path / "copy"))
    second = run_in(copied)
    assert second != first
    moved = original.rename(tmp_path / "moved")
    assert (run_in(moved), run_in(copied)) == (first, second)


@pytest.mark.parametrize(("status", "theirs"), [("finished", "FINISHED"), ("failed", "FAILED"), ("stopped", "KILLED")])
def test_the_status_is_the_truth(store: MlflowClient, tmp_path: Path, status: str, theirs: str) -> None:
    writer = RunWriter(job(tmp_path))
    write(tmp_path, {"step": 1, "loss": 3.5})
    writer.finish(status, "why it ended", {})
    run = store.get_run(writer.run_id)
    assert (run.info.status, run.data.tags["status_detail"]) == (theirs, "why it ended")
    assert run.info.end_time is not None


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_non_finite_numbers_are_counted_and_not_drawn(value: float) -> None:
    record = {"step": 4, "time": 2.5, "loss": value, "lr": 0.5, "text": "inf"}
    assert points(record) == [("nonfinite/loss", 1.0, 2500, 4), ("lr", 0.5, 2500, 4)]


def test_more_points_than_one_batch_takes_all_arrive(store: MlflowClient, tmp_path: Path) -> None:
    writer = RunWriter(job(tmp_path))
    write(tmp_path, *({"step": n, "loss": 1.0 / n, "lr": 0.1, "grad_norm": 2.0} for n in range(1, 801)))
    writer.sync()
    assert history(store, writer.run_id, "loss") == [(n, 1.0 / n) for n in range(1, 801)]
    assert len(history(store, writer.run_id, "grad_norm")) == 800


def test_the_loss_is_the_metric_that_mlflow_opens_on(store: MlflowClient, tmp_path: Path) -> None:
    writer = RunWriter(job(tmp_path))
    write(tmp_path, {"step": 1, "tokens": 8, "grad_norm": 1.0, "loss": 3.5}, {"step": 2, "tokens": 16, "loss": 3.0})
    writer.sync()
    assert next(iter(store.get_run(writer.run_id).data.metrics)) == "loss"


def test_tables_that_a_killed_writer_left_half_made_are_made_anew(tmp_path: Path) -> None:
    """A writer is killed where it does not end in time: in the middle of a migration, on a busy machine."""
    (tmp_path / "mlflow.db.partial").write_bytes(b"half a database")
    client, _ = open_store(f"sqlite:///{tmp_path}/mlflow.db", "trial")
    assert client.get_experiment_by_name("trial") is not None
    assert not (tmp_path / "mlflow.db.partial").exists()


def test_a_line_being_written_waits(store: MlflowClient, tmp_path: Path) -> None:
    writer = RunWriter(job(tmp_path))
    write(tmp_path, {"step": 1, "loss": 3.5})
    line = encode({"step": 2, "loss": 3.0, "time": time.time()})
    with (tmp_path / "run" / "metrics.jsonl").open("ab", buffering=0) as file:
        file.write(line[:12])
        writer.sync()
        assert history(store, writer.run_id, "loss") == [(1, 3.5)]
        file.write(line[12:])
    writer.sync()
    assert history(store, writer.run_id, "loss") == [(1, 3.5), (2, 3.0)]


@pytest.mark.parametrize("fails", ["create_run", "log_batch", "log_artifact", "set_terminated"])
def test_what_failed_is_made_good_later_and_nothing_is_logged_twice(
    store: MlflowClient, tmp_path: Path, fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = RunWriter(job(tmp_path))
    (tmp_path / "run" / "config.yaml").write_text("seed: 7\n")
    write(tmp_path, {"step": 1, "loss": 3.5}, {"step": 2, "loss": 3.0})
    working, calls = getattr(MlflowClient, fails), []

    def fail_at_times(*arguments: Any, **named: Any) -> Any:
        calls.append(named)
        failing = len(calls) in (1, 2, 4, 7, 11)
        # Creating a run is the one call that cannot be repeated if only its answer was lost.
        made = None if failing and fails == "create_run" else working(*arguments, **named)
        if failing:
            raise ConnectionError("the answer got lost")
        return made

    monkeypatch.setattr(MlflowClient, fails, fail_at_times)
    for _ in range(12):
        try:
            writer.finish("finished", "", {"loss": 3.0})
            break
        except ConnectionError:
            continue
    monkeypatch.undo()
    assert len(calls) > 2
    (run,) = store.search_runs([store.get_experiment_by_name("trial").experiment_id])
    assert (run.info.status, run.data.metrics["final/loss"]) == ("FINISHED", 3.0)
    assert history(store, run.info.run_id, "loss") == [(1, 3.5), (2, 3.0)]


@pytest.mark.parametrize("synced_before_the_kill", [2, 4, 5])
def test_a_resumed_run_goes_on_in_the_same_mlflow_run(
    store: MlflowClient, tmp_path: Path, synced_before_the_kill: int
) -> None:
    first = RunWriter(job(tmp_path))
    write(tmp_path, *({"step": n, "loss": float(n)} for n in range(1, synced_before_the_kill + 1)))
    first.sync()
    write(tmp_path, *({"step": n, "loss": float(n)} for n in range(synced_before_the_kill + 1, 6)))
    metrics = tmp_path / "run" / "metrics.jsonl"
    cut_back(metrics, 4)
    write(tmp_path, {"step": 5, "loss": 50.0}, {"step": 6, "loss": 60.0})
    changed = job(tmp_path, resumed_from_step=4, params={"precision": "bf16", "trainer.max_steps": "9", "new": "1"})
    second = RunWriter(changed)
    second.finish("finished", "", {})
    assert second.run_id == first.run_id == (tmp_path / "run" / RUN_ID_FILE).read_text().strip()
    run = store.get_run(first.run_id)
    assert run.data.params == {"precision": "bf16", "trainer.max_steps": "6", "new": "1"}
    assert run.data.tags["resumed/trainer.max_steps"] == "9"
    assert run.data.tags["resumed_from_step"] == "4"
    assert run.info.status == "FINISHED"
    logged = history(store, first.run_id, "loss")
    assert logged[:4] == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0)]
    first_of_5 = 5.0 if synced_before_the_kill == 5 else 50.0  # made again after the kill, and logged once
    assert logged[4:] == [(5, first_of_5), (6, 60.0)]


def test_a_resumed_run_that_mlflow_does_not_know_is_logged_whole(store: MlflowClient, tmp_path: Path) -> None:
    writer = RunWriter(job(tmp_path, resumed_from_step=2))
    (tmp_path / "run" / RUN_ID_FILE).write_text("0" * 32)
    write(tmp_path, {"step": 1, "loss": 3.5}, {"step": 2, "loss": 3.0}, {"step": 3, "loss": 2.5})
    writer.sync()
    assert history(store, writer.run_id, "loss") == [(1, 3.5), (2, 3.0), (3, 2.5)]


def test_long_values_say_that_they_are_cut_and_stay_whole_as_artifact(store: MlflowClient, tmp_path: Path) -> None:
    writer = RunWriter(job(tmp_path, params={"mix": "m" * 7000, "short": "s" * 6000}, tags={"note": "t" * 9000}))
    write(tmp_path, {"step": 1, "loss": 3.5})
    writer.sync()
    run = store.get_run(writer.run_id)
    assert run.data.params["short"] == "s" * 6000
    assert len(run.data.params["mix"]) == 6000
    assert run.data.params["mix"].endswith("m ... [truncated, see artifact params/mix.txt]")
    assert run.data.tags["note"].endswith("t ... [truncated, see artifact tags/note.txt]")
    artifacts = tmp_path / "mlartifacts" / writer.run_id / "artifacts"
    assert (artifacts / "params/mix.txt").read_text() == "m" * 7000
    assert (artifacts / "tags/note.txt").read_text() == "t" * 9000


def test_parameters_are_named_as_the_contract_says(tmp_path: Path) -> None:
    named = compared_parameters(make_config(tmp_path))
    expected = {
        "model": "tiny",
        "parallel": "single",
        "precision": "fp32",
        "data": "made_up",
        "optim": "adamw",
        "schedule": "cosine",
        "recipe": "quickstart",
        "seed": "7",
        "trainer.max_steps": "6",
        "data.global_batch_size": "2",
        "data.micro_batch_size": "2",
        "data.sequence_length": "4",
        "optim.learning_rate": "0.003",
        "data.mix": "code:1 prose:1",
        "schedule.total_steps": "null",
    }
    assert expected.items() <= named.items()
    assert 20 <= len(named) <= 50
    assert json.loads(json.dumps(named)) == named


def test_the_tracking_uri_does_not_depend_on_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert tracking_uri(make_config(tmp_path)) == f"sqlite:///{tmp_path}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://tracker:5000")
    assert tracking_uri(make_config(tmp_path)) == "http://tracker:5000"
    monkeypatch.chdir(tmp_path)
    configured = make_config(tmp_path, logger={"tracking_uri": "sqlite:///mine.db"})
    assert tracking_uri(configured) == f"sqlite:///{tmp_path}/mine.db"
