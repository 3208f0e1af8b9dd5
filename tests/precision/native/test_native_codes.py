"""The start-up check of native casts, over stand-ins for kernels: silent, or it reports the difference. 4 s."""

import pytest
import torch

from lightning_llm.__main__ import main
from lightning_llm.base.errors import ConfigError
from lightning_llm.config.schema.precision import PhaseConfig, slots_of
from lightning_llm.precision.native import codes as native_codes
from lightning_llm.precision.native.codes import StoredCodes, check_native_casts, sample
from tests.precision.native.test_transformer_engine import compute_capability, variants
from tests.precision.recipes import load

CPU = torch.device("cpu")
ONE_OF_EACH_KIND = ["fp8_current", "fp8_delayed", "fp8_subchannel", "mxfp8", "nvfp4"]
NATIVE = [
    *ONE_OF_EACH_KIND,
    *(pytest.param(name, marks=pytest.mark.full) for name in ("fp8_subchannel_fp32scales", "fp16_mxfp8")),
]


def planted(monkeypatch, change):
    """Make the library return `change(role's cast, axis, stored)`."""
    right = native_codes.stored

    def wrong(made, cast, axis, shape):
        return change(cast, axis, right(made, cast, axis, shape))

    monkeypatch.setattr(native_codes, "stored", wrong)


@pytest.fixture
def recipe(request, engine):
    """A recipe by name, on a device that has it."""
    found = variants()[request.param]
    engine.device(*compute_capability(found))
    return found


@pytest.mark.parametrize("recipe", variants(), indirect=True)
def test_it_is_quiet_where_the_casts_are_the_recipes(recipe):
    assert check_native_casts(recipe, CPU) is None


@pytest.mark.parametrize("recipe", ["fp8_current", "fp8_delayed", "fp8_subchannel"], indirect=True)
def test_it_is_quiet_on_a_newer_device_with_another_tensor_layout(recipe, engine):
    """From Blackwell on one copy of a tensor serves both directions, where it has one scale."""
    engine.device(10, 0)
    assert check_native_casts(recipe, CPU) is None


@pytest.mark.parametrize("recipe", NATIVE, indirect=True)
def test_the_kernel_that_casts_and_sums_the_gradient_of_a_bias_is_checked_too(recipe, monkeypatch):
    assert check_native_casts(recipe, CPU, bias=True) is None

    def off(quantizer, tensor, group=None):
        summed, made = right(quantizer, tensor, group)
        return summed * (torch.arange(256) != 7), made

    right = native_codes.quantized_with_bias_gradient
    monkeypatch.setattr(native_codes, "quantized_with_bias_gradient", off)
    with pytest.raises(ConfigError) as raised:
        check_native_casts(recipe, CPU, bias=True)
    assert len(raised.value.problems) == 2
    assert all("dy: 1 of 256 sums of dY, the bias's gradient, are off" in each.text for each in raised.value.problems)


@pytest.mark.parametrize("recipe", NATIVE, indirect=True)
def test_one_wrong_code_or_scale_is_found_in_every_slot(recipe, monkeypatch):
    def change(cast, axis, found):
        codes = found.codes.clone()
        codes[5, 7] ^= 4
        return StoredCodes(codes, found.scales)

    planted(monkeypatch, change)
    with pytest.raises(ConfigError) as raised:
        check_native_casts(recipe, CPU)
    assert len(raised.value.problems) == 6
    assert all("1 of 65536 codes differ, the first at [5, 7]: native" in each.text for each in raised.value.problems)
    monkeypatch.undo()


@pytest.mark.parametrize("recipe", ["nvfp4"], indirect=True)
def test_stochastic_codes_are_one_of_two_neighbours_and_scales_are_the_same(recipe, monkeypatch):
    planted(
        monkeypatch, lambda cast, axis, found: StoredCodes(found.codes, found.scales * (2 if cast.stochastic else 1))
    )
    with pytest.raises(ConfigError) as raised:
        check_native_casts(recipe, CPU)
    assert [each.text.split("recipe's: ")[1].split()[0] for each in raised.value.problems] == ["dgrad.dy", "wgrad.dy"]
    assert "scales differ" in raised.value.problems[0].text


def test_the_sample_has_the_difficult_cases_of_a_cast():
    given = sample(CPU, torch.bfloat16, 127)
    codes = {slot: native_codes.emulated(given, cast, 1).codes & 127 for slot, cast in
             (("mxfp8", load("mxfp8").fprop.x), ("current", load("fp8_current").fprop.x))}  # fmt: skip
    for each in codes.values():
        assert ((each > 0) & (each < 8)).any()  # subnormal
        assert (each == 0).any()
        assert len(each.unique()) > 60
    rotated = sample(CPU, torch.bfloat16, 15).double()
    cast = slots_of(load("nvfp4"))["wgrad.x"]
    signs = torch.tensor(cast.hadamard.vector).double()
    sums = (rotated.reshape(16, 16, -1) * signs[None, :, None]).sum(1) / 4
    assert torch.equal(sums, sums.bfloat16().double())


def test_phases_are_checked(engine):
    recipe = load("fp8_current")
    e4m3 = recipe.fprop.x
    phase = PhaseConfig(start=0.5, fprop=recipe.fprop, dgrad={"dy": e4m3, "w": e4m3}, wgrad={"dy": e4m3, "x": e4m3})
    assert check_native_casts(recipe.model_copy(update={"phases": (phase,)}), CPU) is None


def test_a_run_is_refused_before_its_first_step(small_run, tmp_path, hopper, monkeypatch, capsys):
    planted(monkeypatch, lambda cast, axis, found: StoredCodes(found.codes ^ 1, found.scales))
    shape = ["model.hidden_size=128", "model.num_heads=2", "model.num_kv_heads=2", "model.ffn_hidden_size=256",
             "model.num_layers=3"]  # fmt: skip
    assert main(["train", *small_run(tmp_path, *shape, "precision=fp8_current")]) == 2
    said = capsys.readouterr().err
    assert "precision.backend: would run fp8_current natively, and on cpu Transformer Engine's casts are not" in said
    assert "fprop.x (e4m3 tensor fp32): 65536 of 65536 codes differ, the first at [0, 0]" in said
    assert "Set emulated" in said
    assert "Traceback" not in said
    assert not (tmp_path / "run").exists()
    words = [*shape, "precision=fp8_current", "precision.backend=emulated", "precision.casts=eager"]
    words += ["trainer.compile=false", "trainer.max_steps=1", "checkpoint.every_steps=null"]
    assert main(["train", *small_run(tmp_path, *words)]) == 0
