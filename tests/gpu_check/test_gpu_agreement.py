"""Comparisons of `agreement` on a CPU, with the emulation or a mock on both sides."""

import pytest
import torch

from gpu_check import agreement, layers, setting
from lightning_llm.config.schema.precision import slots_of
from lightning_llm.precision.cast import inductor
from lightning_llm.precision.linear.plan import LinearPlan
from lightning_llm.precision.native.decide import Capability
from lightning_llm.precision.native.transformer_engine import NativeLinear
from tests.gpu_check.check_rows import statuses
from tests.precision.recipes import load


@pytest.mark.parametrize("name", ["fp8_current", "fp8_subchannel", "mxfp8"])
@pytest.mark.parametrize("shape", [(256, 384), (128, 640)])
def test_operands_are_compared_in_one_layout(name, shape, engine):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    recipe = load(name)
    engine.device(10 if name == "mxfp8" else 9)
    quantizers = agreement.quantizers_of(ran(recipe))
    for slot, cast in slots_of(recipe).items():
        axis = agreement.axis_of(slot)
        made = agreement.quantized_by(quantizers[slot.split(".")[1]], x)
        theirs, ours = agreement.stored(made, cast, axis, shape), agreement.emulated(x, cast, axis)
        assert [row.status for row in agreement.compare(slot, theirs, ours)] == ["ok", "ok"]
        wrong = agreement.StoredCodes(theirs.codes ^ 1, theirs.scales * 2)
        assert [row.status for row in agreement.compare(slot, wrong, ours)] == ["off", "off"]
        (first, _) = agreement.compare(slot, agreement.StoredCodes(theirs.codes[:5], theirs.scales), ours)
        assert (first.status, first.value) == ("off", None)


def ran(recipe):
    """Return a native layer after a forward and a backward pass, which make its quantisers."""
    layer = NativeLinear("x", torch.nn.Linear(128, 128, bias=False), LinearPlan.from_recipe(recipe, "eager"))
    layer(torch.ones(128, 128, dtype=torch.bfloat16)).sum().backward()
    return layer


def test_the_library_is_exact_and_as_able_as_we_say(hopper_on_cpu, monkeypatch):
    found = list(layers.admitted())
    found += [row for name in setting.native_recipes() for row in layers.exactness(name, load(name))]
    assert statuses(found) == {}
    assert len([row for row in found if "both say yes" in row.what]) == 3
    assert len([row for row in found if "largest error" in row.what]) == 1 + len(setting.native_recipes())
    monkeypatch.setattr(layers, "LIMITS", {"e4m3": 1e-3})
    assert statuses(layers.exactness("fp8_current_e4m3", load("fp8_current_e4m3"))) != {}


def test_agreement_where_both_sides_are_the_emulation(hopper_on_cpu):
    for name in ("fp8_current", "fp8_subchannel"):
        found = list(agreement.operands(load(name)))
        assert statuses(found) == {}
        assert len(found) == 12
    assert [row.status for row in agreement.start_up_check(load("fp8_current"))] == ["ok"] * 3
    for name, how in (("fp8_current", "GroupedLinear"), ("fp8_delayed", "a linear for each")):
        found = list(agreement.experts(load(name)))
        assert [(row.status, row.value, row.note.endswith(how)) for row in found] == [("ok", 0, True)] * 3
    found = list(agreement.products(load("fp8_current"))) + list(agreement.history(load("fp8_delayed")))
    assert [row.status for row in found] == ["ok"] * 6
    assert [row.value for row in found[:4]] == [0, 0, 0, 0]
    (row,) = agreement.fallback(load("mxfp8"))
    assert row.status == "ok"
    assert "needs compute capability >= 10.0" in row.note


def test_agreement_compares_delayed_scaling_at_scales_that_moved(hopper_on_cpu, monkeypatch):
    recipe, read = load("fp8_delayed"), {}

    def quantized_by(quantizer, tensor):
        role = next(role for role, given in agreement.tensors().items() if torch.equal(given, tensor))
        read[role] = float(quantizer.scale)
        return right(quantizer, tensor)

    right = agreement.quantized_by
    monkeypatch.setattr(agreement, "quantized_by", quantized_by)
    found = list(agreement.operands(recipe))
    assert [row.status for row in found] == ["ok"] * 12
    largest = {role: tensor.abs().amax().item() for role, tensor in agreement.tensors().items()}
    assert read == {role: pytest.approx((57344 if role == "dy" else 448) / largest[role]) for role in ("x", "w", "dy")}
    assert [row.status for row in agreement.products(recipe)] == ["ok"] * 4


def forget_casts() -> None:
    for kept in (inductor.cast_by, inductor._cast_function, inductor.tensor_amax):
        kept.cache_clear()


@pytest.mark.parametrize("name", ["fp8_subchannel_fp32scales", "nvfp4", "mxfp4_sr_fp8"])
def test_agreement_sees_a_compiled_cast_that_is_not_eagers(name, on_cpu, monkeypatch):
    """Compilation is stood for by nothing at all, then by scales that are an ulp off."""
    monkeypatch.setattr(inductor, "why_not", lambda device_type: None)
    for wrong in (False, True):
        forget_casts()

        def plain(function, identity, wrong=wrong):
            def off(*args):
                made = function(*args)
                if made.multiplier is None:  # delayed
                    return made
                return made._replace(multiplier=made.multiplier.nextafter(torch.tensor(torch.inf)))

            return off if wrong and function.__name__ == "cast_blocks" else function

        monkeypatch.setattr(inductor, "compiled", plain)
        (row,) = agreement.compiled_casts(load(name))
        assert row.status == ("off" if wrong else "ok"), row
    forget_casts()
    monkeypatch.setattr(inductor, "why_not", lambda device_type: "no compiler")
    (row,) = agreement.compiled_casts(load(name))
    assert (row.status, row.note) == ("not available", "no compiler")


def test_agreement_has_every_recipe_that_quantises(hopper_on_cpu, call, monkeypatch):
    names = [item.name for item in agreement.items(call)]
    quantizing = {name for name, recipe in setting.recipes().items() if recipe.quantizes}
    native = list(setting.native_recipes())
    assert names[1 : 1 + len(native)] == native
    assert {f"{name}: compiled casts" for name in quantizing} <= set(names)
    assert {name for name in quantizing if f"{name}: fallback" in names} == quantizing - set(setting.native_recipes())
    monkeypatch.setattr(setting, "capability_here", lambda accelerator: Capability.none("no GPU"))
    (row,) = next(item for item in agreement.items(call) if item.name == "native recipes").work()
    assert row.status == "not available"


def test_the_given_tensors_reach_every_corner(on_cpu):
    given = agreement.tensors()
    assert given["x"].shape == (agreement.TOKENS, agreement.INPUTS)
    assert given["x"].abs().amax() > 2000
    assert given["w"].abs().amax(1).min() == 0
    assert layers.relative(given["x"] * 2, given["x"]) == 1
