"""The quantised linear layer against a float64 reference of the specification, for every shipped recipe."""

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from lightning_llm.base.keyed_hash import StepKey
from lightning_llm.precision.cast import inductor
from lightning_llm.precision.cast.random_bits import random_signs, uniform_noise
from lightning_llm.precision.linear.delayed import update_delayed
from lightning_llm.precision.linear.module import (
    QuantizedLinear,
    quantized_layers,
    recompute_contexts,
    set_step_key,
)
from lightning_llm.precision.linear.plan import ROLES, SLOT_NAMES, LinearPlan
from tests.precision import reference
from tests.precision.quantized_layer import K, M, N, layer_of, run, tensors
from tests.precision.recipes import RECIPES, load, sample

QUANTIZED = sample([name for name in RECIPES if load(name).quantizes and name != "quartet_ii"])
"""Recipes with the reference's noise; `test_eden.py` has Quartet II's linear layer."""
TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def expected(layer, recipe, x, dy):
    """The reference's three GEMMs from the same tensors, noise and signs."""

    def bf16(array):
        return torch.from_numpy(np.ascontiguousarray(array)).bfloat16().double().numpy()

    shapes = {"x": (M, K), "w": (N, K), "dy": (M, N)}
    noise, signs = {}, {"fprop": None, "dgrad": None, "wgrad": None}
    for index, slot in enumerate(SLOT_NAMES):
        gemm, role = slot.split(".")
        cast = getattr(getattr(recipe, gemm), role)
        if cast.stochastic:
            rows, columns = shapes[role]
            place = torch.arange(rows * columns).reshape(rows, columns)
            drawn = uniform_noise(layer.keys[index], place, cast.noise_bits).double().numpy()
            contracts_rows = slot in ("dgrad.w", "wgrad.dy", "wgrad.x")
            noise[slot] = drawn.T if contracts_rows else drawn
        if cast.hadamard and cast.hadamard.signs == "fixed":
            signs[gemm] = np.array(cast.hadamard.vector, dtype=float)
        elif cast.hadamard and cast.hadamard.signs == "random":
            which = len(SLOT_NAMES) + ("fprop", "dgrad", "wgrad").index(gemm)
            signs[gemm] = random_signs(layer.keys[which], cast.hadamard.size).double().numpy()
    delayed = {} if layer.scale is None else {role: float(layer.scale[i]) for i, role in enumerate(ROLES)}
    arrays = [each.double().numpy() for each in (x, layer.weight.detach().to(x.dtype), dy)]
    return reference.linear(*arrays, recipe, noise, signs, delayed, bf16)


def disagreement(actual, wanted, dtype, rotated_back):
    """The share of elements that differ by more than two roundings of the output and fp32 accumulation.

    `rotated_back`: the output was rounded before its inverse rotation, which spreads the error over a group of 32.
    """
    half_unit = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}[dtype]
    actual = actual.double().numpy()
    bound = 2.1 * half_unit * np.abs(wanted) + 2e-6 * np.abs(wanted).max(0)
    if rotated_back:
        groups = np.abs(wanted).reshape(-1, 32).max(1)
        bound = bound + half_unit * np.repeat(groups, 32).reshape(wanted.shape)
    return float((np.abs(actual - wanted) > bound).mean())


def worst_disagreement(name, wide=False, recipe=None):
    recipe = recipe or load(name)
    dtype = TORCH_DTYPES[recipe.compute_dtype]
    layer = layer_of(recipe)
    x, dy = tensors(dtype, wide)
    set_step_key(layer, StepKey(seed=3, step=5, micro_batch=2))
    run(layer, x, dy)
    update_delayed(layer)  # so that delayed scales are not 1
    actual = run(layer, x, dy)
    wanted = expected(layer, recipe, x, dy)
    back = recipe.dgrad.w.source == "quantised"
    return max(disagreement(a, w, dtype, back) for a, w in zip(actual, wanted, strict=True))


def allowed(name):
    """A rotation in fp32 differs from float64's in the last bit, which now and then moves a code: a row of results.

    With a scale per row, so does the second rounding of the numbers that are quantized again (0.1 % of those).
    """
    if load(name).fprop.x.amax == "row":
        return 0.05
    return 0.02 if any(slot.hadamard for slot in (load(name).dgrad.dy, load(name).wgrad.dy)) else 0.0


@pytest.mark.parametrize("name", QUANTIZED)
def test_three_gemms_agree_with_the_specification(name):
    assert worst_disagreement(name) <= allowed(name)


def test_gradients_go_back_through_a_rotation_that_is_not_symmetric():
    """Quartet's own matrix is its own transpose; with random signs of fprop it is not."""
    recipe = load("quartet")
    turned = recipe.fprop.x.hadamard.model_copy(update={"signs": "random"})
    x, w = (each.model_copy(update={"hadamard": turned}) for each in (recipe.fprop.x, recipe.fprop.w))
    signed = recipe.model_copy(update={"fprop": recipe.fprop.model_copy(update={"x": x, "w": w})})
    assert worst_disagreement("quartet", recipe=signed) <= allowed("quartet")


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "mxfp4_sr_norht", "fp8_subchannel"])
def test_columns_of_every_size_agree(name):
    assert worst_disagreement(name, wide=True) <= allowed(name)


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "mxfp4_sr_norht", "fp8_subchannel"])
def test_blocks_along_the_storage_axis_would_be_caught(name, monkeypatch):
    right = inductor.block_shape
    monkeypatch.setattr(inductor, "block_shape", lambda block, axis: right(block, 1))
    monkeypatch.setattr(inductor, "cast_by", inductor.cast_by.__wrapped__)  # which keeps nothing
    assert worst_disagreement(name, wide=True) > 0.1


def gradients(layer, x, dy, key):
    set_step_key(layer, key)
    return run(layer, x, dy)


@pytest.mark.parametrize("name", ["mxfp4_sr", "nvfp4", "quartet"])
def test_random_bits_are_those_of_the_key(name):
    layer = layer_of(load(name))
    x, dy = tensors(torch.bfloat16)
    first = gradients(layer, x, dy, StepKey(1, 7, 0))
    again = gradients(layer, x, dy, StepKey(1, 7, 0))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    for other in (StepKey(1, 7, 1), StepKey(1, 8, 0), StepKey(2, 7, 0)):
        assert not torch.equal(first[2], gradients(layer, x, dy, other)[2])


def test_layers_draw_different_bits():
    recipe = load("mxfp4_sr_norht")
    x, dy = tensors(torch.bfloat16)
    results = []
    for name in ("layers.0.q_proj", "layers.1.q_proj"):
        layer = layer_of(recipe)
        layer.name = name
        results.append(gradients(layer, x, dy, StepKey(1, 0, 0))[2])
    assert not torch.equal(*results)


def test_missing_key_is_an_error():
    x, _ = tensors(torch.bfloat16)
    with pytest.raises(ValueError, match="need a key; none was set"):
        layer_of(load("mxfp4_sr"))(x.requires_grad_()).sum().backward()


@pytest.mark.parametrize("name", ["mxfp4_sr", "nvfp4", "fp8_delayed", "fp32"])
def test_bias_is_not_quantised(name):
    recipe = load(name)
    dtype = TORCH_DTYPES[recipe.compute_dtype]
    layer = layer_of(recipe, bias=True)
    set_step_key(layer, StepKey(0, 0, 0))
    x, dy = tensors(dtype)
    y = layer(x)
    y.backward(dy)
    whole = dy.double().sum(0)  # rounded once
    torch.testing.assert_close(
        layer.bias.grad.double(), whole, rtol=2 * torch.finfo(dtype).eps, atol=1e-6 * float(dy.abs().sum())
    )
    assert torch.equal(layer.bias.grad, layer.bias.grad.to(dtype).float())
    with torch.no_grad():
        layer.bias += 1000
        shift = (layer(x).double() - y.double()) - 1000
    assert shift.abs().max() <= 1000 * 2.0**-7  # bf16 holds 1000 + y to 4


@pytest.mark.parametrize("name", ["mxfp4_sr", "nvfp4", "fp8_delayed"])
def test_recomputation_gives_the_same_bits_after_other_micro_batches(name):
    """Two micro-batches go forward before either goes backward, as in a pipeline."""
    recipe = load(name)
    batches = [tensors(torch.bfloat16)[0] * (1 + each) for each in range(2)]
    dy = tensors(torch.bfloat16)[1]
    results = []
    for recompute in (False, True):
        layer = layer_of(recipe)
        outputs = []
        for index, batch in enumerate(batches):
            set_step_key(layer, StepKey(5, 0, index))
            x = batch.clone().requires_grad_()
            if recompute:
                y = checkpoint(layer, x, use_reentrant=False, context_fn=recompute_contexts(layer))
            else:
                y = layer(x)
            outputs.append((x, y))
        for _, y in outputs:
            y.backward(dy)
        update_delayed(layer)
        results.append(
            [x.grad for x, _ in outputs] + [layer.weight.grad] + ([] if layer.scale is None else [layer.scale])
        )
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_module_keeps_names_and_parameters():
    torch.manual_seed(0)
    linear = torch.nn.Linear(8, 4)
    layer = QuantizedLinear("a", linear, LinearPlan.from_recipe(load("mxfp8"), "eager"))
    assert layer.weight is linear.weight
    assert list(layer.state_dict()) == ["weight", "bias"]
    assert quantized_layers(torch.nn.Sequential(layer)) == [layer]


@pytest.mark.parametrize("shape", [(3, 5, 48), (1, 48), (33, 48)])
def test_leading_axes_and_tails(shape):
    layer = layer_of(load("mxfp8"), n=24, k=48)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float32).bfloat16().requires_grad_()
    y = layer(x)
    y.sum().backward()
    assert y.shape == (*shape[:-1], 24)
    assert x.grad.shape == shape
    exact = x.detach().double() @ layer.weight.detach().bfloat16().double().T
    assert (y.detach().double() - exact).norm() <= 0.05 * exact.norm()
