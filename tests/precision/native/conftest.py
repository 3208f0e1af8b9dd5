"""A machine with an H100 and Transformer Engine, or one like it."""

import sys

import pytest

from lightning_llm.precision.native import transformer_engine as te
from lightning_llm.precision.native.decide import Capability
from tests.precision.native import real_engine, stub_kernels


@pytest.fixture
def engine(monkeypatch):
    """Transformer Engine's Python, importable, over kernels that stand in; by default it finds an H100."""
    for name, module in real_engine.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    imported = te.engine
    imported.cache_clear()
    stub_kernels.LOG.clear()
    real_engine.device(9, 0)
    real_engine.emulate_random_bits(monkeypatch)
    yield real_engine
    imported.cache_clear()


@pytest.fixture
def hopper(engine, monkeypatch):
    """A CPU that runs the native recipes of an H100 through the stand-in."""
    here = Capability.of_gpu(9, 0)
    monkeypatch.setattr("lightning_llm.plan.resolve.capability_here", lambda accelerator: here)
    return here
