"""The optimizer step without Lightning, against the same steps written out in plain torch. 3 seconds."""

import math
from collections.abc import Iterator
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_llm.config.schema import ParallelConfig, PrecisionConfig, SpikesConfig
from lightning_llm.config.schema.model import ModelConfig
from lightning_llm.config.schema.optim import OPTIMIZERS, SCHEDULES
from lightning_llm.config.schema.precision import LossScalingConfig
from lightning_llm.data.corpus import Batch
from lightning_llm.model.decoder import Decoder
from lightning_llm.model.init import initialise
from lightning_llm.model.loss import AuxiliaryLosses, next_token_loss_sum
from lightning_llm.optim.kinds import learning_rate_factor
from lightning_llm.optim.optimizer import LearningRate
from lightning_llm.parallel.apply import checkpoint_blocks
from lightning_llm.parallel.cp import SequenceSharder
from lightning_llm.parallel.gradient_sync import GradientSync
from lightning_llm.parallel.layout import Layout
from lightning_llm.plan.degrees import Degrees
from lightning_llm.train.parallel_model import ParallelModel
from lightning_llm.train.quantization import LossScaler, Quantization
from lightning_llm.train.spikes import NonFiniteError, SpikePolicy
from lightning_llm.train.step import Synchronous, TrainState, TrainStep

MODEL = ModelConfig(
    name="tiny", vocab_size=32, num_layers=2, hidden_size=16, num_heads=2, num_kv_heads=1, ffn_hidden_size=32,
    max_sequence_length=8,
)  # fmt: skip
OPTIM = OPTIMIZERS["adamw"](name="adamw", learning_rate=0.02)
SCHEDULE = SCHEDULES["cosine"](name="cosine", warmup_steps=2)
MAX_STEPS, MICRO_BATCHES = 6, 3
SCALING = LossScalingConfig(init_scale=1024.0, growth_interval=3, hysteresis=1)


def made(model: Decoder, **changes: Any) -> TrainStep:
    """Return the step of one rank that trains `model` alone."""
    layout = Layout(ParallelConfig(name="single"), Degrees())
    precision = PrecisionConfig(name="fp32", compute_dtype="fp32")
    optimizer = changes.pop("optimizer", None) or OPTIM.build(model.named_parameters(), None)
    syncs, quantization = [GradientSync(model, layout, [])], Quantization(precision, 0, MAX_STEPS)
    parts = {
        "parallel": ParallelModel(
            model, layout, syncs, None, SequenceSharder(layout), next_token_loss_sum, quantization
        ),
        "optimizer": optimizer,
        "algorithm": Synchronous(),
        "learning_rate": LearningRate(optimizer, SCHEDULE, MAX_STEPS),
        "scaler": LossScaler(None),
        "spikes": SpikePolicy(SpikesConfig()),
        "clip_norm": OPTIM.gradient_clip_norm,
        "state": TrainState(step_tokens=MICRO_BATCHES * 2 * 8),
        "before_zero_grad": lambda: None,
        "on_gradients": [],
    }
    return TrainStep(**(parts | changes))


@pytest.fixture
def model() -> Decoder:
    made = Decoder(MODEL, torch.float64).double()  # Adam makes much of rounding in small gradients
    initialise(made, 0)
    return made


def batches() -> Iterator[Batch]:
    """Yield micro-batches with different numbers of target tokens, so that a mean of means would be another loss."""
    generator = torch.Generator().manual_seed(0)
    while True:
        tokens, labels = torch.randint(32, (2, MICRO_BATCHES, 2, 8), generator=generator)  # [A, B, T] each
        labels[0, :, 3:] = -100
        yield Batch(tokens, labels, None)


def mean_loss(model: Decoder, batch: Batch) -> Tensor:
    logits = model(batch.tokens.flatten(0, 1))  # [A B, T, V]
    return F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), ignore_index=-100)


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("scaling", [None, SCALING])
def test_steps_are_those_of_plain_torch(model, scaling):
    plain = deepcopy(model)
    matrices = [p for name, p in plain.named_parameters() if p.ndim == 2 and "embedding" not in name]
    others = [p for p in plain.parameters() if not any(p is each for each in matrices)]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8)
    step = made(model, scaler=LossScaler(scaling))
    for count, batch in zip(range(5), batches(), strict=False):
        rate = 0.02 * learning_rate_factor(SCHEDULE, count, MAX_STEPS)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.zero_grad()
        loss = mean_loss(plain, batch)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        torch.testing.assert_close(step(batch), loss.detach())
        record = step.state.record
        assert (record["step"], record["tokens"], record["lr"]) == (count + 1, 48 * (count + 1), rate)
        assert record["loss"] == pytest.approx(loss.item(), rel=1e-6)
        assert record["grad_norm"] == pytest.approx(norm.item(), rel=1e-5)
        assert record.get("loss_scale") == (None if scaling is None else 1024.0 if count < 3 else 2048.0)
    torch.testing.assert_close(weights(model), weights(plain), rtol=1e-6, atol=1e-8)
    assert (step.state.completed_steps, step.state.updates) == (5, 5)


def test_every_group_keeps_its_own_base_rate(model):
    groups = [{"params": [p], "lr": 0.02 / (index + 1)} for index, p in enumerate(model.parameters())]
    optimizer = torch.optim.SGD(groups)
    rates = LearningRate(optimizer, SCHEDULE, MAX_STEPS)
    for group in optimizer.param_groups:
        group["lr"] = 7.0  # as a loaded checkpoint would set it
    for updates in range(MAX_STEPS):
        factor = learning_rate_factor(SCHEDULE, updates, MAX_STEPS)
        assert rates.set(updates) == 0.02 * factor
        assert [group["lr"] for group in optimizer.param_groups] == [
            0.02 / (index + 1) * factor for index in range(len(groups))
        ]


def test_one_may_act_between_the_sum_of_gradients_and_the_update(model):
    plain = deepcopy(model)
    batch = next(batches())
    mean_loss(plain, batch).backward()
    seen: dict[str, Tensor] = {}
    given: list[Tensor] = []

    def act(loss: Tensor) -> None:
        assert step.state.record["step"] == 1
        given.append(loss)
        for name, parameter in model.named_parameters():
            seen[name] = parameter.grad / SCALING.init_scale
            parameter.grad.mul_(0.5)

    step = made(model, clip_norm=None, scaler=LossScaler(SCALING), on_gradients=[act])
    step(batch)
    assert step.state.record["loss"] == given[0].item()
    expected = {name: parameter.grad for name, parameter in plain.named_parameters()}
    torch.testing.assert_close(seen, expected)
    norm = torch.stack([gradient.norm() for gradient in expected.values()]).norm()
    assert step.state.record["grad_norm"] == pytest.approx(0.5 * norm.item(), rel=1e-5)
    torch.testing.assert_close({name: 2 * p.grad for name, p in model.named_parameters()}, expected)


@pytest.mark.parametrize("recomputed", [False, True])
def test_auxiliary_losses_of_parts_are_trained_on_and_recorded(model, recomputed):
    """Their mean over micro-batches, though these have different numbers of target tokens; `loss` is without them."""
    plain = deepcopy(model)
    model.auxiliary = AuxiliaryLosses(["size"])
    for block in model.layers.values():
        block.feed_forward.forward = partial(_with_terms, block.feed_forward, block.feed_forward.forward)
    config = ParallelConfig(name="single", activation_checkpoint="full" if recomputed else "none")
    checkpoint_blocks(model.blocks, config)
    step = made(model, clip_norm=None)
    batch = next(batches())
    step(batch)
    terms = []
    for block in plain.layers.values():
        block.feed_forward.register_forward_pre_hook(lambda part, inputs: terms.append(inputs[0].square().mean()))
    loss = mean_loss(plain, batch)
    (loss + 0.01 * sum(terms)).backward()  # micro-batches are of one size, so the mean over all is the mean of means
    record = step.state.record
    assert record["loss"] == pytest.approx(loss.item(), rel=1e-6)
    assert record["auxiliary/size"] == pytest.approx(0.01 * sum(terms).item(), rel=1e-6)
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    torch.testing.assert_close(gradients, {name: parameter.grad for name, parameter in plain.named_parameters()})
    # A graph that outlives the step would keep its activations.
    assert not any("auxiliary_losses" in block.feed_forward.__dict__ for block in model.layers.values())


def _with_terms(part: nn.Module, forward: Any, x: Tensor) -> Tensor:
    part.auxiliary_losses = {"size": 0.01 * x.square().mean()}
    return forward(x)


@pytest.mark.parametrize("floor", [1.0, 1024.0])
def test_an_operand_that_overflowed_skips_the_update_also_at_the_scales_floor(model, floor, monkeypatch):
    scaling = LossScalingConfig(init_scale=1024.0, min_scale=floor, detect="operands")
    step = made(model, scaler=LossScaler(scaling))
    before = weights(model)
    seen = torch.ones((), dtype=torch.bool)  # gradients and loss are finite: the cast saturated
    monkeypatch.setattr(step.parallel.quantization, "take_overflow", lambda: seen)
    step(next(batches()))
    assert step.state.record.get("skipped") is True
    assert math.isfinite(step.state.record["grad_norm"])
    assert (step.state.updates, step.state.skipped_in_a_row, step.scaler.scale) == (0, 1, max(512.0, floor))
    torch.testing.assert_close(weights(model), before, rtol=0, atol=0)
    seen.zero_()
    step(next(batches()))
    assert (step.state.updates, step.state.skipped_in_a_row) == (1, 0)


@pytest.mark.parametrize("min_scale", [1.0, None])
def test_a_non_finite_loss_ends_the_run_at_any_loss_scale(model, min_scale):
    scaling = LossScalingConfig(init_scale=1024.0, min_scale=min_scale)
    step = made(model, scaler=LossScaler(scaling))
    with torch.no_grad():
        model.layers["0"].attention.q_proj.weight[0, 0] = torch.nan
    with pytest.raises(NonFiniteError, match="the loss of step 1 is nan"):
        step(next(batches()))


def test_an_overflow_leaves_weights_moments_and_schedule_as_they_were(model):
    infinite = {2}

    def act(loss: Tensor) -> None:
        if step.state.completed_steps in infinite:
            next(model.parameters()).grad[0, 0] = torch.inf

    step = made(model, scaler=LossScaler(SCALING), on_gradients=[act])
    rates, scales, states = [], [], []
    for _, batch in zip(range(5), batches(), strict=False):
        step(batch)
        rates.append(step.state.record["lr"])
        scales.append(step.state.record["loss_scale"])
        moments = {index: state["exp_avg"].clone() for index, state in enumerate(step.optimizer.state.values())}
        states.append((weights(model), moments))
    assert step.state.record.get("skipped") is None
    assert scales == [1024.0, 1024.0, 1024.0, 512.0, 512.0]
    assert rates[3] == rates[2] > rates[4]
    assert (step.state.completed_steps, step.state.skipped_steps, step.state.updates) == (5, 1, 4)
    torch.testing.assert_close(states[2], states[1], rtol=0, atol=0)
    assert not torch.equal(
        states[3][0]["layers.0.attention.q_proj.weight"], states[2][0]["layers.0.attention.q_proj.weight"]
    )
