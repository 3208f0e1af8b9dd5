"""The six slots of experts: those of separate layers, bit for bit, under every kind of recipe."""

import pytest
import torch
from torch import nn

from lightning_llm.base.keyed_hash import StepKey
from lightning_llm.config.compose import compose_config
from lightning_llm.linalg.grouped import GroupedLinear, Groups
from lightning_llm.precision.linear.delayed import delayed_state, update_delayed
from lightning_llm.precision.linear.grouped import QuantizedGroupedLinear, row_multiple
from lightning_llm.precision.linear.module import QuantizedLinear, quantized_layers, set_step_key
from lightning_llm.precision.linear.plan import LinearPlan
from lightning_llm.precision.linear.swap import swap_linears

MULTIPLES = {"fp8_current": 1, "fp8_delayed": 1, "mxfp8": 32, "nvfp4": 16, "mxfp4_sr": 64, "fp8_subchannel": 128}


def recipe_of(name: str):
    return compose_config([f"precision={name}", "precision.casts=eager"]).precision


def as_model(layer: nn.Module) -> nn.Module:
    """Return a model in which `layer` is a linear of experts of block 0 of 1."""
    model = nn.Module()
    model.layers = nn.ModuleDict({"0": nn.Module()})
    model.layers["0"].up_proj = layer
    return model


@pytest.mark.parametrize("name", MULTIPLES)
def test_each_expert_is_a_layer_of_its_own(name):
    """Outputs, gradients and delayed state of three experts, one without tokens, over two micro-batches."""
    torch.manual_seed(0)
    recipe, multiple = recipe_of(name), MULTIPLES[name]
    assert row_multiple(recipe.cast_sets().values()) == multiple
    counts = [2 * multiple, 0, multiple]
    linear = GroupedLinear(3, 256, 128)
    nn.init.normal_(linear.weight)
    plan = LinearPlan.from_recipe(recipe, "eager")
    grouped = as_model(QuantizedGroupedLinear("layers.0.up_proj", linear, plan, multiple))
    alone = nn.ModuleList()
    for number, weight in enumerate(linear.weight.detach().chunk(3)):
        part = nn.Linear(256, 128, bias=False)
        part.weight.data.copy_(weight)
        alone.append(QuantizedLinear(f"layers.0.up_proj.{number}", part, plan))
    assert [layer.name for layer in quantized_layers(grouped)] == [layer.name for layer in alone]
    for micro_batch in range(2):
        for model in (grouped, alone):
            set_step_key(model, StepKey(0, 3, micro_batch))
        x = torch.randn(sum(counts), 256, dtype=torch.bfloat16)
        gradient = torch.randn(sum(counts), 128, dtype=torch.bfloat16)
        inputs = [x.clone().requires_grad_() for _ in range(2)]
        y = grouped.layers["0"].up_proj(inputs[0], Groups(torch.tensor(counts), len(x)))
        parts = inputs[1].split(counts)
        expected = torch.cat([layer(rows) for layer, rows in zip(alone, parts, strict=True) if len(rows)])
        assert torch.equal(y, expected)
        y.backward(gradient)
        expected.backward(gradient)
        assert torch.equal(inputs[0].grad, inputs[1].grad)
    gradients = [torch.zeros_like(each.weight) if each.weight.grad is None else each.weight.grad for each in alone]
    assert torch.equal(linear.weight.grad, torch.cat(gradients))
    for model in (grouped, alone):
        update_delayed(model)
    ours, theirs = delayed_state(grouped), delayed_state(alone)
    if name == "fp8_delayed":
        assert list(ours) == [f"layers.0.up_proj.{number}" for number in range(3)]
    for key, state in theirs.items():
        for tensor, value in state.items():
            assert torch.equal(ours[key][tensor], value)


def test_zero_rows_fill_up_blocks_and_change_nothing():
    torch.manual_seed(0)
    plan = LinearPlan.from_recipe(recipe_of("mxfp8"), "eager")
    linear = GroupedLinear(1, 64, 32)
    nn.init.normal_(linear.weight)
    layer = QuantizedGroupedLinear("layers.0.up_proj", linear, plan, 32)
    x = torch.randn(20, 64, dtype=torch.bfloat16)
    padded = torch.cat([x, torch.zeros(12, 64, dtype=torch.bfloat16)])
    y = layer(padded, Groups(torch.tensor([32]), 32))
    y.backward(torch.cat([torch.ones(20, 32), torch.zeros(12, 32)]).bfloat16())
    assert y[20:].eq(0).all()
    longer = torch.cat([padded, torch.zeros(32, 64, dtype=torch.bfloat16)])
    first = linear.weight.grad.clone()
    linear.weight.grad = None
    layer(longer, Groups(torch.tensor([64]), 64)).backward(
        torch.cat([torch.ones(20, 32), torch.zeros(44, 32)]).bfloat16()
    )
    assert torch.equal(linear.weight.grad, first)


def test_the_swap_goes_by_the_name_of_the_group():
    model = as_model(GroupedLinear(2, 64, 64))
    swap_linears(model, recipe_of("mxfp8"), 1, "cpu")
    assert isinstance(model.layers["0"].up_proj, QuantizedGroupedLinear)
    assert model.layers["0"].up_proj.row_multiple == 32
    model.eval()
    assert not any(layer.training for layer in quantized_layers(model))
    kept = as_model(GroupedLinear(2, 64, 64))
    kept.layers["0"].other = nn.Linear(64, 64)
    recipe = compose_config(["precision=mxfp8", "precision.modules.exclude=['*.up_proj']"]).precision
    report = swap_linears(kept, recipe, 1, "cpu", "eager")
    assert type(kept.layers["0"].up_proj) is GroupedLinear
    assert "modules.exclude" in report.kept["layers.0.up_proj"]
