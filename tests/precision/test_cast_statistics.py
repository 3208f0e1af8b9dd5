"""The sums over a cast against float64 by the definitions, element by element and block by block."""

import math

import numpy as np
import pytest
import torch

from lightning_llm.config.schema.precision import CastConfig, PrecisionConfig
from lightning_llm.precision.linear.autograd import quantized_linear
from lightning_llm.precision.linear.plan import KEY_COUNT, LinearPlan
from lightning_llm.precision.linear.statistics import SUMS, cast_sums, figures
from tests.precision.recipes import RECIPES, load, sample
from tests.precision.reference import LARGEST


def casts_seen(recipe, x, weight, dy, scales=None):
    """Return the reports to an observer during forward and backward of one linear."""
    seen = []
    plan = LinearPlan({**LinearPlan.from_recipe(recipe, "eager").casts}, "eager", observe=seen.append)
    x = x.clone().requires_grad_()
    y = quantized_linear(x, weight.clone().requires_grad_(), None, plan, torch.arange(KEY_COUNT), scales)
    y.backward(dy)
    return seen


def tensors(spread=6.0):
    generator = torch.Generator().manual_seed(0)

    def wide(*shape):
        exponents = spread * torch.randn(*shape, generator=generator)
        return (torch.randn(*shape, generator=generator) * torch.exp2(exponents)).bfloat16()

    x, weight, dy = wide(64, 128), wide(192, 128).float(), wide(64, 192) * 1e-6
    x[:32, :32] = 0
    return x, weight, dy


@pytest.mark.parametrize("name", sample([name for name in RECIPES if load(name).quantizes]))
def test_sums_are_those_of_the_definitions(name):
    scales = torch.tensor([3.0, 5.0, 1e5])
    for seen in casts_seen(load(name), *tensors(), scales):
        x = seen.rounded.detach().double().numpy()
        q = seen.operand.dequantized().double().numpy()
        sums, span = cast_sums(seen)
        got = dict(zip(SUMS, sums.tolist(), strict=True))
        assert got["elements"] == x.size
        assert got["non_zero"] == np.count_nonzero(x)
        assert got["underflowed"] == np.count_nonzero((x != 0) & (q == 0))
        assert got["non_finite"] == 0
        assert got["signal"] == pytest.approx((x**2).sum(), rel=1e-5)
        assert got["noise"] == pytest.approx(((q - x) ** 2).sum(), rel=1e-5)
        assert got["magnitude"] == pytest.approx(np.abs(x).sum(), rel=1e-6)
        assert got["drift"] == pytest.approx((np.sign(x) * (q - x)).sum(), abs=1e-6 * np.abs(x).sum())
        clipped, exponents = by_blocks(x, seen)
        assert got["saturated"] == clipped
        assert span.tolist() == pytest.approx([min(exponents), max(exponents)], abs=1e-5)


def by_blocks(x, seen):
    """Return how many elements lie beyond the format's range, and log2 of every scale of a block with content."""
    multiplier = seen.scaled.multiplier.double().numpy().reshape(-1)
    rows, columns = x.shape if seen.cast.block_size is None else seen.cast.block_size
    columns = columns or x.shape[seen.axis]
    if seen.axis == 0 and seen.cast.block != "tensor":
        rows, columns = columns, rows
    clipped, exponents, index = 0, [], 0
    for top in range(0, x.shape[0], rows):
        for left in range(0, x.shape[1], columns):
            block, m = np.abs(x[top : top + rows, left : left + columns]), multiplier[index]
            index += 1
            if m < 3e38:
                clipped += np.count_nonzero(block * m > LARGEST[seen.cast.format] * (1 + 1e-6))
            if block.any() and m < 3e38:
                exponents.append(-math.log2(m))
    assert index == multiplier.size
    return clipped, exponents


def test_some_recipes_saturate_and_some_underflow():
    of = {name: [cast_sums(s)[0] for s in casts_seen(load(name), *tensors())] for name in ("mxfp8_ocp", "fp8_current")}
    assert sum(sums[SUMS.index("saturated")] for sums in of["mxfp8_ocp"]) > 0
    assert all(sums[SUMS.index("saturated")] == 0 for sums in of["fp8_current"])
    assert all(sums[SUMS.index("underflowed")] > 0 for sums in of["fp8_current"])


@pytest.mark.parametrize("name", ["mxfp8", "mxfp8_ocp", "fp8_current", "nvfp4"])
def test_non_finite_elements_are_counted_and_excluded(name):
    x, weight, dy = tensors(1.0)
    x[40, 3], x[50, 7] = math.nan, math.inf
    seen = casts_seen(load(name), x, weight, dy)[0]
    sums = dict(zip(SUMS, cast_sums(seen)[0].tolist(), strict=True))
    assert sums["non_finite"] == 2
    usable = torch.isfinite(seen.rounded) & torch.isfinite(seen.operand.dequantized())
    assert sums["elements"] == usable.sum()
    kept = seen.rounded.detach().double()[usable]
    assert sums["signal"] == pytest.approx((kept**2).sum().item(), rel=1e-5)
    # NVFP4's tensor scale of Inf leaves nothing of the whole tensor
    assert ("sqnr_db" in figures(sums, 0.0, 0.0)) == (name != "nvfp4")


def test_nearest_rounding_of_a_tie_pattern_leans_and_stochastic_does_not():
    """2.5 is between E2M1's 2 and 3: ties to even always give 2, stochastic rounding in half of the cases."""
    x = torch.full((256, 64), 2.5)
    x[:, ::32] = 4.0  # fixes the scale of every block at 1

    def bias(**keys):
        cast = CastConfig(format="e2m1", block="1x32", scale="e8m0_floor", **keys)
        recipe = PrecisionConfig.model_validate(
            {"name": "one", "compute_dtype": "bf16", "fprop": {"x": cast.model_dump()}}
        )
        seen = casts_seen(recipe, x.bfloat16(), torch.ones(8, 64), torch.ones(256, 8).bfloat16())[0]
        sums = dict(zip(SUMS, cast_sums(seen)[0].tolist(), strict=True))
        return figures(sums, 0.0, 0.0)["bias"], sums

    even, sums = bias(rounding="even")
    assert even == pytest.approx(-0.5 * 31 / (2.5 * 31 + 4), rel=1e-6)
    chance, _ = bias(rounding="stochastic")
    error = 0.5 * math.sqrt(sums["elements"]) / sums["magnitude"]  # of a coin of half a step
    assert abs(chance) < 4 * error < abs(even) / 10


def test_every_cast_is_seen_once():
    for name in ("mxfp8", "quartet", "mxfp4_sr_fp8"):
        recipe = load(name)
        seen = casts_seen(recipe, *tensors(1.0), torch.ones(3))
        quantized = [slot for slot, cast in LinearPlan.from_recipe(recipe, "eager").casts.items() if cast.quantizes]
        assert sorted(each.slot for each in seen) == sorted(quantized)
