"""The recipe schema, its identity, the lint's rules, and the recipes that ship."""

import subprocess
import sys

import pytest
import yaml
from pydantic import ValidationError

from lightning_llm.config.schema.precision import PrecisionConfig, slots_of
from lightning_llm.precision.lint import RULES, lint
from tests.precision.recipes import FOLDER, RECIPES, load

SHIPPED = (
    "fp32 bf16 bf16_true fp16 fp8_delayed fp8_delayed_micro_batch fp8_current fp8_current_e4m3 fp8_subchannel "
    "fp8_subchannel_fp32scales mxfp8 mxfp8_ocp nvfp4 nvfp4_all_blocks mxfp4_sr mxfp4_sr_fp8 mxfp4_rne mxfp4_sr_norht "
    "mxfp4_rht_rne quartet fp16_mxfp8 fp16_mxfp8_hybrid bf16_kahan bf16_sr fp8_rowwise fp8_rowwise_gw_hp "
    "fp8_subchannel_ue8m0 fp8_mlp fp8_unit int8_rowwise mxfp6 mxfp8_wgrad_hp mxfp8_bwd_dequantized mxfp8_bwd_high_fwd "
    "mxfp8_fwd_nvfp4_bwd nvfp4_fwd_mxfp8_bwd nvfp4_bwd_dequantized nvfp4_1d_weight nvfp4_4over6 nvfp4_late_bf16_fwd "
    "fp4_all_the_way tetrajet_v2 quartet_ii nvfp4_qat"
)


def recipe(text, **more):
    return PrecisionConfig.model_validate({"name": "t", "compute_dtype": "bf16", **yaml.safe_load(text), **more})


def test_shipped_recipes_are_complete_and_distinct():
    assert set(RECIPES) == set(SHIPPED.split())
    assert len({load(name).recipe_hash for name in RECIPES}) == len(RECIPES)


@pytest.mark.parametrize("name", RECIPES)
def test_a_shipped_recipe_has_a_description_and_passes_the_lint(name):
    loaded = load(name)
    assert loaded.name == name
    assert loaded.reference
    assert loaded.hardware
    assert lint(loaded) == []
    text = (FOLDER / f"{name}.yaml").read_text()
    assert text.startswith("# ")
    assert name == "fp32" or "High precision:" in text


def test_slots_of_published_recipes():
    """The table of operand slots, as Transformer Engine and the papers have it: format and block."""

    def row(name):
        return [f"{cast.format} {cast.block}" if cast.quantizes else "high" for cast in slots_of(load(name)).values()]

    e4m3, e5m2 = "e4m3 tensor", "e5m2 tensor"
    assert (
        row("fp8_delayed")
        == row("fp8_delayed_micro_batch")
        == row("fp8_current")
        == [e4m3, e4m3, e5m2, e4m3, e5m2, e4m3]
    )
    line, square = "e4m3 1x128", "e4m3 128x128"
    assert row("fp8_subchannel") == [line, square, line, square, line, line]
    assert row("mxfp8") == row("fp16_mxfp8") == ["e4m3 1x32"] * 6
    assert row("nvfp4") == ["e2m1 1x16", "e2m1 16x16", "e2m1 1x16", "e2m1 16x16", "e2m1 1x16", "e2m1 1x16"]
    assert row("mxfp4_sr") == ["high"] * 2 + ["e2m1 1x32"] * 4
    assert row("quartet") == ["e2m1 1x32"] * 6
    assert {slot for slot, cast in slots_of(load("nvfp4")).items() if cast.stochastic} == {"dgrad.dy", "wgrad.dy"}
    assert {slot for slot, cast in slots_of(load("nvfp4")).items() if cast.hadamard} == {"wgrad.dy", "wgrad.x"}


def test_when_scales_move_is_part_of_the_identity_and_changed_none_from_before():
    one, other = load("fp8_delayed"), load("fp8_delayed_micro_batch")
    assert one.recipe_hash == "3aa16c7e6f38"  # of dc39dec, which had no such key
    assert one.recipe_hash != other.recipe_hash
    assert (one.updates_every_micro_batch, other.updates_every_micro_batch) == (False, True)
    assert PrecisionConfig.model_validate(other.model_dump()) == other
    mixed = other.model_copy(update={"fprop": one.fprop})
    assert any("Give all delayed slots the same" in problem.text for problem in lint(mixed))


def test_identity_leaves_out_the_name_and_takes_in_every_number():
    one = recipe("fprop: {x: {format: e4m3, block: 1x32, scale: e8m0_ceil}}")
    assert one.recipe_hash == one.model_copy(update={"name": "u", "reference": "r", "backend": "native"}).recipe_hash
    others = [
        recipe("fprop: {x: {format: e4m3, block: 1x32, scale: e8m0_floor}}"),
        recipe("fprop: {w: {format: e4m3, block: 1x32, scale: e8m0_ceil}}"),
        recipe("fprop: {x: {format: e4m3, block: 1x32, scale: e8m0_ceil}}\nmodules: {exclude: [a]}"),
        recipe("fprop: {x: {format: e4m3, block: 1x32, scale: e8m0_ceil}}\noptimizer: {eps: 1.0e-9}"),
    ]
    assert len({one.recipe_hash} | {other.recipe_hash for other in others}) == 5
    assert hash(one) == hash(one.model_copy())
    assert recipe("{}") == PrecisionConfig(name="t", compute_dtype="bf16")
    assert not recipe("{}").quantizes


def test_phases_replace_the_slots_for_their_steps():
    phased = recipe("fprop: {x: {format: e4m3}, w: {format: e4m3}}\nphases: [{start: 0.9}]")
    assert phased.at(89, 100).fprop.x.format == "e4m3"
    assert phased.at(90, 100).fprop.x.format == "high"
    assert phased.at(99, 100).fprop.x.format == "high"


def test_a_phase_ends_before_the_step_at_its_end_and_the_next_may_begin_there():
    phases = "[{start: 0.0, end: 0.3}, {start: 0.3, end: 0.5, fprop: {x: {format: e5m2}}}, {start: 0.8, end: 0.9}]"
    phased = recipe(f"fprop: {{x: {{format: e4m3}}}}\nphases: {phases}")
    formats = [phased.at(step, 10).fprop.x.format for step in range(10)]
    assert formats == ["high"] * 3 + ["e5m2"] * 2 + ["e4m3"] * 3 + ["high", "e4m3"]


@pytest.mark.parametrize(("text", "message"), [
    ("phases: [{start: 0.5, end: 0.8}, {start: 0.7}]", "one ends at 0.8, the next starts at 0.7"),
    ("phases: [{start: 0.5, end: 0.5}]", "must be below end=0.5"),
    ("fprop: {x: {format: e9m9}}", "'e4m3', 'e5m2', 'e2m1'"),
    ("fprop: {x: {format: e4m3, block: 48}}", "'row'.*'1x32', '128x128'"),
    ("fprop: {x: {block: 1x32}}", "Set a format, or omit"),
    ("dgrad: {dy: {format: e2m1, block: 1x32, scale: e8m0_floor, hadamard: {size: 48}}}", "size=48: must be a power"),
    ("dgrad: {dy: {format: e2m1, hadamard: {size: 4, signs: fixed}}}", "must be set with signs: fixed"),
    ("dgrad: {dy: {format: e2m1, hadamard: {size: 4, signs: fixed, vector: [1, 1]}}}", "must have 4, each 1 or -1"),
    ("fprop: {x: {format: e4m3, block: 1x32, scale: delayed, delayed: {}}}", "needs block: tensor"),
    ("fprop: {x: {format: e4m3, scale: delayed}}", "must be set with scale: delayed"),
    ("fprop: {x: {format: e4m3, scale: e8m0_ceil}}", "needs a block"),
    ("fprop: {x: {format: e4m3, block: 1x16, scale: two_level_e4m3}}", "NVFP4"),
    ("fprop: {x: {format: e4m3, block: 1x32, scale: quest}}", "Quartet"),
    ("fprop: {x: {format: e4m3, prescale: 0.75}}", "prescale needs a scale of e8m0_ceil, e8m0_even, e8m0_fl"),
    ("fprop: {x: {format: e4m3, clip_gradient: true}}", "clip_gradient needs scale: quest"),
    ("fprop: {x: {format: e4m3, blokc: 1x32}}", "blokc"),
])  # fmt: skip
def test_meaningless_settings_are_rejected(text, message):
    with pytest.raises(ValidationError, match=message):
        recipe(text)


MX4 = "format: e2m1, block: 1x32, scale: e8m0_floor"


@pytest.mark.parametrize(("text", "more", "keys"), [
    ("dgrad: {dy: {format: e5m2, block: 1x32, scale: e8m0_ceil}}", {}, ["precision.dgrad.dy.format"]),
    ("fprop: {w: {format: e5m2}}", {}, ["precision.fprop.w.format"]),
    ("dgrad: {dy: {format: e4m3}}\nloss_scaling: {}", {"compute_dtype": "fp16"}, ["precision.loss_scaling.detect"]),
    ("{}", {"compute_dtype": "fp16"}, ["precision.loss_scaling"]),
    ("wgrad: {dy: {format: e5m2, scale: delayed, delayed: {}}}\nloss_scaling: {detect: operands}",
     {"compute_dtype": "fp16"}, ["precision.wgrad.dy.scale"]),
    (f"fprop: {{x: {{{MX4}}}}}\nloss_scaling: {{}}", {"compute_dtype": "fp16"}, ["precision.fprop.x.format"]),
    (f"dgrad: {{w: {{{MX4}, rounding: stochastic}}}}", {}, ["precision.dgrad.w.prescale"]),
    ("dgrad: {w: {format: int4, block: 1x32, scale: e8m0_floor, rounding: stochastic, prescale: 0.9}}", {},
     ["precision.dgrad.w.prescale"]),
    ("dgrad: {w: {format: int4, block: 1x32, scale: e8m0_floor, rounding: stochastic, prescale: 0.875}}", {}, []),
    ("fprop: {x: {format: int4}}\nloss_scaling: {}", {"compute_dtype": "fp16"}, ["precision.fprop.x.format"]),
    (f"dgrad: {{dy: {{{MX4}, hadamard: {{size: 32}}}}, w: {{{MX4}}}}}", {}, ["precision.dgrad"]),
    (f"dgrad: {{dy: {{{MX4}, hadamard: {{size: 32}}}}, w: {{{MX4}, hadamard: {{size: 32, signs: random}}}}}}", {},
     ["precision.dgrad"]),
    ("wgrad: {dy: {format: e2m1, block: 1x32, scale: quest}}", {}, ["precision.wgrad.dy.scale"]),
    ("dgrad: {dy: {format: e4m3, source: quantised}, w: {format: e4m3, source: quantised}}", {},
     ["precision.dgrad.dy.source", "precision.dgrad.w.source"]),
    ("fprop: {x: {format: e4m3, scale: delayed, delayed: {}}}\n"
     "wgrad: {x: {format: e5m2, scale: delayed, delayed: {history_length: 4}}}", {},
     ["precision.wgrad.x.format", "precision.wgrad.x.delayed"]),
    ("fprop: {x: {format: e2m1, block: 1x32, scale: quest, clip_gradient: true}}", {},
     ["precision.fprop.x.clip_gradient"]),
    ("phases: [{start: 0.5, fprop: {w: {format: e5m2}}}]", {}, ["precision.phases.0.fprop.w.format"]),
    ("modules: {casts: [{fprop: {w: {format: e5m2}}}]}", {}, ["precision.modules.casts.0.fprop.w.format"]),
    ("fprop: {w: {format: e5m2}}\nmodules: {casts: [{dgrad: {w: {format: e4m3}}}]}", {},
     ["precision.fprop.w.format"]),  # once, though the rule takes it over
])  # fmt: skip
def test_combinations_known_to_fail_are_rejected(text, more, keys):
    assert [problem.key for problem in lint(recipe(text, **more))] == keys


HYBRID = "dgrad: {dy: {format: e5m2, block: 1x32, scale: e8m0_ceil}}"


def test_a_rule_of_the_lint_can_be_allowed_by_name_and_then_is_part_of_the_recipe():
    plain, allowed = recipe(HYBRID), recipe(HYBRID, allow=["mx_gradients_in_e5m2"])
    (problem,) = lint(plain)
    assert "precision.allow=[mx_gradients_in_e5m2] trains it all the same" in problem.text
    assert lint(allowed) == []
    assert plain.recipe_hash != allowed.recipe_hash
    both = recipe(f"{HYBRID}\nfprop: {{w: {{format: e5m2}}}}", allow=["mx_gradients_in_e5m2"])
    assert [each.key for each in lint(both)] == ["precision.fprop.w.format"]


@pytest.mark.parametrize(("text", "name", "said"), [
    (HYBRID, "mx_gradient_in_e5m2", "is not a lint rule. Did you mean 'mx_gradients_in_e5m2'?"),
    ("fprop: {w: {format: e4m3}}", "mx_gradients_in_e5m2", "a rule that the recipe does not break"),
    (f"dgrad: {{dy: {{{MX4}, hadamard: {{size: 32}}}}, w: {{{MX4}}}}}", "one_sided_hadamard", "would be wrong"),
])  # fmt: skip
def test_an_opt_out_that_is_unknown_needless_or_of_a_wrong_product_is_refused(text, name, said):
    problems = lint(recipe(text, allow=[name]))
    assert said in next(each.text for each in problems if each.key == "precision.allow")
    assert all("precision.allow=" not in each.text for each in problems if "one_sided" in each.text)


def test_hybrid_mxfp8_differs_from_mxfp8_over_fp16_in_the_gradients_format_alone():
    ours, theirs = load("fp16_mxfp8_hybrid"), load("fp16_mxfp8")
    assert ours.allow == ("mx_gradients_in_e5m2",)
    changed = {slot for slot, cast in slots_of(ours).items() if cast != slots_of(theirs)[slot]}
    assert changed == {"dgrad.dy", "wgrad.dy"}
    back = {slot: cast.model_copy(update={"format": "e4m3"}) for slot, cast in slots_of(ours).items()}
    assert back == slots_of(theirs)
    surroundings = {"name", "reference", "allow", "fprop", "dgrad", "wgrad"}
    assert ours.model_dump(exclude=surroundings) == theirs.model_dump(exclude=surroundings)


HASHES = {
    "bf16": "f797fb4c384f", "bf16_true": "3607be3c03ea", "fp16": "a8a2bc53a481", "fp16_mxfp8": "8ec72d75781a",
    "fp32": "87a2231f7c33", "fp8_current": "91dae1570efb", "fp8_current_e4m3": "f59d3fa81b5b",
    "fp8_delayed": "3aa16c7e6f38", "fp8_subchannel": "2ddedbcc7ce8", "fp8_subchannel_fp32scales": "f0390f1b5a32",
    "mxfp4_rht_rne": "f414f1ad29e2", "mxfp4_rne": "95ff28c63ab2", "mxfp4_sr": "383bcfa441f5",
    "mxfp4_sr_fp8": "ec1e53f2f567", "mxfp4_sr_norht": "bf58c28838c2", "mxfp8": "770c34a5e60f",
    "mxfp8_ocp": "e7b3a61ddf62", "nvfp4_all_blocks": "181e2034cef5", "quartet": "e63ec948748b",
}  # fmt: skip


def test_a_recipe_keeps_the_hash_that_runs_of_earlier_versions_have():
    """By commit dc39dec, where nvfp4_all_blocks was nvfp4: keys that came later count only where they are set."""
    assert {name: load(name).recipe_hash for name in HASHES} == HASHES


def test_every_rule_names_its_source():
    assert all(rule.__doc__ and "Source:" in rule.__doc__ for rule in RULES)


def test_schema_and_lint_need_no_torch():
    modules = "lightning_llm.config.schema.precision, lightning_llm.precision.lint"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
