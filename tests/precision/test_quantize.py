"""Blocks and scales: covariance, tails, the GEMM's operand, SQNR against theory."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_llm.config.schema.number_formats import NUMBER_FORMATS
from lightning_llm.config.schema.precision import CastConfig
from lightning_llm.precision.cast import inductor, nvfp4_scales, scales
from lightning_llm.precision.cast.quantize import quantize, rotate, rotation
from lightning_llm.precision.cast.random_bits import Origin, keyed_noise, scale_noise
from tests.precision import reference
from tests.precision.recipes import CASTS, DISTINCT, OTHER_FORMATS, load

BLOCKED = [cast for cast in DISTINCT if cast.block != "tensor" and cast.scale != "quest" and not cast.stochastic]


def sample(rows, columns, seed=0):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).bfloat16()


def label(cast):
    return DISTINCT.get(cast, "")


@pytest.mark.parametrize("cast", BLOCKED, ids=label)
@given(exponent=st.integers(-20, 20), seed=st.integers(0, 5))
@settings(max_examples=10, deadline=None)
def test_scaling_by_a_power_of_two_scales_the_result(cast, exponent, seed):
    """NVFP4's tensor scale rounds equally, and fp32 block scales divide equally."""
    x = sample(32, 128, seed)
    plain, scaled = quantize(x, cast), quantize(x * 2.0**exponent, cast)
    assert torch.equal(scaled.values, plain.values)
    assert torch.equal(scaled.dequantized, plain.dequantized * 2.0**exponent)


@pytest.mark.parametrize("cast", [cast for cast in DISTINCT if not cast.stochastic], ids=label)
def test_symmetric_in_the_sign(cast):
    x, delayed = sample(32, 128), torch.tensor(3.0)
    plain = quantize(x, cast, delayed=delayed).dequantized
    assert torch.equal(quantize(-x, cast, delayed=delayed).dequantized, -plain)


@pytest.mark.parametrize(
    "cast", [c for c in DISTINCT if not c.stochastic and c.scale.startswith(("e8", "pow"))], ids=label
)
def test_idempotent(cast):
    once = quantize(sample(32, 128), cast).dequantized
    assert torch.equal(quantize(once, cast).dequantized, once)


@pytest.mark.parametrize("cast", [cast for cast in DISTINCT if cast.block != "tensor"], ids=label)
def test_blocks_follow_the_contraction_axis(cast):
    """Quantising along axis 0 is quantising the transpose along its last axis; the noise turns with it."""
    x = sample(128, 256) * torch.logspace(-3, 3, 256)
    noise = torch.rand(128, 256, generator=torch.Generator().manual_seed(1))
    down = quantize(x, cast, 0, noise=noise)
    across = quantize(x.T.contiguous(), cast, 1, noise=noise.T.contiguous())
    assert torch.equal(down.dequantized, across.dequantized.T)
    assert torch.equal(down.stored_scale, across.stored_scale.T)


@pytest.mark.parametrize(
    "cast", [cast for cast in DISTINCT if cast.block != "tensor" and cast.scale != "quest"], ids=label
)
@pytest.mark.parametrize("axis", [0, 1])
def test_tails_are_as_if_padded_with_zeros(cast, axis):
    x = sample(37, 51)
    noise = torch.rand(37, 51, generator=torch.Generator().manual_seed(1))
    pad = (0, 256 - 51, 0, 256 - 37)
    whole = quantize(torch.nn.functional.pad(x, pad), cast, axis, noise=torch.nn.functional.pad(noise, pad))
    assert torch.equal(quantize(x, cast, axis, noise=noise).dequantized, whole.dequantized[:37, :51])


@pytest.mark.parametrize("cast", DISTINCT, ids=label)
def test_zeros_stay_zero_and_nothing_else_appears(cast):
    x = torch.zeros(32, 128).bfloat16()
    made = quantize(x, cast, noise=torch.full(x.shape, 0.999), delayed=torch.tensor(1.0))
    assert torch.equal(made.dequantized, torch.zeros(32, 128))


@pytest.mark.parametrize("cast", DISTINCT, ids=label)
def test_the_gemms_operand_is_the_dequantised_tensor(cast):
    x = sample(96, 160)
    key, delayed = torch.tensor(99), torch.tensor(7.5)
    noise = keyed_noise(x, cast, key, Origin()) if cast.rounding_kind.draws else scale_noise(x, cast, key, Origin())
    wanted = quantize(x, cast, 0, noise=noise, delayed=delayed).dequantized
    made = inductor.operand(x, cast, 0, "eager", key=key, delayed=delayed)
    assert made.tensor.dtype == torch.bfloat16
    assert (made.blocks is None) == (cast.block == "tensor" or cast.scale != "fp32")
    torch.testing.assert_close(made.dequantized(), wanted, rtol=2.0**-22, atol=0)
    torch.testing.assert_close(made.flipped.dequantized(), wanted.T, rtol=2.0**-22, atol=0)


EXACT = [cast for cast in DISTINCT if cast.scale.startswith("e8m0") and not cast.stochastic and cast.prescale == 1]


@pytest.mark.parametrize("cast", EXACT, ids=label)
def test_blocks_of_one_magnitude_have_the_scale_of_the_specification_down_to_the_least(cast):
    """The least scale is 2^-127: amaxes from there to the largest, at powers of two and next to them."""
    magnitudes = [
        2.0**exponent * factor
        for exponent in range(-120, 127)
        for factor in (1.0, 1.0078125, 1.75, 1.875, 1.984375, 1.9921875)
    ]
    x = torch.tensor(magnitudes)[:, None].expand(-1, 32).bfloat16()
    found = quantize(x, cast.model_copy(update={"block": "1x32"}))
    fmt = cast.number_format
    for magnitude, code in zip(magnitudes, found.stored_scale.flatten().tolist(), strict=True):
        mantissa, exponent = math.frexp(magnitude)
        if cast.scale == "e8m0_floor":
            power = exponent - 1 - int(math.log2(fmt.max))
        else:
            mantissa, exponent = math.frexp(magnitude / fmt.max)
            power = exponent - (mantissa == 0.5)
        assert code == max(power, -127) + 127, (magnitude, cast.scale)


@pytest.mark.parametrize("name", list(NUMBER_FORMATS))
def test_shared_exponents_of_zero_subnormal_and_non_finite_blocks(name):
    amaxes = torch.tensor([0.0, 2.0**-149, 2.0**-127, 2.0**-126, 2.0**-100, 1.0, 2.0**127, math.inf, math.nan])
    emax = reference.EMAX[name]
    floor = [0, 0, 0, max(1 - emax, 0), 27 - emax, 127 - emax, 254 - emax, 255, 255]
    assert scales.e8m0_floor(amaxes, NUMBER_FORMATS[name]).tolist() == floor
    biased = torch.arange(256, dtype=torch.int32)
    values = [2.0 ** (each - 127) for each in range(255)]
    assert scales.e8m0_value(biased)[:255].tolist() == values
    assert scales.e8m0_reciprocal(biased)[:255].tolist() == values[::-1]
    assert scales.e8m0_value(biased)[255].isnan()
    assert scales.e8m0_reciprocal(biased)[255].isnan()
    assert scales.e8m0_exponent(scales.e8m0_value(biased)).tolist() == list(range(256))


def test_a_power_of_two_is_rounded_up_to_at_every_edge():
    """Against the least power of two that is not below, by arithmetic; 2^-127, which is subnormal, is the least."""
    edges = [2.0**exponent for exponent in range(-149, 128)]
    beside = torch.tensor(edges)
    up = torch.nextafter(beside, torch.tensor(math.inf))
    down = torch.nextafter(beside, torch.tensor(0.0))
    for values, above in ((beside, 0), (up, 1), (down, 0)):
        expected = [min(max(exponent + above, -127), 127) + 127 for exponent in range(-149, 128)]
        if values is down:  # below the least subnormal is 0, and 2^-148 less a bit is 2^-149
            expected[0] = 0
        assert scales.float_to_e8m0(values).tolist() == expected
    assert scales.float_to_e8m0(torch.tensor([0.0, math.inf, math.nan])).tolist() == [0, 254, 255]


def test_quotients_are_those_of_ieee_division():
    """numpy divides fp32 by fp32: 400,000 quotients of the scales' numerators, normal and subnormal."""
    bits = np.random.default_rng(0).integers(1, 0x7F800000, 50_000, dtype=np.int32)
    with np.errstate(over="ignore", under="ignore"):
        for numerator in (1.0, 6.0, 448.0, 57344.0 * 2.0**-3, 2688.0, 1.9999999, 3e-38, 3e38):
            n, d = np.float32(numerator), bits.view(np.float32)
            made = scales.divide(float(n), torch.from_numpy(d))
            assert made.dtype == torch.float32
            assert np.array_equal(made.numpy(), n / d)


def test_a_missing_scale_or_amax_is_an_error():
    with pytest.raises(ValueError, match="kept from earlier steps"):
        quantize(sample(4, 4), load("fp8_delayed").fprop.x)
    with pytest.raises(ValueError, match="needs the tensor's amax"):
        scales.scale(sample(4, 4), load("nvfp4").fprop.x, 1)


def test_shards_that_agree_on_amax_quantise_as_the_whole():
    x, cast = sample(64, 64), load("fp8_current").fprop.x
    amax = x.float().abs().amax()
    whole = inductor.operand(x, cast, 1, "eager")
    parts = [inductor.operand(part, cast, 1, "eager", reduce_amax=lambda _: amax).tensor for part in x.chunk(2)]
    assert torch.equal(torch.cat(parts), whole.tensor)


@pytest.mark.parametrize("size", [2, 16, 32, 64])
def test_rotation_is_orthogonal_and_cancels(size):
    generator = torch.Generator().manual_seed(0)
    signs = torch.randint(0, 2, (size,), generator=generator) * 2.0 - 1
    s = rotation(size, signs, torch.device("cpu"))
    torch.testing.assert_close(s.double() @ s.double().T, torch.eye(size).double(), atol=1e-6, rtol=0)
    a, b = torch.randn(8, 128, generator=generator), torch.randn(128, 8, generator=generator)
    rotated = rotate(a, s, 1, torch.float32) @ rotate(b, s, 0, torch.float32)
    torch.testing.assert_close(rotated, a @ b, atol=2e-5, rtol=1e-5)


def sqnr(x, cast):
    error = quantize(x, cast, noise=torch.rand(x.shape, generator=torch.Generator().manual_seed(1))).dequantized - x
    return 10 * math.log10(float(x.double().square().mean() / error.double().square().mean()))


def theory(x, cast):
    """SQNR in dB of a unit Gaussian with an error uniform over a step: step^2 / 12 rounded, step^2 / 6 if stochastic.

    Averaged over the binades of the format (subnormals: one step) under the scales that the blocks of `x` have.
    """
    fmt = cast.number_format
    amax = scales.tensor_amax(x)
    multipliers = scales.scale(x, cast, 1, amax).multiplier.flatten()[:2000].double()
    edges = [0.0] + [2.0**e for e in range(fmt.min_exponent, fmt.max_exponent + 2)]
    steps = [2.0 ** (fmt.min_exponent - fmt.mantissa_bits)]
    steps += [2.0 ** (e - fmt.mantissa_bits) for e in range(fmt.min_exponent, fmt.max_exponent + 1)]
    noise = torch.zeros_like(multipliers)
    for low, high, step in zip(edges[:-1], edges[1:], steps, strict=True):
        share = torch.erf(high / multipliers / 2**0.5) - torch.erf(low / multipliers / 2**0.5)
        noise += share * (step / multipliers) ** 2 / (6 if cast.stochastic else 12)
    return -10 * math.log10(float(noise.mean()))


@pytest.mark.parametrize("which", [
    "mxfp8:fprop.x", "fp8_subchannel:fprop.x", "fp8_subchannel_fp32scales:fprop.w", "fp8_current:fprop.x",
    "fp8_current:dgrad.dy", "nvfp4:fprop.x", "nvfp4:dgrad.dy", "mxfp4_sr_norht:dgrad.dy",
])  # fmt: skip
def test_sqnr_of_a_gaussian_equals_theory(which):
    x, cast = sample(1024, 512).float(), CASTS[which]
    assert sqnr(x, cast) == pytest.approx(theory(x, cast), abs=0.6 if cast.format == "e2m1" else 0.25)


@pytest.mark.parametrize("cast", OTHER_FORMATS, ids=label)
def test_formats_without_a_recipe_are_cast_as_the_reference_has_them(cast):
    x = sample(128, 256) * torch.exp2(torch.arange(128.0) % 24 - 12)[:, None]
    noise = torch.rand(x.shape, generator=torch.Generator().manual_seed(1))
    wanted, _ = reference.cast(x.bfloat16().double().numpy(), cast, noise=noise.numpy())
    np.testing.assert_allclose(quantize(x.bfloat16(), cast, noise=noise).dequantized.numpy(), wanted, rtol=1e-6)


def test_block_scales_wait_for_the_product_where_it_may_not_fit_bf16():
    """Bits of a grid value and of a scale: 2 + 4 and 7 + 0 of bf16's 8, and 24 of an fp32 scale with any."""
    waits = {label(cast): cast.scales_partial_sums for cast in DISTINCT}
    assert {name for name, found in waits.items() if found} == {
        name for cast, name in DISTINCT.items() if cast.block != "tensor" and cast.scale == "fp32"
    }


def test_blocks_contain_an_outlier():
    """One outlier per 4096 elements: a tensor scale loses a four-bit tensor, blocks of 32 lose one block in 128."""
    x = sample(256, 1024).float()
    x[::4, 0] = 1000.0
    inliers = x.abs() < 100

    def inlier_sqnr(made):
        error = (made.dequantized - x)[inliers].double()
        return 10 * math.log10(float(x[inliers].double().square().mean() / error.square().mean()))

    tensor = inlier_sqnr(quantize(x, CastConfig(format="e2m1", block="tensor")))
    block = inlier_sqnr(quantize(x, load("mxfp4_rne").dgrad.dy))
    assert tensor < 1
    assert block > 12


@pytest.mark.parametrize(("scale", "block", "prescale", "bits", "shrinks"), [
    ("two_level_e4m3", "1x16", 1.0, 8, 0.40), ("two_level_e4m3", "1x16", 1.0, 20, 0.35),
    ("e8m0_floor", "1x32", 1.0, 20, 1.04), ("e8m0_floor", "1x32", 0.75, 20, 0.0),
])  # fmt: skip
def test_how_much_stochastic_e2m1_shrinks_a_gaussian(scale, block, prescale, bits, shrinks):
    """Percentages of docs/explanation/emulation.md: NVFP4 scales let elements pass 6, not MXFP4's 3/4."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2048, 1024, generator=generator)
    noise = (torch.rand(x.shape, generator=generator) * 2**bits).floor() / 2**bits
    cast = CastConfig(
        format="e2m1", block=block, scale=scale, rounding="stochastic", noise_bits=bits, prescale=prescale
    )
    made = quantize(x, cast, noise=noise).dequantized
    along = (made.double() * x).sum() / x.double().square().sum()
    assert 100 * (1 - along.item()) == pytest.approx(shrinks, abs=0.03)


@pytest.mark.parametrize("whole", [448 * 6.0, 256 * 6.0])
def test_sums_by_parts_divide_every_candidates_number_exactly(whole):
    """Code * block scale * amax of every E2M1, E4M3 and bf16 mantissa, against float64; exponents only shift it."""
    codes = torch.tensor([0.5, 1, 1.5, 2, 3, 4, 6])[:, None, None]
    blocks = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()[:, None]
    amax = 1 + torch.arange(128) / 128
    high, low = nvfp4_scales._reciprocal_parts(whole)
    found = codes * (blocks * amax * high) + codes * (blocks * amax * low)
    assert torch.equal(found, ((codes * blocks * amax).double() / whole).float())
    assert nvfp4_scales._reciprocal_parts(whole * 16 / 17) is None
