"""Products of 16-bit numbers through fp32: against float64 and torch's own; tensors saved for backward."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from lightning_llm.linalg import gemm

WIDENED = [torch.bfloat16, torch.float16]
HALF_UNIT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}  # of 8 and 11 bits, rounded to nearest
SUBNORMAL = 2.0**-25  # half of fp16's smallest number
FP32_SUM = 2.0**-22


@pytest.fixture(autouse=True)
def widened(monkeypatch):
    """Behave like a CPU without 16-bit products."""
    monkeypatch.setattr(gemm, "widened", frozenset(WIDENED))


def numbers(*shape: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def rounding(dtype: torch.dtype, exact: torch.Tensor, magnitudes: torch.Tensor) -> torch.Tensor:
    """Return the allowed error in `dtype` of the sum `exact`, with `magnitudes` in total: rounded once, fp32 sums."""
    return HALF_UNIT[dtype] * exact.abs() + FP32_SUM * magnitudes + SUBNORMAL


@given(st.sampled_from(WIDENED), st.integers(1, 40), st.integers(1, 300), st.integers(1, 40), st.integers(0, 2**16))
def test_sums_are_rounded_once(dtype, rows, depth, columns, seed):
    a, b = numbers(rows, depth, seed=seed, dtype=dtype), numbers(depth, columns, seed=seed + 1, dtype=dtype)
    exact, magnitudes = a.double() @ b.double(), a.double().abs() @ b.double().abs()
    made = gemm.product(a, b)
    assert made.dtype == dtype
    assert ((made.double() - exact).abs() <= rounding(dtype, exact, magnitudes) * 1.01).all()


@pytest.mark.parametrize("dtype", WIDENED)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("chunk_elements", [1 << 22, 1000])  # at once; ten rows, the last chunk with eight
def test_a_linear_layer_and_its_gradients_are_those_of_float64(dtype, bias, chunk_elements, monkeypatch):
    monkeypatch.setattr(gemm, "CHUNK_ELEMENTS", chunk_elements)
    shapes = [(2, 24, 96), (80, 96), (2, 24, 80), (80,)]
    x, w, dy, b = (numbers(*shape, seed=seed, dtype=dtype) for seed, shape in enumerate(shapes))
    b = b if bias else None
    given_ = [each.clone().requires_grad_() for each in (x, w, b) if each is not None]
    y = gemm.linear(*given_)
    found = [y, *torch.autograd.grad(y, given_, dy)]
    wide = [each.double().requires_grad_() for each in (x, w, b) if each is not None]
    exact = F.linear(*wide)
    wanted = [exact, *torch.autograd.grad(exact, wide, dy.double())]
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.dtype == dtype
        assert torch.allclose(ours.double(), theirs, rtol=HALF_UNIT[dtype] * 1.01, atol=1e-4)


def test_one_row_is_a_linear_layers_too():
    x, w = numbers(96, seed=0), numbers(80, 96, seed=1)
    assert gemm.linear(x, w).shape == (80,)
    exact = w.double() @ x.double()
    assert torch.allclose(gemm.linear(x, w).double(), exact, rtol=HALF_UNIT[x.dtype] * 1.01, atol=1e-4)


@pytest.mark.parametrize("dtype", WIDENED)
def test_no_copy_is_kept_for_the_backward_pass(dtype):
    def kept(linear) -> list[tuple[torch.Size, torch.dtype]]:
        found = []
        x, w = (numbers(*shape, seed=0, dtype=dtype).requires_grad_() for shape in ((4, 8, 32), (16, 32)))
        with torch.autograd.graph.saved_tensors_hooks(lambda t: found.append(t) or t, lambda t: t):
            linear(x, w).sum().backward()
        return sorted((each.dtype, each.numel()) for each in found)

    assert kept(gemm.linear) == kept(F.linear)


@pytest.mark.parametrize("dtype", WIDENED)
def test_tensors_without_requires_grad_get_no_gradient(dtype):
    x, w = numbers(8, 32, seed=0, dtype=dtype), numbers(16, 32, seed=1, dtype=dtype).requires_grad_()
    gemm.linear(x, w).sum().backward()
    assert x.grad is None
    assert torch.equal(w.grad, x.float().sum(0).expand(16, -1).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_other_numbers_are_left_to_torch(dtype):
    x, w = numbers(8, 32, seed=0, dtype=dtype), numbers(16, 32, seed=1, dtype=dtype)
    assert torch.equal(gemm.linear(x, w), F.linear(x, w))
    assert torch.equal(gemm.product(x, w.t()), x @ w.t())


def test_it_can_be_left_to_torch():
    x, w = numbers(8, 32, seed=0), numbers(16, 32, seed=1)
    with gemm.unwidened():
        assert torch.equal(gemm.linear(x, w), F.linear(x, w))
    assert gemm.widened == set(WIDENED)
