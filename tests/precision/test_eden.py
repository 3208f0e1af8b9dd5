"""MS-EDEN of Quartet II: the authors' steps, a whole linear layer, and the mean over random rotations."""

import json
from pathlib import Path

import numpy as np
import torch

from lightning_llm.config.schema.precision import CastConfig, slots_of
from lightning_llm.precision.cast import inductor
from lightning_llm.precision.cast.quantize import quantize, rotate, rotation
from lightning_llm.precision.linear.autograd import quantized_linear
from lightning_llm.precision.linear.operands import LinearCall
from lightning_llm.precision.linear.plan import KEY_COUNT, LinearPlan
from tests.precision import reference
from tests.precision.recipes import load

OVERRIDE = 17 / 16 * 0.93
"""The authors' `backward_scale_override`."""
KEYS = {
    "format": "e2m1", "block": "1x16", "scale": "eden", "rounding": "half_away", "scale_max": 255.99,
    "headroom": 1 / OVERRIDE, "hadamard": {"size": 128, "signs": "random"},
}  # fmt: skip
EDEN = CastConfig.model_validate(KEYS)


def test_a_cast_is_that_of_the_authors_kernel():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(48, 384, generator=generator) * torch.exp2(torch.randint(-6, 4, (48, 1), generator=generator))
    noise = torch.rand(48, 384, generator=generator)
    for axis in (0, 1):
        given, its = (x, noise) if axis == 1 else (x.T.contiguous(), noise.T.contiguous())
        made = quantize(given, EDEN, axis, noise=its)
        expected = reference.eden(x.double().numpy(), EDEN, noise.numpy())
        found = (made.dequantized if axis == 1 else made.dequantized.T).double().numpy()
        np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_recorded_vectors_of_the_authors_are_of_the_shipped_casts():
    cases = json.loads((Path(__file__).parent / "vectors" / "manifest.json").read_text())["cases"]
    recorded = [case for case in cases if case["file"] == "quartet_ii.npz"]
    for case in recorded:
        assert CastConfig.model_validate(case["cast"]) == slots_of(load(case["recipe"]))[case["slot"]], case["name"]
    assert {(case["recipe"], case["slot"]) for case in recorded} == {
        (recipe, slot) for recipe in ("quartet_ii", "tetrajet_v2") for slot in ("fprop.x", "dgrad.dy")
    }


def test_the_operand_is_the_cast_of_its_keyed_noise_and_a_key_is_needed():
    x, key = torch.randn(32, 256, generator=torch.Generator().manual_seed(1)).bfloat16(), torch.tensor(5)
    first, again = (inductor.operand(x, EDEN, 1, "eager", key=each).dequantized() for each in (key, key))
    other = inductor.operand(x, EDEN, 1, "eager", key=key + 1).dequantized()
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
            made = quantize(rotate(x, s, 1, torch.float32), cast, noise=noise).dequantized @ s.T
            along.append(float((made * x).sum() / (x * x).sum()) - 1)
        drift[name] = np.mean(along) / (np.std(along) / len(along) ** 0.5)
    assert abs(drift["eden"]) < 4
    assert abs(drift["plain"]) > 6


def test_a_linear_layer_multiplies_the_casts_of_quartet_ii():
    """Y, dX and dW in float64 from the six casts; the rotations cancel, and W and X are quantized again."""
    recipe, generator = load("quartet_ii"), torch.Generator().manual_seed(3)
    x, w, dy = (torch.randn(*shape, generator=generator).bfloat16() for shape in ((256, 96), (128, 96), (256, 128)))
    x, w, keys = x.requires_grad_(), w.requires_grad_(), torch.arange(1000, 1000 + KEY_COUNT)
    plan = LinearPlan.from_recipe(recipe, "eager")
    y = quantized_linear(x, w, None, plan, keys)
    y.backward(dy)
    call = LinearCall(plan, keys, None)
    forward = {
        role: call.operand(each.detach(), f"fprop.{role}", 1).dequantized() for role, each in (("x", x), ("w", w))
    }
    given = {
        "dgrad.dy": (dy, 1), "dgrad.w": (forward["w"].bfloat16(), 0),
        "wgrad.dy": (dy, 0), "wgrad.x": (forward["x"].bfloat16(), 0),
    }  # fmt: skip
    q = {slot: call.operand(each, slot, axis).dequantized().double() for slot, (each, axis) in given.items()}
    for found, expected in (
        (y, forward["x"].double() @ forward["w"].double().T),
        (x.grad, q["dgrad.dy"] @ q["dgrad.w"]),
        (w.grad, q["wgrad.dy"].T @ q["wgrad.x"]),
    ):
        torch.testing.assert_close(found.double(), expected, rtol=2.0**-7, atol=1e-2)
    for found, exact in ((x.grad, dy.double() @ w.detach().double()), (w.grad, dy.double().T @ x.detach().double())):
        error = (found.double() - exact).norm() / exact.norm()
        assert error < 0.25  # rotated by the same matrix on both sides
