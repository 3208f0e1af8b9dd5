"""Callbacks as Lightning's users know them: saved, resumed under another layout, and of one mind on all ranks."""

import json
from pathlib import Path

import pytest
import torch

from lightning_llm.config.compose import compose_config
from lightning_llm.config.schema import Config
from tests.own_callbacks import Remembers
from tests.parallel.traced_run import run_with
from tests.run_metrics import curve, read_metrics, read_tensors

DECAY = 0.8
CALLBACKS = [
    f"+callbacks.ema={{_target_: lightning.pytorch.callbacks.EMAWeightAveraging, decay: {DECAY}}}",
    "+callbacks.patience={_target_: lightning.pytorch.callbacks.EarlyStopping, monitor: val_loss, patience: 9}",
    "+callbacks.rates={_target_: lightning.pytorch.callbacks.LearningRateMonitor}",
    "+callbacks.timer={_target_: lightning.pytorch.callbacks.Timer, duration: {hours: 1}}",
    "+callbacks.devices={_target_: lightning.pytorch.callbacks.DeviceStatsMonitor}",
    "+callbacks.own={_target_: tests.own_callbacks.Remembers}",
]


def train(config: Config) -> dict | None:
    """Train; return the observations of rank 0's callback."""
    trainer = run_with(config)
    return next((each.state_dict() for each in trainer.callbacks if isinstance(each, Remembers)), None)


@pytest.fixture(scope="module")
def words(small_run):
    def run(folder: Path, layout: str, world: int, *more: str) -> Config:
        shape = [f"parallel={layout}", f"trainer.devices={world}", "data.micro_batch_size=1", "model.num_kv_heads=2"]
        times = ["schedule.total_steps=6", "trainer.validate_every_steps=2"]
        return compose_config(small_run(folder, *shape, *times, *more))

    return run


def averages(folder: Path, step: int) -> dict[str, torch.Tensor]:
    return read_tensors(folder / "checkpoints" / f"step={step}", "callbacks.")


@pytest.mark.parametrize(
    "chain", [[("single", 1), ("zero3", 2)], pytest.param([("pp_tp", 4), ("hsdp", 4)], marks=pytest.mark.full)]
)
def test_state_comes_back_under_another_layout(chain, ranks, words, tmp_path):
    every = ["checkpoint.every_steps=1", "checkpoint.keep_last=6"]
    whole = words(tmp_path / "whole", "single", 1, *CALLBACKS, *every)
    seen = ranks(1).call(train, whole)
    (before, ranks_before), (after, ranks_after) = chain
    ranks(ranks_before).call(train, words(tmp_path / "parts", before, ranks_before, *CALLBACKS, "trainer.max_steps=4"))
    resumed = ranks(ranks_after).call(train, words(tmp_path / "parts", after, ranks_after, *CALLBACKS, "resume=auto"))
    one, two = tmp_path / "whole" / "run", tmp_path / "parts" / "run"
    equal = before == "single"
    if equal:  # the others sum in another order
        assert curve(two) == curve(one)
        assert resumed == seen
    assert [each["own/remembered"] for each in read_metrics(two) if "loss" in each] == [1, 2, 3, 4, 5, 6]
    assert [each["own/validations"] for each in read_metrics(two) if "val_loss" in each][-1] == 3
    assert all("lr-AdamW/pg1" in each for each in read_metrics(two) if "loss" in each)
    assert "DeviceStatsMonitor.on_train_batch_end/cpu_vm_percent" in read_metrics(two)[-2]
    states = [torch.load(run / "checkpoints" / "step=6" / "callbacks.pt", weights_only=True) for run in (one, two)]
    for key in ("callbacks", "averaging_state"):
        ours, theirs = ({k: v for k, v in each[key].items() if k != "Timer"} for each in states)
        assert (str(ours) == str(theirs)) or not equal
    # the averages themselves, against a mean made of the weights after each step
    expected: dict[str, torch.Tensor] = {}
    for step in range(1, 7):
        for name, tensor in read_tensors(one / "checkpoints" / f"step={step}", "model.").items():
            expected[name] = tensor.double() if step == 1 else DECAY * expected[name] + (1 - DECAY) * tensor.double()
    for run, bound in ((one, 1e-6), (two, 1e-6 if equal else 1e-4)):
        found = averages(run, 6)
        assert {name.removeprefix("callbacks.state_dict.") for name in found} == expected.keys()
        for name, tensor in found.items():
            torch.testing.assert_close(
                tensor.double(), expected[name.removeprefix("callbacks.state_dict.")], rtol=bound, atol=bound
            )
    if equal:
        ours, theirs = averages(one, 6), averages(two, 6)
        assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


def test_one_rank_that_ends_the_run_ends_it_on_all(ranks, words, tmp_path):
    stop = "+callbacks.stop={_target_: tests.own_callbacks.StopsAlone, rank: 1, step: 3}"
    mean = "+callbacks.mean={_target_: lightning.pytorch.callbacks.WeightAveraging}"
    config = words(tmp_path, "zero3", 2, stop, mean, "checkpoint.every_steps=1", "checkpoint.keep_last=6")
    ranks(2).call(train, config)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "finished"
    assert summary["ended_by"] == {"step": 3, "callback": None, "reason": "a callback set trainer.should_stop"}
    assert [each["step"] for each in read_metrics(tmp_path / "run")] == [1, 2, 2, 3, 3]  # validated once more
    after = [read_tensors(tmp_path / "run" / "checkpoints" / f"step={step}", "model.") for step in (1, 2, 3)]
    for name, tensor in averages(tmp_path / "run", 3).items():
        of_steps = torch.stack([each[name.removeprefix("callbacks.state_dict.")] for each in after])
        torch.testing.assert_close(tensor, of_steps.mean(dim=0), rtol=1e-6, atol=1e-7)
