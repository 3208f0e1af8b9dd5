"""The GEMM under fp32 block scales: partial sums per block, to the bit where they are exact, and against float64."""

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_llm.config.schema.precision import CastConfig
from lightning_llm.linalg import gemm as products
from lightning_llm.precision.cast import inductor
from lightning_llm.precision.cast.quantize import BlockScales, Operand
from lightning_llm.precision.linear import operands
from lightning_llm.precision.linear.operands import multiply

ROW, SQUARE = CastConfig(format="e4m3", block="1x128"), CastConfig(format="e4m3", block="128x128")
NARROW, POWER = CastConfig(format="e4m3", block="1x32"), CastConfig(format="e4m3", block="1x32", scale="e8m0_ceil")
M, N = 24, 40


def operand_of_integers(rows, depth, width, axis, generator):
    """Codes are small integers, so partial sums are exact; the scales are any fp32 numbers."""
    codes = torch.randint(-8, 9, (rows, depth), generator=generator).bfloat16()
    scales = torch.rand(rows, -(-depth // width), generator=generator) + 0.1
    made = Operand(codes, None, None, BlockScales(scales, width, 1))
    return made if axis == 1 else made.flipped


def by_the_specification(a, b, width):
    """acc = fma(partial * a's scale, b's scale, acc) per block; float64 holds the fma's product and sum."""
    left, right = a.tensor.double().numpy(), b.tensor.double().numpy()
    total = np.zeros((len(left), right.shape[1]), np.float32)
    for start in range(0, left.shape[1], width):
        partial = (left[:, start : start + width] @ right[start : start + width]).astype(np.float32)
        scaled = partial * a.blocks.scales.numpy()[:, start // a.blocks.width, None]
        scale = b.blocks.scales.numpy()[None, start // b.blocks.width]
        total = (scaled.astype(np.float64) * scale + total).astype(np.float32)
    return torch.from_numpy(total)


@pytest.mark.parametrize(("depth", "left", "right"), [(384, 128, 128), (300, 128, 128), (256, 32, 128)])
def test_partial_sums_are_scaled_in_the_order_of_the_blocks(depth, left, right):
    generator = torch.Generator().manual_seed(0)
    a = operand_of_integers(M, depth, left, 1, generator)
    b = operand_of_integers(N, depth, right, 0, generator)
    product = multiply(a, b, torch.float32, "eager")
    assert torch.equal(product, by_the_specification(a, b, min(left, right)))
    assert not torch.equal(product, a.dequantized() @ b.dequantized())  # the sum is not that of one GEMM


@pytest.mark.parametrize(("x_cast", "w_cast"), [
    (ROW, SQUARE), (ROW, ROW), (NARROW, SQUARE), (ROW, POWER), (POWER, SQUARE), (ROW, CastConfig(format="e4m3")),
    (ROW, CastConfig()),
])  # fmt: skip
def test_products_agree_with_float64(x_cast, w_cast):
    """Ten roundings of fp32 at most; a second operand may have any other kind of scale, or none."""
    generator = torch.Generator().manual_seed(1)
    depth = 300
    x = (torch.randn(M, depth, generator=generator) * torch.logspace(-2, 2, depth)).bfloat16()
    w, bias = torch.randn(N, depth, generator=generator).bfloat16(), torch.randn(N, generator=generator)
    made = []
    for tensor, cast in ((x, x_cast), (w, w_cast)):
        made.append(inductor.operand(tensor, cast, 1, "eager") if cast.quantizes else Operand(tensor))
    left, right = (each.dequantized().double() for each in made)
    product = multiply(made[0], made[1].flipped, torch.float32, "eager", bias)
    bound = 10 * 2.0**-24 * (left.abs() @ right.abs().T + bias.abs())
    assert ((product - (left @ right.T + bias)).abs() <= bound).all()
    error = (left - x.double()).abs().sum()
    assert 0 < error <= 0.07 * x.double().abs().sum()


def test_a_factor_multiplies_the_fp32_sum_where_the_device_returns_it(monkeypatch):
    """Rounded once: exactly the bf16 number nearest to sum x factor. On a CPU some elements are rounded twice."""
    generator = torch.Generator().manual_seed(2)
    a, b = (torch.randint(-15, 16, shape, generator=generator).bfloat16() for shape in ((M, 64), (64, N)))
    factor = torch.tensor(0.3)
    once = ((a.double() @ b.double()).float() * factor).bfloat16()  # sums of integers are exact
    assert not torch.equal(multiply(Operand(a, factor), Operand(b), torch.bfloat16, "eager"), once)
    mm = torch.mm
    monkeypatch.setattr(torch, "mm", lambda left, right, out_dtype: mm(left.to(out_dtype), right.to(out_dtype)))
    for module in (products, operands):
        monkeypatch.setattr(module, "returns_fp32", lambda device: True)
    assert torch.equal(multiply(Operand(a, factor), Operand(b), torch.bfloat16, "eager"), once)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_cuda_is_asked_for_fp32_sums(dtype):
    with FakeTensorMode():
        a, b = (torch.empty(shape, device="cuda", dtype=dtype) for shape in ((32, 64), (64, 16)))
        assert products.fp32_product(a, b).dtype == torch.float32
        assert multiply(Operand(a), Operand(b), torch.float32, "eager").dtype == torch.float32
        assert multiply(Operand(a, torch.ones((), device="cuda")), Operand(b), dtype, "eager").dtype == dtype
