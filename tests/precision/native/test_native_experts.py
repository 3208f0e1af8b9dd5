"""Native linears of experts, in Transformer Engine's Python over kernels that stand in, and the emulation. 3 s."""

import copy
import sys

import pytest
import torch
from torch import nn

from lightning_llm.base.errors import ConfigError
from lightning_llm.linalg.grouped import GroupedLinear, Groups
from lightning_llm.precision.linear.delayed import update_delayed
from lightning_llm.precision.linear.module import high_precision_forward, quantized_layers, set_recipe
from lightning_llm.precision.linear.swap import swap_linears
from lightning_llm.precision.native import transformer_engine as te
from lightning_llm.precision.native.codes import check_native_casts
from lightning_llm.precision.native.decide import Decision
from lightning_llm.precision.native.grouped import NativeGroupedLinear
from lightning_llm.precision.native.transformer_engine import NativeLinear
from tests.precision.native import stub_kernels
from tests.precision.native.test_transformer_engine import DTYPES, compute_capability, variants
from tests.precision.recipes import load

NATIVE = Decision("native", library="2.20.2")
ROWS, INPUTS, OUTPUTS = (128, 0, 256), 128, 256
NAME = "layers.1.feed_forward.experts.up_proj"
AT_ONCE = ["fp8_current", "fp8_current_e4m3", "fp8_subchannel", "fp8_subchannel_fp32scales", "mxfp8", "fp16_mxfp8",
           "high_backward", "power_of_two", "mxfp8_square"]  # fmt: skip
ONE_BY_ONE = ["fp8_delayed", "nvfp4"]


def pair(recipe, sharded=False, master=torch.float32):
    """Return emulated and native linears of three experts with the same weights."""
    torch.manual_seed(0)
    linear = GroupedLinear(len(ROWS), INPUTS, OUTPUTS).to(master)
    nn.init.normal_(linear.weight)
    rules = recipe.modules.model_copy(update={"first_blocks_high_precision": 0, "last_blocks_high_precision": 0})
    recipe, made = recipe.model_copy(update={"modules": rules}), []
    for native in (False, True):
        model = nn.Module()
        parent = model
        for child in NAME.split(".")[:-1]:
            parent.add_module(child, nn.Module())
            parent = parent.get_submodule(child)
        parent.up_proj = copy.deepcopy(linear)
        how = {"decision": NATIVE, "sharded": sharded} if native else {"backend": "eager"}
        swap_linears(model, recipe, 3, "cuda", **how)
        for layer in quantized_layers(model):
            layer.keys = torch.arange(9)
        made.append(model)
    return made


def run(model, dtype, rows=ROWS, **given):
    """Return y, dx and dw of a pass."""
    layer, generator = model.get_submodule(NAME), torch.Generator().manual_seed(1)
    layer.weight.grad = None
    x, dy = (torch.randn(sum(rows), size, generator=generator).to(dtype) for size in (INPUTS, OUTPUTS))
    y = layer(x.requires_grad_(), Groups(torch.tensor(rows), sum(rows)), **given)
    y.backward(dy)
    return [y.detach(), x.grad, layer.weight.grad]


def same(ours, theirs):
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def kernels(model):
    """Return the library's modules that a native layer made: (for all experts at once, one by one)."""
    layer = model.get_submodule(NAME)
    return len(layer._kernel), sum(len(expert._kernel) for expert in layer.experts)


@pytest.mark.parametrize("name", [*AT_ONCE, *ONE_BY_ONE])
def test_native_experts_have_the_bits_of_emulated_ones(name, engine):
    recipe = variants().get(name) or load(name)
    engine.device(*compute_capability(recipe))
    emulated, native = pair(recipe)
    assert isinstance(native.get_submodule(NAME), NativeGroupedLinear)
    assert list(native.state_dict()) == list(emulated.state_dict())
    for _ in range(2):
        assert same(*(run(model, DTYPES[recipe.compute_dtype]) for model in (emulated, native)))
        for model in (emulated, native):
            update_delayed(model)
    assert kernels(native) == ((1, 0) if name in AT_ONCE else (0, 2))
    library = te.engine().pytorch
    assert not [module for module in native.modules() if isinstance(module, (library.Linear, library.GroupedLinear))]
    with high_precision_forward(emulated), high_precision_forward(native):
        assert same(*(run(model, DTYPES[recipe.compute_dtype]) for model in (emulated, native)))


@pytest.mark.parametrize("wgrad_dtype", [None, "fp32"])
@pytest.mark.parametrize("sharded", [False, True])
def test_gathered_weights_and_unrounded_gradients_have_the_same_bits(sharded, wgrad_dtype, engine):
    recipe = load("fp8_current").model_copy(update={"wgrad_dtype": wgrad_dtype})
    emulated, native = pair(recipe, sharded)
    ours, theirs = (run(model, torch.bfloat16) for model in (emulated, native))
    assert same(ours, theirs)
    assert kernels(native) == ((0, 2) if sharded else (1, 0))


@pytest.mark.parametrize("rows", [(0, 0, 0), (3, 0, 16), (16, 32, 48), (0, 0, 16)])
def test_any_number_of_rows_goes_in(rows, engine):
    emulated, native = pair(load("fp8_current"))
    assert same(*(run(model, torch.bfloat16, rows) for model in (emulated, native)))
    assert kernels(native)[0] == (1 if sum(rows) and not any(count % 16 for count in rows) else 0)


def test_a_rank_with_some_of_the_experts_uses_those(engine):
    emulated, native = pair(load("fp8_current"))
    for model in (emulated, native):
        layer = model.get_submodule(NAME)
        layer.weight = nn.Parameter(layer.weight.detach()[OUTPUTS:].clone())
    assert same(*(run(model, torch.bfloat16, ROWS[1:], first=1) for model in (emulated, native)))


def test_rules_and_phases_for_single_experts_are_followed(engine):
    recipe = load("fp8_current")
    rules = recipe.modules.model_copy(update={"exclude": ("*.experts.2.*",)})
    emulated, native = pair(recipe.model_copy(update={"modules": rules}))
    assert same(*(run(model, torch.bfloat16) for model in (emulated, native)))
    assert kernels(native) == (0, 1)
    emulated, native = pair(recipe)
    run(native, torch.bfloat16)
    assert kernels(native) == (1, 0)
    for model in (emulated, native):
        set_recipe(model, load("fp8_current_e4m3"), 3)
    assert same(*(run(model, torch.bfloat16) for model in (emulated, native)))


def test_the_check_at_the_start_finds_wrong_casts_and_products_of_several_experts(engine, monkeypatch):
    recipe, device = load("fp8_current"), torch.device("cpu")
    assert check_native_casts(recipe, device, experts=True) is None
    split, gemm = stub_kernels.split_quantize, stub_kernels.te_general_grouped_gemm

    def one_scale(*given, **keys):
        made = split(*given, **keys)
        made[-1]._scale_inv = made[0]._scale_inv * 0.5
        return made

    library = sys.modules["transformer_engine_torch"]
    te.engine.cache_clear()
    monkeypatch.setattr(library, "split_quantize", one_scale)
    with pytest.raises(ConfigError, match=r"fprop.x of experts.*scales differ"):
        check_native_casts(recipe, device, experts=True)
    te.engine.cache_clear()
    monkeypatch.setattr(library, "split_quantize", split)
    monkeypatch.setattr(library, "te_general_grouped_gemm", lambda a, ta, b, tb, out, *more: [o.zero_() for o in out])
    with pytest.raises(ConfigError, match="experts: y of all at once is"):
        check_native_casts(recipe, device, experts=True)
    te.engine.cache_clear()
    monkeypatch.setattr(library, "te_general_grouped_gemm", gemm)
    assert check_native_casts(load("fp8_delayed"), device, experts=True) is None


def test_experts_of_native_layers_are_native(engine):
    _, native = pair(load("nvfp4"))
    assert all(isinstance(layer, NativeLinear) for layer in quantized_layers(native))
