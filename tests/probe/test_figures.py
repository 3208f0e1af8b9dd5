"""Bias, variance, SQNR and cosine against float64 by the definitions, and on noise with known bias."""

import math

import numpy as np
import pytest
import torch

from lightning_llm.config.schema.precision import CastConfig
from lightning_llm.precision.cast import quantize
from lightning_llm.precision.cast.random_bits import Origin, keyed_noise
from lightning_llm.probe.figures import compare, figures


def brute(reference, samples):
    g = reference.double().numpy().ravel()
    ks = [sample.double().numpy().ravel() for sample in samples]
    errors = [k - g for k in ks]
    n, norm = len(ks), g @ g
    products = [errors[i] @ errors[j] for i in range(n) for j in range(n) if i != j]
    mean = np.mean(errors, axis=0)
    return {
        "error": np.mean([e @ e for e in errors]) / norm,
        "cosine": np.mean([k @ g / math.sqrt((k @ k) * norm) for k in ks]),
        "gain": np.mean([k @ g for k in ks]) / norm - 1,
        "variance": sum((e - mean) @ (e - mean) for e in errors) / (n - 1) / norm,
        "bias": math.sqrt(max(0, np.mean(products) / norm)),
    }


def test_figures_are_those_of_the_definitions():
    generator = torch.Generator().manual_seed(0)
    reference = torch.randn(40, 30, generator=generator)
    samples = [reference * 0.9 + 0.1 * torch.randn(40, 30, generator=generator) for _ in range(5)]
    made = figures(compare(reference, samples))
    for name, value in brute(reference, samples).items():
        assert made[name] == pytest.approx(value, rel=1e-5), name
    assert made["sqnr_db"] == pytest.approx(-10 * math.log10(made["error"]))
    halves = compare(reference[:20], [s[:20] for s in samples]) + compare(reference[20:], [s[20:] for s in samples])
    assert figures(halves) == pytest.approx(made)


def test_a_known_bias_is_found_under_noise_that_is_larger():
    generator = torch.Generator().manual_seed(1)
    reference = torch.ones(100, 100)
    bias, noise = 0.02 * torch.randn(100, 100, generator=generator), 0.2
    samples = [reference + bias + noise * torch.randn(100, 100, generator=generator) for _ in range(32)]
    made = figures(compare(reference, samples))
    assert made["bias"] == pytest.approx(0.02, rel=0.1)
    assert made["bias"] > 2 * made["bias_floor"]
    assert made["variance"] == pytest.approx(noise**2, rel=0.05)


def test_noise_without_bias_stays_below_the_floor():
    """The floor is two standard errors: over many trials about one in forty is above it, not one in two."""
    generator = torch.Generator().manual_seed(2)
    reference = torch.ones(20, 20)
    above = 0
    for _ in range(200):
        made = figures(compare(reference, [reference + torch.randn(20, 20, generator=generator) for _ in range(8)]))
        above += made["bias"] > made["bias_floor"]
    assert above < 30


def test_stochastic_rounding_is_unbiased_and_ties_to_even_are_not():
    x = torch.full((64, 64), 2.5)  # between E2M1's 2 and 3
    x[:, ::32] = 4.0
    cast = CastConfig(format="e2m1", block="1x32", scale="e8m0_floor", rounding="stochastic")
    keys = [torch.tensor(k) for k in range(16)]
    noisy = [quantize.quantize(x, cast, noise=keyed_noise(x, cast, k, Origin())) for k in keys]
    chance = figures(compare(x, [each.dequantized for each in noisy]))
    assert chance["bias"] < chance["bias_floor"] < 0.1
    assert chance["variance"] == pytest.approx(0.25 * 31 / (6.25 * 31 + 16), rel=0.05)  # a coin of half a step
    even = figures(compare(x, [quantize.quantize(x, cast.model_copy(update={"rounding": "even"})).dequantized]))
    assert even["bias"] == pytest.approx(math.sqrt(0.25 * 31 / (6.25 * 31 + 16)))
    assert even["variance"] == 0
    assert even["gain"] < -0.1


def test_a_zero_reference_has_no_figures():
    assert figures(compare(torch.zeros(3), [torch.ones(3)])) == {}
