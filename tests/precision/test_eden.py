"""MS-EDEN of Quartet II: the authors' steps in float64, and the mean over random rotations."""

import numpy as np
import torch

from lightning_llm.config.schema.precision import CastConfig
from lightning_llm.precision.cast import inductor
from lightning_llm.precision.cast.hadamard import rotate, rotation
from lightning_llm.precision.cast.quantize import quantise
from tests.precision.reference import round_elements

OVERRIDE = 17 / 16 * 0.93
"""The authors' `backward_scale_override`."""
KEYS = {
    "format": "e2m1", "block": "1x16", "scale": "eden", "rounding": "half_away", "scale_max": 255.99,
    "headroom": 1 / OVERRIDE, "hadamard": {"size": 128, "signs": "random"},
}  # fmt: skip
EDEN = CastConfig.model_validate(KEYS)


def authors(x, noise):
    """`eden_1x16s_fp4_kernel` of IST-DASLab/Quartet-II after its rotation, [R, C], in float64."""
    largest = 6.0 / OVERRIDE
    decode = np.abs(x).max() / 255.99 / largest
    blocks = x.reshape(len(x), -1, 16)
    scale = round_elements(np.abs(blocks).max(2) / largest / decode, "e4m3", "even")
    scale = np.where(scale == 0, 1.0, scale)[..., None]
    elements = blocks / (scale * decode)
    codes = round_elements(elements, "e2m1", "half_away")
    groups = elements.reshape(len(x), -1, 128), codes.reshape(len(x), -1, 128)
    correction = (groups[0] ** 2).sum(2) / (groups[0] * groups[1]).sum(2)
    wanted = scale * np.repeat(correction, 8, axis=1)[..., None]
    scale = round_elements(wanted, "e4m3", "stochastic_compare", noise.reshape(*blocks.shape)[..., :1])
    return (codes * scale * decode).reshape(x.shape)


def test_a_cast_is_that_of_the_authors_kernel():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(48, 384, generator=generator) * torch.exp2(torch.randint(-6, 4, (48, 1), generator=generator))
    noise = torch.rand(48, 384, generator=generator)
    for axis in (0, 1):
        given, its = (x, noise) if axis == 1 else (x.T.contiguous(), noise.T.contiguous())
        made = quantise(given, EDEN, axis, noise=its)
        expected = authors(x.double().numpy(), noise.numpy())
        found = (made.dequantised if axis == 1 else made.dequantised.T).double().numpy()
        off = np.abs(found - expected) > 1e-6 * np.abs(expected)
        assert off.mean() < 2e-3  # scales that an order of products takes over a midpoint


def test_the_operand_is_the_cast_of_its_keyed_noise_and_a_key_is_needed():
    x, key = torch.randn(32, 256, generator=torch.Generator().manual_seed(1)).bfloat16(), torch.tensor(5)
    first, again = (inductor.operand(x, EDEN, 1, "eager", key=each).dequantised() for each in (key, key))
    other = inductor.operand(x, EDEN, 1, "eager", key=key + 1).dequantised()
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert EDEN.stochastic


def test_it_is_unbiased_over_random_rotations_and_nearest_rounding_is_not():
    """A vector that nearest rounding shrinks, over 600 rotations: its mean along x, in standard errors."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(1, 128, generator=generator)
    plain = EDEN.model_copy(update={"scale": "two_level_e4m3"})
    drift = {}
    for name, cast in (("eden", EDEN), ("plain", plain)):
        along = []
        for _ in range(600):
            s = rotation(128, torch.randint(0, 2, (128,), generator=generator) * 2.0 - 1, x.device)
            noise = torch.rand(1, 128, generator=generator)
            made = quantise(rotate(x, s, 1, torch.float32), cast, noise=noise).dequantised @ s.T
            along.append(float((made * x).sum() / (x * x).sum()) - 1)
        drift[name] = np.mean(along) / (np.std(along) / len(along) ** 0.5)
    assert abs(drift["eden"]) < 4
    assert abs(drift["plain"]) > 6
