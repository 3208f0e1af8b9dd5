"""Every cast of blocks that random data never has: near-constant, tiny, exactly at the maximum, of zeros, with NaN."""

import numpy as np
import pytest
import torch

from lightning_llm.precision.cast import inductor
from lightning_llm.precision.cast.quantize import quantize
from tests.precision import reference
from tests.precision.recipes import DISTINCT, load

SIZE = 128
"""Rows and columns: one block of 128x128, or many smaller ones."""
DELAYED = 3.0


def near_constant(generator):
    """Values one unit in the last place of bf16 apart, around a different constant in each row."""
    base = torch.randn(SIZE, 1, generator=generator).mul(3).exp2().bfloat16()
    return torch.where(torch.rand(SIZE, SIZE, generator=generator) < 0.5, base, base * (1 + 2.0**-7))


def tiny(generator):
    """Multiples of 2^-133, the least bf16 number, with a largest magnitude of 2^-127 in most rows."""
    return (torch.randint(-64, 65, (SIZE, SIZE), generator=generator).double() * 2.0**-133).float()


def at_the_maximum(generator):
    """The largest magnitude of a row is exactly 6, 448 or 57344 times a power of two."""
    x = torch.randint(-15, 16, (SIZE, SIZE), generator=generator) / 16.0
    top = torch.tensor([6.0, 448.0, 57344.0]).repeat(SIZE)[:SIZE, None]
    x = x * top
    x[:, ::16] = top
    return x * torch.randint(-20, 20, (SIZE, 1), generator=generator).double().exp2().float()


def alone(generator):
    """One number in a row of zeros."""
    x = torch.zeros(SIZE, SIZE)
    place = torch.randint(0, SIZE, (SIZE,), generator=generator)
    x[torch.arange(SIZE), place] = torch.randn(SIZE, generator=generator)
    return x


def at_quests_clip(_):
    """31 numbers of magnitude 1 and a 3: QuEST's scale is 0.5, so 3 becomes 6, the first number that is clipped."""
    signs = torch.tensor([1.0, -1.0]).repeat(SIZE // 2)
    x = signs.expand(SIZE, SIZE).clone()
    x[:, ::32] = 3.0
    return x


KINDS = (near_constant, tiny, at_the_maximum, alone, at_quests_clip)


def made(kind):
    return kind(torch.Generator().manual_seed(0)).bfloat16()


def noise_of(cast):
    generator = torch.Generator().manual_seed(1)
    levels = 2**cast.noise_bits if cast.stochastic else 1
    return torch.randint(0, levels, (SIZE, SIZE), generator=generator) / levels


def label(cast):
    return DISTINCT.get(cast, "")


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("cast", DISTINCT, ids=label)
def test_degenerate_blocks_are_cast_as_specified(cast, kind):
    x, noise = made(kind), noise_of(cast)
    found = quantize(x, cast, noise=noise, delayed=torch.tensor(DELAYED))
    wanted, inside = reference.cast(x.double().numpy(), cast, noise.double().numpy(), DELAYED)
    assert np.isfinite(wanted).all()
    error = np.abs(found.dequantized.double().numpy() - wanted)
    wrong = ~(error <= 2.0**-22 * np.abs(wanted) + 2.0**-148)
    assert not wrong.any()
    if inside is not None:
        assert np.array_equal(found.inside.bool().numpy(), inside)
        mask = inductor.operand(x, cast, 1, "eager").inside
        assert mask is not None
        assert np.array_equal(mask.bool().numpy(), inside)


def test_quest_of_blocks_of_negative_variance_is_finite():
    """Rotated operands are fp32 numbers, and the two moments of near-constant ones differ by rounding alone."""
    cast, generator = load("quartet").fprop.x, torch.Generator().manual_seed(0)
    base = torch.randn(SIZE, 1, generator=generator).mul(3).exp2()
    x = base * (1 + 1e-6 * torch.randn(SIZE, SIZE, generator=generator))
    moments = [[reference.by_halves(each) / np.float32(32) for each in (b, b * b)] for b in x.reshape(-1, 32).numpy()]
    assert min(square - mean * mean for mean, square in moments) < 0
    wanted, _ = reference.cast(x.double().numpy(), cast)
    assert np.array_equal(quantize(x, cast).dequantized.double().numpy(), wanted)


@pytest.mark.parametrize("cast", DISTINCT, ids=label)
def test_a_nan_spoils_its_block_or_its_element_alone(cast):
    """microxcaling's floor scale, and QuEST's moments, hand it to the whole block; CUDA's maximum ignores it."""
    x, noise = torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(0)).bfloat16(), noise_of(cast)
    without = x.clone()
    without[70, 40] = 0.0
    x[70, 40] = torch.nan
    found, plain = (
        quantize(each, cast, noise=noise, delayed=torch.tensor(DELAYED)).dequantized for each in (x, without)
    )
    spoiled = torch.zeros(SIZE, SIZE, dtype=torch.bool)
    if cast.scale in ("e8m0_floor", "e8m0_even", "quest"):
        spoiled[slice(64, 96) if cast.is_square else 70, 32:64] = True
        assert not found[spoiled].isfinite().any()
    if cast.candidates is not None:  # no candidate has a smaller error than NaN: the first is taken
        spoiled[70, 32:48] = True
    spoiled[70, 40] = True
    assert torch.equal(found[~spoiled], plain[~spoiled])
