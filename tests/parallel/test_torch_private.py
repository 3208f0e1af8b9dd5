"""Errors if torch lacks an undocumented interface that layouts use."""

import tomllib
from pathlib import Path

import pytest
import torch
from torch.distributed.pipelining import PipelineStage

from lightning_llm.base.errors import ConfigError
from lightning_llm.parallel.pp_stage import TrainStage
from lightning_llm.parallel.torch_private import TESTED, check_overridden, private

ROOT = Path(__file__).parents[2]


def test_the_range_of_torch_is_one_wherever_it_stands():
    requirements = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert f"torch{TESTED}" in requirements
    low, high = (tuple(map(int, bound.lstrip(">=<").split("."))) for bound in TESTED.split(","))
    assert f"{low} <= tuple(" in (ROOT / "Makefile").read_text()
    assert f"< {high}" in (ROOT / "Makefile").read_text()
    assert low <= tuple(map(int, torch.__version__.split(".")[:2])) < high


def test_a_part_that_is_gone_is_named_with_the_range(monkeypatch):
    assert private(torch, "never_was", "tensor") is torch.tensor
    monkeypatch.delattr(torch.distributed.DeviceMesh, "_flatten")
    with pytest.raises(ConfigError, match=r"has no DeviceMesh._flatten, .* Install torch>=2.11,<2.14"):
        private(torch.distributed.DeviceMesh, "_flatten")


def test_a_changed_signature_of_an_overridden_method_is_an_error(monkeypatch):
    check_overridden(TrainStage, "backward_one_chunk")

    def backward_one_chunk(self, chunk, loss=None):
        pass

    monkeypatch.setattr(PipelineStage, "backward_one_chunk", backward_one_chunk)
    with pytest.raises(ConfigError, match=r"PipelineStage.backward_one_chunk\(self, chunk, loss\), not \(self, bwd_"):
        check_overridden(TrainStage, "backward_one_chunk")
