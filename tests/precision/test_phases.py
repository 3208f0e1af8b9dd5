"""Phases that inherit: slots and modules of the recipe stay in effect where a phase sets none."""

import pytest
import torch
import yaml
from torch import nn

from lightning_llm.base.errors import ConfigError
from lightning_llm.base.keyed_hash import StepKey
from lightning_llm.config.compose import compose_config
from lightning_llm.config.schema.precision import UNQUANTIZED, PrecisionConfig, slots_of
from lightning_llm.plan.check import check_config
from lightning_llm.plan.resolve import DerivedConfig
from lightning_llm.precision.describe import precision_facts
from lightning_llm.precision.linear.module import quantized_layers, set_recipe, set_step_key
from lightning_llm.precision.linear.swap import swap_linears
from lightning_llm.precision.module_rules import layers_of_casts, reasons_to_stay_unquantized
from lightning_llm.train.quantization import Quantization
from tests.precision.recipes import load

LAYERS = 4
FORWARD_IN_BF16 = {"start": 0.85, "inherit": True, "fprop": {"x": {"format": "high"}, "w": {"format": "high"}}}
NAMES = [f"layers.{index}.{name}" for index in range(LAYERS) for name in ("q_proj", "up_proj")]


def with_phases(name, *phases, **modules):
    values = load(name).model_dump(exclude={"phases"})
    values["modules"] |= modules
    return PrecisionConfig.model_validate({**values, "phases": list(phases)})


def quantized(recipe):
    return {name for name, why in reasons_to_stay_unquantized(NAMES, recipe, LAYERS).items() if why is None}


def test_a_late_bf16_forward_pass_is_one_phase_of_three_lines():
    recipe = with_phases("nvfp4", FORWARD_IN_BF16)
    own, late = slots_of(recipe), slots_of(recipe.at(85, 100))
    assert slots_of(recipe.at(84, 100)) == own
    assert late == own | {"fprop.x": UNQUANTIZED, "fprop.w": UNQUANTIZED}
    assert recipe.at(85, 100).modules == recipe.modules


def test_a_phase_that_does_not_inherit_is_unquantized_where_it_sets_nothing():
    phase = {"start": 0.5, "dgrad": {"dy": {"format": "e4m3"}}}
    recipe = with_phases("mxfp8", phase)
    late = slots_of(recipe.at(5, 10))
    assert {slot for slot, cast in late.items() if cast.quantizes} == {"dgrad.dy"}
    assert recipe.phases[0].given() == late


def test_a_slot_of_a_phase_replaces_those_of_inherited_rules():
    rule = {"names": ["*.up_proj"], "fprop": {"x": {"format": "e5m2"}}, "wgrad": {"x": {"format": "e5m2"}}}
    recipe = with_phases("fp8_current", FORWARD_IN_BF16, casts=[rule])
    early, late = recipe.at(0, 100).casts_under(0), recipe.at(99, 100).casts_under(0)
    assert (early["fprop.x"].format, early["wgrad.x"].format) == ("e5m2", "e5m2")
    assert (late["fprop.x"], late["fprop.w"], late["wgrad.x"].format) == (UNQUANTIZED, UNQUANTIZED, "e5m2")


def test_rules_of_a_phase_come_before_its_slots():
    rule = {"names": ["*.up_proj"], "recipe": "mxfp8", **load("mxfp8").model_dump(include={"fprop", "dgrad", "wgrad"})}
    recipe = with_phases("nvfp4", {**FORWARD_IN_BF16, "modules": {"casts": [rule]}})
    late = recipe.at(99, 100)
    assert late.casts_under(0) == slots_of(load("mxfp8"))
    assert late.casts_under(None)["fprop.x"] == UNQUANTIZED
    assert "phases.0.modules.casts.0" in recipe.cast_sets()
    layers = layers_of_casts(NAMES, recipe, LAYERS)
    assert layers["phases.0.modules.casts.0"] == [name for name in sorted(quantized(recipe)) if "up_proj" in name]
    assert layers["phases.0"] == [name for name in sorted(quantized(recipe)) if "q_proj" in name]


def test_modules_of_a_phase_keep_the_keys_that_it_does_not_set():
    phase = {"start": 0.5, "inherit": True, "modules": {"exclude": ["*.q_proj"]}}
    recipe = with_phases("mxfp8", phase, first_blocks_high_precision=1)
    late = recipe.at(5, 10)
    assert (late.modules.first_blocks_high_precision, late.modules.exclude) == (1, ("*.q_proj",))
    assert recipe.modules.exclude == ()
    assert quantized(recipe) == {name for name in NAMES if not name.startswith("layers.0.")}
    assert quantized(late) == {f"layers.{index}.up_proj" for index in (1, 2, 3)}


def test_a_dumped_recipe_is_read_back_with_the_same_phases_and_hash():
    rule = {"names": ["*.up_proj"], "high": True}
    phase = {**FORWARD_IN_BF16, "modules": {"exclude": ["*.q_proj"]}}
    recipe = with_phases("mxfp8", phase, first_blocks_high_precision=1, casts=[rule])
    again = PrecisionConfig.model_validate(yaml.safe_load(yaml.safe_dump(recipe.model_dump(mode="json"))))
    assert again == recipe
    assert again.recipe_hash == recipe.recipe_hash
    assert again.at(99, 100) == recipe.at(99, 100)


def test_the_hash_follows_the_casts_in_effect():
    """Equal casts, spelled with and without `inherit`, have one hash; the modules of a phase are part of it."""
    inherited = with_phases("mxfp8", FORWARD_IN_BF16)
    every = {slot: cast.model_dump() for slot, cast in slots_of(inherited.in_phase(0)).items()}
    spelled = {}
    for slot, cast in every.items():
        gemm, operand = slot.split(".")
        spelled.setdefault(gemm, {})[operand] = cast
    same = with_phases("mxfp8", {"start": 0.85, "inherit": True, **spelled})
    other = with_phases("mxfp8", {**FORWARD_IN_BF16, "modules": {"exclude": ["*.q_proj"]}})
    assert same.recipe_hash == inherited.recipe_hash != other.recipe_hash


def test_a_null_slot_needs_inherit():
    with pytest.raises(ValueError, match=r"fprop\.w: null keeps the recipe's cast. Set inherit: true"):
        with_phases("mxfp8", {"start": 0.5, "fprop": {"x": {"format": "high"}, "w": None}})


def test_globs_of_a_phase_must_match_a_layer():
    phase = "{start: 0.5, inherit: true, modules: {exclude: ['*.mlp_typo']}}"
    config = compose_config(["model=llama_tiny", "precision=mxfp8", f"precision.phases=[{phase}]"])
    with pytest.raises(
        ConfigError, match=r"precision\.phases\.0\.modules\.exclude: has '\*\.mlp_typo', which matches no"
    ):
        check_config(config)


def test_the_plan_shows_the_modules_of_a_phase():
    recipe = with_phases("mxfp8", {**FORWARD_IN_BF16, "modules": {"exclude": ["*.q_proj"]}})
    config = compose_config(["model=llama_tiny"])
    facts = precision_facts(recipe, DerivedConfig(config).decision, NAMES, LAYERS)
    (phase,) = facts["phases"]
    assert phase["modules"] == {"exclude": ("*.q_proj",)}
    assert set(phase["slots"]) == {"fprop.x", "fprop.w"}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj, self.up_proj = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)

    def forward(self, x):
        return self.up_proj(self.q_proj(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleDict({str(index): Block() for index in range(LAYERS)})

    def forward(self, x):
        for block in self.layers.values():
            x = block(x)
        return x


def made(recipe):
    torch.manual_seed(0)
    model = Model().bfloat16()
    swap_linears(model, recipe, LAYERS, "cpu", "eager")
    return model


def test_layers_train_by_the_phase_of_the_step():
    """Modules included: each step has the bits of a model of the phase's recipe alone, and the recipe's own return."""
    phase = {"start": 0.4, "end": 0.6, "inherit": True, "fprop": {"x": {"format": "high"}, "w": {"format": "high"}},
             "modules": {"first_blocks_high_precision": 0, "exclude": ["*.q_proj"]}}  # fmt: skip
    recipe = with_phases("mxfp8", phase, first_blocks_high_precision=2)
    quantization = Quantization(recipe, 0, 10, backend="eager")
    torch.manual_seed(0)
    model = Model().bfloat16()
    quantization.swap(model, LAYERS, "cpu")
    assert {layer.name for layer in quantized_layers(model)} == quantized(recipe)
    assert {"layers.0.up_proj", "layers.3.q_proj"} < quantized(recipe)  # one in the phase alone, one outside of it
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    for step in (0, 4, 5, 6):
        quantization.begin_step(model, step)
        alone = made(recipe.at(step, 10).model_copy(update={"phases": ()}))
        results = []
        for each in (model, alone):
            set_step_key(each, StepKey(0, step, 0))
            each.zero_grad()
            y = each(x)
            y.float().square().sum().backward()
            results.append([y, *(parameter.grad for parameter in each.parameters())])
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True)), step


def test_a_layer_that_a_phase_does_not_quantize_has_no_casts_then():
    recipe = with_phases("mxfp8", {"start": 0.5, "inherit": True, "modules": {"last_blocks_high_precision": 1}})
    model = made(recipe)
    set_recipe(model, recipe.at(9, 10), LAYERS)
    casts = {layer.name: any(cast.quantizes for cast in layer.plan.casts.values()) for layer in quantized_layers(model)}
    assert {name for name, has in casts.items() if not has} == {"layers.3.q_proj", "layers.3.up_proj"}
