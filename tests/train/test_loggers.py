"""Lightning's loggers have the content of metrics.jsonl, across a resume, and cannot hurt a run. 5 seconds."""

import csv
import json
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_llm.__main__ import main
from lightning_llm.tracking.files import read_records
from lightning_llm.train import loggers
from lightning_llm.train.loggers import WANDB_ID_FILE, LightningRunLogger
from lightning_llm.train.run_folder import RunFolder
from tests.protocol_module import make_config


def records(first: int, last: int) -> list[dict[str, Any]]:
    steps = [
        {"step": n, "tokens": 64 * n, "loss": 6.0 - n / 8, "lr": n / 1024, "word": "x"} for n in range(first, last)
    ]
    return [*steps, {"step": last - 1, "tokens": 64 * last, "val_loss": 5.0 - last / 8}]


def write(config: Any, lines: list[dict[str, Any]], resumed: int | None = None) -> LightningRunLogger:
    logger = LightningRunLogger(config, Path(config.run.dir))
    folder = RunFolder(Path(config.run.dir), [logger], resumed)
    folder.open("cpu")
    for line in lines:
        folder.write(line)
    folder.close("stopped")
    return logger


def expected(run_dir: Path) -> list[tuple[int, dict[str, float]]]:
    numbers = [
        {key: value for key, value in each.items() if isinstance(value, int | float) and key != "time"}
        for each in read_records(run_dir / "metrics.jsonl")
    ]
    return [(int(each.pop("step")), each) for each in numbers]


@pytest.fixture
def resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Return a function that trains five steps with a logger, resumed at step 3, and returns the folder."""
    monkeypatch.setattr("lightning_llm.train.run_folder.draw_losses", lambda *_: None)

    def make(name: str) -> Path:
        config = make_config(tmp_path, logger={"name": name})
        first = write(config, records(1, 6))
        if name == "wandb":  # names its parts by the second: a real resume takes longer
            time.sleep(1 - time.time() % 1)
        for logger in (first, write(config, records(4, 8), resumed=3)):
            assert logger.summary_fields() == {"logger": {"name": name}}
        return Path(config.run.dir)

    return make


def test_csv(resumed):
    folder = resumed("csv")
    with (folder / "csv" / "metrics.csv").open() as file:
        rows = [(int(row.pop("step")), {k: float(v) for k, v in row.items() if v}) for row in csv.DictReader(file)]
    assert rows == expected(folder)


def test_tensorboard(resumed):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = resumed("tensorboard")
    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    found = {(tag, each.step): each.value for tag in events.Tags()["scalars"] for each in events.Scalars(tag)}
    assert found == {(key, step): value for step, line in expected(folder) for key, value in line.items()}


def wandb_records(file: Path) -> Iterator[bytes]:
    """Yield what wandb wrote: LevelDB's log format (blocks of 32 KiB, CRC, length, type) behind a header of 7 bytes."""
    data, position, whole = file.read_bytes(), 7, b""
    while position + 7 <= len(data):
        if 32768 - position % 32768 < 7:
            position += 32768 - position % 32768
        _, length, kind = struct.unpack_from("<IHB", data, position)
        whole += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # full, last
            yield whole
            whole = b""


def wandb_history(folder: Path) -> list[tuple[int, dict[str, float]]]:
    from wandb.proto import wandb_internal_pb2

    found = []
    for file in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        for data in wandb_records(file):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "history":
                items = [(each.key or "/".join(each.nested_key), each.value_json) for each in record.history.item]
                line = {key: json.loads(value) for key, value in items if not key.startswith("_")}
                found.append((int(line.pop("trainer/global_step")), line))
    return found


def test_wandb_offline(resumed, monkeypatch):
    monkeypatch.setenv("WANDB_SILENT", "true")
    folder = resumed("wandb")
    lines = expected(folder)
    deadline = time.monotonic() + 60
    while len(found := wandb_history(folder)) < 11 and time.monotonic() < deadline:
        time.sleep(0.1)  # wandb's own process writes, and ends after the logger does: later on a busy machine
    assert found[:3] == lines[:3]
    assert found[-5:] == lines[3:]
    names = {file.name for file in folder.glob("wandb/offline-run-*/*.wandb")}
    assert names == {f"run-{(folder / WANDB_ID_FILE).read_text()}.wandb"}  # one run, in as many parts as starts


def test_a_failing_logger_is_disabled(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("lightning_llm.train.run_folder.draw_losses", lambda *_: None)
    monkeypatch.setattr(loggers.CSVLogger, "log_metrics", lambda *_: 1 / 0)
    config = make_config(tmp_path, logger={"name": "csv"})
    logger = write(config, records(1, 4))
    assert "ZeroDivisionError" in logger.summary_fields()["logger"]["problem"]
    assert len([each for each in caplog.records if "is disabled" in each.getMessage()]) == 1
    assert len(expected(Path(config.run.dir))) == 4


def test_a_missing_package_is_named_with_its_extra(tmp_path, small_run, capsys, monkeypatch):
    monkeypatch.setattr("lightning_llm.plan.check.find_spec", lambda name: None)
    assert main(["train", *small_run(tmp_path, "logger=wandb")]) == 2
    assert "logger: is wandb, which is not installed. Run pip install 'lightning-llm[wandb]'" in (
        capsys.readouterr().err
    )


def test_a_run_under_a_logger(tmp_path, small_run):
    own = "+callbacks.own={_target_: tests.own_callbacks.Remembers}"
    assert main(["train", *small_run(tmp_path, "logger=csv", "trainer.max_steps=2", own)]) == 0
    with (tmp_path / "run" / "csv" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["own/remembered"] for row in rows if row["loss"]] == ["1.0", "2.0"]
    assert "learning_rate" in (tmp_path / "run" / "csv" / "hparams.yaml").read_text()
