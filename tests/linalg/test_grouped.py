"""Grouped products: one per expert, one grouped GEMM, and autograd agree bit for bit."""

import pytest
import torch
import torch.nn.functional as F

from lightning_llm.linalg.grouped import GroupedLinear, Groups, grouped_mm, takes_grouped_mm

SIZES = [5, 0, 17, 1]


def layer_and_rows(dtype: torch.dtype) -> tuple[GroupedLinear, torch.Tensor, Groups]:
    torch.manual_seed(0)
    layer = GroupedLinear(len(SIZES), 32, 48).to(dtype)
    torch.nn.init.normal_(layer.weight)
    x = torch.randn(sum(SIZES), 32, dtype=dtype, requires_grad=True)
    return layer, x, Groups(torch.tensor(SIZES), sum(SIZES))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_each_group_is_multiplied_by_its_own_matrix(dtype):
    layer, x, groups = layer_and_rows(dtype)
    gradient = torch.randn(sum(SIZES), 48, dtype=dtype)
    layer(x, groups).backward(gradient)
    found = x.grad, layer.weight.grad
    x.grad = layer.weight.grad = None
    parts = zip(x.split(SIZES), layer.weight.view(4, 48, 32), strict=True)
    expected = torch.cat([F.linear(rows, weight) for rows, weight in parts])
    assert torch.equal(layer(x, groups), expected)
    expected.backward(gradient)
    assert torch.equal(found[0], x.grad)
    assert torch.equal(found[1], layer.weight.grad)
    assert found[1].view(4, 48, 32)[1].eq(0).all()  # no rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_grouped_gemm_has_the_same_bits(dtype):
    """The call that CUDA makes also runs on a CPU."""
    layer, x, groups = layer_and_rows(dtype)
    gradient, results = torch.randn(sum(SIZES), 48, dtype=dtype), []
    for y in (layer(x, groups), grouped_mm(x, layer.weight.view(4, 48, 32), groups)):
        x.grad = layer.weight.grad = None
        y.backward(gradient)
        results.append((y, x.grad, layer.weight.grad))
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)
    assert not takes_grouped_mm(x, 48)  # only on CUDA


def test_an_unrounded_gradient_is_the_fp32_sum():
    layer, x, groups = layer_and_rows(torch.bfloat16)
    layer.float()
    layer.rounds_wgrad = False
    gradient = torch.randn(sum(SIZES), 48, dtype=torch.bfloat16)
    layer(x, groups).backward(gradient)
    pairs = zip(x.split(SIZES), gradient.split(SIZES), strict=True)
    expected = torch.cat([dy.float().t() @ rows.float() for rows, dy in pairs])
    torch.testing.assert_close(layer.weight.grad, expected.detach(), rtol=1e-6, atol=1e-6)
    assert not torch.equal(layer.weight.grad, layer.weight.grad.bfloat16().float())
