"""Rounding against torch's own float8 casts, a table of E2M1, and its algebraic properties."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_llm.precision.cast.rounding import FORMATS, TORCH_DTYPES, decode, encode, round_to_format
from tests.precision import reference

DETERMINISTIC = ["even", "half_away", "half_to_zero"]


def every_bf16():
    return torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()


def midpoints(name):
    """Every number of the format, every midpoint of two neighbours, and the fp32 numbers next to each."""
    table = torch.tensor(reference.grid(name), dtype=torch.float32)
    points = torch.cat([table, (table[1:] + table[:-1]) / 2])
    points = torch.cat(
        [points, torch.nextafter(points, torch.tensor(1e9)), torch.nextafter(points, torch.tensor(-1.0))]
    )
    return torch.cat([points, -points])


@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
def test_nearest_even_is_torchs_cast_for_every_bf16_and_random_fp32(name):
    random = torch.randn(1 << 18, generator=torch.Generator().manual_seed(0)) * torch.logspace(-9, 6, 1 << 18)
    v = torch.cat([every_bf16(), random, midpoints(name)])
    largest = FORMATS[name].max
    wanted = v.clamp(-largest, largest).to(TORCH_DTYPES[name]).float()
    assert torch.equal(round_to_format(v, name, "even").nan_to_num(nan=-1.5), wanted.nan_to_num(nan=-1.5))


@pytest.mark.parametrize("name", list(FORMATS))
@pytest.mark.parametrize("rounding", DETERMINISTIC)
def test_every_rounding_agrees_with_the_table(name, rounding):
    v = torch.cat([every_bf16(), midpoints(name)])
    v = v[torch.isfinite(v)]
    if rounding != "even":
        # These add a half in fp32, as the published code does: next to a midpoint, fp32 numbers may tie.
        v = v.bfloat16().float()
    wanted = reference.round_elements(v.double().numpy(), name, rounding)
    assert np.array_equal(round_to_format(v, name, rounding).numpy(), wanted)


def test_four_bit_special_values():
    v = torch.tensor([float("nan"), -float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e-40])
    assert round_to_format(v, "e2m1", "even").tolist() == [6, 6, 6, -6, 0, 0, 0]


@pytest.mark.parametrize("name", list(FORMATS))
def test_codes_decode_to_the_values_they_came_from(name):
    codes = torch.arange(16 if name == "e2m1" else 256, dtype=torch.uint8)
    values = decode(codes, name)
    finite = torch.isfinite(values)
    assert torch.equal(encode(values, name)[finite], codes[finite])
    assert sorted(set(values[finite].abs().tolist())) == reference.grid(name).tolist()


floats = st.floats(width=32, allow_nan=False, allow_infinity=False)
formats = st.sampled_from(sorted(FORMATS))
roundings = st.sampled_from(DETERMINISTIC)


@given(floats, formats, roundings)
@settings(max_examples=300, deadline=None)
def test_idempotent_and_symmetric(value, name, rounding):
    v = torch.tensor([value, -value])
    once = round_to_format(v, name, rounding)
    assert torch.equal(round_to_format(once, name, rounding), once)
    assert once[0] == -once[1]


@given(st.lists(floats, min_size=2, max_size=40), formats, roundings)
@settings(max_examples=200, deadline=None)
def test_monotone(values, name, rounding):
    rounded = round_to_format(torch.tensor(sorted(values)), name, rounding)
    assert bool((rounded.diff() >= 0).all())


@given(floats, formats, st.floats(0, 1, exclude_max=True, width=32))
@settings(max_examples=300, deadline=None)
def test_stochastic_rounding_gives_a_neighbour_and_leaves_the_grid_alone(value, name, noise):
    v, u = torch.tensor([value]), torch.tensor([noise]) // 2.0**-20 * 2.0**-20
    table = reference.grid(name)
    rounded = abs(round_to_format(v, name, "stochastic", u).item())
    magnitude = min(abs(v.item()), table[-1])
    low = table[np.searchsorted(table, magnitude, side="right") - 1]
    high = table[min(np.searchsorted(table, magnitude, side="left"), len(table) - 1)]
    assert rounded in (low, high)


def test_unknown_rounding_and_missing_noise_are_errors():
    with pytest.raises(ValueError, match="unknown rounding 'up'"):
        round_to_format(torch.ones(1), "e4m3", "up", torch.zeros(1))
    with pytest.raises(ValueError, match="needs noise"):
        round_to_format(torch.ones(1), "e4m3", "stochastic")
