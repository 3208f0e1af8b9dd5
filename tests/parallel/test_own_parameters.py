"""Parameters of a part outside its linears under tensor parallelism: their gradients, and rejected cases."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_llm.base.errors import AgreedError, ConfigError
from lightning_llm.config.schema import Config
from lightning_llm.config.schema.model import ModelConfig
from lightning_llm.model.feed_forward import DenseFeedForward
from lightning_llm.model.kinds import DenseSpec
from lightning_llm.model.norm import RMSNorm
from lightning_llm.model.spec import Distribution, ParameterSpec
from lightning_llm.plan.check import check_config
from tests.parallel.traced_run import traced_run

SHAPE = ["model.num_layers=2", "model.num_heads=2", "model.num_kv_heads=2", "model.head_dim=64", "trainer.max_steps=2"]
NORMS = ("before", "after")
"""Norms of the part's input and of its output: children of the part that hold a replicated parameter."""


@pytest.fixture(scope="module")
def alone(ranks, matrix_run) -> dict[str, Any]:
    return ranks(1).call(run_with_own_norms, matrix_run("single", 1, 4, "fp32", *SHAPE))


@pytest.mark.parametrize("sequence_parallel", ["true", "false"])
def test_replicated_parameters_of_a_part_get_whole_gradients(alone, ranks, matrix_run, sequence_parallel):
    key = f"parallel.sequence_parallel={sequence_parallel}"
    found = ranks(2).call(run_with_own_norms, matrix_run("tp", 2, 4, "fp32", *SHAPE, key))
    for step in (0, 1):
        ours, theirs = found["gradients"][step], alone["gradients"][step]
        assert ours.keys() == theirs.keys()
        assert {f"layers.1.feed_forward.{norm}.weight" for norm in NORMS} <= ours.keys()
        for name, gradient in ours.items():
            torch.testing.assert_close(
                gradient, theirs[name], rtol=1e-3, atol=5e-6, msg=lambda text, n=name: f"{n} {text}"
            )


def test_a_parameter_of_no_child_module_is_rejected_under_tensor_parallelism(matrix_run, monkeypatch):
    bare = [ParameterSpec("scale", (64,), "replicate", Distribution(mean=1.0))]
    monkeypatch.setattr(DenseSpec, "own_parameters", lambda self, model: bare)
    check_config(matrix_run("single", 1, 4, "fp32", *SHAPE))
    with pytest.raises(ConfigError, match=r"parallel\.tp: is 2, .*'scale' of \w+ .*child module .* parallel\.tp=1"):
        check_config(matrix_run("tp", 2, 4, "fp32", *SHAPE))


def test_a_module_without_normalise_is_rejected_under_tensor_parallelism(ranks, matrix_run):
    problem = ranks(2).call(problem_without_normalise, matrix_run("tp", 2, 4, "fp32", *SHAPE))
    assert problem.startswith("parallel.tp: is 2, and layers.0.feed_forward.before (Bare)")
    assert "normalise(x, weight, bias)" in problem


def problem_without_normalise(config: Config) -> str:
    with own_norms(Bare):
        try:
            traced_run(config, saves=False)
        except AgreedError as error:
            return str(error)
    return "none"


class Bare(torch.nn.Module):
    """A scale without the method `normalise`."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def run_with_own_norms(config: Config) -> dict[str, Any]:
    with own_norms():
        return traced_run(config, saves=False)


@contextmanager
def own_norms(norm: type[torch.nn.Module] = RMSNorm) -> Iterator[None]:
    """Give feed-forward networks a norm of their input and one of their output."""
    make, forward = DenseFeedForward.__init__, DenseFeedForward.forward

    def make_with_norms(self: Any, kind: DenseSpec, model: ModelConfig) -> None:
        make(self, kind, model)
        self.before, self.after = (norm(model.hidden_size, model.norm_eps) for _ in NORMS)

    def normed(self: Any, x: Tensor) -> Tensor:
        return self.after(forward(self, self.before(x)))

    def own_parameters(self: DenseSpec, model: ModelConfig) -> list[ParameterSpec]:
        shape = (model.hidden_size,)
        return [ParameterSpec(f"{norm}.weight", shape, "replicate", Distribution(mean=1.0)) for norm in NORMS]

    DenseFeedForward.__init__, DenseFeedForward.forward = make_with_norms, normed
    DenseSpec.own_parameters = own_parameters
    try:
        yield
    finally:
        DenseFeedForward.__init__, DenseFeedForward.forward = make, forward
        del DenseSpec.own_parameters
