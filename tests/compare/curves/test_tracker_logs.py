"""Logs of trackers (TensorBoard, MLflow, W&B, the Trainer), written by the programs themselves, and of our own runs."""

import json
import math
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas
import pytest

from lightning_llm.base.errors import ConfigError
from lightning_llm.compare.curves.readers import read_table
from lightning_llm.compare.curves.table import LoggedTable
from tests.compare.run_folders import make_run

if TYPE_CHECKING:
    from mlflow import MlflowClient

LOGS = Path(__file__).parent / "logs"


def problem(address: Path | str) -> str:
    """Return the problem that reading `address` reports."""
    with pytest.raises(ConfigError) as raised:
        read_table(str(address))
    assert "\n" not in str(raised.value)
    return str(raised.value)


@pytest.fixture
def writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Return a function that writes scalars with PyTorch's SummaryWriter, at ascending times; it returns the folder."""
    from torch.utils.tensorboard import SummaryWriter

    now = iter(range(10**6))
    monkeypatch.setattr("time.time", lambda: 1.7e9 + next(now))

    def write(losses: Mapping[int, float], folder: str = "run", suffix: str = "", purge: int | None = None) -> Path:
        with SummaryWriter(str(tmp_path / folder), purge_step=purge, filename_suffix=suffix) as log:
            for step, loss in losses.items():
                log.add_scalar("train/loss", loss, step)
                log.add_scalar("train/grad_norm", 1.0, step)
        return tmp_path / folder

    return write


def losses_of(table: LoggedTable) -> dict[int, float]:
    """Return {step: loss} of a table of the fixture `writer`, rounded as float32 requires."""
    pairs = zip(table.columns["step"], table.columns["train/loss"], strict=True)
    return {int(step): round(float(loss), 5) for step, loss in pairs}


def test_tensorboard_scalars_are_read(writer: Callable[..., Path]):
    folder = writer({1: 3.0, 2: 2.5, 3: math.nan})
    table = read_table(str(folder))
    assert table.format == "tensorboard"
    assert losses_of(table) == {1: 3.0, 2: 2.5, 3: math.inf}
    assert set(table.columns) == {"step", "train/loss", "train/grad_norm"}
    (file,) = folder.iterdir()
    renamed = shutil.copy(file, folder.parent / "renamed.bin")
    assert losses_of(read_table(str(folder.parent))) == losses_of(read_table(str(renamed))) == losses_of(table)


@pytest.mark.parametrize("purge", [None, 3])
def test_event_files_of_a_resumed_run_are_one_curve(writer: Callable[..., Path], purge: int | None):
    writer({1: 3.0, 2: 2.5, 3: 2.2, 4: 2.1})
    table = read_table(str(writer({3: 2.3, 5: 2.0}, suffix=".2", purge=purge)))
    assert losses_of(table) == {1: 3.0, 2: 2.5, 3: 2.3, 5: 2.0}
    assert "It resumed once, at step 3: 2 points of abandoned attempts are left out." in table.notes


def test_folders_that_continue_each_other_are_one_run_and_others_are_named(writer: Callable[..., Path]):
    writer({1: 3.0, 2: 2.5}, "tb/20260101-1000")
    table = read_table(str(writer({2: 2.4, 3: 2.0}, "tb/20260101-1200").parent))
    assert losses_of(table) == {1: 3.0, 2: 2.4, 3: 2.0}
    writer({1: 3.5, 2: 3.0}, "tb/another")
    message = problem(writer({1: 3.5}, "tb/20260101-1000/empty").parents[1])
    assert "20260101-1000, 20260101-1000/empty, 20260101-1200, another. Name the folder of one." in message


def test_event_files_written_at_the_same_time_must_agree(writer: Callable[..., Path], monkeypatch: pytest.MonkeyPatch):
    writer({1: 3.0, 2: 2.5, 3: 2.2})
    monkeypatch.setattr("time.time", lambda: 1.7e9 + 9)
    assert losses_of(read_table(str(writer({2: 2.5}, suffix=".2")))) == {1: 3.0, 2: 2.5, 3: 2.2}
    assert "different values of 'train/loss' at step 1" in problem(writer({1: 9.0}, suffix=".3"))


def test_a_cut_off_event_file_is_read_to_its_last_complete_record(writer: Callable[..., Path]):
    (file,) = writer({1: 3.0, 2: 2.5}).iterdir()
    file.write_bytes(file.read_bytes()[:-70])
    assert losses_of(read_table(str(file))) == {1: 3.0}
    file.write_bytes(file.read_bytes()[:60])
    assert "has no scalars" in problem(file)


def test_a_damaged_record_within_an_event_file_is_refused(writer: Callable[..., Path]):
    (file,) = writer({1: 3.0, 2: 2.5, 3: 2.2}).iterdir()
    data = bytearray(file.read_bytes())
    data[data.index(b"train/loss")] ^= 1
    file.write_bytes(data)
    assert "record 2 of 7" in problem(file)


def test_without_tensorboard_the_error_names_the_package(writer: Callable[..., Path], monkeypatch: pytest.MonkeyPatch):
    folder = writer({1: 3.0, 2: 2.5})
    monkeypatch.setitem(sys.modules, "tensorboard.backend.event_processing.event_file_loader", None)
    assert "pip install tensorboard" in problem(folder)


def test_text_that_trainers_log_to_tensorboard_gives_settings(tmp_path: Path):
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as log:
        log.add_text("args", json.dumps({"seed": 42, "optim": "adamw", "fsdp_config": {"v": 2}}))  # the Trainer
        log.add_text("seq_length", "1024", 0)  # Megatron-LM
        log.add_scalar("lm loss", 2.0, 1)
        log.add_scalar("lm loss vs samples", 2.0, 256)
    table = read_table(str(tmp_path))
    assert table.settings == {"seed": 42, "optim": "adamw", "fsdp_config.v": 2, "seq_length": 1024}
    assert table.columns["step"].tolist() == [1]


def test_trainer_state_is_read_from_the_file_and_the_output_folder(tmp_path: Path):
    """`logs/trainer_state.json` was written by the Trainer of transformers 5.23: logging_steps=2, eval_steps=10."""
    table = read_table(str(LOGS / "trainer_state.json"))
    history = json.loads((LOGS / "trainer_state.json").read_text())["log_history"]
    assert table.format == "trainer_state"
    expected = {each["step"]: each["loss"] for each in history if "loss" in each}
    known = ~np.isnan(table.columns["loss"])
    assert dict(zip(table.columns["step"][known], table.columns["loss"][known], strict=True)) == expected
    assert int((~np.isnan(table.columns["eval_loss"])).sum()) == 2
    assert "train_loss" not in table.columns
    assert table.settings == {"total_steps": 20, "logging_steps": 2}
    assert any("mean over the last 2 steps" in note for note in table.notes)
    assert not any("resumed" in note for note in table.notes)
    for step in (9, 20):
        (tmp_path / f"checkpoint-{step}").mkdir()
        state = {"global_step": step, "log_history": [{"step": each, "loss": 3.0} for each in range(1, step + 1)]}
        (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text(json.dumps(state))
    assert read_table(str(tmp_path)).columns["step"].max() == 20


def test_mlflow_runs_are_read_by_every_address(store: "MlflowClient", tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = store.create_run("0", run_name="nvfp4").info.run_id
    store.log_param(run, "seed", 3)
    steps = [(1, 3.0), (2, 2.5), (3, 2.2), (2, 2.6), (3, 2.3), (4, math.nan)]
    for at, (step, loss) in enumerate(steps):
        store.log_metric(run, "loss", loss, timestamp=1000 + at, step=step)
    database = f"sqlite:///{tmp_path}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", database)
    for address in (
        f"runs:/{run}",
        f"mlflow:runs:/{run}",
        f"{database}#{run}",
        f"mlflow:{database}#{run}",
        f"mlflow.db#{run}",
    ):
        table = read_table(address)
        assert table.format == "mlflow"
        assert table.columns["step"].tolist() == [1, 2, 3, 4]
        assert table.columns["loss"].tolist() == [3.0, 2.6, 2.3, math.inf]
        assert table.settings == {"seed": 3, "run": "nvfp4"}
        assert "It resumed once, at step 2: 2 points of abandoned attempts are left out." in table.notes
    assert "not found" in problem("runs:/" + "0" * 32)
    assert "does not exist" in problem(f"sqlite:///{tmp_path}/none.db#{run}")
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    assert "MLFLOW_TRACKING_URI is not set" in problem(f"runs:/{run}")
    assert "names no run" in problem("https://example.com/loss.csv")


def test_an_mlflow_metric_without_steps_is_refused(store: "MlflowClient", tmp_path: Path):
    run = store.create_run("0").info.run_id
    for at in range(3):
        store.log_metric(run, "loss", 3.0 - at, timestamp=1000 + at)
    assert "have step 0" in problem(f"sqlite:///{tmp_path}/mlflow.db#{run}")


def test_the_folder_of_a_run_in_an_mlflow_file_store_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    client = MlflowClient((tmp_path / "mlruns").as_uri())
    run = client.create_run(client.create_experiment("precision")).info
    client.log_metric(run.run_id, "loss", 2.5, step=7)
    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE")
    for address in (tmp_path / "mlruns" / run.experiment_id / run.run_id, f"{tmp_path}/mlruns#{run.run_id}"):
        assert read_table(str(address)).columns["loss"].tolist() == [2.5]


WANDB = """"Step","bf16 - 0 - train/loss","bf16 - 0 - train/loss__MIN","bf16 - 0 - train/loss__MAX",\
"nvfp4 - train/loss","nvfp4 - train/loss__MIN","nvfp4 - train/loss__MAX"
"0","3.0","3.0","3.0","3.1","3.05","3.15"
"10","2.5","2.5","2.5","","",""
"20","NaN","NaN","NaN","2.6","2.6","2.6"
"""
"""A download of a chart, in the form of public ones: RUN - METRIC with bounds, empty where a run has no point."""


def test_a_run_of_a_wandb_chart_is_chosen_by_name(tmp_path: Path):
    file = tmp_path / "wandb_export_2026-08-21.csv"
    file.write_text(WANDB)
    table = read_table(f"{file}#bf16 - 0")
    assert table.format == "wandb-csv"
    assert {name: values.tolist() for name, values in table.columns.items()} == {
        "step": [0, 10, 20], "train/loss": [3.0, 2.5, math.inf],
    }  # fmt: skip
    assert table.smoothed == {}
    other = read_table(f"{file}#nvfp4")
    assert other.columns["step"].tolist() == [0, 20]
    assert list(other.smoothed) == ["train/loss"]  # its bounds differ: the chart shows means of several steps
    assert "it has 2 runs: bf16 - 0, nvfp4" in problem(file)
    assert "no run 'fp8'. Its runs: bf16 - 0, nvfp4." in problem(f"{file}#fp8")
    file.write_text(WANDB.replace("nvfp4 -", "Group: nvfp4 -"))
    assert "mean of a group of runs" in problem(f"{file}#Group: nvfp4")


@pytest.mark.parametrize("rows", ["[1, 2]", "[[1, 2, 3]]", "3"])
def test_a_table_without_rows_of_its_columns_is_refused(tmp_path: Path, rows: str):
    (tmp_path / "log.json").write_text(f'{{"columns": ["step", "loss"], "data": {rows}}}')
    assert '"data" must be rows' in problem(tmp_path / "log.json")


def test_wandb_history_is_read_in_every_orientation_of_pandas(tmp_path: Path):
    frame = pandas.DataFrame({"_step": [0, 1, 2], "train/loss": [3.0, None, 2.5], "config": ["a", "a", "a"]})
    for orient in ("columns", "records", "split", "list"):
        text = json.dumps(frame.to_dict("list")) if orient == "list" else frame.to_json(orient=orient)
        (tmp_path / "history.json").write_text(text)
        table = read_table(str(tmp_path / "history.json"))
        assert table.format == "json"
        assert table.columns["_step"].tolist() == [0, 1, 2]
        np.testing.assert_array_equal(table.columns["train/loss"], [3.0, math.nan, 2.5])
    diverged = [{"_step": step, "loss": 3.0 if step < 5 else math.nan} for step in range(8)]
    (tmp_path / "history.json").write_text(json.dumps(diverged))
    assert read_table(str(tmp_path / "history.json")).columns["loss"].tolist() == [3.0] * 5 + [math.inf] * 3
    (tmp_path / "history.json").write_text(json.dumps([{"_step": step, "loss": 3.0} for step in range(500)], indent=1))
    assert "scan_history" in read_table(str(tmp_path / "history.json")).notes[0]
    (tmp_path / "history.json").write_text('[{"_step": 0, "loss": 3.0}, {"_st')
    assert "cannot be read as json" in problem(tmp_path / "history.json")


def test_runs_of_this_program_are_read_and_folders_of_several_refer_to_plain_compare(tmp_path: Path):
    folder = make_run(tmp_path / "sweep" / "0", "seed=4")
    for address in (folder, folder / "metrics.jsonl"):
        table = read_table(str(address))
        assert table.format == "lightning-llm"
        assert table.columns["tokens"][:2].tolist() == [2048, 4096]
        assert table.settings["seed"] == 4
        assert table.settings["sequence_length"] == 256
    assert f"lightning-llm compare {folder.parent}" in problem(folder.parent)


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ([], "It is empty"),
        (["metrics.csv"], "name the file: {}/metrics.csv"),
        (["bf16-0.csv"], "--from {}/* --pattern '{{arm}}-{{seed}}.csv'"),
        (["mxfp8_seed12/steps.txt"], "--from {}/* --pattern '{{arm}}_seed{{seed}}'"),
        (["bf16/0/trainer_state.json"], "--from {}/*/* --pattern '{{arm}}/{{seed}}'"),
        (["bf16/1.jsonl"], "--from {}/*/* --pattern '{{arm}}/{{seed}}.jsonl'"),
    ],
)
def test_the_error_for_a_folder_of_logs_names_them_with_a_pattern(names, words, tmp_path: Path):
    for name in names:
        path = tmp_path / "logs" / name
        path.parent.mkdir(parents=True)
        path.write_text("")
    (tmp_path / "logs").mkdir(exist_ok=True)
    assert words.format(tmp_path / "logs") in problem(tmp_path / "logs")
