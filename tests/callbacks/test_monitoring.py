"""Goodput over restarts, jitter of steps, system metrics, and traces. 6 seconds."""

import gzip
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from lightning_llm.callbacks.profile import Profile
from lightning_llm.callbacks.system import System
from lightning_llm.callbacks.throughput import Throughput
from lightning_llm.config.compose import compose_config
from lightning_llm.config.schema import Config
from lightning_llm.tracking.final_figures import final_figures
from lightning_llm.train.run_folder import RunFolder
from tests.protocol_module import TinyModule, fit, make_config


def records(config: Config) -> list[dict[str, Any]]:
    lines = Path(config.run.dir, "metrics.jsonl").read_text().splitlines()
    return [record for line in lines if "loss" in (record := json.loads(line))]


def test_waiting_and_jitter_leave_warm_up_out() -> None:
    steps = [{"step": n, "step_seconds": 1.0, "data_seconds": 0.25} for n in range(1, 21)]
    steps[0] |= {"step_seconds": 100.0, "data_seconds": 90.0, "timing_warmup": True}
    steps[-1] |= {"step_seconds": 3.0, "skipped": True}
    figures = final_figures(steps)
    assert figures["data_wait_share"] == pytest.approx(19 * 0.25 / (18 + 3))
    assert figures["step_jitter"] == pytest.approx(
        0.2
    )  # of 19 values, the 95th percentile is 1/10 of the way to the last
    assert figures["train_seconds"] == 121
    assert figures["useful_seconds"] == 118
    even = final_figures([{"step": n, "step_seconds": 2.0} for n in range(1, 9)])
    assert even["step_jitter"] == 0
    assert "data_wait_share" not in even


class Slow(TinyModule):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        time.sleep(0.05)
        return super().training_step(batch, batch_idx)


def test_goodput_counts_what_was_kept_since_the_first_start(config: Config) -> None:
    began = time.time()
    with pytest.raises(RuntimeError):
        fit(Slow(config, fail_at=(6, RuntimeError())), [Throughput(), RunFolder(Path(config.run.dir))])
    time.sleep(0.5)  # down
    kept = [record["step_seconds"] for record in records(config)[:4]]
    folder = RunFolder(Path(config.run.dir), resumed_from_step=4)  # step 5 is lost
    folder.open("cpu")
    for step in (5, 6):
        folder.write({"step": step, "tokens": 8 * step, "loss": 1.0, "step_seconds": 0.1})
    folder.write({"step": 7, "tokens": 56, "loss": 1.0, "step_seconds": 0.1, "skipped": True})
    folder.close("finished")
    wall = time.time() - began
    summary = json.loads(Path(config.run.dir, "summary.json").read_text())
    assert summary["starts"] == 2
    useful = sum(kept) + 0.2
    assert summary["useful_seconds"] == pytest.approx(useful)
    assert useful / wall <= summary["goodput"] <= useful / (0.5 + sum(kept))
    assert began <= summary["first_started_at"] <= began + wall


def test_the_machine_is_looked_at_now_and_then(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    fit(Slow(config), [System(every_seconds=0.12), RunFolder(Path(config.run.dir))])
    having = [record["step"] for record in records(config) if "system/rss_bytes" in record]
    assert having[0] == 1
    assert 1 < len(having) < 6
    record = records(config)[0]
    assert 0.5 < record["system/rss_bytes"] / psutil.Process().memory_info().rss < 1.5
    assert 0 <= record["system/cpu_percent"] <= 100
    assert record["system/process_cpu_percent"] >= 0
    assert not [key for key in record if "gpu" in key]


def test_a_gpu_is_asked_as_far_as_it_answers(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3, 10))
    monkeypatch.setattr(torch.cuda, "utilization", lambda device: 87)
    monkeypatch.setattr(torch.cuda, "power_draw", lambda device: 300_000)
    trainer: Any = SimpleNamespace(is_global_zero=True, strategy=SimpleNamespace(root_device=torch.device("cuda", 0)))
    module: Any = SimpleNamespace(step_record={})
    system = System(every_seconds=0)
    system.on_train_batch_end(trainer, module)
    gpu = {key: value for key, value in module.step_record.items() if "gpu" in key}
    assert gpu == {"system/gpu_memory_bytes": 7, "system/gpu_percent": 87, "system/gpu_watts": 300}

    def missing(device: torch.device) -> int:
        raise ModuleNotFoundError("nvidia-ml-py does not seem to be installed")

    monkeypatch.setattr(torch.cuda, "utilization", missing)
    for _ in range(2):
        module.step_record = {}
        system.on_train_batch_end(trainer, module)
        assert [key for key in module.step_record if "gpu" in key] == ["system/gpu_memory_bytes"]
    assert caplog.text.count("nvidia-ml-py") == 1


@pytest.mark.parametrize(("first", "steps", "name"), [(3, 2, "3-4"), (5, 10, "5-6"), (9, 1, None)])
def test_the_steps_asked_for_are_traced(
    first: int, steps: int, name: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = make_config(tmp_path)
    bare = TinyModule(config)
    fit(bare, [])
    module = TinyModule(config)
    fit(module, [Profile(first_step=first, steps=steps), RunFolder(Path(config.run.dir))])
    assert module.true_losses == bare.true_losses
    marked = [record["step"] for record in records(config) if record.get("timing_warmup")]
    if name is None:
        assert marked == []
        assert "callbacks.profile.first_step=9 was not reached" in caplog.text
        return
    assert marked == list(range(first - 1, min(first + steps, 7)))
    trace = Path(config.run.dir, "profile", f"rank=0.steps={name}.json.gz")
    found = [
        event["name"] for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"] if "name" in event
    ]
    assert found.count("Optimizer.step#AdamW.step") == int(name[2]) - first + 1
    assert "aten::addmm" in trace.with_name(f"rank=0.steps={name}.txt").read_text()


def test_the_group_profile_is_the_default_and_a_trace() -> None:
    words = ["recipe=quickstart", "callbacks=profile", "callbacks.profile.steps=1", "logger=none"]
    callbacks = compose_config(words).callbacks
    default = compose_config(["recipe=quickstart", "logger=none"]).callbacks
    assert {**default, "profile": callbacks["profile"]} == callbacks
    assert callbacks["profile"]["steps"] == 1
