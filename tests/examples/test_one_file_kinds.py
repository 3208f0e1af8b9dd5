"""Kinds of one file each, to which docs/howto/extend.md links: their arithmetic against independent references.

`tests/docs/test_extend.py` installs, plans, trains and resumes them.
"""

import importlib
import math
import sys

import pytest
import torch
from torch import nn

from lightning_llm.config.schema.model import NORMS, ModelConfig
from lightning_llm.config.schema.optim import OPTIMIZERS, SCHEDULES
from lightning_llm.model.spec import ForwardPass
from lightning_llm.optim.kinds import learning_rate_factor
from lightning_llm.optim.matrices import on_one_rank
from tests.model.model_shapes import llama


@pytest.fixture
def registered(monkeypatch):
    """Register the three examples for one test, as an entry point does at the start of a process."""
    for registry in (OPTIMIZERS, SCHEDULES, NORMS):
        monkeypatch.setattr(registry, "_kinds", {name: registry[name] for name in registry})
        monkeypatch.setattr(registry, "_in_use", False)
    for name in ("lion", "wsd_sqrt", "layernorm_no_bias"):
        monkeypatch.delitem(sys.modules, f"tests.examples.{name}", raising=False)
        importlib.import_module(f"tests.examples.{name}")


def test_lion_follows_the_published_rule_in_float64(registered):
    rate, decay, beta1, beta2 = 0.01, 0.3, 0.8, 0.95
    config = OPTIMIZERS["lion"](learning_rate=rate, weight_decay=decay, beta1=beta1, beta2=beta2)
    generator = torch.Generator().manual_seed(0)
    matrix, bias = torch.randn(7, 5, generator=generator), torch.randn(7, generator=generator)
    named = {"layers.0.x.weight": nn.Parameter(matrix.clone()), "layers.0.x.bias": nn.Parameter(bias.clone())}
    optimizer = config.build(named.items(), on_one_rank)
    expected = {name: each.detach().double() for name, each in named.items()}
    momentum = {name: torch.zeros_like(each) for name, each in expected.items()}
    for _ in range(20):
        for name, parameter in named.items():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
            gradient = parameter.grad.double()
            # Algorithm 2 of Chen et al. 2023, arXiv 2302.06675; a bias does not decay here.
            direction = torch.sign(beta1 * momentum[name] + (1 - beta1) * gradient)
            shrunk = decay * expected[name] if name.endswith("weight") else 0.0
            expected[name] = expected[name] - rate * (direction + shrunk)
            momentum[name] = beta2 * momentum[name] + (1 - beta2) * gradient
        optimizer.step()
    for name, parameter in named.items():
        torch.testing.assert_close(parameter.detach().double(), expected[name], rtol=1e-5, atol=1e-6)
        kept = optimizer.state[parameter]["momentum"]
        torch.testing.assert_close(kept.double(), momentum[name], rtol=1e-5, atol=1e-6)


def test_wsd_sqrt_follows_its_formula(registered):
    schedule = SCHEDULES["wsd_sqrt"](warmup_steps=10, decay_fraction=0.25, final_factor=0.1)
    factors = [learning_rate_factor(schedule, updates, 200) for updates in range(200)]
    assert factors[:10] == [(updates + 1) / 10 for updates in range(10)]
    assert factors[10:150] == [1.0] * 140
    # Haegele et al. 2024, arXiv 2405.18392, section 3: 1 - sqrt((n - (N - N_decay)) / N_decay), here above a floor
    assert factors[150:] == pytest.approx([0.1 + 0.9 * (1 - math.sqrt((n - 150) / 50)) for n in range(151, 201)])


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_layernorm_without_bias_is_torchs_in_float64(registered, dtype, tolerance):
    model = ModelConfig.model_validate({**llama().model_dump(), "bias": True, "norm_eps": 1e-3})
    kind = NORMS["layernorm_no_bias"]()
    module = kind.build_for(model, 24)
    assert [(name, each.tolist()) for name, each in module.named_parameters()] == [("weight", [1.0] * 24)]
    assert [(each.name, each.shape) for each in kind.parameters_for(model, 24, "replicate")] == [("weight", (24,))]
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        module.weight.copy_(torch.randn(24, generator=generator))
    x = (3 * torch.randn(5, 24, generator=generator) + 2).to(dtype).requires_grad_()
    weight, wide = (each.detach().double().requires_grad_() for each in (module.weight, x))
    expected = torch.nn.functional.layer_norm(wide, (24,), weight, None, 1e-3)
    downstream = torch.randn(5, 24, generator=generator)
    module(x).backward(downstream.to(dtype))
    expected.backward(downstream.to(dtype).double())
    found = (module(x.detach()), x.grad, module.weight.grad)
    for ours, theirs in zip(found, (expected, wide.grad, weight.grad), strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=tolerance, atol=tolerance)


def test_layernorm_without_bias_keeps_what_it_declares(registered):
    model, kept = llama(), []
    kind = NORMS["layernorm_no_bias"]()
    module, x = kind.build_for(model, 24), torch.randn(5, 24, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        module(x)
    of_tokens = sum(each.nbytes for each in kept if each.shape[0] == 5)
    declared = kind.saved_for(24, ForwardPass(width=4, sequence_length=5))
    assert of_tokens == 5 * sum(each.elements * each.width for each in declared)
