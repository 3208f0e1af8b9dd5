import json
import math
import os
import shutil
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import matplotlib.pyplot as plt
import pytest

from lightning_llm.base.errors import ConfigError
from lightning_llm.config.schema import Config
from lightning_llm.tracking import run_state as heartbeat
from lightning_llm.tracking.final_figures import final_figures
from lightning_llm.tracking.run_state import FolderGoneError
from lightning_llm.train import run_folder
from lightning_llm.train.run_folder import RunFolder
from tests.protocol_module import TinyModule, fit

pytestmark = pytest.mark.usefixtures("drawn")


class Memo:
    """A logger that keeps its inputs."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def open(self, facts: Any, resumed_from_step: int | None) -> None:
        self.told.append(("open", facts["status"], resumed_from_step))

    def record(self, record: Any) -> None:
        self.told.append(record)

    def close(self, status: str, detail: str, figures: Any) -> None:
        self.told.append(("close", status, detail, figures["loss"]))

    def summary_fields(self) -> dict[str, Any]:
        return {"memo": len(self.told)}


def lines(run_dir: str | Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(run_dir, "metrics.jsonl").read_text().splitlines()]


def summary(run_dir: str | Path) -> dict[str, Any]:
    return json.loads(Path(run_dir, "summary.json").read_text())


def test_every_step_and_validation_is_a_line_and_goes_to_the_sinks(config: Config) -> None:
    module, memo = TinyModule(config), Memo()
    fit(module, [RunFolder(Path(config.run.dir), [memo])])
    written = lines(config.run.dir)
    assert [line["loss"] for line in written if "loss" in line] == module.true_losses
    assert [(line["step"], "val_loss" in line) for line in written] == [
        (1, False),
        (2, False),
        (3, False),
        (3, True),
        (4, False),
        (5, False),
        (6, False),
        (6, True),
    ]
    assert written[3] == {
        "step": 3,
        "tokens": 24,
        "val_loss": 2.97,
        "val_loss/code": 2.0,
        "val_loss/prose": 2.0,
        "time": written[3]["time"],
    }
    assert memo.told == [("open", "running", None), *written, ("close", "finished", "", module.true_losses[-1])]


def test_the_summary_has_the_result_of_the_run(config: Config) -> None:
    module = TinyModule(config, losses={2: math.nan, 3: math.inf})
    fit(module, [RunFolder(Path(config.run.dir))])
    told = summary(config.run.dir)
    assert told["status"] == "finished"
    assert (told["step"], told["tokens"], told["loss"]) == (6, 48, module.true_losses[-1])
    assert (told["val_loss"], told["best_val_loss"], told["best_val_step"]) == (2.94, 2.94, 6)
    assert told["versions"]["torch"]
    assert len(told["git"]["sha"]) == 40
    assert told["wall_seconds"] > 0
    assert Path(config.run.dir, "loss.png").read_bytes().startswith(b"\x89PNG")
    assert plt.get_fignums() == []
    assert [line["loss"] for line in lines(config.run.dir)[1:3]] == ["nan", "inf"]


class LookAtStep2(pl.Callback):
    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if pl_module.step_record["step"] == 2:
            self.summary, self.lines = summary(pl_module.config.run.dir), lines(pl_module.config.run.dir)


def test_a_running_run_has_its_status_and_unbuffered_records(config: Config) -> None:
    look = LookAtStep2()
    fit(TinyModule(config), [look, RunFolder(Path(config.run.dir))])
    assert look.summary["status"] == "running"
    assert look.summary["process"].split()[1] == str(os.getpid())
    assert [line["step"] for line in look.lines] == [1]


def test_a_heart_beats_from_the_first_summary_to_the_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "HEARTBEAT_SECONDS", 0.02)
    folder, file, began = RunFolder(tmp_path), tmp_path / "summary.json", time.time()

    def beats(within_seconds: float) -> bool:
        os.utime(file, (1e9, 1e9))
        until = time.monotonic() + within_seconds
        while time.monotonic() < until and file.stat().st_mtime == 1e9:
            time.sleep(0.01)
        return file.stat().st_mtime > 1e9

    before = set(threading.enumerate())
    folder.open("cpu")
    (thread,) = set(threading.enumerate()) - before
    assert beats(10)  # while nothing is written: a validation, a checkpoint
    assert began <= heartbeat.last_sign(tmp_path) <= time.time()
    file.rename(tmp_path / "away")
    time.sleep(0.1)
    (tmp_path / "away").rename(file)
    assert beats(10)  # storage that was away did not end it
    folder.close("finished")
    thread.join(timeout=10)
    assert not thread.is_alive()
    assert not beats(0.2)


@pytest.mark.parametrize("fate", ["moved", "replaced", "deleted"])
def test_a_folder_that_goes_during_the_run_stops_it_and_is_not_written_again(
    fate: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_folder, "CHECKED_EVERY_SECONDS", -1.0)
    here, moved = tmp_path / "run", tmp_path / "moved"
    folder = RunFolder(here)
    folder.open("cpu")
    folder.write({"step": 1, "tokens": 8, "loss": 2.0})
    if fate == "deleted":
        shutil.rmtree(here)
    else:
        here.rename(moved)
    if fate == "replaced":
        here.mkdir()
    with pytest.raises(FolderGoneError, match="was deleted" if fate == "deleted" else f"was moved to {moved}"):
        folder.write({"step": 2, "tokens": 16, "loss": 1.5})
    folder.close("failed", "FolderGoneError: ...")
    assert list(here.glob("*")) == []
    if fate != "deleted":
        summary = json.loads((moved / "summary.json").read_text())
        assert (summary["status"], summary["step"], summary["loss"]) == ("failed", 2, 1.5)


class Told(BaseException):
    pass


class StopAt3(pl.Callback):
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        trainer.should_stop = trainer.global_step == 3


@pytest.mark.parametrize(
    ("error", "status"),
    [(RuntimeError("out of luck"), "failed"), (SystemExit(0), "failed"), (Told("by a signal"), "stopped")],
)
def test_an_exception_ends_as_failed_and_a_signal_as_stopped(config: Config, error: BaseException, status: str) -> None:
    with pytest.raises(type(error)):
        fit(TinyModule(config, fail_at=(4, error)), [RunFolder(Path(config.run.dir))])
    told = summary(config.run.dir)
    assert (told["status"], told["step"]) == (status, 3)
    assert told["detail"] == f"{type(error).__name__}: {error}"


def test_an_early_end_is_not_called_finished(config: Config) -> None:
    fit(TinyModule(config), [StopAt3(), RunFolder(Path(config.run.dir))])
    told = summary(config.run.dir)
    assert (told["status"], told["detail"]) == ("stopped", "after step 3 of 6")


def test_failing_before_the_first_step_can_be_recorded(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.close("failed", "before open: nothing to write")
    assert os.listdir(tmp_path) == []
    folder.open("cpu")
    folder.close("failed", "no data")
    folder.close("finished")
    assert (summary(tmp_path)["status"], summary(tmp_path)["detail"]) == ("failed", "no data")


def test_a_folder_with_records_is_rejected_and_not_changed(config: Config) -> None:
    run_dir = Path(config.run.dir)
    fit(TinyModule(config), [RunFolder(run_dir)])
    before = {path: path.read_bytes() for path in run_dir.iterdir()}
    with pytest.raises(ConfigError, match="already contains the records of a run"):
        RunFolder(run_dir).open("cpu")
    assert {path: path.read_bytes() for path in run_dir.iterdir()} == before


def test_a_folder_that_cannot_be_made_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigError, match=r"run\.dir: .*cannot be written"):
        RunFolder(tmp_path / "file" / "run").open("cpu")


def test_a_resumed_run_continues_after_the_checkpoint(config: Config) -> None:
    run_dir = Path(config.run.dir)
    with pytest.raises(RuntimeError):
        fit(TinyModule(config, fail_at=(6, RuntimeError())), [RunFolder(run_dir)])
    first = lines(run_dir)
    memo, folder = Memo(), RunFolder(run_dir, resumed_from_step=4)
    folder.loggers.append(memo)
    folder.open("cpu")
    assert lines(run_dir) == [line for line in first if line["step"] <= 4]
    folder.write({"step": 5, "tokens": 40, "loss": 1.5})
    folder.close("finished")
    assert [line["step"] for line in lines(run_dir)] == [1, 2, 3, 3, 4, 5]
    assert memo.told[0] == ("open", "running", 4)
    told = summary(run_dir)
    assert (told["status"], told["resumed_from_step"], told["best_val_step"], told["loss"]) == ("finished", 4, 3, 1.5)


def test_other_ranks_write_nothing(config: Config) -> None:
    folder, module = RunFolder(Path(config.run.dir)), TinyModule(config)
    rank1: Any = SimpleNamespace(
        is_global_zero=False, sanity_checking=False, state=SimpleNamespace(fn="fit"), logger=None
    )
    folder.setup(rank1, module, "fit")
    folder.on_train_batch_end(rank1, module)
    folder.on_validation_end(rank1, module)
    folder.on_fit_end(rank1, module)
    assert not Path(config.run.dir).exists()


def test_medians_leave_out_warm_up_and_figures_survive_nan() -> None:
    steps = [{"step": n, "loss": 1.0, "tokens_per_second": 10.0 * n, "step_seconds": 2.0} for n in (1, 2, 3, 4)]
    steps[0] |= {"timing_warmup": True, "host_memory_peak_bytes": 5}
    steps[3] |= {"host_memory_peak_bytes": 9}
    validations = [{"step": n, "val_loss": loss} for n, loss in ((1, math.nan), (2, 2.5), (3, 2.75))]
    figures = final_figures([*steps, *validations])
    assert figures["tokens_per_second_median"] == 30.0
    assert figures["train_seconds"] == 8.0
    assert figures["host_memory_peak_bytes"] == 9
    assert (figures["best_val_loss"], figures["best_val_step"], figures["val_loss"]) == (2.5, 2, 2.75)
    assert final_figures(steps[:1])["tokens_per_second_median"] == 10.0
    assert final_figures([]) == {}


def test_a_picture_that_fails_does_not_hide_how_the_run_ended(
    config: Config, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr("lightning_llm.train.run_folder.draw_losses", full)
    fit(TinyModule(config), [RunFolder(Path(config.run.dir))])
    assert summary(config.run.dir)["status"] == "finished"
    assert "loss.png was not drawn: OSError: No space left" in caplog.text
