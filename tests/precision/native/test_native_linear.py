"""Native linears, in Transformer Engine's Python over kernels that stand in, and the emulation: the same bits. 5 s."""

import copy

import pytest
import torch
from torch import nn

from lightning_llm.config.schema.precision import slots_of
from lightning_llm.precision.linear.delayed import delayed_state, load_delayed_state, update_delayed
from lightning_llm.precision.linear.module import QuantizedLinear, high_precision_forward, set_recipe
from lightning_llm.precision.linear.plan import LinearPlan, Shard
from lightning_llm.precision.linear.swap import swap_linears
from lightning_llm.precision.native import transformer_engine as te
from lightning_llm.precision.native.decide import Decision
from lightning_llm.precision.native.transformer_engine import NativeLinear
from tests.precision.native.test_transformer_engine import compute_capability
from tests.precision.recipes import load

NATIVE = Decision("native", library="2.20.2")
WIDTH = 256
SHIPPED = ["fp8_current", "fp8_current_e4m3", "fp8_delayed", "fp8_delayed_micro_batch", "fp8_subchannel",
           "fp8_subchannel_fp32scales", "mxfp8", "nvfp4", "fp16_mxfp8", "fp16_mxfp8_hybrid"]  # fmt: skip
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Linear(nn.Linear):
    def forward(self, x):
        return nn.functional.linear(x, self.weight.to(x.dtype))


def pair(recipe, master=torch.float32):
    """Return a model of two blocks under the emulation, and one with the same weights and native linears."""
    torch.manual_seed(0)
    block = {"up_proj": Linear(WIDTH, 384, bias=False), "down_proj": Linear(384, WIDTH, bias=False)}
    model = nn.ModuleDict({"layers": nn.ModuleDict({"1": nn.ModuleDict(block)})}).to(master)
    other = copy.deepcopy(model)
    rules = recipe.modules.model_copy(update={"first_blocks_high_precision": 0, "last_blocks_high_precision": 0})
    recipe = recipe.model_copy(update={"modules": rules})
    swap_linears(model, recipe, 3, "cuda", "eager")
    report = swap_linears(other, recipe, 3, "cuda", decision=NATIVE)
    assert report.converted == ("layers.1.up_proj", "layers.1.down_proj")
    return model, other


def block_of(model):
    return model["layers"]["1"]


def run(model, x, dy):
    """Return the output, and the gradients of the input and of the weights."""
    block = block_of(model)
    for parameter in model.parameters():
        parameter.grad = None
    x = x.clone().requires_grad_()
    y = block["down_proj"](torch.relu(block["up_proj"](x)))
    y.backward(dy)
    return [y.detach(), x.grad, *(parameter.grad for parameter in model.parameters())]


def same(ours, theirs):
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def batch(dtype, rows=(2, 64), seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*rows, WIDTH, generator=generator).to(dtype) for _ in range(2)]


@pytest.mark.parametrize("name", SHIPPED)
@pytest.mark.parametrize("master", [torch.float32, torch.bfloat16])
def test_native_is_the_emulation(name, master, engine):
    recipe = load(name)
    engine.device(*compute_capability(recipe))
    emulated, native = pair(recipe, master)
    assert all(isinstance(each, NativeLinear) for each in block_of(native).values())
    x, dy = batch(DTYPES[recipe.compute_dtype])
    for model in (emulated, native):
        for layer in block_of(model).values():
            layer.keys = torch.arange(9)
    assert same(run(emulated, x, dy), run(native, x, dy))
    with high_precision_forward(emulated), high_precision_forward(native):
        assert same(run(emulated, x, dy), run(native, x, dy))


@pytest.mark.parametrize("rows", [(1, 3), (37,), (5, 16)])
@pytest.mark.parametrize("name", ["fp8_current", "fp8_subchannel", "fp8_delayed"])
def test_any_number_of_tokens_goes_in(name, rows, engine):
    """Kernels refuse odd sizes: sampling, and a last batch, have them."""
    emulated, native = pair(load(name))
    x, dy = batch(torch.bfloat16, rows)
    assert same(run(emulated, x, dy), run(native, x, dy))


def test_names_parameters_and_state_are_the_emulations(engine):
    emulated, native = pair(load("fp8_delayed"))
    x, dy = batch(torch.bfloat16)
    run(native, x, dy)
    assert list(native.state_dict()) == list(emulated.state_dict()) == [name for name, _ in native.named_parameters()]
    assert [type(module) for module in native.modules() if isinstance(module, QuantizedLinear)] == [NativeLinear] * 2
    kernels = te.engine().pytorch.Linear
    assert isinstance(block_of(native)["up_proj"]._kernel[0], kernels)
    assert not [module for module in native.modules() if isinstance(module, kernels)]


def test_delayed_scales_move_once_per_step_and_not_in_validation(engine):
    emulated, native = pair(load("fp8_delayed"))
    for step in range(4):
        for model in (emulated, native):
            model.train()
        for micro_batch in range(3):
            x, dy = batch(torch.bfloat16, seed=10 * step + micro_batch)
            x, dy = (1 + step) * x, dy / (1 + step)
            assert same(run(emulated, x, dy), run(native, x, dy))
        for model in (emulated, native):
            model.eval()
            with torch.no_grad():
                block_of(model)["up_proj"](100 * x)
            update_delayed(model)
        ours, theirs = delayed_state(native), delayed_state(emulated)
        assert ours.keys() == theirs.keys()
        for name, state in ours.items():
            assert all(torch.equal(state[key], theirs[name][key]) for key in ("scale", "amax_history"))
    assert ours["layers.1.up_proj"]["scale"].min() != 1


@pytest.mark.parametrize("between", ["no_grad", "evaluation"])
def test_a_forward_pass_in_between_leaves_a_backward_pass_its_scales_and_its_amax(between, engine):
    """One without gradients, or one in evaluation: the gradient's amax was once lost to it."""
    x, dy = batch(torch.bfloat16)
    states, gradients = [], []
    for model in pair(load("fp8_delayed")):
        run(model, x, dy)
        update_delayed(model)
        layer = block_of(model)["up_proj"]
        layer.weight.grad = None
        y = layer(x)
        if between == "no_grad":
            with torch.no_grad():
                layer(3 * x)
        else:
            model.eval()
            layer(3 * x)
            model.train()
        y.backward(y.detach() * 2)
        states.append(delayed_state(model)["layers.1.up_proj"]["amax_history"])
        gradients.append(layer.weight.grad)
    assert states[0][0, 2] > 0
    assert torch.equal(states[0], states[1])
    assert torch.equal(gradients[0], gradients[1])


def test_delayed_state_goes_from_one_backend_to_the_other(engine):
    emulated, native = pair(load("fp8_delayed"))
    x, dy = batch(torch.bfloat16)
    for _ in range(2):
        run(emulated, x, dy)
        update_delayed(emulated)
    assert load_delayed_state(native, delayed_state(emulated)) == []
    assert same(run(emulated, x, dy), run(native, x, dy))


def test_a_phase_gets_its_own_quantisers(engine):
    """A kernel keeps those of the first recipe of a class."""
    recipe, later = load("fp8_current"), load("fp8_current_e4m3")
    emulated, native = pair(recipe)
    x, dy = batch(torch.bfloat16)
    first = run(native, x, dy)
    for phase in (later, load("bf16"), recipe):
        for model in (emulated, native):
            set_recipe(model, phase, 3)
        assert same(run(emulated, x, dy), run(native, x, dy))
    assert same(first, run(native, x, dy))


@pytest.mark.parametrize("name", SHIPPED)
def test_observers_see_the_emulations_casts_and_change_nothing(name, engine):
    """Inputs, scales and results of the casts of all six slots; a call without gradients has the first two."""
    recipe = load(name)
    engine.device(*compute_capability(recipe))
    emulated, native = pair(recipe)
    x, dy = batch(DTYPES[recipe.compute_dtype], (3, 48))
    seen, bare = {"emulated": [], "native": []}, []
    for model, into in ((emulated, seen["emulated"]), (native, seen["native"]), (native, None)):
        for name_, layer in block_of(model).items():
            layer.keys = torch.arange(9)
            layer.observe = None if into is None else lambda cast, into=into, name_=name_: into.append((name_, cast))
        torch.manual_seed(0)
        made = run(model, x, dy)
        bare.append([*made, *(layer.amax_history for layer in block_of(model).values() if layer.plan.delayed_casts())])
        with torch.no_grad():
            block_of(model)["up_proj"](x)
    assert same(bare[1], bare[2])
    ours, theirs = (sorted(each, key=lambda one: (one[0], one[1].slot)) for each in (seen["native"], seen["emulated"]))
    assert [(layer, cast.slot) for layer, cast in ours] == [(layer, cast.slot) for layer, cast in theirs]
    assert len(ours) == 2 * len([cast for cast in slots_of(recipe).values() if cast.quantizes]) + 2
    for (_, one), (_, other) in zip(ours, theirs, strict=True):
        assert (one.cast, one.axis) == (other.cast, other.axis)
        assert torch.equal(one.given, other.given)
        assert torch.equal(one.scaled.multiplier, other.scaled.multiplier)
        assert torch.equal(one.operand.dequantized(), other.operand.dequantized())


def test_a_weight_is_not_held_between_calls(engine):
    _, native = pair(load("fp8_current"))
    layer = block_of(native)["up_proj"]
    layer(batch(torch.bfloat16)[0])
    assert not hasattr(layer._kernel[0], "weight")
    assert layer._kernel[0]._is_fsdp2 is False


def test_casts_that_it_cannot_make_are_an_error_not_an_approximation(engine):
    layer = NativeLinear("x", Linear(WIDTH, WIDTH, bias=False), LinearPlan.from_recipe(load("mxfp8_ocp"), "eager"))
    with pytest.raises(ValueError, match=r"x: fprop\.x e4m3 1x32 e8m0_floor"):
        layer(batch(torch.bfloat16)[0])


def test_parts_of_a_gradient_are_rounded_by_other_bits_and_copies_by_the_same(engine):
    layer = NativeLinear("a", nn.Linear(32, 32, bias=False), LinearPlan.from_recipe(load("nvfp4"), "eager"))
    words = {}
    for keys in (0, 1):
        layer.keys = torch.arange(9) + keys
        for part in (None, 0, 1, 2):
            shards = {} if part is None else {"dy": Shard(part=part)}
            layer.plan = LinearPlan(layer.plan.casts, "eager", shards)
            words[keys, part] = layer.random_word()
    assert words[0, None] == words[0, 0]
    assert len(set(words.values())) == 6


def test_bits_do_not_depend_on_the_order_of_backward_passes(engine):
    """Pipelines run other micro-batches' forward passes in between."""
    recipe = load("nvfp4")
    engine.device(10, 0)
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(32, 64, generator=generator).bfloat16() for _ in range(3)]
    dy = torch.randn(32, 32, generator=generator).bfloat16()
    gradients = {}
    for kind in (NativeLinear, QuantizedLinear):
        linear = nn.Linear(64, 32, bias=False)
        nn.init.uniform_(linear.weight, generator=torch.Generator().manual_seed(1))
        layer = kind("a", linear, LinearPlan.from_recipe(recipe, "eager"))
        for order in ((0, 1, 2), (2, 0, 1)):
            passes = []
            given = [x.clone().requires_grad_() for x in inputs]
            for micro_batch, x in enumerate(given):
                layer.keys = torch.arange(9) + micro_batch
                passes.append(layer(x))
            for micro_batch in order:
                passes[micro_batch].backward(dy)
            gradients[kind, order] = [x.grad for x in given]
    first, *rest = gradients.values()
    assert all(torch.equal(one, other) for each in rest for one, other in zip(first, each, strict=True))
    assert not torch.equal(first[0], first[1])
