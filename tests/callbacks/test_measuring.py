"""Throughput and memory on a real trainer, with a clock that advances only during planted waits."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.profilers import SimpleProfiler
from torch.utils.data import TensorDataset

from lightning_llm.base.hardware import host_peak_bytes
from lightning_llm.callbacks import throughput
from lightning_llm.callbacks.memory import Memory
from lightning_llm.callbacks.throughput import Throughput
from lightning_llm.config.schema import Config
from tests.protocol_module import TinyModule, fit, make_config


class Collect(pl.Callback):
    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.records.append(pl_module.step_record)


class Clock:
    """Mock of the time module: advances only when a test advances it."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


class TimedModule(TinyModule):
    """Takes 3 seconds by `clock` for a step and 50 for a validation batch."""

    def __init__(self, config: Config, clock: Clock):
        super().__init__(config)
        self.clock = clock

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.clock.now += 3
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.clock.now += 50
        super().validation_step(batch, batch_idx)


def test_time_is_split_into_waiting_and_computing_without_validations(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, fetch = Clock(), TensorDataset.__getitem__

    def timed_fetch(self: TensorDataset, index: int) -> Any:
        clock.now += 1
        return fetch(self, index)

    monkeypatch.setattr(TensorDataset, "__getitem__", timed_fetch)
    monkeypatch.setattr(throughput, "time", clock)
    collect = Collect()
    fit(TimedModule(config, clock), [Throughput(warmup_steps=2), collect])
    assert [record.get("timing_warmup", False) for record in collect.records] == [True, True, *[False] * 4]
    assert [record["data_seconds"] for record in collect.records] == [2] * 6  # of two sequences
    for record in collect.records:
        assert record["compute_seconds"] == 3
        assert record["step_seconds"] == record["data_seconds"] + 3  # also in the step behind a validation
        assert record["tokens_per_second"] == 8 / record["step_seconds"]
        assert record["tflops_per_second"] == pytest.approx(6e9 * 8 / record["step_seconds"] / 1e12)
        assert "mfu" not in record  # no peak is known for a CPU


def test_mfu_is_the_share_of_the_devices_peak(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(throughput, "device_name", lambda device: "NVIDIA A100-SXM4-80GB")
    collect = Collect()
    fit(TinyModule(config), [Throughput(), collect])
    for record in collect.records:
        assert record["mfu"] == pytest.approx(record["tflops_per_second"] / 19.5)


def test_a_users_profiler_stays(config: Config) -> None:
    class Replace(pl.Callback):
        def setup(self, trainer: pl.Trainer, pl_module: Any, stage: str) -> None:
            trainer.profiler = SimpleProfiler()

    collect = Collect()
    trainer = fit(TinyModule(config), [Replace(), Throughput(), collect])
    assert type(trainer.profiler) is SimpleProfiler
    assert "step_seconds" in collect.records[0]
    assert "data_seconds" not in collect.records[0]


def test_memory_is_recorded_every_so_many_steps(tmp_path: Path) -> None:
    collect = Collect()
    fit(TinyModule(make_config(tmp_path, max_steps=7)), [Memory(every_steps=3), collect])
    having = [record["step"] for record in collect.records if "host_memory_peak_bytes" in record]
    assert having == [1, 3, 6]
    assert "device_memory_peak_bytes" not in collect.records[0]


def test_the_peak_counts_memory_that_was_given_back() -> None:
    # From within this larger process: the peak of the one that starts another must not be passed on.
    ballast = torch.ones(100 * 2**20)  # 400 MB
    code = (
        "from lightning_llm.base.hardware import host_peak_bytes as peak\n"
        "before = peak(); block = b'x' * (300 * 2**20); del block; print(before, peak())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    before, after = map(int, done.stdout.split())
    assert before < 200 * 2**20
    assert before + 250 * 2**20 < after < before + 350 * 2**20
    assert host_peak_bytes() > ballast.nbytes == 400 * 2**20
