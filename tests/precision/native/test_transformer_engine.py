"""Transformer Engine's own Python, driven as a native run drives it: which casts and GEMMs come of it. 4 seconds."""

import re
import weakref
from dataclasses import replace
from inspect import getsource
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lightning_llm.config.schema.precision import UNQUANTIZED, slots_of
from lightning_llm.precision.linear.module import QuantizedLinear
from lightning_llm.precision.linear.plan import LinearPlan
from lightning_llm.precision.native import transformer_engine as te
from lightning_llm.precision.native.codes import quantizers_of
from lightning_llm.precision.native.decide import Capability, device_problems
from lightning_llm.precision.native.express import MULTIPLES, native_recipe
from lightning_llm.precision.native.transformer_engine import NativeLinear
from tests.precision.native.stub_kernels import LOG, Cast, Gemm, casts_of
from tests.precision.native.test_decision import NATIVE, with_cast
from tests.precision.recipes import load

ROWS, INPUTS, OUTPUTS = 128, 256, 384
SIDES = (("fprop.x", "wgrad.x"), ("fprop.w", "dgrad.w"), ("dgrad.dy", "wgrad.dy"))  # along rows, along columns
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def variants():
    """Return recipes that no file ships and Transformer Engine has."""
    made = {name: load(name) for name in NATIVE}
    current = load("fp8_current")
    for gemm, operand in (slot.split(".") for slot in slots_of(current)):
        cast = getattr(getattr(current, gemm), operand).model_copy(update={"scale": "power_of_two"})
        current = current.model_copy(update={gemm: getattr(current, gemm).model_copy(update={operand: cast})})
    square = with_cast("mxfp8", "fprop.w", block="32x32")
    square = square.model_copy(update={"dgrad": square.dgrad.model_copy(update={"w": square.fprop.w})})
    plain = load("nvfp4")
    x = plain.fprop.x
    parts = {gemm: type(getattr(plain, gemm)) for gemm in ("fprop", "dgrad", "wgrad")}
    plain = plain.model_copy(update={
        "fprop": parts["fprop"](x=x, w=x), "dgrad": parts["dgrad"](dy=x, w=x), "wgrad": parts["wgrad"](dy=x, x=x)
    })  # fmt: skip
    high = load("fp8_subchannel")
    high = high.model_copy(update={"dgrad": parts["dgrad"](), "wgrad": parts["wgrad"]()})
    return made | {"power_of_two": current, "mxfp8_square": square, "nvfp4_plain": plain, "high_backward": high}


def compute_capability(recipe):
    """Return that of a device which has the recipe."""
    return (10, 0) if native_recipe(recipe)[0].kind in ("mxfp8", "nvfp4") else (9, 0)


def layer_of(recipe, bias=False, sharded=False):
    torch.manual_seed(0)
    linear = nn.Linear(INPUTS, OUTPUTS, bias=bias)
    layer = NativeLinear("layers.1.linear", linear, LinearPlan.from_recipe(recipe, "eager"), sharded)
    layer.keys = torch.arange(9)
    return layer


def step(layer, recipe):
    """Run it forward and backward; return the kernel calls."""
    LOG.clear()
    generator = torch.Generator().manual_seed(0)
    x, dy = (
        torch.randn(ROWS, size, generator=generator).to(DTYPES[recipe.compute_dtype]) for size in (INPUTS, OUTPUTS)
    )
    layer(x.requires_grad_()).backward(dy)
    return [each for each in LOG if isinstance(each, Cast)], [each for each in LOG if isinstance(each, Gemm)]


def without_history(casts):
    return {slot: cast.model_copy(update={"delayed": None}) for slot, cast in casts.items()}


@pytest.mark.parametrize("name", variants())
def test_kernels_are_asked_for_the_recipes_six_casts_and_three_gemms(name, engine):
    """Slot by slot: format, block, scale, rounding, rotation; and each of the three tensors is cast once."""
    recipe = variants()[name]
    engine.device(*compute_capability(recipe))
    layer = layer_of(recipe)
    casts, gemms = step(layer, recipe)
    native, _ = native_recipe(recipe)
    asked = {}
    for (rows, columns), cast in zip(SIDES, casts, strict=native.gradient != "high"):
        asked |= {rows: cast.rows, columns: cast.columns}
    if native.gradient == "high":
        assert len(casts) == 2
        asked = {slot: asked.get(slot) or UNQUANTIZED for slot in slots_of(recipe)}
    assert without_history(asked) == without_history(slots_of(recipe))
    assert [gemm.layout for gemm in gemms] == ["TN", "NN", "NT"]
    always = native.kind in ("delayed", "current", "subchannel")
    assert [gemm.split_accumulator for gemm in gemms] == [always, True, True]
    if native.gradient != "high":  # the check at the start uses these quantizers
        for role, cast in zip(("x", "w", "dy"), casts, strict=True):
            assert casts_of(quantizers_of(layer)[role]) == (cast.rows, cast.columns)


def test_without_gradients_nothing_is_cast_for_a_backward_pass(engine):
    layer = layer_of(load("fp8_subchannel"))
    with torch.no_grad():
        layer(torch.randn(ROWS, INPUTS).bfloat16())
    assert [(cast.rows is None, cast.columns is None) for cast in LOG if isinstance(cast, Cast)] == [(False, True)] * 2


@pytest.mark.parametrize("name", ["fp8_current", "mxfp8", "nvfp4"])
def test_a_gathered_weight_is_cast_anew_for_the_backward_pass(name, engine):
    """Under FSDP2 no quantised copy is kept: the same casts of W, made twice, and the same gradients."""
    recipe = load(name)
    engine.device(*compute_capability(recipe))
    made = {}
    for sharded in (False, True):
        layer = layer_of(recipe, sharded=sharded)
        torch.manual_seed(0)
        casts, _ = step(layer, recipe)
        made[sharded] = layer.weight.grad
        assert len(casts) == 3 + sharded
    assert torch.equal(made[False], made[True])
    assert casts[1].columns is None
    assert (casts[3].rows, casts[3].columns) == (recipe.fprop.w, recipe.dgrad.w)


def test_a_weight_that_the_library_caches_by_micro_batch_does_not_follow_the_weight(engine):
    """So the casts are dropped at the end of a step (`KeptByKernel`), because masters change between steps."""
    layer = layer_of(load("fp8_current"))
    x = torch.randn(ROWS, INPUTS).bfloat16()
    before = layer(x)
    kernel = layer._kernel[0]
    assert kernel._fp8_workspaces == {}
    kernel.__dict__["weight"] = layer.weight.detach().bfloat16()
    made = []
    for first in (True, False, True):
        LOG.clear()
        with te.engine().pytorch.autocast(enabled=True, recipe=layer._recipe), torch.no_grad():
            made.append(kernel(x, is_first_microbatch=first))
        assert len([each for each in LOG if isinstance(each, Cast)]) == 2 - (not first)
        assert [each.updates for each in LOG if isinstance(each, Cast)][1:] in ([False], [], [True])
        kernel.__dict__["weight"] = 2 * layer.weight.detach().bfloat16()
    assert torch.equal(made[0], before)
    assert torch.equal(made[1], before)
    assert torch.equal(made[2], 2 * before)  # a power of two: its codes are the same, its scale is twice


@pytest.mark.parametrize("name", ["fp8_current", "fp8_delayed", "fp8_subchannel", "mxfp8", "nvfp4", "high_backward"])
def test_a_bias_is_added_by_the_gemm_and_its_gradient_is_that_of_dy_before_the_cast(name, engine):
    recipe = variants()[name]
    engine.device(*compute_capability(recipe))
    native, emulated = layer_of(recipe, bias=True), layer_of(recipe, bias=True)
    emulated.__class__ = QuantizedLinear
    made = {}
    for layer in (native, emulated):
        with torch.no_grad():
            layer.bias.copy_(torch.linspace(-3, 3, OUTPUTS))
        layer.keys = torch.arange(9)
        casts, gemms = step(layer, recipe)
        made[layer] = [layer.bias.grad, layer.weight.grad, layer(torch.ones(16, INPUTS).to(torch.bfloat16))]
        if layer is native:
            assert [gemm.bias for gemm in gemms] == [True, False, name == "high_backward"]
            assert len(casts) == (2 if name == "high_backward" else 3)
    assert all(one.dtype == other.dtype for one, other in zip(*made.values(), strict=True))
    assert all(torch.equal(one, other) for one, other in zip(*made.values(), strict=True))
    assert made[native][0].abs().min() > 0
    assert [name for name, _ in native.named_parameters()] == ["weight", "bias"]
    assert not hasattr(native._kernel[0], "bias")


@pytest.mark.parametrize("name", ["fp8_current", "fp8_delayed", "fp8_subchannel", "mxfp8", "nvfp4", "high_backward"])
@pytest.mark.parametrize("sharded", [False, True])
def test_unrounded_gradients_are_the_output_of_the_wgrad_gemm(name, sharded, engine):
    """Into a new tensor per backward pass, two of them in reversed order here; none is kept."""
    recipe = variants()[name].model_copy(update={"wgrad_dtype": "fp32"})
    engine.device(*compute_capability(recipe))
    native, emulated = layer_of(recipe, sharded=sharded), layer_of(recipe)
    emulated.__class__ = QuantizedLinear
    inputs = [torch.randn(ROWS, INPUTS).bfloat16() for _ in range(2)]
    dy = torch.randn(ROWS, OUTPUTS).bfloat16()
    for layer in (native, emulated):
        layer.keys = torch.arange(9)
        LOG.clear()
        first, second = (layer(x) for x in inputs)
        second.backward(dy)
        first.backward(dy)
        if layer is native:
            outs = [gemm.out for gemm in LOG if isinstance(gemm, Gemm)]
            assert [out is not None for out in outs] == [False, False, True, True]
            kept = [weakref.ref(out) for out in outs if out is not None]
            del outs
            LOG.clear()
    assert native.weight.grad.dtype == torch.float32
    assert torch.equal(native.weight.grad, emulated.weight.grad)
    assert not torch.equal(native.weight.grad, native.weight.grad.bfloat16().float())
    assert [each() for each in kept if each() is not native.weight.grad] == [None] * len(kept)
    native.weight.requires_grad_(False)
    step(native, recipe)  # now with two GEMMs and no gradient of the weight
    assert torch.equal(native.weight.grad, emulated.weight.grad)


def test_the_library_accepts_what_the_plan_accepts(engine):
    """On every device. Ours is stricter twice: blocks of 128 from 12.0 on, and NVFP4's rotation and rounding there."""
    asks = {"delayed": "fp8", "current": "fp8", "subchannel": "fp8_block_scaling", "mxfp8": "mxfp8", "nvfp4": "nvfp4"}
    for device in ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (11, 0), (12, 0), (12, 1)):
        engine.device(*device)
        here = Capability.of_gpu(*device)
        for name in ("fp8_delayed", "fp8_current", "fp8_subchannel", "mxfp8", "nvfp4"):
            native, _ = native_recipe(load(name))
            theirs = getattr(te.engine().pytorch, f"is_{asks[native.kind]}_available")()
            ours = not device_problems(replace(native, rotated=False, stochastic=False), here)
            assert ours == (theirs and not (native.kind == "subchannel" and device >= (12, 0))), (name, device)


def test_every_default_that_the_environment_sets_is_passed(engine, monkeypatch):
    """Read off the library's own source: NVTE_ variables give recipes defaults when it is imported."""
    own, passed = te.engine().recipe, {}

    def recording(name):
        return lambda **keys: passed.update({name: keys}) or getattr(own, name)(**keys)

    names = ("Float8CurrentScaling", "Float8BlockScaling", "MXFP8BlockScaling", "NVFP4BlockScaling", "CustomRecipe")
    recorder = SimpleNamespace(**vars(own) | {name: recording(name) for name in names})
    parts = te.engine()._replace(recipe=recorder)
    monkeypatch.setattr(te, "engine", lambda: parts)
    for recipe in (load("fp8_current"), load("fp8_subchannel"), load("mxfp8"), load("nvfp4")):
        te.recipe_object(native_recipe(recipe)[0])
    te.DelayedQuantizers(LinearPlan.from_recipe(load("fp8_delayed"), "eager").delayed_casts(), torch.device("cpu"))
    inert = {"nvfp4_4over6_e4m3_use_256", "nvfp4_4over6_err_mode"}  # without effect under nvfp4_4over6="none"
    for name in names:
        source = getsource(getattr(own, name))
        set_outside = set(re.findall(r"^    (\w+): \w[^\n]*?=[\s(]*os\.getenv", source, re.MULTILINE))
        assert "backward_override" in set_outside
        assert set_outside - set(passed[name]) <= inert
        assert set(passed[name]) <= set(getattr(own, name).__dataclass_fields__)


def test_a_norm_fused_with_a_linear_is_handed_the_linears_cast(engine, monkeypatch):
    """The norm's kernel then decides the input of the cast, not the recipe, so no fused norm is used."""
    library, handed = te.engine().pytorch, []

    def norm(x, weight, eps, out, quantizer, *_):
        handed.append(quantizer)
        raise StopIteration

    for each in ("rmsnorm_fwd", "rmsnorm_bwd", "layernorm_fwd", "layernorm_bwd"):
        monkeypatch.setattr(library.cpp_extensions, each, norm, raising=False)
    keys = {"bias": False, "normalization": "RMSNorm", "params_dtype": torch.bfloat16, "device": "cpu"}
    for name in ("fp8_current", "fp8_subchannel"):
        own = te.recipe_object(native_recipe(load(name))[0])
        assert (own.fp8_dpa, own.fp8_mha) == (False, False)  # and attention within `autocast` is left as it is
        fused = library.LayerNormLinear(INPUTS, OUTPUTS, **keys)
        with pytest.raises(StopIteration), library.autocast(enabled=True, recipe=own):
            fused(torch.randn(ROWS, INPUTS).bfloat16())
    assert [casts_of(each)[0] for each in handed] == [load(name).fprop.x for name in ("fp8_current", "fp8_subchannel")]


@pytest.mark.parametrize("name", ["fp8_current", "fp8_delayed", "fp8_subchannel", "mxfp8", "nvfp4"])
def test_sizes_that_fit_are_the_librarys(name, engine):
    recipe = load(name)
    engine.device(*compute_capability(recipe))
    kind = native_recipe(recipe)[0].kind
    step(layer := layer_of(recipe), recipe)
    multiple = MULTIPLES[kind]
    assert all(each.is_quantizable(torch.empty(multiple, 3 * multiple)) for each in quantizers_of(layer).values())
    if kind in ("delayed", "current"):
        with pytest.raises(ValueError, match="last dimension to be divisible by 16"):
            te.engine().pytorch.utils.assert_dim_for_fp8_exec(torch.empty(multiple, 3 * multiple + 8))
    elif kind != "nvfp4":  # its GEMMs need 32, its casts do not
        assert not any(
            each.is_quantizable(torch.empty(multiple, multiple // 2)) for each in quantizers_of(layer).values()
        )
