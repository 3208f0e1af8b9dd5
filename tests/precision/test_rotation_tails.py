"""Rotated recipes on axes that are no multiple of the rotation: the same bits as tensors padded with zeros by hand."""

import pytest
import torch
import torch.nn.functional as F

from lightning_llm.base.keyed_hash import StepKey
from lightning_llm.config.compose import compose_config
from lightning_llm.plan.check import check_config
from lightning_llm.precision.cast.random_bits import Origin
from lightning_llm.precision.linear.module import QuantizedLinear, set_step_key
from lightning_llm.precision.linear.operands import LinearCall
from lightning_llm.precision.linear.plan import LinearPlan, Shard
from lightning_llm.precision.linear.weight_rules import kept_bytes
from tests.precision.recipes import load

M, K, N = 40, 72, 24
PADDED = 128
"""K padded to whole rotations of 64."""


def _tensors():
    generator = torch.Generator().manual_seed(1)
    shapes = ((M, K), (N, K), (M, N))
    return [torch.randn(shape, generator=generator).bfloat16() for shape in shapes]


def _layer(recipe, weight):
    linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    linear.weight.data.copy_(weight)
    layer = QuantizedLinear("layers.0.q_proj", linear, LinearPlan.from_recipe(recipe, "eager"))
    set_step_key(layer, StepKey(0, 0, 0))
    return layer


def _pass(recipe, x, w, dy):
    layer, x = _layer(recipe, w), x.clone().requires_grad_()
    y = layer(x)
    y.backward(dy)
    return y.detach(), x.grad, layer.weight.grad


@pytest.mark.parametrize("name", ["mxfp4_rht_rne", "quartet", "mxfp4_sr", "nvfp4"])
def test_a_tail_is_close_to_the_unquantized_product(name):
    """4-bit GEMMs of Gaussian tensors have relative errors of 0.1 to 0.4. A wrong product of the same size has 1.4."""
    x, w, dy = _tensors()
    y, dx, dw = _pass(load(name), x, w, dy)
    exact = x.double() @ w.double().T, dy.double() @ w.double(), dy.double().T @ x.double()
    for made, want in zip((y, dx, dw), exact, strict=True):
        assert made.shape == want.shape
        assert (made.double() - want).norm() <= 0.45 * want.norm()


def test_a_tail_has_the_bits_of_tensors_padded_by_hand():
    """All three axes end within a group; without random rounding, because its bits depend on the columns of a row."""
    recipe = load("mxfp4_rht_rne")
    recipe = recipe.model_copy(update={"fprop": recipe.fprop.model_copy(update=_rotated_operands(recipe))})
    x, w, dy = _tensors()
    down, right, out = -M % 64, PADDED - K, -N % 64
    padded = _pass(recipe, F.pad(x, (0, right, 0, down)), F.pad(w, (0, right, 0, out)), F.pad(dy, (0, out, 0, down)))
    y, dx, dw = _pass(recipe, x, w, dy)
    assert torch.equal(y, padded[0][:M, :N])
    assert torch.equal(dx, padded[1][:M, :K])
    assert torch.equal(dw, padded[2][:N, :K])


def _rotated_operands(recipe):
    return {"x": recipe.dgrad.dy, "w": recipe.dgrad.w}


def test_a_clip_mask_over_a_tail_is_dropped_with_it():
    """Quartet's gradients go through fprop's mask and rotation: the same as of operands padded along K by hand."""
    recipe = load("quartet")
    plain = {"rounding": "even"}
    recipe = recipe.model_copy(
        update={
            gemm: getattr(recipe, gemm).model_copy(
                update={slot: getattr(getattr(recipe, gemm), slot).model_copy(update=plain) for slot in slots}
            )
            for gemm, slots in (("dgrad", ("dy", "w")), ("wgrad", ("dy", "x")))
        }
    )
    size = recipe.fprop.x.hadamard.size
    x, w, dy = (each[:, :40] if each.shape[1] == K else each for each in _tensors())
    right = -40 % size
    assert right
    y, dx, dw = _pass(recipe, x, w, dy)
    padded = _pass(recipe, F.pad(x, (0, right)), F.pad(w, (0, right)), dy)
    assert torch.equal(y, padded[0])
    assert torch.equal(dx, padded[1][:, :40])
    assert torch.equal(dw, padded[2][:, :40])


def test_random_bits_of_a_tail_follow_the_padded_row():
    """A rank that holds whole rows states the row's unpadded length; its bits are those of a single process."""
    recipe = load("mxfp4_sr")
    _, _, dy = _tensors()
    layer = _layer(recipe, torch.zeros(N, K))
    alone = LinearCall(layer.plan, layer.keys, None)
    shards = {"dy": Shard(Origin(0, 0, N))}
    placed = alone._replace(plan=layer.plan.__class__(**{**vars(layer.plan), "shards": shards}))
    want, found = (call.operand(dy, "dgrad.dy", 1) for call in (alone, placed))
    assert want.tensor.shape == (M, 64)
    assert torch.equal(want.tensor, found.tensor)


@pytest.mark.parametrize("name", ["quartet", "mxfp4_sr"])
@pytest.mark.parametrize("model", ["llama_20m", "llama_60m", "llama_350m", "llama_micro", "gla_tiny", "hybrid_tiny"])
def test_rotated_recipes_are_valid_on_shipped_models(name, model):
    check_config(compose_config([f"precision={name}", f"model={model}", "data.sequence_length=64"]))


def test_kept_casts_of_a_tail_are_counted_padded():
    recipe = load("quartet")
    layer = _layer(recipe, torch.zeros(N, K))
    call = LinearCall(layer.plan, layer.keys, None)
    kept = call.operand(layer.weight.detach().bfloat16(), "fprop.w", 1)
    assert kept.tensor.shape == kept.inside.shape == (N, 96)
    assert kept_bytes(recipe.casts_under(None), N, K) == 2 * kept.tensor.numel() + 2 * kept.inside.numel()
