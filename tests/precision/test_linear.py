"""The quantised linear layer against a float64 reference of the specification, for every shipped recipe."""

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from lightning_llm.base.keyed_hash import StepKey
from lightning_llm.config.schema.precision import DelayedConfig
from lightning_llm.precision.cast import inductor
from lightning_llm.precision.cast.random_bits import random_signs, uniform_noise
from lightning_llm.precision.linear import delayed
from lightning_llm.precision.linear.delayed import delayed_state, load_delayed_state, update_delayed
from lightning_llm.precision.linear.module import (
    QuantisedLinear,
    quantised_layers,
    recompute_contexts,
    set_recipe,
    set_step_key,
)
from lightning_llm.precision.linear.plan import ROLES, SLOT_NAMES, LinearPlan
from tests.precision import reference
from tests.precision.recipes import RECIPES, load

M, K, N = 192, 256, 128
QUANTISED = [name for name in RECIPES if load(name).quantises]
TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def layer_of(recipe, bias=False, n=N, k=K, seed=0):
    torch.manual_seed(seed)
    linear = torch.nn.Linear(k, n, bias=bias)
    return QuantisedLinear("layers.0.q_proj", linear, LinearPlan.from_recipe(recipe, "eager"))


def tensors(dtype, wide=False):
    """X with a few outlier channels, dY with rows of very different size; `wide`: columns over eight decades."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(M, K, generator=generator)
    x[:, ::37] *= 20
    dy = torch.randn(M, N, generator=generator) * torch.logspace(-4, -1, M)[:, None]
    if wide:
        x *= torch.logspace(-4, 4, K)[torch.randperm(K, generator=generator)]
        dy *= torch.logspace(-4, 4, N)[torch.randperm(N, generator=generator)]
    return x.to(dtype), dy.to(dtype)


def run(layer, x, dy):
    x = x.clone().requires_grad_()
    layer.weight.grad = None
    y = layer(x)
    y.backward(dy)
    return y.detach(), x.grad, layer.weight.grad


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
    """A rotation in fp32 differs from float64's in the last bit, which now and then moves a code: a row of results."""
    return 0.02 if any(slot.hadamard for slot in (load(name).dgrad.dy, load(name).wgrad.dy)) else 0.0


@pytest.mark.parametrize("name", QUANTISED)
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


def test_delayed_scale_comes_from_the_step_before():
    layer = layer_of(load("fp8_delayed"))
    x, dy = tensors(torch.bfloat16)
    run(layer, x, dy)
    assert torch.equal(layer.scale, torch.ones(3))
    run(layer, x * 2, dy)  # the maximum over micro-batches counts
    amaxes = torch.stack([(x * 2).abs().max(), layer.weight.detach().bfloat16().abs().max(), dy.abs().max()]).float()
    assert torch.equal(layer.amax_history[0], amaxes)
    update_delayed(layer)
    assert torch.equal(layer.scale, torch.tensor([448.0, 448.0, 57344.0]) / amaxes)
    assert torch.equal(layer.amax_history[0], torch.zeros(3))


def test_delayed_scales_that_move_with_every_micro_batch():
    """Each is cast by the amaxes of those before it; the recipe that moves with the step is left alone meanwhile."""
    recipe = load("fp8_delayed_micro_batch")
    layer, by_step = layer_of(recipe), layer_of(load("fp8_delayed"))
    x, dy = tensors(torch.bfloat16)
    seen, largest = [], torch.tensor([448.0, 448.0, 57344.0])
    layer.observe = lambda cast: seen.append((cast.slot, float(cast.scaled.multiplier)))
    amax = torch.zeros(3)
    for factor in (1, 4, 2):
        seen.clear()
        run(layer, x * factor, dy / factor)
        run(by_step, x * factor, dy / factor)
        expected = torch.where(amax > 0, largest / amax, torch.ones(3))
        by_role = dict(zip(("x", "w", "dy"), expected.tolist(), strict=True))
        assert seen == [(slot, by_role[slot.split(".")[1]]) for slot, _ in seen]
        assert len(seen) == 6
        for each in (layer, by_step):
            update_delayed(each, after="micro_batch")
        now = [(x * factor).abs().max(), layer.weight.detach().bfloat16().abs().max(), (dy / factor).abs().max()]
        amax = torch.maximum(amax, torch.stack(now).float())
    assert torch.equal(by_step.scale, torch.ones(3))
    assert int((layer.amax_history > 0).all(1).sum()) == 3
    update_delayed(by_step, after="step")
    assert int((by_step.amax_history > 0).all(1).sum()) == 1
    assert torch.equal(by_step.scale, layer.scale)  # the maximum of all three


def test_evaluation_records_no_amax():
    layer = layer_of(load("fp8_delayed"))
    x, dy = tensors(torch.bfloat16)
    run(layer, x, dy)
    before = layer.amax_history.clone()
    with torch.no_grad():
        layer(x * 100)
    layer.eval()
    layer(x * 100)
    assert torch.equal(layer.amax_history, before)


def test_delayed_update_takes_the_maximum_over_ranks():
    layer = layer_of(load("fp8_delayed"))
    run(layer, *tensors(torch.bfloat16))
    other = torch.tensor([1e3, 1e-9, 1e4])
    mine = layer.amax_history[0].clone()
    update_delayed(layer, lambda amax: torch.maximum(amax, other))
    assert torch.equal(layer.scale, torch.tensor([448.0, 448.0, 57344.0]) / torch.maximum(mine, other))


def with_history(recipe, config):
    """Return `recipe` with `config` for all its delayed scales."""
    parts = ((gemm, getattr(recipe, gemm)) for gemm in ("fprop", "dgrad", "wgrad"))
    changed = {
        gemm: type(part)(**{role: cast.model_copy(update={"delayed": config}) for role, cast in part})
        for gemm, part in parts
    }
    return recipe.model_copy(update=changed)


def test_layers_are_updated_together_as_each_would_be_alone():
    """Three with one recipe and one with a shorter history, with different amaxes."""
    recipe = load("fp8_delayed")
    short = with_history(recipe, DelayedConfig(history_length=3, algorithm="most_recent"))
    layers = [layer_of(each) for each in (recipe, short, recipe, recipe)]
    largest = torch.tensor([448.0, 448.0, 57344.0])
    for step in range(4):
        for index, layer in enumerate(layers):
            x, dy = tensors(torch.bfloat16)
            run(layer, x * (1 + index) / (1 + step), dy * (1 + index * step))
        alone = [delayed.update(each.amax_history, each.scale, largest, each.delayed_config()) for each in layers]
        update_delayed(torch.nn.ModuleList(layers))
        for layer, (history, scale) in zip(layers, alone, strict=True):
            assert torch.equal(layer.amax_history, history)
            assert torch.equal(layer.scale, scale)
    assert len({tuple(layer.scale.tolist()) for layer in layers}) == 4


def test_delayed_scales_are_kept_through_a_phase_without_them():
    recipe = load("fp8_delayed")
    layer = layer_of(recipe)
    x, dy = tensors(torch.bfloat16)
    run(layer, x, dy)
    update_delayed(layer)
    kept = delayed_state(layer)["layers.0.q_proj"]
    set_recipe(layer, load("bf16"), 1)
    run(layer, x * 9, dy)
    update_delayed(layer)
    assert all(torch.equal(kept[key], each) for key, each in delayed_state(layer)["layers.0.q_proj"].items())
    set_recipe(layer, recipe, 1)
    run(layer, x / 2, dy)
    update_delayed(layer)
    assert torch.equal(layer.scale, kept["scale"])  # the maximum of the history is still the first step's


def test_delayed_state_survives_resume():
    recipe = load("fp8_delayed")
    x, dy = tensors(torch.bfloat16)
    layer, fresh = layer_of(recipe), layer_of(recipe)
    for scale in (1, 4, 2):
        run(layer, x * scale, dy)
        update_delayed(layer)
    assert load_delayed_state(fresh, delayed_state(layer)) == []
    assert all(torch.equal(a, b) for a, b in zip(run(layer, x, dy), run(fresh, x, dy), strict=True))
    assert load_delayed_state(fresh, {}) == ["layers.0.q_proj"]
    assert fresh.scale is None or torch.equal(fresh.scale, torch.ones(3))


def test_the_whole_amax_history_survives_resume():
    """Four steps, the largest amax first, a history of three: the oldest row decides the next scale, then goes."""
    recipe = with_history(load("fp8_delayed"), DelayedConfig(history_length=3))
    x, dy = tensors(torch.bfloat16)
    layer, fresh = layer_of(recipe), layer_of(recipe)
    for scale in (64, 16, 4, 1):
        run(layer, x * scale, dy)
        update_delayed(layer)
    history = layer.amax_history.clone()
    assert len(set(history[:, 0].tolist())) == 3
    assert load_delayed_state(fresh, delayed_state(layer)) == []
    assert torch.equal(fresh.amax_history, history)
    for each in (layer, fresh):
        run(each, x, dy)
        update_delayed(each)
    assert torch.equal(fresh.scale, layer.scale)


@pytest.mark.parametrize(("saved", "restored"), [(4, 4), (4, 2), (3, 5), (4, None)])
def test_a_full_history_is_restored_to_its_newest_rows(saved, restored):
    """Row 0 collects the amax of this step, and the others are earlier ones, oldest first; None: in a phase of bf16."""
    recipe = load("fp8_delayed")
    layer = layer_of(with_history(recipe, DelayedConfig(history_length=saved)))
    layer.materialise_state(torch.device("cpu"))
    layer.amax_history[:] = torch.arange(saved)[:, None] + torch.tensor([10.0, 20.0, 30.0])
    layer.scale[:] = torch.tensor([2.0, 3.0, 4.0])
    config = None if restored is None else DelayedConfig(history_length=restored)
    other = layer_of(load("bf16") if config is None else with_history(recipe, config))
    assert load_delayed_state(other, delayed_state(layer)) == []
    wanted = {4: [0, 1, 2, 3], 2: [0, 3], 5: [0, None, None, 1, 2], None: [0, 1, 2, 3]}[restored]
    rows = [[0.0] * 3 if row is None else [10.0 + row, 20.0 + row, 30.0 + row] for row in wanted]
    assert other.amax_history.tolist() == rows
    assert other.scale.tolist() == [2.0, 3.0, 4.0]


def test_module_keeps_names_and_parameters():
    torch.manual_seed(0)
    linear = torch.nn.Linear(8, 4)
    layer = QuantisedLinear("a", linear, LinearPlan.from_recipe(load("mxfp8"), "eager"))
    assert layer.weight is linear.weight
    assert list(layer.state_dict()) == ["weight", "bias"]
    assert quantised_layers(torch.nn.Sequential(layer)) == [layer]


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
