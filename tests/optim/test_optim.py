"""Decay groups, the schedules at their landmarks, and clipping against torch in float64."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lightning_llm.config.schema import OptimConfig, ParallelConfig, ScheduleConfig
from lightning_llm.optim.optimizer import build_optimizer, decay_groups, initialise_state
from lightning_llm.optim.schedule import learning_rate_factor
from lightning_llm.parallel.grad_norm import clip_gradients
from lightning_llm.parallel.layout import Layout
from lightning_llm.plan.degrees import Degrees

ALONE = Layout(ParallelConfig(name="single"), Degrees())
PARAMETERS = [
    ("embedding.weight", nn.Parameter(torch.ones(4, 2))),
    ("layers.0.attention.q_proj.weight", nn.Parameter(torch.ones(2, 2))),
    ("layers.0.attention.q_proj.bias", nn.Parameter(torch.ones(2))),
    ("layers.0.attention_norm.weight", nn.Parameter(torch.ones(2))),
]


def config(**values: object) -> OptimConfig:
    return OptimConfig(name="adamw", learning_rate=0.1, **values)


@pytest.mark.parametrize(
    ("key", "names"),
    [
        (None, {"layers.0.attention.q_proj.weight"}),
        ("decay_norms", {"layers.0.attention.q_proj.weight", "layers.0.attention_norm.weight"}),
        ("decay_biases", {"layers.0.attention.q_proj.weight", "layers.0.attention.q_proj.bias"}),
        ("decay_embeddings", {"layers.0.attention.q_proj.weight", "embedding.weight"}),
    ],
)
def test_what_is_decayed(key, names):
    decayed, undecayed = decay_groups(PARAMETERS, config(**({key: True} if key else {})))
    assert {name for name, _ in decayed} == names
    assert len(decayed) + len(undecayed) == len(PARAMETERS)


def test_the_update_is_adamw_in_float64():
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(3, 5, generator=generator)
    gradients = [torch.randn(3, 5, generator=generator) for _ in range(4)]
    parameter = nn.Parameter(start.clone())
    optimizer = build_optimizer(
        [("layers.0.x.weight", parameter)], config(beta1=0.8, beta2=0.9, eps=1e-6, weight_decay=0.3)
    )
    expected, first, second = start.double(), torch.zeros(3, 5).double(), torch.zeros(3, 5).double()
    for t, gradient in enumerate(gradients, 1):
        parameter.grad = gradient.clone()
        optimizer.step()
        first = 0.8 * first + 0.2 * gradient
        second = 0.9 * second + 0.1 * gradient.double() ** 2
        expected = expected * (1 - 0.1 * 0.3)
        expected -= 0.1 * (first / (1 - 0.8**t)) / ((second / (1 - 0.9**t)).sqrt() + 1e-6)
    torch.testing.assert_close(parameter.detach().double(), expected, rtol=1e-5, atol=1e-6)


def test_schedules_at_their_landmarks():
    def factors(name: str) -> list[float]:
        schedule = ScheduleConfig(name=name, warmup_steps=4, decay_fraction=0.25, final_factor=0.1)
        return [learning_rate_factor(schedule, updates, 20) for updates in range(25)]

    for name in ("constant", "cosine", "wsd"):
        assert factors(name)[:4] == [0.25, 0.5, 0.75, 1.0]
    assert factors("constant")[4:] == [1.0] * 21
    assert factors("wsd")[4:15] == [1.0] * 11
    assert factors("wsd")[15:20] == pytest.approx([0.82, 0.64, 0.46, 0.28, 0.1])
    assert factors("cosine")[11] == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi / 2)) / 2)
    for name in ("cosine", "wsd"):
        assert factors(name)[19:] == pytest.approx([0.1] * 6)


@given(
    name=st.sampled_from(["constant", "cosine", "wsd"]),
    warmup=st.integers(0, 30),
    total=st.integers(31, 200),
    final=st.floats(0, 1),
    fraction=st.floats(0, 1),
)
def test_schedules_rise_then_never_rise_again(name, warmup, total, final, fraction):
    schedule = ScheduleConfig(
        name=name, warmup_steps=warmup, total_steps=total, decay_fraction=fraction, final_factor=final
    )
    factors = [learning_rate_factor(schedule, updates, 10**6) for updates in range(total + 5)]
    assert all(0 <= factor <= 1 for factor in factors)
    assert all(b >= a for a, b in pairwise(factors[:warmup]))
    assert all(b <= a + 1e-12 for a, b in pairwise(factors[warmup:]))


def test_clipping_against_torch_in_float64():
    generator = torch.Generator().manual_seed(1)
    shapes = [(3, 4), (7,), (2, 2, 2)]
    gradients = [torch.randn(shape, generator=generator) * 100 for shape in shapes]
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
    for max_norm in (None, 1e9, 1.0):
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.clone()
        norm = clip_gradients(parameters, max_norm, ALONE)
        expected = torch.cat([gradient.flatten().double() for gradient in gradients]).norm().item()
        assert norm == np.float32(expected)
        after = torch.cat([parameter.grad.flatten().double() for parameter in parameters]).norm().item()
        assert after == pytest.approx(min(expected, max_norm or expected), rel=1e-6)


def test_clipping_leaves_what_is_within_untouched_bit_for_bit():
    parameter = nn.Parameter(torch.zeros(5))
    parameter.grad = torch.tensor([0.1, -0.2, 0.3, 0.0, 1e-30])
    before = parameter.grad.clone()
    clip_gradients([parameter], 1.0, ALONE)
    assert torch.equal(parameter.grad, before)


def test_a_state_that_was_looked_at_before_the_first_step_changes_nothing():
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    def weights(looked_at: bool) -> torch.Tensor:
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 4)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
        if looked_at:
            initialise_state(optimizer)
            assert {float(state["step"]) for state in optimizer.state.values()} == {0.0}
            assert optimizer.param_groups[0]["lr"] == 0.1
            get_optimizer_state_dict(model, optimizer)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).square().sum().backward()
            optimizer.step()
        return model.weight.detach()

    assert torch.equal(weights(looked_at=True), weights(looked_at=False))
