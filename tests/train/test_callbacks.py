"""Lightning's own callbacks, and a user's, in runs as the command line makes them. 15 seconds."""

import json
import shutil
import signal
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch

from lightning_llm.__main__ import main
from lightning_llm.config.compose import compose_config
from lightning_llm.config.from_file import load_config
from lightning_llm.config.schema.callbacks import metric_names
from lightning_llm.model.decoder import Decoder
from lightning_llm.plan.resolve import plan_of
from lightning_llm.run.rank import run
from tests import own_callbacks
from tests.own_callbacks import HookOrder
from tests.planted import infinite_gradient
from tests.run_metrics import curve, read_metrics, steps_saved

MISBEHAVES = "+callbacks.own={{_target_: tests.own_callbacks.Misbehaves, what: {}}}"
STOP = "callbacks.stop={_target_: lightning.pytorch.callbacks.EarlyStopping, monitor: val_loss, "
STOPPED = ["schedule.total_steps=9", "trainer.max_steps=9", f"+{STOP}patience: 1, min_delta: 9}}"]


def summary(folder: Path) -> dict:
    return json.loads((folder / "run" / "summary.json").read_text())


@pytest.fixture(scope="module")
def stopped(tmp_path_factory, small_run) -> Path:
    """The folder above a run that EarlyStopping has ended at its second validation, step 6 of 9."""
    folder = tmp_path_factory.mktemp("stopped")
    assert (
        main(["train", *small_run(folder, *STOPPED, "+callbacks.own={_target_: tests.own_callbacks.Remembers}")]) == 0
    )
    return folder


def test_early_stopping_is_a_finished_run_with_a_reason(stopped):
    found = summary(stopped)
    assert (found["status"], found["ended_by"]["callback"], found["ended_by"]["step"]) == (
        "finished",
        "callbacks.stop",
        6,
    )
    assert "val_loss did not improve in the last 1 records" in found["detail"]
    assert steps_saved(stopped / "run")[-1] == 6


def test_callbacks_find_the_records_numbers(stopped):
    records = read_metrics(stopped / "run")
    assert [each["own/remembered"] for each in records if "loss" in each] == [1, 2, 3, 4, 5, 6]
    assert [each["own/validations"] for each in records if "val_loss" in each] == [1, 2]


def test_the_names_that_a_monitor_is_held_against_are_those_that_callbacks_find(stopped):
    config = load_config(stopped / "run" / "config.yaml", [])
    assert {*metric_names(config), "own/remembered", "own/validations"} == own_callbacks.Remembers.names


@pytest.mark.full
def test_a_run_ended_by_a_callback_does_not_resume_by_itself(stopped, tmp_path, small_run, capsys):
    shutil.copytree(stopped / "run", tmp_path / "run")
    own = "+callbacks.own={_target_: tests.own_callbacks.Remembers}"
    for steps in (9, 12):
        words = small_run(tmp_path, *STOPPED, own, f"trainer.max_steps={steps}", "resume=auto")
        assert main(["train", *words]) == 0
        said = capsys.readouterr().out
        assert f"is finished at step 6 of {steps}: ended by callbacks.stop (Monitored metric val_loss" in said
    assert curve(tmp_path / "run") == curve(stopped / "run")
    more = [f"+{STOP}patience: 4, min_delta: 9}}", own, "schedule.total_steps=9", "trainer.max_steps=9", "resume=auto"]
    assert main(["train", *small_run(tmp_path, *more)]) == 0  # with more patience, it does
    assert "resume from step 6" in capsys.readouterr().out
    assert (summary(tmp_path)["status"], summary(tmp_path).get("ended_by")) == ("finished", None)
    assert [each["own/remembered"] for each in read_metrics(tmp_path / "run") if "loss" in each] == [*range(1, 10)]
    assert main(["train", *small_run(tmp_path / "whole", *more[:-1])]) == 0
    assert curve(tmp_path / "run") == curve(tmp_path / "whole" / "run")


def test_callback_state_that_cannot_be_saved_is_reported_before_the_first_step(tmp_path, small_run, capsys):
    assert main(["train", *small_run(tmp_path, MISBEHAVES.format("state"))]) == 2
    assert "the state of Misbehaves cannot be kept in a checkpoint" in capsys.readouterr().err
    assert not read_metrics(tmp_path / "run")


@pytest.mark.parametrize(
    ("what", "hook", "said"),
    [
        ("checkpoint", "on_train_batch_end", "RuntimeError: trainer.save_checkpoint is not supported"),
        ("colours", "on_train_batch_end", r"ValueError: \x1b[31mred and more"),
        ("exit", "on_exception", "RuntimeError: and its on_exception fails, too"),
        ("interrupt", "on_train_batch_end", "KeyboardInterrupt: "),
        ("setup", "setup", "RuntimeError: before the run's folder is open"),
    ],
)
def test_a_callback_that_fails_is_named_in_one_line(what, hook, said, tmp_path, small_run, capfd):
    words = small_run(tmp_path, MISBEHAVES.format(what), "trainer.max_steps=1", "data.validation.fraction=0")
    assert main(["train", *words]) == 1
    told = capfd.readouterr().err.splitlines()
    (line,) = [each for each in told if each.startswith("error: ")]
    assert line.startswith(
        f"error: callbacks.own (tests.own_callbacks.Misbehaves) failed in {hook} ({own_callbacks.__file__}:"
    )
    assert said in line
    assert "\x1b" not in line
    assert "Traceback" not in " ".join(told)
    whole = tmp_path / "run" / "traceback.txt"
    assert str(whole) in line
    assert whole.read_text().startswith("Traceback (most recent call last)")
    assert summary(tmp_path)["status"] == "failed"
    assert said in summary(tmp_path)["detail"]


def test_timer_counts_over_resumes(tmp_path, small_run):
    timer = "+callbacks.timer={_target_: lightning.pytorch.callbacks.Timer, duration: {microseconds: 1}}"
    assert main(["train", *small_run(tmp_path, "trainer.max_steps=2")]) == 0
    assert main(["train", *small_run(tmp_path, timer, "resume=auto")]) == 0
    assert summary(tmp_path)["ended_by"]["callback"] == "callbacks.timer"
    assert steps_saved(tmp_path / "run")[-1] <= 3


def test_a_run_from_python_gives_its_signal_handlers_back(tmp_path, small_run):
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    assert run(plan_of(compose_config(small_run(tmp_path, "trainer.max_steps=1", "data.validation.fraction=0")))) == 0
    assert {number: signal.getsignal(number) for number in before} == before


class AutomaticallyOptimized(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.layer(batch).sum()

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        pass

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_hooks_come_as_in_automatic_optimization_and_a_skipped_step_counts(tmp_path, small_run, monkeypatch):
    """Gradients, too, are there where Lightning has them, but for on_before_backward: many backward passes have run."""
    monkeypatch.setattr(HookOrder, "seen", [])
    trainer = pl.Trainer(
        accelerator="cpu", max_steps=6, max_epochs=-1, val_check_interval=3, check_val_every_n_epoch=None, logger=False,
        num_sanity_val_steps=0, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[HookOrder()], default_root_dir=tmp_path,
    )  # fmt: skip
    batches = torch.utils.data.DataLoader(torch.ones(20, 2))
    trainer.fit(AutomaticallyOptimized(), batches, batches)
    theirs, HookOrder.seen = HookOrder.seen, []
    monkeypatch.setattr(Decoder, "forward", infinite_gradient(Decoder.forward, lambda n: n == 2 * 4))
    words = small_run(tmp_path, "+callbacks.order={_target_: tests.own_callbacks.HookOrder}", "spikes.policy=skip")
    assert main(["train", *words]) == 0
    assert [each["step"] for each in read_metrics(tmp_path / "run") if each.get("skipped")] == [5]
    assert [(name, step) for name, step, _ in HookOrder.seen] == [(name, step) for name, step, _ in theirs]
    differ = {ours[0] for ours, its in zip(HookOrder.seen, theirs, strict=True) if ours != its}
    assert differ <= {"on_before_backward"}
