"""A part's auxiliary loss is trained on and recorded alike under every layout, pipelines included."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from lightning_llm.config.schema import Config
from lightning_llm.model import kinds
from lightning_llm.model.feed_forward import DenseFeedForward
from tests.parallel.traced_run import traced_run

SHAPE = ["model.num_layers=4", "model.num_heads=2", "model.num_kv_heads=2", "model.head_dim=64", "trainer.max_steps=2"]
LAYOUTS = [
    ("ddp", 2, []),
    ("zero3", 2, []),
    ("tp", 2, []),
    ("tp", 2, ["parallel.sequence_parallel=false"]),
    ("cp", 2, []),
    ("pp", 2, []),
    ("pp", 2, ["parallel.activation_checkpoint=full"]),
    ("pp_interleaved", 2, []),
    ("pp_tp", 4, []),
]


@pytest.fixture(scope="module")
def alone(ranks, matrix_run) -> dict[str, Any]:
    return ranks(1).call(auxiliary_run, matrix_run("single", 1, 4, "fp32", *SHAPE), 1.0)


def test_the_loss_of_a_part_moves_the_weights(alone, ranks, matrix_run):
    without = ranks(1).call(auxiliary_run, matrix_run("single", 1, 4, "fp32", *SHAPE), 0.0)
    assert without["auxiliary"] == [0.0, 0.0]
    assert without["trace"]["curve"][0][2] == alone["trace"]["curve"][0][2]  # the loss is the cross entropy alone
    name = "layers.2.feed_forward_norm.weight"
    ours, theirs = (each["trace"]["gradients"][0][name] for each in (alone, without))
    assert (ours - theirs).norm() > 0.1 * theirs.norm()


@pytest.mark.parametrize(("layout", "world", "more"), LAYOUTS, ids=lambda each: str(each))
def test_it_is_the_same_under_every_layout(alone, ranks, matrix_run, layout, world, more):
    found = ranks(world).call(auxiliary_run, matrix_run(layout, world, 4, "fp32", *SHAPE, *more), 1.0)
    assert found["auxiliary"] == pytest.approx(alone["auxiliary"], rel=1e-5)
    for step in (0, 1):
        ours, theirs = found["trace"]["gradients"][step], alone["trace"]["gradients"][step]
        assert ours.keys() == theirs.keys()
        for name, gradient in ours.items():
            torch.testing.assert_close(
                gradient, theirs[name], rtol=1e-3, atol=1e-6, msg=lambda text, n=name: f"{n} {text}"
            )


def test_a_loss_that_its_kind_does_not_name_is_rejected(ranks, matrix_run):
    with pytest.raises(RuntimeError, match=r"sets the auxiliary loss size.*auxiliary_losses"):
        ranks(1).call(unnamed_run, matrix_run("single", 1, 4, "fp32", *SHAPE))


class Recorded(pl.Callback):
    """Keeps the auxiliary loss of each step's record."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        self.values.append(pl_module.step_record["auxiliary/size"])


def auxiliary_run(config: Config, weight: float) -> dict[str, Any]:
    """Return the trace and the recorded auxiliary losses of a run, whose feed-forward networks weigh their input."""
    recorded = Recorded()
    with losses_of_size(weight, ("size",)):
        return {"trace": traced_run(config, recorded, saves=False), "auxiliary": recorded.values}


def unnamed_run(config: Config) -> None:
    with losses_of_size(1.0, ()):
        traced_run(config, saves=False)


@contextmanager
def losses_of_size(weight: float, names: tuple[str, ...]) -> Iterator[None]:
    forward, before = DenseFeedForward.forward, kinds.SwiGLU.auxiliary_losses

    def with_loss(self: Any, x: Tensor) -> Tensor:
        self.auxiliary_losses = {"size": weight * (x.float() - 0.5).square().mean()}
        return forward(self, x)

    DenseFeedForward.forward, kinds.SwiGLU.auxiliary_losses = with_loss, names
    try:
        yield
    finally:
        DenseFeedForward.forward, kinds.SwiGLU.auxiliary_losses = forward, before
