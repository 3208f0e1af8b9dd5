"""On a GPU with Transformer Engine: native linears against the emulation. `make gpu-check ARGS=steps` runs them."""

import pytest
import torch

from gpu_check import agreement, setting

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def recipes():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    here = setting.here()
    if here.library_problem is not None:
        pytest.skip(here.library_problem)
    return {name: recipe for name, (recipe, _) in setting.native_recipes().items()}


def statuses(rows):
    return {row.what: row.note for row in rows if row.status in ("off", "error")}


def test_codes_and_scales_are_the_emulations(recipes):
    for recipe in recipes.values():
        assert statuses(agreement.operands(recipe)) == {}


def test_products_are_the_emulations(recipes):
    for recipe in recipes.values():
        assert statuses(agreement.products(recipe)) == {}


def test_delayed_scales_are_the_emulations(recipes):
    if "fp8_delayed" in recipes:
        assert statuses(agreement.history(recipes["fp8_delayed"])) == {}
