"""Layers that a recipe quantizes, and their casts: counts, fractions, globs, rules, and their order."""

import math
from fractions import Fraction

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import ValidationError

from lightning_llm.config.schema.precision import UNQUANTIZED, PrecisionConfig, slots_of
from lightning_llm.precision.module_rules import (
    blocks_of,
    fractions_of_no_block,
    idle_rules,
    layers_of_casts,
    reasons_to_stay_unquantized,
    rule_of,
    unmatched,
    without_idle_rules,
)
from tests.precision.recipes import load

E4M3 = {"format": "e4m3"}
PROJECTIONS = ("attention.q_proj", "attention.o_proj", "feed_forward.down_proj")


def names(num_layers):
    return [f"layers.{index}.{name}" for index in range(num_layers) for name in PROJECTIONS] + ["head"]


def recipe(**modules):
    slots = {gemm: dict.fromkeys(pair, E4M3) for gemm, pair in (("fprop", "xw"), ("dgrad", ("dy", "w")))}
    return PrecisionConfig.model_validate({"name": "t", "compute_dtype": "bf16", **slots, "modules": modules})


def high_blocks(made, num_layers):
    reasons = reasons_to_stay_unquantized(names(num_layers), made, num_layers)
    return [index for index in range(num_layers) if reasons[f"layers.{index}.attention.q_proj"] is not None]


@pytest.mark.parametrize(("num_layers", "high"), [
    (1, []), (2, []), (3, []), (4, [3]), (8, [7]), (12, [10, 11]), (16, [0, 14, 15]), (32, [0, 28, 29, 30, 31]),
    (62, [0, 1, *range(54, 62)]), (80, [0, 1, 2, *range(70, 80)]),
])  # fmt: skip
def test_nvfp4_leaves_the_blocks_of_nvidias_recipe_unquantized_at_every_depth(num_layers, high):
    """2 and 8 of 62 blocks as published; 4 of 32 at the end as in Megatron-Bridge's Llama 3 8B."""
    assert high_blocks(load("nvfp4"), num_layers) == high
    assert high_blocks(load("nvfp4_all_blocks"), num_layers) == []


@given(st.integers(0, 1000), st.integers(1, 200))
@example(15, 100)  # a half, 1.5, where the double nearest to 0.015 is less than that
@example(145, 100)  # the product of doubles is below 14.5
@example(500, 5)  # halves go up, and not to the even
def test_a_fraction_is_the_nearest_count_halves_up(thousandths, num_layers):
    found, exact = blocks_of(None, thousandths / 1000, num_layers), Fraction(thousandths, 1000) * num_layers
    assert abs(found - exact) <= Fraction(1, 2)
    assert found == math.floor(exact + Fraction(1, 2))
    assert 0 <= found <= num_layers


def test_the_blocks_of_a_fraction_are_reported():
    made = recipe(first_fraction_high_precision=0.25, last_fraction_high_precision=0.05)
    reasons = reasons_to_stay_unquantized(names(4), made, 4)
    assert reasons["layers.0.attention.o_proj"] == "modules.first_fraction_high_precision=0.25: 1 of 4 blocks"
    assert fractions_of_no_block(made.modules, 4) == ["modules.last_fraction_high_precision=0.05: 0 of 4 blocks"]
    assert fractions_of_no_block(made.modules, 20) == []


@pytest.mark.parametrize(("modules", "message"), [
    (
        {"first_blocks_high_precision": 1, "first_fraction_high_precision": 0.1},
        "first_fraction_high_precision=0.1; set first_blocks_high_precision to 0, or",
    ),
    ({"last_fraction_high_precision": 1.5}, "less than or equal to 1"),
    ({"casts": [{"names": ["*"]}]}, "has no casts. Give `recipe`"),
    ({"casts": [{"high": True, "fprop": {"x": E4M3}}]}, "`high: true` cannot be combined with `recipe` or slots"),
    ({"casts": [{"high": False}]}, "Input should be True"),
    ({"casts": [{"names": [], "high": True}]}, "at least 1 item"),
    ({"casts": [{"recipe": "mxfp8"}]}, "is only resolved when a config is composed"),
    ({"casts": [{"high": True, "last_blocks": 1, "last_fraction": 0.5}]}, "has last_blocks=1 and last_fraction=0.5"),
    ({"casts": [{"fprop": {"dy": E4M3}}]}, "dy"),
])  # fmt: skip
def test_rules_without_a_meaning_are_refused(modules, message):
    with pytest.raises(ValidationError, match=message):
        recipe(**modules)


def test_the_first_matching_rule_applies_after_unquantized_layers():
    made = recipe(
        first_blocks_high_precision=1,
        exclude=["*.5.attention.q_proj"],
        casts=[
            {"names": ["*.o_proj"], "last_blocks": 2, "high": True},
            {"names": ["*.o_proj", "*.down_proj"], "fprop": {"x": {"format": "e5m2"}}},
            {"names": ["*.down_proj"], "first_blocks": 2, "high": True},  # never reached: the one before fits, too
        ],
    )
    layers = layers_of_casts(names(6), made, 6)
    assert layers[""] == [f"layers.{index}.attention.q_proj" for index in (1, 2, 3, 4)]
    assert layers["modules.casts.0"] == []  # high, so not quantised
    down = {f"layers.{index}.feed_forward.down_proj" for index in (1, 2, 3, 4, 5)}
    assert set(layers["modules.casts.1"]) == down | {f"layers.{index}.attention.o_proj" for index in (1, 2, 3)}
    reasons = reasons_to_stay_unquantized(names(6), made, 6)
    assert reasons["layers.0.attention.o_proj"] == "modules.first_blocks_high_precision=1"
    assert reasons["layers.5.attention.q_proj"] == "modules.exclude has '*.5.attention.q_proj'"
    assert reasons["layers.4.attention.o_proj"] == "modules.casts.0 keeps it high"
    assert rule_of("layers.0.attention.o_proj", made.modules, 6) == 1
    assert idle_rules(made, names(6), 6) == {
        2: "modules.first_blocks_high_precision=1; modules.casts.1 comes first and matches its layers"
    }


def test_a_rule_sets_its_slots_and_leaves_the_others():
    made = recipe(casts=[{"fprop": {"x": {"format": "e5m2"}}}, {"names": ["head"], "high": True}])
    own = slots_of(made)
    assert made.casts_under(0) == own | {"fprop.x": own["fprop.x"].model_copy(update={"format": "e5m2"})}
    assert made.casts_under(None) == own
    assert set(made.casts_under(1).values()) == {UNQUANTIZED}
    assert list(made.cast_sets()) == ["", "modules.casts.0", "modules.casts.1"]


def test_a_phase_replaces_all_casts_but_unquantized_layers_stay_so():
    made = recipe(casts=[{"names": ["*.o_proj"], "fprop": {"x": {"format": "e5m2"}}}]).model_dump()
    made = PrecisionConfig.model_validate({**made, "phases": [{"start": 0.5, "fprop": {"w": E4M3}}]})
    assert made.at(4, 10).casts_under(0)["fprop.x"].format == "e5m2"
    assert made.at(5, 10).casts_under(0) == made.phases[0].given()
    assert made.at(5, 10).modules.include == made.modules.include


def test_a_recipe_that_quantises_by_rule_alone_leaves_the_others_as_they_are():
    values = {
        "name": "t",
        "compute_dtype": "bf16",
        "modules": {"casts": [{"names": ["*.o_proj"], "fprop": {"x": E4M3}}]},
    }
    made = PrecisionConfig.model_validate(values)
    assert made.quantizes
    reasons = reasons_to_stay_unquantized(names(2), made, 2)
    assert [name for name, why in reasons.items() if why is None] == [f"layers.{i}.attention.o_proj" for i in range(2)]
    assert reasons["layers.0.attention.q_proj"] == "no rule of modules.casts fits it"


def test_rules_that_no_layer_follows_are_problems_and_can_be_taken_out():
    rules = [
        {"names": ["*.o_prj"], "high": True},
        {"names": ["*.o_proj"], "fprop": {"x": {"format": "e5m2"}}},
        {"names": ["*.o_proj"], "high": True},
        {"last_fraction": 0.05, "high": True},
    ]
    made = recipe(casts=rules)
    assert {problem.key: problem.text for problem in unmatched(made, names(4), 4)} == {
        "precision.modules.casts.0.names": "has '*.o_prj', which matches no linear layer of this model. Its layers: "
        "layers.*.attention.q_proj, layers.*.attention.o_proj, layers.*.feed_forward.down_proj, head.",
        "precision.modules.casts.2": "applies to no layer: modules.casts.1 comes first and matches its layers. Put it "
        "first, widen it, or remove it.",
        "precision.modules.casts.3": "applies to no layer: no layer in the blocks that it names matches. Put it first, "
        "widen it, or remove it.",
    }
    left = without_idle_rules(made, names(4), 4)
    assert left.modules.casts == (made.modules.casts[1],)
    assert unmatched(left, names(4), 4) == []


@pytest.mark.parametrize(
    ("glob", "said"),
    [
        ("*.attention_norm", "names norms, which no recipe casts. In Transformer Engine's LayerNormLinear"),
        ("*_norm", "names norms, which no recipe casts"),
        ("*.attention", "recipes have no slot for its products; Transformer Engine's FP8 attention (fp8_dpa, fp8_mha)"),
        ("*.attention", "Write '*.attention.*' for its linears."),
        ("*.feed_forward", "Its layers: layers.*.attention.q_proj, layers.*.attention.o_proj, layers.*.feed_forward"),
    ],
)
def test_modules_that_are_no_linears_are_refused_with_why_they_are_not_cast(glob, said):
    for rules, key in (
        ({"include": [glob]}, "include"),
        ({"casts": [{"names": [glob], "high": True}]}, "casts.0.names"),
    ):
        (problem,) = unmatched(recipe(**rules), names(2), 2)
        assert problem.key == f"precision.modules.{key}"
        assert f"has '{glob}', which matches no linear layer" in problem.text
        assert said in problem.text


def test_the_hash_depends_on_the_casts_not_on_how_a_rule_writes_them():
    named = [{"names": ["*.o_proj"], "recipe": "other", **_all_slots(E4M3)}]
    written = [{"names": ["*.o_proj"], **_all_slots(E4M3)}]
    assert recipe(casts=named).recipe_hash == recipe(casts=written).recipe_hash
    others = [
        recipe(),
        recipe(casts=[{"names": ["*.q_proj"], **_all_slots(E4M3)}]),
        recipe(casts=[{"names": ["*.o_proj"], **_all_slots({"format": "e5m2"})}]),
        recipe(casts=[{"names": ["*.o_proj"], "last_blocks": 1, **_all_slots(E4M3)}]),
        recipe(last_fraction_high_precision=0.1),
        recipe(first_fraction_high_precision=0.1),
    ]
    hashes = [made.recipe_hash for made in (recipe(casts=written), *others)]
    assert len(set(hashes)) == len(hashes)


def _all_slots(cast):
    pairs = {"fprop": ("x", "w"), "dgrad": ("dy", "w"), "wgrad": ("dy", "x")}
    return {gemm: dict.fromkeys(pair, cast) for gemm, pair in pairs.items()}
