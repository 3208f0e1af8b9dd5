"""Delayed scales of a quantised linear: updates, phases without them, and their state across resumes."""

import pytest
import torch

from lightning_llm.config.schema.precision import DelayedConfig
from lightning_llm.precision.linear import delayed
from lightning_llm.precision.linear.delayed import delayed_state, load_delayed_state, update_delayed
from lightning_llm.precision.linear.module import set_recipe
from tests.precision.quantized_layer import layer_of, run, tensors
from tests.precision.recipes import load


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
