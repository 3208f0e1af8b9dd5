"""Formats by their grid, rows, blocks of any size, even exponents and headroom, against tables and float64."""

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from lightning_llm.__main__ import main
from lightning_llm.config.schema.number_formats import NUMBER_FORMATS
from lightning_llm.config.schema.precision import CastConfig, PrecisionConfig
from lightning_llm.precision.cast import inductor
from lightning_llm.precision.cast.quantize import quantize
from lightning_llm.precision.linear.autograd import quantized_linear
from lightning_llm.precision.linear.grouped import row_multiple
from lightning_llm.precision.linear.plan import LinearPlan
from lightning_llm.precision.linear.weight_rules import kept_bytes

FLOATS = [fmt for fmt in NUMBER_FORMATS.values() if not fmt.integer]


def cast_of(**keys):
    return CastConfig.model_validate(keys)


def grid_of(fmt):
    keys = {"mantissa": fmt.mantissa_bits, "min_exponent": fmt.min_exponent, "max_exponent": fmt.max_exponent}
    return keys | {"max": fmt.max}


def every_bf16():
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    return x[torch.isfinite(x)].reshape(1, -1)


@pytest.mark.parametrize("fmt", FLOATS, ids=lambda fmt: fmt.name)
def test_a_format_by_its_grid_is_the_format_of_that_name(fmt):
    x = every_bf16()
    named, given = (quantize(x, cast_of(format=each, scale="unit")) for each in (fmt.name, grid_of(fmt)))
    assert torch.equal(given.dequantized, named.dequantized)


def test_a_grid_has_a_name_that_reads_back_and_a_hash_of_its_own():
    grid = {"mantissa": 1, "min_exponent": 0, "max_exponent": 2}
    recipes = [
        PrecisionConfig.model_validate({"name": "own", "compute_dtype": "bf16", "fprop": {"x": {"format": each}}})
        for each in (grid, grid | {"max": 6}, grid | {"max": 4}, "e2m1")
    ]
    assert recipes[0] == recipes[1] == PrecisionConfig.model_validate(recipes[0].model_dump(mode="json"))
    assert len({recipe.recipe_hash for recipe in recipes}) == 3
    assert recipes[0].fprop.x.number_format.code_bits == 4


GRID = {"mantissa": 1, "min_exponent": 0, "max_exponent": 2}


@pytest.mark.parametrize(("keys", "message"), [
    ({"format": GRID | {"mantissa": 8}}, r"format.mantissa=8: must be 0 to 7 bits"),
    ({"format": GRID | {"min_exponent": 3}}, r"min_exponent=3, max_exponent=2: must be -60 <= min_exponent <="),
    ({"format": "grid_m8_e0_2_max6.0"}, r"format.mantissa=8: must be 0 to 7 bits"),
    ({"format": "grid_m1_e3_2_max6.0"}, r"min_exponent=3, max_exponent=2: must be"),
    ({"format": "grid_m1_e0_2_max99.0"}, r"format.max=99: must be a multiple of 2 from 4 to 6"),
    ({"format": "grid_m1_e0_2_max6"}, r"format=grid_m1_e0_2_max6: is another spelling of grid_m1_e0_2_max6.0"),
    ({"format": "grid_m1_e0_2_max6.0.0"}, r"must be 'high', 'e4m3'"),
    ({"format": "high", "headroom": 0.9, "amax": "row"}, r"format: high takes no headroom, amax. Set a format"),
    ({"format": GRID | {"max": 5}}, r"format.max=5: must be a multiple of 2 from 4 to 6"),
    ({"format": GRID | {"max": 8}}, r"format.max=8: must be a multiple of 2 from 4 to 6"),
    ({"format": GRID | {"bias": 1}}, r"keys mantissa, min_exponent, max_exponent, max; unknown: bias"),
    ({"format": {"mantissa": 1}}, r"missing: min_exponent, max_exponent"),
    ({"format": GRID | {"mantissa": 1.5}}, r"format.mantissa=1.5: must be an integer"),
    ({"format": "e2m1", "block": "1x0"}, r"must be 'tensor', 'row'"),
    ({"format": "e2m1", "block": "1x8192"}, r"up to 4096"),
    ({"format": "e2m1", "block": "row", "scale": "unit"}, r"unit needs block: tensor, and block is row"),
    ({"format": "e2m1", "block": "1x32", "scale": "e8m0_floor", "headroom": 0.9},
     r"headroom needs a scale of e8m0_ceil, eden, fp32, power_of_two, two_level_e4m3, and scale is e8m0_floor"),
    ({"format": "e2m1", "block": "1x16", "scale": "eden", "rounding": "stochastic"}, r"eden draws random bits itself"),
    ({"format": "e2m1", "block": "1x16", "scale": "two_level_e4m3", "rounding": "stochastic", "candidates": {}},
     r"candidates are compared by their errors, and rounding is stochastic"),
    ({"format": "e2m1", "block": "16x16", "scale": "two_level_e4m3", "amax": "row"},
     r"amax: row needs blocks of one row"),
    ({"format": "e2m1", "block": "1x16", "scale": "two_level_e4m3", "headroom": 1.2},
     r"headroom=1.2: must be at most 1"),
    ({"format": "e2m1", "block": "1x32", "scale": "e8m0_floor", "prescale": 2.0}, r"less than or equal to 1 "),
    ({"format": "e2m1", "block": "1x32", "scale": "e8m0_floor", "prescale": 1e-40}, r"greater than or equal to 0.125"),
    ({"format": "e4m3", "headroom": 1e-40}, r"greater than or equal to 0.125"),
    ({"format": "e2m1", "block": "1x16", "scale": "eden", "headroom": 1.6}, r"less than or equal to 1.5"),
    ({"format": "e2m1", "block": "1x16", "scale": "two_level_e4m3", "scale_max": 449}, r"less than or equal to 448"),
    ({"format": "e2m1", "block": "1x16", "scale": "two_level_e4m3", "scale_max": 1e-30}, r"or equal to 1 "),
    ({"format": "e2m1", "block": "1x16", "scale": "two_level_e4m3", "candidates": {"factors": [1.0, 1e30]}},
     r"less than or equal to 8"),
    ({"format": "e2m1", "block": "1x16", "scale": "two_level_e4m3", "candidates": {"factors": [1.0, 1.5, 1.0]}},
     r"factors=\[1.0, 1.5, 1.0\]: must differ"),
    ({"format": "e2m1", "clip_gradient": True, "gradient": "clip_mask"}, r"clip_gradient needs scale: quest"),
])  # fmt: skip
def test_spellings_that_mean_nothing_are_refused(keys, message):
    with pytest.raises(ValidationError, match=message):
        cast_of(**keys)


def rowwise(x, axis):
    """torchao's `rowwise` in float64: 448 / amax of each vector along the contraction axis, to a power of two."""
    scale = 2 ** np.floor(np.log2(448 / np.abs(x).max(axis, keepdims=True)))
    codes = torch.from_numpy(x * scale).float().to(torch.float8_e4m3fn).double().numpy()
    return codes / scale


@pytest.mark.parametrize("axis", [0, 1])
def test_rows_are_torchaos_rowwise_fp8(axis):
    x = (torch.randn(48, 80, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 3, 80)).bfloat16()
    made = quantize(x, cast_of(format="e4m3", block="row", scale="power_of_two"), axis)
    assert np.array_equal(made.dequantized.double().numpy(), rowwise(x.double().numpy(), axis))
    assert made.stored_scale.shape == ((48, 1) if axis == 1 else (1, 80))


@pytest.mark.parametrize("block", ["row", "1x24"])
@pytest.mark.parametrize("other", ["tensor", "1x32", "3x20"])
def test_products_of_rows_and_of_any_blocks_are_those_of_the_dequantised_operands(block, other):
    """Scales of partial sums with widths that do not divide each other, and an incomplete last block."""
    generator = torch.Generator().manual_seed(1)
    x, w, dy = (torch.randn(*shape, generator=generator).bfloat16() for shape in ((40, 52), (36, 52), (40, 36)))
    a, b = cast_of(format="int8", block=block), cast_of(format="e4m3", block=other)
    casts = {"fprop.x": a, "fprop.w": b, "dgrad.dy": a, "dgrad.w": b, "wgrad.dy": b, "wgrad.x": a}
    x, w = x.requires_grad_(), w.requires_grad_()
    y = quantized_linear(x, w, None, LinearPlan(casts, "eager"))
    y.backward(dy)
    q = {
        slot: quantize(tensor.detach(), casts[slot], axis).dequantized.double()
        for slot, tensor, axis in (
            ("fprop.x", x, 1), ("fprop.w", w, 1), ("dgrad.dy", dy, 1), ("dgrad.w", w, 0), ("wgrad.dy", dy, 0),
            ("wgrad.x", x, 0),
        )
    }  # fmt: skip
    for found, expected in (
        (y, q["fprop.x"] @ q["fprop.w"].T),
        (x.grad, q["dgrad.dy"] @ q["dgrad.w"]),
        (w.grad, q["wgrad.dy"].T @ q["wgrad.x"]),
    ):
        torch.testing.assert_close(found.double(), expected, rtol=2.0**-7, atol=1e-2)


def test_kept_rows_count_their_scales():
    row = cast_of(format="int8", block="row")
    casts = dict.fromkeys(("fprop.x", "fprop.w", "dgrad.dy", "dgrad.w", "wgrad.dy", "wgrad.x"), row)
    assert kept_bytes(casts, 64, 96) == 2 * 2 * 64 * 96 + 4 * 64 + 4 * 96


@pytest.mark.parametrize("name", ["e2m1", "e2m3", "e3m2", "e4m3", "e5m2"])
def test_even_exponents_are_torchaos(name):
    """Every positive bf16 amax: its exponent after rounding half up to the format's mantissa, less the largest one."""
    fmt = NUMBER_FORMATS[name]
    amax = every_bf16().flatten()
    amax = amax[amax >= 2.0**-120]
    made = quantize(amax[:, None].expand(-1, 32), cast_of(format=name, block="1x32", scale="e8m0_even"))
    wide = amax.double().numpy()
    step = 2.0 ** (np.floor(np.log2(wide)) - fmt.mantissa_bits)
    exponent = np.log2(np.floor(wide / step + 0.5) * step)
    expected = np.maximum(np.floor(exponent) - fmt.max_exponent, -127) + 127
    assert np.array_equal(made.stored_scale.flatten().numpy(), expected)


@pytest.mark.parametrize("scale", ["e8m0_floor", "e8m0_even"])
def test_the_largest_bf16_numbers_have_the_largest_exponent_in_formats_below_one(scale):
    x = torch.full((1, 32), torch.finfo(torch.bfloat16).max, dtype=torch.bfloat16)
    grid = {"mantissa": 1, "min_exponent": -4, "max_exponent": -2}
    made = quantize(x, cast_of(format=grid, block="1x32", scale=scale))
    assert made.stored_scale.eq(254).all()
    assert made.dequantized.eq(0.375 * 2.0**127).all()  # saturated at the format's largest


def test_stochastic_casts_with_headroom_are_unbiased_where_scales_round_down():
    """E4M3 scales round down by up to 1/17, so the largest elements clip; 16/17 of 6 leaves room for that."""
    x = torch.randn(64, 1024, generator=torch.Generator().manual_seed(0))
    bias = {}
    for headroom in (1.0, 16 / 17):
        cast = cast_of(format="e2m1", block="1x16", scale="two_level_e4m3", rounding="stochastic", headroom=headroom)
        drift = torch.zeros((), dtype=torch.float64)
        for seed in range(8):
            noise = torch.rand(x.shape, generator=torch.Generator().manual_seed(seed + 1))
            made = quantize(x, cast, noise=noise).dequantized
            drift += ((made.abs() - x.abs()).double().sum() / x.abs().double().sum()) / 8
        bias[headroom] = float(drift)
    assert bias[1.0] < -1e-3
    assert abs(bias[16 / 17]) < 5e-4


def test_plan_shows_the_keys_that_a_cast_sets(capsys):
    cast = "{format: e2m1, block: 1x16, scale: two_level_e4m3, amax: row, headroom: 0.9, candidates: {by: mse}}"
    assert main(["plan", "precision=bf16", f"precision.fprop.x={cast}"]) == 0
    shown = "e2m1 1x16, two_level_e4m3 scale, even, headroom=0.9, amax=row, candidates=(by=mse, factors=[1.0, 1.5])"
    assert shown in " ".join(capsys.readouterr().out.split())


def test_experts_of_one_scale_per_row_need_no_padding():
    casts = dict.fromkeys(("fprop.x", "dgrad.dy", "wgrad.dy", "wgrad.x"), cast_of(format="int8", block="row"))
    assert row_multiple([casts]) == 1
    assert row_multiple([casts | {"wgrad.x": cast_of(format="int8", block="1x48")}]) == 48


@pytest.mark.parametrize("scale", ["fp32", "power_of_two", "e8m0_ceil", "e8m0_floor", "unit"])
def test_clip_mask_is_zero_for_clipped_elements_alone(scale):
    """The largest element of a block is scaled to the largest number, or a rounding beyond it, and is not clipped."""
    x = (600 * torch.randn(64, 64, generator=torch.Generator().manual_seed(2))).bfloat16()
    cast = cast_of(format="e4m3", scale=scale, block="tensor" if scale == "unit" else "1x32", gradient="clip_mask")
    amax = x.double().reshape(64, 2, 32).abs().amax(2).repeat_interleave(32, 1)
    scaled = {"unit": x.double(), "e8m0_floor": x.double() / 2.0 ** (amax.log2().floor() - 8)}.get(scale)
    clipped = torch.zeros_like(x, dtype=torch.bool) if scaled is None else scaled.abs() > 448
    inside = inductor.operand(x, cast, 1, "eager").inside
    assert torch.equal(inside == 0, clipped)
    assert clipped.any() == (scaled is not None)
