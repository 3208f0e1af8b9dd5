"""Single-slot recipes: only the rounding is removed."""

import pytest
import torch
import yaml

from lightning_llm.config.schema.precision import SLOTS, PrecisionConfig, slots_of
from lightning_llm.precision.linear.autograd import quantized_linear
from lightning_llm.precision.linear.plan import KEY_COUNT, LinearPlan
from lightning_llm.precision.lint import lint
from lightning_llm.probe.measure import all_but_slot, as_yaml_values, only_slot
from tests.precision.recipes import RECIPES, load, sample

QUANTIZED = sample([name for name in RECIPES if load(name).quantizes])
SLOT_NAMES = [".".join(slot) for slot in SLOTS]


@pytest.mark.parametrize("name", QUANTIZED)
def test_every_ablation_is_a_recipe_of_its_own(name):
    recipe = load(name)
    for slot, cast in slots_of(recipe).items():
        if not cast.quantizes:
            continue
        for made, quantized in ((only_slot(recipe, slot), {slot}), (all_but_slot(recipe, slot), None)):
            its = {each for each, its in slots_of(made).items() if its.quantizes}
            assert its == (quantized or {each for each, its in slots_of(recipe).items() if its.quantizes} - {slot})
            again = PrecisionConfig.model_validate(yaml.safe_load(yaml.safe_dump(as_yaml_values(made))))
            assert again == made
            assert lint(made) == []


@pytest.mark.parametrize("name", ["quartet", "mxfp4_rht_rne", "nvfp4"])
def test_without_any_rounding_rotations_cancel(name):
    """Y, dX and dW of all slots without rounding are the products themselves, whichever rotations there are."""
    recipe = load(name)
    for slot in SLOT_NAMES:
        if slots_of(recipe)[slot].quantizes:
            recipe = all_but_slot(recipe, slot)
    assert not recipe.quantizes
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(128, 64, generator=generator).requires_grad_()
    weight = torch.randn(192, 64, generator=generator).requires_grad_()
    dy = torch.randn(128, 192, generator=generator)
    y = quantized_linear(x, weight, None, LinearPlan.from_recipe(recipe, "eager"), torch.arange(KEY_COUNT))
    dx, dw = torch.autograd.grad(y, (x, weight), dy)
    # rotated operands are kept in bf16 by some recipes
    for made, exact in ((y, x @ weight.T), (dx, dy @ weight), (dw, dy.T @ x)):
        assert ((made - exact).norm() / exact.norm()).item() < 5e-3
