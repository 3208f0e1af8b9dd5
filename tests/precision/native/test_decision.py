"""Recipes that run natively per device, and the reasons for the others. Under a second."""

import pytest

from lightning_llm.base import hardware
from lightning_llm.config.compose import compose_config
from lightning_llm.config.schema.precision import CastConfig, PhaseConfig, slots_of
from lightning_llm.plan.describe import matrix_rows
from lightning_llm.plan.resolve import DerivedConfig, plan_of
from lightning_llm.precision.native import decide as decide_module
from lightning_llm.precision.native import transformer_engine as te
from lightning_llm.precision.native.decide import (
    DEVICES,
    Capability,
    capability_here,
    decide,
    decision_matrix,
    installed_library,
    shipped_recipes,
    version_tuple,
)
from lightning_llm.precision.native.express import MULTIPLES, casts_of, express, native_recipe
from tests.messages import missing
from tests.precision.recipes import RECIPES, load

NATIVE = {  # by recipe, the devices that Transformer Engine 2.20's own checks admit
    "fp8_delayed": {"sm_89", "sm_90", "sm_100", "sm_120"},
    "fp8_delayed_micro_batch": {"sm_89", "sm_90", "sm_100", "sm_120"},
    "fp8_current": {"sm_89", "sm_90", "sm_100", "sm_120"},
    "fp8_mlp": {"sm_89", "sm_90", "sm_100", "sm_120"},
    "fp8_current_e4m3": {"sm_89", "sm_90", "sm_100", "sm_120"},
    "fp8_subchannel": {"sm_90", "sm_100"},
    "fp8_subchannel_fp32scales": {"sm_90"},
    "mxfp8": {"sm_100"},
    "fp16_mxfp8": {"sm_100"},
    "fp16_mxfp8_hybrid": {"sm_100"},
    "nvfp4": {"sm_100"},
    "nvfp4_all_blocks": {"sm_100"},
}
HOPPER = DEVICES["sm_90"]


def with_cast(name, slot, **keys):
    recipe = load(name)
    gemm, operand = slot.split(".")
    part = getattr(recipe, gemm)
    cast = CastConfig.model_validate({**getattr(part, operand).model_dump(), **keys})
    return recipe.model_copy(update={gemm: part.model_copy(update={operand: cast})})


def test_the_matrix_of_recipes_and_devices_agrees_with_the_library():
    made = decision_matrix(shipped_recipes())
    assert set(made) == set(RECIPES)
    for name, row in made.items():
        assert list(row) == ["cpu", "sm_80", "sm_89", "sm_90", "sm_100", "sm_120"]
        native = {device for device, decision in row.items() if decision.runs == "native"}
        wanted = NATIVE.get(name, set())
        if not load(name).quantizes:
            wanted = set(DEVICES) - ({"cpu"} if name == "fp16" else set())
        assert native == wanted, name
        assert all(decision.reason for decision in row.values())
    rows, reasons = matrix_rows(made)
    assert [row[0] for row in rows[1:]] == sorted(RECIPES)
    assert len(set(reasons)) == len(reasons)


@pytest.mark.parametrize("name", NATIVE)
def test_a_native_recipe_means_exactly_its_casts(name):
    """`test_transformer_engine.py` tests the casts of Transformer Engine under the configuration."""
    found, differences = express(slots_of(load(name)))
    assert differences == []
    assert casts_of(found) == slots_of(load(name))


@pytest.mark.parametrize(
    ("name", "slot", "keys"),
    [
        ("fp8_current", "wgrad.x", {"format": "e5m2"}),
        ("fp8_current", "dgrad.w", {"scale": "power_of_two"}),
        ("fp8_current", "wgrad.dy", {"rounding": "stochastic"}),
        ("fp8_subchannel", "fprop.w", {"block": "1x128"}),
        ("fp8_subchannel", "wgrad.x", {"scale": "fp32"}),
        ("mxfp8", "dgrad.w", {"block": "32x32"}),
        ("mxfp8", "fprop.w", {"scale": "e8m0_floor"}),
        ("nvfp4", "wgrad.dy", {"hadamard": None}),
        ("nvfp4", "dgrad.dy", {"noise_bits": 20}),
        ("nvfp4", "dgrad.w", {"block": "1x16"}),
        ("fp8_delayed", "wgrad.dy", {"delayed": {"history_length": 16}}),
        ("fp8_current", "fprop.x", {"format": "e5m2"}),
        ("fp8_current", "dgrad.dy", {"format": "e2m1"}),
        ("fp8_current", "dgrad.dy", {"format": "int8"}),
        ("mxfp8", "dgrad.dy", {"format": "e3m2"}),
        ("mxfp8", "fprop.x", {"format": "e2m3"}),
    ],
)
def test_every_difference_runs_emulated_and_is_named(name, slot, keys):
    decision = decide(with_cast(name, slot, **keys), DEVICES["sm_100"])
    assert decision.runs == "emulated"
    assert f"precision.{slot}" in {problem.key for problem in decision.problems}
    assert "Transformer Engine" in decision.reason


def test_a_backward_pass_in_high_precision_is_native_but_not_a_half_of_one():
    recipe = load("fp8_current")
    high = recipe.model_copy(update={"dgrad": type(recipe.dgrad)(), "wgrad": type(recipe.wgrad)()})
    assert native_recipe(high)[0].gradient == "high"
    assert decide(high, HOPPER).runs == "native"
    half = recipe.model_copy(update={"dgrad": type(recipe.dgrad)()})
    assert decide(half, HOPPER).runs == "emulated"
    delayed = load("fp8_delayed").model_copy(update={"dgrad": type(recipe.dgrad)(), "wgrad": type(recipe.wgrad)()})
    assert decide(delayed, HOPPER).runs == "emulated"


def test_phases_must_all_be_native_or_high():
    for phase, runs in (({"start": 0.5}, "native"), ({"start": 0.5, "fprop": load("quartet").fprop}, "emulated")):
        recipe = load("fp8_current").model_copy(update={"phases": (PhaseConfig(**phase),)})
        decision = decide(recipe, HOPPER)
        assert decision.runs == runs
        assert all(problem.key.startswith("precision.phases.0.") for problem in decision.problems)
    late = load("bf16").model_copy(update={"phases": (PhaseConfig(start=0.5, **_gemms("fp8_current")),)})
    assert decide(late, HOPPER).runs == "native"
    assert decide(late, DEVICES["cpu"]).runs == "emulated"


def _gemms(name):
    return {gemm: getattr(load(name), gemm) for gemm in ("fprop", "dgrad", "wgrad")}


def test_all_reasons_against_native_are_reported_at_once_with_numbers():
    words = ["precision=fp8_subchannel", "precision.backend=native", "model.hidden_size=200", "model.num_heads=4"]
    config = compose_config([*words, "model.num_kv_heads=2", "model.ffn_hidden_size=640"])
    here = Capability("sm_86", (8, 6), (12, 6), "2.14.0", library_problem="Transformer Engine 2.14.0 is installed")
    decision = DerivedConfig(config, here).decision
    assert decision.runs == "refused"
    said = "\n".join(map(str, decision.refusals()))
    for part in (
        "200, not a multiple of 128",
        "model.num_kv_heads=2 x head_dim=50: is 100, not a multiple of 128",
        "needs compute capability >= 9.0",
        "8.6",
    ):
        assert part in said
    for part in ("CUDA >= 12.9", "12.6", "2.14.0 is installed", "precision.backend=native: "):
        assert part in said
    assert "640" not in said
    assert decision.refusals() == list(dict.fromkeys(decision.refusals()))
    automatic = config.model_copy(update={"precision": config.precision.model_copy(update={"backend": "auto"})})
    assert DerivedConfig(automatic, here).decision.runs == "emulated"
    assert DerivedConfig(automatic, here).decision.refusals() == []


SCOPES = [
    f"precision.{slot}.amax_scope=shard"
    for slot in ("fprop.x", "fprop.w", "dgrad.dy", "dgrad.w", "wgrad.dy", "wgrad.x")
]


DIFFERENT = "the two casts of X have different amax_scope"


@pytest.mark.parametrize(("recipe", "device", "more", "said"), [
    ("fp8_current", "sm_90", [], None),
    ("fp8_current", "sm_90", SCOPES, None),
    ("fp8_current", "sm_90", [SCOPES[1], SCOPES[3]], None),
    ("fp8_current", "sm_90", SCOPES[1:], DIFFERENT),
    ("fp8_delayed", "sm_90", [], None),
    ("fp8_subchannel", "sm_90", [], None),
    ("mxfp8", "sm_100", [], None),
    ("nvfp4", "sm_100", [], None),
    ("nvfp4", "sm_100", SCOPES[1:], DIFFERENT),
])  # fmt: skip
def test_parts_of_tensors_are_cast_natively_where_that_is_the_cast_of_the_whole(recipe, device, more, said):
    """Scales of blocks, which no layout splits; others take the maximum of the ranks' amaxes, or are of parts."""
    for axis in ("tp", "cp"):
        words = [f"precision={recipe}", f"parallel.{axis}=2", "model=llama_1b", *more]
        decision = DerivedConfig(compose_config(words), DEVICES[device]).decision
        assert decision.runs == ("native" if said is None else "emulated")
        assert said is None or (f"parallel.{axis}=2: must be 1, because" in decision.reason and said in decision.reason)


def test_a_ranks_part_of_a_size_must_fit_the_kernels_too():
    words = ["precision=fp8_delayed", "model.ffn_hidden_size=1040"]
    assert DerivedConfig(compose_config(words), HOPPER).decision.runs == "native"
    decision = DerivedConfig(compose_config([*words, "parallel.tp=2"]), HOPPER).decision
    parts = "model.ffn_hidden_size / tp=2", "520", "multiple of 16", "Float8Quantizer"
    assert missing(decision.reason, *parts) == []


def test_an_axis_that_cuts_is_named_with_its_degree():
    """A null axis counts with its resolved degree."""
    for words, said in (
        (["parallel.cp=2"], ["parallel.cp=2: must be 1, because"]),
        (
            ["parallel.tp=2", "parallel.cp=4", "world=8"],
            ["parallel.tp=2: must be 1, because", "parallel.cp=4: must be 1, because"],
        ),
        (["parallel.tp=null", "world=4"], ["parallel.tp=null, which is 4 of 4 ranks: must be 1, because"]),
        (["parallel.tp=null", "parallel.cp=2", "world=2"], ["parallel.cp=2: must be 1, because"]),
        (["parallel.tp=null", "world=1"], []),
    ):
        config = compose_config(["precision=fp8_current", "precision.backend=native", SCOPES[0], *words])
        refusals = [str(each) for each in DerivedConfig(config, HOPPER).decision.refusals()]
        assert [text[: len(start)] for text, start in zip(refusals, said, strict=True)] == said
        assert all(
            f"{DIFFERENT}, while Float8CurrentScaling has one for both; so precision" in text for text in refusals
        )


def test_sizes_are_named_by_their_keys_with_all_numbers():
    words = ["precision=fp8_current", "model.hidden_size=96", "model.num_heads=4", "model.num_kv_heads=1"]
    said = DerivedConfig(compose_config(words), HOPPER).decision.reason
    parts = "model.num_kv_heads=1 x head_dim=24", "24", "multiple of 16", "Float8CurrentScaling"
    assert missing(said, *parts) == []


def test_each_kernel_has_its_multiple():
    for name, kind in (("fp8_current", "current"), ("fp8_subchannel", "subchannel"), ("fp8_delayed", "delayed")):
        multiple = MULTIPLES[kind]
        assert decide(load(name), HOPPER, {"model.hidden_size": 3 * multiple}).runs == "native"
        decision = decide(load(name), HOPPER, {"model.hidden_size": 3 * multiple + multiple // 2})
        assert decision.runs == "emulated"
        assert f"not a multiple of {multiple}" in decision.reason


@pytest.mark.parametrize(("device", "keys", "runs", "said"), [
    ((10, 3), {}, "native", ""),
    ((11, 0), {}, "emulated", "stochastic rounding is checked on compute capability 10.x alone"),
    ((12, 0), {}, "emulated", "rotation does not run from compute capability 12.0 on (issue 3062)"),
    ((12, 1), {"rounding": "even", "noise_bits": 20}, "emulated", "rotation does not run"),
    ((12, 1), {"hadamard": None}, "emulated", "stochastic rounding"),
    ((12, 1), {"rounding": "even", "noise_bits": 20, "hadamard": None}, "native", ""),
])  # fmt: skip
def test_nvfp4_is_native_only_where_its_kernels_rotate_and_round(device, keys, runs, said):
    """12.0 is "Partial" in NVIDIA's matrix: plain NVFP4 runs there, the recipe's rotation and rounding do not."""
    recipe = load("nvfp4")
    for slot in ("dgrad.dy", "wgrad.dy", "wgrad.x"):
        gemm, operand = slot.split(".")
        part = getattr(recipe, gemm)
        cast = getattr(part, operand)
        changed = {key: value for key, value in keys.items() if key == "hadamard" or cast.stochastic}
        cast = CastConfig.model_validate({**cast.model_dump(), **changed})
        recipe = recipe.model_copy(update={gemm: part.model_copy(update={operand: cast})})
    decision = decide(recipe, Capability.of_gpu(*device))
    assert decision.runs == runs
    assert said in decision.reason


def test_emulated_is_emulated_also_where_it_could_be_native():
    recipe = load("fp8_current").model_copy(update={"backend": "emulated"})
    assert decide(recipe, HOPPER).facts() == {"runs": "emulated", "reason": "precision.backend=emulated asks for it"}
    for name in ("bf16", "fp32"):
        native = load(name).model_copy(update={"backend": "native"})
        assert decide(native, DEVICES["cpu"]).runs == "native"  # nothing is quantised, so nothing is missing


@pytest.mark.parametrize(("version", "problem"), [
    ("2.20.2", None), ("2.21.0", None), ("2.20.0.dev0+d0067d0", None), ("2.19.1", "2.19.1"), ("3.0.0", "3.0.0"),
])  # fmt: skip
def test_versions_of_the_library(version, problem, monkeypatch):
    monkeypatch.setattr(decide_module, "version", lambda name: version)
    found, said = installed_library()
    assert found == version
    assert (said is None) if problem is None else (problem in said)
    assert version_tuple("13.0") == (13, 0)


def test_a_machine_without_a_driver_is_known_without_torch(monkeypatch):
    monkeypatch.setattr(hardware, "DRIVER_FILES", ())
    capability_here.cache_clear()
    here = capability_here("auto")
    assert (here.device, here.compute_capability) == ("cpu", None)
    assert "no NVIDIA driver" in here.problem
    assert capability_here("cpu").problem == "trainer.accelerator=cpu"
    capability_here.cache_clear()


def test_only_a_recipe_that_quantises_asks_for_the_library(monkeypatch):
    """Importing Transformer Engine takes seconds, which a bf16 run has no use for."""
    asked = []
    monkeypatch.setattr(hardware, "DRIVER_FILES", ("/",))
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(decide_module, "installed_library", lambda: ("2.20.2", None))
    monkeypatch.setattr(te, "import_problem", lambda: asked.append("imported"))
    capability_here.cache_clear()
    for name in ("bf16", "fp16", "fp32"):
        assert DerivedConfig(compose_config([f"precision={name}"])).decision.runs == "native"
    assert asked == []
    monkeypatch.setattr("torch.version.cuda", "13.0")
    assert DerivedConfig(compose_config(["precision=fp8_current"])).decision.runs == "native"
    assert asked == ["imported"]
    capability_here.cache_clear()


@pytest.mark.parametrize("error", [RuntimeError("cudnn shared object not found."), OSError("libcudart.so.13: no")])
def test_a_library_that_cannot_be_imported_is_a_reason_not_a_traceback(error, monkeypatch):
    def broken():
        raise error

    monkeypatch.setattr(te, "engine", broken)
    assert f"{type(error).__name__}: {error}" in te.import_problem()
    monkeypatch.setenv("NVTE_USE_FAST_MATH", "1")
    assert "NVTE_USE_FAST_MATH" in te.import_problem()


@pytest.mark.parametrize(("layout", "devices"), [("pp", 2), ("fsdp_pp", 4)])
def test_stages_of_a_pipeline_run_natively(layout, devices):
    """Also with stochastic rounding: the generator is seeded before each cast of dY."""
    place = [f"parallel={layout}", f"trainer.devices={devices}", "model.head_dim=64"]
    for recipe in ("mxfp8", "nvfp4"):
        config = compose_config(["recipe=quickstart", f"precision={recipe}", *place])
        assert DerivedConfig(config, DEVICES["sm_100"]).decision.runs == "native"


@pytest.mark.parametrize("hardware", ["h100", "b200"])
def test_the_shipped_405b_recipe_is_planned_natively(hardware):
    config = compose_config(["recipe=llama3_405b_3d", f"hardware={hardware}"])
    decision = plan_of(config).decision
    assert (decision.runs, [each.name for each in decision.natives]) == ("native", ["Float8CurrentScaling"])


def test_a_bias_changes_nothing_and_a_mixers_own_sizes_count():
    """GPT-3's linears have one; GLA's gates have a rank that MXFP8's blocks of 32 do not divide."""
    made = {
        model: plan_of(compose_config([f"model={model}", "precision=mxfp8"]), DEVICES["sm_100"]).decision
        for model in ("llama_tiny", "gpt3_345m", "hybrid_tiny")
    }
    assert [made[model].runs for model in made] == ["native", "native", "emulated"]
    said = [f"{problem.key} {problem.text}" for problem in made["hybrid_tiny"].problems]
    assert all("not a multiple of 32, as MXFP8BlockScaling requires" in text for text in said)
    assert any(text.startswith("gate_low_rank_dim of gla is 16") for text in said)
