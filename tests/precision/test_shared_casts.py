"""One cast of X for all layers that read it, as long as X does not change."""

import pytest
import torch
from torch import nn

from lightning_llm.precision.cast import inductor
from lightning_llm.precision.linear.module import QuantizedLinear
from lightning_llm.precision.linear.plan import LinearPlan
from tests.precision.recipes import load


def layers_of(name, count):
    torch.manual_seed(0)
    plan = LinearPlan.from_recipe(load(name), "eager")
    return [QuantizedLinear(f"layer {n}", nn.Linear(64, 32, bias=False), plan) for n in range(count)]


def tensor(seed):
    return torch.randn(32, 64, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.fixture
def made(monkeypatch):
    """The tensors' shapes and casts, as they are made."""
    seen, right = [], inductor.operand

    def operand(x, *given, **more):
        seen.append(tuple(x.shape))
        return right(x, *given, **more)

    monkeypatch.setattr(inductor, "operand", operand)
    return seen


@pytest.mark.parametrize(("name", "of_dy"), [("mxfp8", 2), ("fp8_current", 1)])
def test_layers_share_the_casts_of_a_common_input(name, of_dy, made):
    layers, x, dy = layers_of(name, 3), tensor(1).requires_grad_(), torch.randn(32, 32).bfloat16()
    alone = []
    for layer in layers:
        copy = x.detach().clone().requires_grad_()
        layer(copy).backward(dy)
        alone.append((copy.grad, layer.weight.grad))
        layer.weight.grad = None
    made.clear()
    outputs = [layer(x) for layer in layers]
    assert made.count((32, 64)) == 1 + 3  # X once, and each weight [32, 64]
    sum((y * dy).sum() for y in outputs).backward()
    assert made.count((32, 64)) == 2 + 6  # once more for wgrad
    assert made.count((32, 32)) == 3 * of_dy
    for layer, (_, of_weight) in zip(layers, alone, strict=True):
        assert torch.equal(layer.weight.grad, of_weight)


def test_a_changed_tensor_is_cast_anew():
    first, second = layers_of("mxfp8", 2)
    x = tensor(1)
    with torch.no_grad():
        first(x)
        x.mul_(-3)
        assert torch.equal(second(x), second(x.clone()))
        for seed in range(20):  # reuses the memory of the previous tensor
            y = second(tensor(seed))
            assert torch.equal(y, second(tensor(seed).clone()))
            del y


def test_tensors_changed_by_compiled_kernels_are_cast_again():
    """Inductor's C++ reuses a buffer without changing its version: `buf4 = buf0; del buf0  # reuse`."""
    (layer,), buffer, later = layers_of("mxfp8", 1), tensor(1).float(), tensor(2).float()
    call = torch.ops.lightning_llm.quantized_linear.default
    with torch.no_grad():
        call(buffer, layer.weight, None, None, layer._number, False, False)
        before = buffer._version
        buffer.numpy()[:] = later.numpy()
        assert buffer._version == before
        got = call(buffer, layer.weight, None, None, layer._number, False, False)
        assert torch.equal(got, call(later, layer.weight, None, None, layer._number, False, False))


def test_delayed_scales_take_the_amax_of_a_shared_input_once(monkeypatch):
    taken, right = [], inductor.tensor_amax("eager")

    def amax(x):
        taken.append(tuple(x.shape))
        return right(x)

    monkeypatch.setattr(inductor, "tensor_amax", lambda _: amax)
    layers, x = layers_of("fp8_delayed", 3), tensor(1).requires_grad_()
    for layer in layers:
        layer(x)
    assert len(taken) == 1 + 3  # X once, and each weight


def test_an_observer_sees_each_layers_cast():
    layers, x, seen = layers_of("mxfp8", 2), tensor(1), []
    for layer in layers:
        layer.observe = lambda cast: seen.append(cast.slot)
        layer(x)
    assert seen == ["fprop.x", "fprop.w"] * 2
