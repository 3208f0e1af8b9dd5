"""A machine with an H100 and Transformer Engine, or one like it."""

import sys

import fake_engine
import pytest

from lightning_llm.precision.native import transformer_engine as te
from lightning_llm.precision.native.capability import Capability


@pytest.fixture
def engine(monkeypatch):
    """Transformer Engine's stand-in, importable."""
    for name, module in fake_engine.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    te.engine.cache_clear()
    yield fake_engine
    te.engine.cache_clear()


@pytest.fixture
def hopper(engine, monkeypatch):
    """A machine whose runs are native where an H100's would be, on the CPU, through the stand-in."""
    here = Capability.of_gpu(9, 0)
    monkeypatch.setattr("lightning_llm.plan.resolve.capability_here", lambda accelerator: here)
    monkeypatch.setattr("torch.cuda.manual_seed", lambda word: None)
    return here
