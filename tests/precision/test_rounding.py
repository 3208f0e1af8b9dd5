"""Rounding and codes of every number format: torch's own float8 casts, exhaustive tables, algebraic properties."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_llm.config.schema.number_formats import NUMBER_FORMATS, NumberFormat
from lightning_llm.precision.cast.rounding import decode, encode, round_to_format, torch_dtype
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
    fmt = NUMBER_FORMATS[name]
    wanted = v.clamp(-fmt.max, fmt.max).to(torch_dtype(fmt)).float()
    assert torch.equal(round_to_format(v, fmt, "even").nan_to_num(nan=-1.5), wanted.nan_to_num(nan=-1.5))


@pytest.mark.parametrize("name", list(NUMBER_FORMATS))
@pytest.mark.parametrize("rounding", DETERMINISTIC)
def test_every_rounding_agrees_with_the_table(name, rounding):
    v = torch.cat([every_bf16(), midpoints(name)])
    v = v[torch.isfinite(v)]
    if rounding != "even":
        # These add a half in fp32, as the published code does: next to a midpoint, fp32 numbers may tie.
        v = v.bfloat16().float()
    wanted = reference.round_elements(v.double().numpy(), name, rounding)
    assert np.array_equal(round_to_format(v, NUMBER_FORMATS[name], rounding).numpy(), wanted)


@pytest.mark.parametrize("rounding", DETERMINISTIC)
@pytest.mark.parametrize("fmt", NUMBER_FORMATS.values(), ids=NUMBER_FORMATS)
def test_special_values(fmt, rounding):
    v = torch.tensor([float("nan"), -float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e-40])
    rounded = round_to_format(v, fmt, rounding)
    assert rounded[2:].tolist() == [fmt.max, -fmt.max, 0, 0, 0]
    assert rounded[:2].isnan().all() if fmt.has_nan else rounded[:2].tolist() == [fmt.max, fmt.max]


@pytest.mark.parametrize("name", list(NUMBER_FORMATS))
def test_rows_are_the_published_formats(name):
    """Fields of the row against the reference's own table; what follows from them against the grid."""
    fmt, grid = NUMBER_FORMATS[name], reference.grid(name)
    if fmt.integer:
        assert (fmt.code_bits, fmt.mantissa_bits, fmt.max) == (
            2 if name == "ternary" else int(name[3:]),
            fmt.code_bits - 2,
            2 ** (fmt.code_bits - 1) - 1,
        )
    else:
        assert (fmt.exponent_bits, fmt.mantissa_bits, fmt.bias, fmt.max) == reference.FIELDS[name]
    assert 2.0**fmt.max_exponent <= fmt.max < 2.0 ** (fmt.max_exponent + 1)
    assert (grid[1], grid[-1]) == (2.0 ** (fmt.min_exponent - fmt.mantissa_bits), fmt.max)
    unused = {"none": 1 if fmt.integer else 0, "nan": 2, "ieee": 2 ** (fmt.mantissa_bits + 1)}[fmt.specials]
    zeros = 1 if fmt.integer else 2
    assert 2**fmt.code_bits - unused == 2 * len(grid) - 2 + zeros


@pytest.mark.parametrize("name", [name for name, fmt in NUMBER_FORMATS.items() if fmt.torch_dtype])
def test_codes_are_those_of_torchs_dtype(name):
    fmt = NUMBER_FORMATS[name]
    codes = torch.arange(256, dtype=torch.uint8)
    wanted = codes.view(torch_dtype(fmt)).float()
    found = torch.tensor([fmt.value(code) for code in range(256)])
    assert torch.equal(found.nan_to_num(nan=1e9), wanted.nan_to_num(nan=1e9))
    assert torch.equal(found.isnan(), wanted.isnan())


@pytest.mark.parametrize("name", list(NUMBER_FORMATS))
def test_codes_decode_to_the_values_they_came_from(name):
    """Every code: positive ones count up the reference's grid; NaN comes back as some NaN."""
    fmt = NUMBER_FORMATS[name]
    codes = torch.arange(2**fmt.code_bits, dtype=torch.uint8 if fmt.code_bits <= 8 else torch.int16)
    values = decode(codes, fmt)
    numbers = ~torch.isnan(values)
    assert torch.equal(encode(values, fmt)[numbers], codes[numbers])
    assert decode(encode(values, fmt), fmt)[~numbers].isnan().all()
    finite = torch.isfinite(values)
    grid = reference.grid(name)
    assert values[: len(grid)].tolist() == grid.tolist()
    unused = [-fmt.max - 1] if fmt.integer else []
    assert sorted(set(values[finite].tolist())) == sorted({*grid, *-grid, *unused})


@pytest.mark.parametrize("name", list(NUMBER_FORMATS))
@pytest.mark.parametrize("rounding", ["stochastic", "stochastic_compare"])
def test_stochastic_rounding_rounds_up_with_the_probability_of_the_remainder(name, rounding):
    """All 256 noises of eight bits, between every two neighbours: up as often as the remainder requires, to 1/256."""
    grid = torch.tensor(reference.grid(name))
    low, high = grid[:-1], grid[1:]
    noise = torch.arange(256.0) / 256
    for remainder in (0.0, 0.25, 0.5, 0.8125):
        v = (low + remainder * (high - low)).float()
        made = round_to_format(v[:, None].expand(-1, 256), NUMBER_FORMATS[name], rounding, noise.expand(len(v), -1))
        up = made == high[:, None].float()
        assert bool((up | (made == low[:, None].float())).all())
        assert up.sum(1).tolist() == [256 * remainder] * len(v)


CUSTOM = {
    "ternary": (NumberFormat("ternary", 1, 0, 1, 1.0, ""), [0, 1]),
    "e2m2 without its last code": (NumberFormat("e2m2", 2, 2, 4, 0.75, ""), [*range(8), 8, 10, 12, 14, 16, 20, 24]),
}


@pytest.mark.parametrize(("fmt", "steps"), CUSTOM.values(), ids=CUSTOM)
def test_a_format_of_ones_own_is_a_row(fmt, steps):
    """`steps`: its magnitudes, in units of the smallest."""
    grid = np.array(steps) * 2.0 ** (fmt.min_exponent - fmt.mantissa_bits)
    v = every_bf16()[::7]
    v = v[torch.isfinite(v)]
    rounded = round_to_format(v, fmt, "even")
    held = v.double().abs().clamp(max=fmt.max).numpy()
    errors = np.abs(held - rounded.double().abs().numpy())
    assert np.array_equal(errors, np.abs(held[:, None] - grid).min(1))
    assert set(rounded.abs().tolist()) == set(grid.tolist())
    assert torch.equal(decode(encode(rounded, fmt), fmt), rounded)


floats = st.floats(width=32, allow_nan=False, allow_infinity=False)
formats = st.sampled_from(sorted(NUMBER_FORMATS))
roundings = st.sampled_from(DETERMINISTIC)


@given(floats, formats, roundings)
@settings(max_examples=300, deadline=None)
def test_idempotent_and_symmetric(value, name, rounding):
    v = torch.tensor([value, -value])
    once = round_to_format(v, NUMBER_FORMATS[name], rounding)
    assert torch.equal(round_to_format(once, NUMBER_FORMATS[name], rounding), once)
    assert once[0] == -once[1]


@given(st.lists(floats, min_size=2, max_size=40), formats, roundings)
@settings(max_examples=200, deadline=None)
def test_monotone(values, name, rounding):
    rounded = round_to_format(torch.tensor(sorted(values)), NUMBER_FORMATS[name], rounding)
    assert bool((rounded.diff() >= 0).all())


@given(floats, formats, st.floats(0, 1, exclude_max=True, width=32))
@settings(max_examples=300, deadline=None)
def test_stochastic_rounding_gives_a_neighbour_and_leaves_the_grid_alone(value, name, noise):
    v, u = torch.tensor([value]), torch.tensor([noise]) // 2.0**-20 * 2.0**-20
    table = reference.grid(name)
    rounded = abs(round_to_format(v, NUMBER_FORMATS[name], "stochastic", u).item())
    magnitude = min(abs(v.item()), table[-1])
    low = table[np.searchsorted(table, magnitude, side="right") - 1]
    high = table[min(np.searchsorted(table, magnitude, side="left"), len(table) - 1)]
    assert rounded in (low, high)


def test_unknown_rounding_and_missing_noise_are_errors():
    with pytest.raises(ValueError, match="there is no rounding 'up'"):
        round_to_format(torch.ones(1), NUMBER_FORMATS["e4m3"], "up", torch.zeros(1))
    with pytest.raises(ValueError, match="needs noise"):
        round_to_format(torch.ones(1), NUMBER_FORMATS["e4m3"], "stochastic")
