"""Transformer Engine's stand-in of the native linears' tests, and a simulated GPU with the CPU's arithmetic."""

from contextlib import nullcontext

import pytest
import torch

from gpu_check import agreement, emulation, layers, setting, speed, steps
from gpu_check.checks import Call
from gpu_check.journal import Clock, Journal
from gpu_check.machine import Machine
from gpu_check.speed import PlainBlock
from lightning_llm.precision.native.decide import Capability
from tests.precision.native.conftest import engine

__all__ = ["engine"]


@pytest.fixture
def on_cpu(monkeypatch):
    """The checks' device is the CPU."""
    monkeypatch.setattr(setting, "DEVICE", "cpu")


@pytest.fixture
def hopper_on_cpu(engine, on_cpu, monkeypatch):
    """A mock H100 with Transformer Engine's Python interface, CPU arithmetic and small sizes."""
    monkeypatch.setattr(setting, "capability_here", lambda accelerator: Capability.of_gpu(9, 0))
    for place, names in {
        agreement: {"TOKENS": 128, "INPUTS": 256, "OUTPUTS": 128},
        layers: {"SHAPES": ((64, 128, 256),), "TOKENS": 128, "LAYERS": {"o_proj": (128, 128)}},
        speed: {"LENGTH": 64, "sequences": lambda: 2},
    }.items():
        for name, value in names.items():
            monkeypatch.setattr(place, name, value)
    tiny = setting.model_config("llama_tiny", **steps.SIZES)
    eager = {name: recipe.model_copy(update={"casts": "eager"}) for name, recipe in setting.recipes().items()}
    once = lambda contenders, **_: {name: work() or 1.0 for name, work in contenders.items()}  # noqa: E731
    for place in (speed, emulation):
        monkeypatch.setattr(place, "model_config", lambda name, **keys: tiny)
    for place in (speed, layers, emulation):
        monkeypatch.setattr(place, "recipes", lambda: eager)
    for place in (speed, layers):
        monkeypatch.setattr(place, "milliseconds", once)
    monkeypatch.setattr(speed, "peak_flops_per_second", lambda device, dtype: 1e9)
    monkeypatch.setattr(torch, "compile", lambda layer, **_: layer)
    monkeypatch.setattr(PlainBlock, "compile", lambda block: None)
    monkeypatch.setattr(speed, "compile_blocks", lambda blocks: None)
    monkeypatch.setattr(speed, "attention_by", lambda name: nullcontext())
    monkeypatch.setattr(speed, "compiled_loss_sum", lambda: speed.next_token_loss_sum)


@pytest.fixture
def call(tmp_path):
    """Inputs of a check: no rows yet, and enough time."""
    return Call(Journal(tmp_path / "rows.jsonl", Machine("d", "1", "2", None)), Clock(1000), tmp_path)
