"""Recipes with different casts per layer, in YAML alone: composed, checked, planned, native or not."""

import json
from pathlib import Path

import pytest
import yaml

from lightning_llm.__main__ import main
from lightning_llm.base.errors import ConfigError
from lightning_llm.config.compose import compose_config
from lightning_llm.config.from_file import load_config
from lightning_llm.config.schema.precision import UNQUANTIZED, slots_of
from lightning_llm.plan.check import check_config
from lightning_llm.plan.resolve import DerivedConfig
from lightning_llm.plan.time.step import StepTimer
from lightning_llm.precision.lint import lint
from lightning_llm.precision.native.decide import DEVICES

MIXED = """
defaults: [nvfp4_all_blocks, _self_]
name: mixed
reference: a test
modules:
  casts: # of an NVFP4 recipe: attention in MXFP8, the last block in bf16
    - {last_blocks: 1, high: true}
    - {names: ["*.attention.*"], recipe: mxfp8}
"""
DEEPSEEK = """
defaults: [fp8_subchannel_fp32scales, _self_]
name: deepseek_like
reference: DeepSeek-V3, arXiv 2412.19437, section 3.3
modules:
  casts: # the input of the linear after attention: power-of-two scales
    - names: ["*.o_proj"]
      fprop: {x: &power {format: e4m3, block: 1x128, scale: power_of_two}}
      wgrad: {x: *power}
"""


@pytest.fixture
def folder(tmp_path) -> Path:
    """A --config-dir with both recipes."""
    made = tmp_path / "mine" / "precision"
    made.mkdir(parents=True)
    for text in (MIXED, DEEPSEEK):
        (made / f"{yaml.safe_load(text)['name']}.yaml").write_text(text)
    return made.parent


def composed(folder, *words):
    return compose_config(["model=llama_tiny", *words], folder)


def test_a_rule_copies_the_slots_of_another_recipe_into_the_config(folder, tmp_path):
    config = composed(folder, "precision=mixed")
    check_config(config)
    recipe = config.precision
    assert set(recipe.casts_under(0).values()) == {UNQUANTIZED}
    assert recipe.casts_under(1) == slots_of(compose_config(["precision=mxfp8"]).precision)
    assert recipe.casts_under(None) == slots_of(compose_config(["precision=nvfp4_all_blocks"]).precision)
    file = tmp_path / "config.yaml"  # as a run writes it, read where nobody knows of mxfp8
    file.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    assert load_config(file, []).precision.recipe_hash == recipe.recipe_hash


def test_slots_of_a_rule_override_those_of_its_recipe():
    rule = '{names: ["*.o_proj"], recipe: mxfp8, fprop: {x: {format: e5m2}}}'
    recipe = compose_config(["precision=bf16", f"precision.modules.casts=[{rule}]"]).precision
    casts, theirs = recipe.casts_under(0), slots_of(compose_config(["precision=mxfp8"]).precision)
    assert casts["fprop.x"].format == "e5m2"
    assert {slot: cast for slot, cast in casts.items() if slot != "fprop.x"} == {
        slot: cast for slot, cast in theirs.items() if slot != "fprop.x"
    }
    assert [problem.key for problem in lint(recipe)] == ["precision.modules.casts.0.fprop.x.format"]


@pytest.mark.parametrize(("rule", "key", "said"), [
    ("recipe: mxpf8", "precision.modules.casts.0.recipe", "there is no 'mxpf8'. Did you mean 'mxfp8'?"),
    ("recipe: fp16_mxfp8", "precision.modules.casts.0.recipe", "computes in fp16, and this recipe in bf16"),
    ("recipe: mixed", "precision.modules.casts.0.recipe", "which has different casts for layers or steps"),
    ("recipe: 8", "precision.modules.casts.0.recipe", "=8: must be"),
    ("recipe: mxfp8, hihg: true", "precision.modules.casts.0.hihg", "Did you mean 'high'?"),
    ("high: true, names: '*.o_proj'", "precision.modules.casts.0.names", "must be"),
])  # fmt: skip
def test_a_rule_that_cannot_be_followed_is_named(rule, key, said, folder):
    with pytest.raises(ConfigError) as error:
        composed(folder, "precision=mxfp8", f"precision.modules.casts=[{{{rule}}}]")
    assert {problem.key for problem in error.value.problems} == {key}
    assert said in str(error.value)


def test_a_rule_for_no_layer_is_a_problem():
    words = ["precision=mxfp8", "precision.modules.first_blocks_high_precision=1"]
    config = compose_config([*words, 'precision.modules.casts=[{names: ["layers.0.*"], high: true}]'])
    with pytest.raises(
        ConfigError, match=r"precision\.modules\.casts\.0: applies to no layer: modules\.first_blocks_high_precision=1"
    ):
        check_config(config)


def test_split_blocks_are_checked_on_the_layers_of_their_rule():
    """With tp=2 o_proj's inputs are 2 x 32: blocks of 64 tokens' features do not fit there, and do elsewhere."""
    shape = ["model.hidden_size=256", "model.num_heads=4", "model.num_kv_heads=4", "model.head_dim=32"]
    shape += ["model.ffn_hidden_size=512", "parallel=tp", "trainer.devices=2", "precision=mxfp8"]
    rule = '{names: ["*.o_proj"], fprop: {x: {format: e4m3, block: 1x128, scale: fp32}}}'
    with pytest.raises(ConfigError, match=r"would split precision\.modules\.casts\.0\.fprop\.x \(blocks of 1x128\)"):
        check_config(compose_config([*shape, f"precision.modules.casts=[{rule}]"]))
    check_config(compose_config([*shape, f"precision.modules.casts=[{rule.replace('o_proj', 'down_proj')}]"]))


def test_a_mix_is_native_only_where_every_part_is(folder):
    mixed, deepseek = (composed(folder, f"precision={name}") for name in ("mixed", "deepseek_like"))
    runs = {
        name: {device: DerivedConfig(config, DEVICES[device]).decision.runs for device in ("sm_90", "sm_100", "sm_120")}
        for name, config in (("mixed", mixed), ("deepseek_like", deepseek))
    }
    assert runs["mixed"] == {"sm_90": "emulated", "sm_100": "native", "sm_120": "emulated"}
    made = DerivedConfig(mixed, DEVICES["sm_100"]).decision
    assert made.reason == "Transformer Engine 2.20.2, NVFP4BlockScaling and MXFP8BlockScaling"
    assert any(native.stochastic for native in made.natives)
    # Transformer Engine has one kind of scale for a layer's operands: o_proj's weight here has another than its input.
    assert set(runs["deepseek_like"].values()) == {"emulated"}
    said = DerivedConfig(deepseek, DEVICES["sm_90"]).decision.reason
    assert "precision.modules.casts.0.fprop.w is e4m3 128x128 fp32, and" in said


def test_the_plan_lists_the_layers_that_differ(folder, capsys, tmp_path):
    words = ["model=llama_tiny", "precision=mixed", f"run.root={tmp_path}", "--config-dir", str(folder)]
    assert main(["plan", *words]) == 0
    text = capsys.readouterr().out
    assert (
        "21 of 29 linear layers quantized, in 3 of 4 blocks; 7 high (modules.casts.0 keeps it high); "
        "1 high (it lies outside the blocks" in text
    )
    assert "modules.casts.1 (names=[*.attention.*]), the slots of mxfp8: 12 layers, these slots differ" in text
    assert main(["plan", "--json", *words]) == 0
    facts = json.loads(capsys.readouterr().out)["precision"]
    assert facts["layers"]["quantised"] == 21
    high, attention = facts["module_casts"]
    assert (high["for"], high["layers"]) == ({"names": ["*"], "last_blocks": 1}, [])
    assert attention["layers"][:2] == ["layers.0.attention.q_proj", "layers.0.attention.k_proj"]
    assert attention["slots"]["dgrad.dy"]["block"] == "1x32"


def test_the_plan_says_what_is_allowed_and_what_a_fraction_comes_to(capsys, tmp_path):
    assert main(["plan", "precision=fp16_mxfp8_hybrid", f"run.root={tmp_path}"]) == 0
    assert "mx_gradients_in_e5m2: known to fail, and asked for (precision.allow)" in capsys.readouterr().out
    assert main(["plan", "model=llama_tiny", "precision=nvfp4", f"run.root={tmp_path}"]) == 0
    text = capsys.readouterr().out
    assert "7 high (modules.last_fraction_high_precision=0.129: 1 of 4 blocks)" in text
    assert "modules.first_fraction_high_precision=0.032: 0 of 4 blocks" in text


EXPERTS = [
    "model=moe_tiny",
    "cluster=h100_dgx",
    "precision=fp8_current",
    "data.global_batch_size=16",
    "data.micro_batch_size=4",
]
NONE = ["precision.modules.exclude=['*.experts.*']"]
HALF = "precision.modules.exclude=['*.experts.[0-3].*']"


def facts_of(capsys, *words):
    assert main(["plan", *EXPERTS, *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("backend", ["native", "emulated"])
def test_bytes_and_flops_follow_rules_for_single_experts(backend, capsys):
    """Half of the experts: their part of everything lies in the middle between all experts and none."""
    how = [f"precision.backend={backend}"]
    every, half, none = (facts_of(capsys, *how, *more) for more in ([], [HALF], NONE))
    for kind in ("weight_casts", "compute_copies", "activations"):
        most, middle, least = (each["memory_bytes"].get(kind, 0) for each in (every, half, none))
        assert middle == pytest.approx((most + least) / 2, abs=64), kind
    assert every["memory_bytes"] != none["memory_bytes"]
    if backend == "native":
        configs = [compose_config([*EXPERTS, *how, *more]) for more in ([], [HALF], NONE)]
        timers = (StepTimer(DerivedConfig(config).plan(), config.cluster) for config in configs)
        most, middle, least = (each.time.needed.flops["fp8"] for each in timers)
        assert least < middle == pytest.approx((most + least) / 2)
    assert half["precision"]["layers"]["experts_high"] == {"modules.exclude has '*.experts.[0-3].*'": 2 * 3 * 4}
    assert half["precision"]["layers"]["coverage"] == every["precision"]["layers"]["coverage"]


def test_rules_for_single_experts_are_reported(capsys):
    rule = "precision.modules.casts=[{names: ['*.experts.5.up_proj'], recipe: fp8_current_e4m3}]"
    facts = facts_of(capsys, rule)["precision"]
    assert facts["module_casts"][0]["layers"] == [f"layers.{at}.feed_forward.experts.5.up_proj" for at in (1, 2)]
    assert facts["experts"] == "a Linear for each, since rules of precision.modules name single ones"
    assert facts_of(capsys)["precision"]["experts"] == "one GroupedLinear for all"
    sharded = facts_of(capsys, "parallel=zero3", "world=2")["precision"]["experts"]
    assert sharded == "a Linear for each, since FSDP2 gathers their weights"
