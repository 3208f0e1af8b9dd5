"""The six slots of experts: those of separate layers, bit for bit, under every kind of recipe."""

import pytest
import torch
from torch import nn

from lightning_llm.base.errors import ConfigError
from lightning_llm.base.keyed_hash import StepKey
from lightning_llm.config.compose import compose_config
from lightning_llm.linalg.grouped import GroupedLinear, Groups
from lightning_llm.model.decoder import Decoder
from lightning_llm.model.init import initialise
from lightning_llm.plan.check import check_config
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
    grouped = as_model(QuantizedGroupedLinear("layers.0.up_proj", linear, [plan] * 3, multiple))
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
    layer = QuantizedGroupedLinear("layers.0.up_proj", linear, [plan], 32)
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


GATES = "layers.3.feed_forward.experts.gate_proj"
SINGLE = {
    "one high": ["precision=mxfp8", "precision.modules.exclude=['*.experts.3.*']"],
    "one other": ["precision=mxfp8", "precision.modules.casts=[{names: ['*.experts.3.*'], recipe: nvfp4}]"],
    "one alone": ["precision=mxfp8", "precision.modules.include=['*.experts.3.gate_proj']"],
    "all by number": ["precision=mxfp8", "precision.modules.include=['*.experts.*.gate_proj']"],
}


def formats_of(words: list[str]) -> list[str]:
    """Return the format of the weight in fprop of each expert's gate in the last block of `moe_tiny`."""
    config = compose_config(["model=moe_tiny", "precision.casts=eager", *words])
    check_config(config)
    with torch.device("meta"):
        model = Decoder(config.model)
    swap_linears(model, config.precision, config.model.num_layers, "cpu")
    return [expert.plan.casts["fprop.w"].format for expert in model.get_submodule(GATES).experts]


def test_rules_name_single_experts():
    assert formats_of(SINGLE["one high"]) == ["e4m3"] * 3 + ["high"] + ["e4m3"] * 4
    assert formats_of(SINGLE["one other"]) == ["e4m3"] * 3 + ["e2m1"] + ["e4m3"] * 4
    assert formats_of(SINGLE["one alone"]) == ["high"] * 3 + ["e4m3"] + ["high"] * 4
    assert formats_of(SINGLE["all by number"]) == ["e4m3"] * 8


def test_an_unquantized_expert_computes_as_it_does_without_a_recipe():
    """Beside a quantized one, of which another number changes: the rows of expert 0, forward and backward."""
    words = ["model=moe_tiny", "model.num_layers=1", "precision=mxfp8", "precision.casts=eager"]
    recipe = compose_config([*words, "precision.modules.exclude=['*.experts.0.*']"]).precision
    config, results = compose_config(words).model, []
    for quantized in (False, True):
        model = Decoder(config, torch.bfloat16)
        initialise(model, 0)
        if quantized:
            swap_linears(model, recipe, 1, "cpu")
            set_step_key(model, StepKey(0, 1, 0))
        layer = model.get_submodule(GATES.replace("3", "0"))
        x = torch.randn(64, 192, generator=torch.Generator().manual_seed(0)).bfloat16().requires_grad_()
        y = layer(x, Groups(torch.tensor([32, 32, 0, 0, 0, 0, 0, 0]), 64))
        y.sum().backward()
        results.append((y[:32], y[32:], x.grad[:32]))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][2], results[1][2])
    assert not torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize(
    "words",
    [
        ["precision.modules.exclude=['*.experts.8.*']"],
        ["precision.modules.casts=[{names: ['*.experts.8.up_proj'], high: true}]"],
        ["precision.modules.include=['*.experts.8.up_proj']"],
    ],
    ids=["exclude", "casts", "include"],
)
def test_an_expert_that_does_not_exist_is_named_with_those_that_do(words):
    config = compose_config(["model=moe_tiny", "precision=mxfp8", *words])
    with pytest.raises(ConfigError, match=r"which names expert 8, and there are 8 experts\. Use 0 to 7\."):
        check_config(config)


def test_experts_record_amaxes_after_a_validation():
    """Lightning sets the mode of each module by its attribute then, and the layers of experts are no modules of it."""
    linear = GroupedLinear(2, 32, 32)
    nn.init.normal_(linear.weight)
    plan = LinearPlan.from_recipe(recipe_of("fp8_delayed"), "eager")
    layer = QuantizedGroupedLinear("layers.0.up_proj", linear, [plan] * 2, 1)
    x, groups = torch.randn(4, 32, dtype=torch.bfloat16), Groups(torch.tensor([4, 0]), 4)
    layer.eval()
    layer(x, groups)
    assert layer.experts[0].amax_history is not None
    assert layer.experts[0].amax_history[0, 0] == 0
    layer.training = True
    layer(x, groups)
    assert layer.experts[0].amax_history[0, 0] == x.abs().max()


def test_without_rows_the_gradients_are_zeros():
    """A rank whose experts nobody chose takes part in the sums and exchanges of a backward pass."""
    linear = GroupedLinear(2, 32, 32)
    nn.init.normal_(linear.weight)
    plan = LinearPlan.from_recipe(recipe_of("mxfp8"), "eager")
    layer = QuantizedGroupedLinear("layers.0.up_proj", linear, [plan] * 2, 1)
    x = torch.zeros(0, 32, dtype=torch.bfloat16, requires_grad=True)
    layer(x, Groups(torch.tensor([0, 0]), 0)).sum().backward()
    assert x.grad is not None
    assert torch.equal(layer.weight.grad, torch.zeros_like(layer.weight))
