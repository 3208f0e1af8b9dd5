"""A part's auxiliary loss is trained on and recorded, with the same values under every layout."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from lightning_llm.__main__ import main
from lightning_llm.base.errors import AgreedError, ConfigError
from lightning_llm.config.compose import compose_config
from lightning_llm.config.schema import Config
from lightning_llm.config.schema.model import ModelConfig
from lightning_llm.model.attention.attention import Attention
from lightning_llm.model.decoder import Decoder
from lightning_llm.model.feed_forward import DenseFeedForward
from lightning_llm.model.loss import undeclared
from lightning_llm.model.spec import Norm, Part
from lightning_llm.model.structure import norm_of
from lightning_llm.parallel.pp import Pipeline, check_auxiliary_losses
from lightning_llm.plan.check import check_config
from tests.parallel.traced_run import traced_run

NAMES = {"columns": "sum", "output": "mean", "size": "mean"}
"""Losses of the parts: of a sum over columns that tensor parallelism cuts, of a mixer's output, of a part's input."""
SHAPE = ["model.num_layers=4", "model.num_heads=2", "model.num_kv_heads=2", "model.head_dim=64", "trainer.max_steps=2"]
LAYOUTS = [
    pytest.param("ddp", 2, [], marks=pytest.mark.full),
    ("zero3", 2, []),
    ("tp", 2, []),
    pytest.param("tp", 2, ["parallel.sequence_parallel=false"], marks=pytest.mark.full),
    ("cp", 2, []),
    pytest.param("pp", 2, [], marks=pytest.mark.full),
    pytest.param("pp", 2, ["parallel.activation_checkpoint=full"], marks=pytest.mark.full),
    ("pp_interleaved", 2, []),
    pytest.param("pp_tp", 4, [], marks=pytest.mark.full),
]


@pytest.fixture(scope="module")
def alone(ranks, matrix_run) -> dict[str, Any]:
    return ranks(1).call(auxiliary_run, matrix_run("single", 1, 4, "fp32", *SHAPE), 1.0)


def test_the_loss_of_a_part_moves_the_weights(alone, ranks, matrix_run):
    without = ranks(1).call(auxiliary_run, matrix_run("single", 1, 4, "fp32", *SHAPE), 0.0)
    assert without["auxiliary"] == [0.0] * 6
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


@pytest.mark.parametrize(("layout", "world"), [("single", 1), ("pp", 2)])
def test_a_loss_that_its_config_class_does_not_declare_is_rejected_on_every_rank(layout, world, ranks, matrix_run):
    problems = ranks(world).call(problems_of_undeclared_run, matrix_run(layout, world, 4, "fp32", *SHAPE))
    assert len(problems) == world
    for problem in problems:
        assert "Attention: sets the auxiliary loss output" in problem
        assert "auxiliary_losses" in problem


def test_a_pipeline_checks_blocks_of_every_kind_without_computing():
    """Of blocks that set no loss it finds nothing; one that needs values is left to its stage."""
    for model in ("llama_tiny", "hybrid_tiny", "gemma2_tiny", "gpt3_345m"):
        config = compose_config([f"model={model}"]).model
        with torch.device("meta"):
            decoder = Decoder(config)
        with pytest.MonkeyPatch.context() as patch:
            last = list(decoder.layers.values())[-1].feed_forward
            patch.setattr(last, "forward", partial(with_undeclared, last, last.forward), raising=False)
            with pytest.raises(AgreedError, match="sets the auxiliary loss late"):
                check_auxiliary_losses(decoder, 32)
            patch.setattr(last, "forward", lambda x: x * float(x.sum()))
            check_auxiliary_losses(decoder, 32)
        check_auxiliary_losses(decoder, 32)


def with_undeclared(module: torch.nn.Module, forward: Any, x: Tensor) -> Tensor:
    module.__dict__["auxiliary_losses"] = {"late": x.sum()}
    return forward(x)


def test_a_pipeline_raises_the_config_error_of_a_stage_as_it_is():
    problem = undeclared("Router", ["balance"])

    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("stage 0 failed to run forward") from ConfigError(problem)

    stage: Any = SimpleNamespace(
        stages=[], has_first=False, has_last=False, schedule=SimpleNamespace(step=fails), _sent=None
    )
    batch = torch.zeros(1, 1, 2, dtype=torch.long)
    with pytest.raises(ConfigError, match="Router: sets the auxiliary loss balance"):
        Pipeline.step(stage, batch, batch, None, lambda *_: None, lambda *_: batch, 1.0)


@pytest.mark.parametrize("declared", [("columns", "output", "size"), NAMES | {"size": "average"}])
def test_tensor_parallelism_rejects_a_loss_without_a_declared_reduction(matrix_run, declared):
    with losses_of_size(1.0, declared):
        check_config(matrix_run("zero3", 2, 4, "fp32", *SHAPE))
        with pytest.raises(ConfigError, match=r"parallel\.tp: is 2, .*'size'.*'mean'.*'sum'.*parallel\.tp=1"):
            check_config(matrix_run("tp", 2, 4, "fp32", *SHAPE))


def test_a_loss_declared_by_the_torch_module_alone_is_one_line_of_error(small_run, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(DenseFeedForward, "auxiliary_losses", ("balance",), raising=False)
    assert main(["train", *small_run(tmp_path, "trainer.max_steps=1")]) == 2
    error = capsys.readouterr().err
    assert "Traceback" not in error
    (line,) = [line for line in error.splitlines() if "balance" in line]
    assert "DenseFeedForward: sets the auxiliary loss balance" in line
    assert "config class" in line


class Recorded(pl.Callback):
    """Keeps the auxiliary loss of each step's record."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        self.values += [pl_module.step_record[f"auxiliary/{name}"] for name in NAMES]


def auxiliary_run(config: Config, weight: float) -> dict[str, Any]:
    """Return the trace and the recorded auxiliary losses of a run with `losses_of_size`."""
    recorded = Recorded()
    with losses_of_size(weight, NAMES):
        return {"trace": traced_run(config, recorded, saves=False), "auxiliary": recorded.values}


def problems_of_undeclared_run(config: Config) -> list[str]:
    """Return the problem that each rank raises."""
    with losses_of_size(1.0, ()):
        try:
            traced_run(config, saves=False)
        except ConfigError as error:
            found = [str(error)] * config.trainer.devices
            if config.trainer.devices > 1:
                torch.distributed.all_gather_object(found, str(error))
            return found
    return []


@contextmanager
def losses_of_size(weight: float, declared: Mapping[str, str] | tuple[str, ...]) -> Iterator[None]:
    """Give mixers a loss of their outputs, feed-forward networks one of their inputs and one of their columns."""
    forward, mix, before = DenseFeedForward.forward, Attention.forward, Part.auxiliary_losses

    def with_loss(self: Any, x: Tensor) -> Tensor:
        inner = self.up_proj(x).float()  # [B, T, F], or this rank's columns of it
        self.auxiliary_losses = {"size": weight * (x.float() - 0.5).square().mean()}
        self.auxiliary_losses["columns"] = 0.1 * weight * (inner - 0.5).square().sum(-1).mean()
        return forward(self, x)

    def with_loss_of_output(self: Any, x: Tensor, *rest: Any) -> Tensor:
        y = mix(self, x, *rest)
        self.auxiliary_losses = {"output": 10 * weight * (y.float() - 0.5).square().mean()}
        return y

    DenseFeedForward.forward, Attention.forward = with_loss, with_loss_of_output
    Part.auxiliary_losses, Norm.auxiliary_losses = declared, {}
    try:
        yield
    finally:
        DenseFeedForward.forward, Attention.forward = forward, mix
        Part.auxiliary_losses = before
        del Norm.auxiliary_losses


def test_a_norm_that_names_a_loss_is_rejected(monkeypatch):
    monkeypatch.setattr(Norm, "auxiliary_losses", ("size",))
    model = ModelConfig(
        name="tiny", vocab_size=64, num_layers=1, hidden_size=8, num_heads=1, num_kv_heads=1, ffn_hidden_size=8,
        max_sequence_length=8,
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"model\.norm=rmsnorm.*size.*mixer or the feed-forward"):
        norm_of(model)
