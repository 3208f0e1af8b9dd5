"""G1 to G5 on a CPU, the emulation or a stand-in on both sides: what they compare, time and read. 20 s."""

import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from native.fake_engine import laid_out
from precision.recipes import RECIPES, load

from gpu_check import agreement, curves, library, setting, speed, steps
from gpu_check.rows import Clock
from lightning_llm.__main__ import main
from lightning_llm.config.compose import compose_config
from lightning_llm.config.schema.precision import slots_of
from lightning_llm.precision import inductor
from lightning_llm.precision.native.capability import DEVICES, Capability

SUBCHANNEL = slots_of(load("fp8_subchannel"))
CURRENT = slots_of(load("fp8_current"))
MXFP8 = slots_of(load("mxfp8"))


@pytest.mark.parametrize("slots", [CURRENT, SUBCHANNEL, MXFP8])
@pytest.mark.parametrize("shape", [(256, 384), (128, 640)])
def test_operands_are_compared_in_one_layout(slots, shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    for slot, cast in slots.items():
        axis = 0 if slot.startswith("wgrad") or slot == "dgrad.w" else 1
        theirs, ours = agreement.stored(laid_out(x, cast, axis), cast, axis, shape), agreement.emulated(x, cast, axis)
        assert [row.status for row in agreement.compare(slot, theirs, ours)] == ["ok", "ok"]
        wrong = agreement.Stored(theirs.codes ^ 1, theirs.scales * 2)
        assert [row.status for row in agreement.compare(slot, wrong, ours)] == ["off", "off"]
        (first, _) = agreement.compare(slot, agreement.Stored(theirs.codes[:5], theirs.scales), ours)
        assert (first.status, first.value) == ("off", None)


@pytest.fixture
def on_cpu(monkeypatch):
    """The checks' device is the CPU."""
    monkeypatch.setattr(setting, "DEVICE", "cpu")


@pytest.fixture
def hopper_on_cpu(engine, on_cpu, monkeypatch):
    """An H100 with Transformer Engine's stand-in, whose arithmetic is the CPU's, and every size small."""
    monkeypatch.setattr(setting, "capability_here", lambda accelerator: Capability.of_gpu(9, 0))
    module = sys.modules["transformer_engine.pytorch"]
    for name, answer in {"fp8": True, "fp8_block_scaling": True, "mxfp8": False, "nvfp4": False}.items():
        monkeypatch.setattr(module, f"is_{name}_available", lambda return_reason, a=answer: (a, ""), raising=False)
    for place, names in {
        library: {"SHAPES": ((64, 128, 256),), "SIZE": 128},
        agreement: {"TOKENS": 128, "INPUTS": 256, "OUTPUTS": 128},
        speed: {"TOKENS": 128, "LAYERS": {"o_proj": (128, 128)}, "SEQUENCES": 2, "LENGTH": 64, "EMULATED": ("mxfp8",)},
    }.items():
        for name, value in names.items():
            monkeypatch.setattr(place, name, value)
    tiny = setting.model_config("llama_tiny", **steps.SIZES)
    monkeypatch.setattr(speed, "model_config", lambda name, **keys: tiny)
    eager = {name: recipe.model_copy(update={"casts": "eager"}) for name, recipe in setting.recipes().items()}
    monkeypatch.setattr(speed, "recipes", lambda: eager)
    once = lambda contenders, **_: {name: work() or 1.0 for name, work in contenders.items()}  # noqa: E731
    monkeypatch.setattr(speed, "milliseconds", once)
    monkeypatch.setattr(speed.torch, "compile", lambda layer: layer)
    monkeypatch.setattr(speed, "compile_blocks", lambda blocks: None)


def statuses(found):
    return {row.what: row.note for row in found if row.status in ("off", "error")}


def test_g1_finds_the_library_exact_and_as_able_as_we_say(hopper_on_cpu, monkeypatch):
    found = list(library.check(Clock(1000)))
    assert statuses(found) == {}
    assert len([row for row in found if "both say yes" in row.what]) == 3
    assert len([row for row in found if "largest error" in row.what]) == 7
    assert len([row for row in found if row.unit == "TFLOP/s"]) == 7
    late = list(library.check(Clock(0)))
    assert [row.note for row in late if row.status == "not available"] == ["out of time"] * 7
    monkeypatch.setattr(library, "LIMITS", {"e4m3": 1e-3})
    assert statuses(library.exactness("fp8_current_e4m3", load("fp8_current_e4m3"))) != {}


class Quantizer:
    """Stands for Transformer Engine's quantiser of one tensor: lays our operands out as it does, both directions."""

    def __init__(self, role):
        self.role = role

    def both(self, tensor, casts):
        rows_, columns = (next(slot for slot in casts if slot.endswith(f".{self.role}") and side(slot) == axis)
                          for axis in (1, 0))  # fmt: skip
        return SimpleNamespace(
            **vars(laid_out(tensor, casts[rows_], 1)),
            **({} if casts[rows_].block == "tensor" else vars(laid_out(tensor, casts[columns], 0))),
        )


def side(slot):
    return 0 if slot.startswith("wgrad") or slot == "dgrad.w" else 1


def test_g2_agrees_where_both_sides_are_the_emulation(hopper_on_cpu, engine, monkeypatch):
    quantizers = {"scaling_fwd": [Quantizer("x"), Quantizer("w"), None], "scaling_bwd": [Quantizer("dy"), None]}
    monkeypatch.setattr(engine.Linear, "quantizers", quantizers, raising=False)
    for name in ("fp8_current", "fp8_subchannel"):
        recipe = load(name)
        casts = slots_of(recipe)
        monkeypatch.setattr(agreement, "quantised_by", lambda q, tensor, casts=casts: q.both(tensor, casts))
        found = list(agreement.operands(recipe))
        assert statuses(found) == {}
        assert len(found) == 12
    found = list(agreement.products(load("fp8_current"))) + list(agreement.history(load("fp8_delayed")))
    assert [row.status for row in found] == ["ok"] * 5
    assert [row.value for row in found[:3]] == [0, 0, 0]
    (row,) = agreement.fallback(load("mxfp8"))
    assert row.status == "ok"
    assert "needs compute capability >= 10.0" in row.note


def test_g2_compares_delayed_scaling_at_scales_that_moved(hopper_on_cpu, engine, monkeypatch):
    recipe, read = load("fp8_delayed"), {}

    def quantizers(kernel):
        made = {
            role: kernel.first.qfactory(SimpleNamespace(tensor_type=role))
            for role in ("input", "weight", "grad_output")
        }
        return {"scaling_fwd": [made["input"], made["weight"], None], "scaling_bwd": [made["grad_output"], None]}

    def quantised_by(quantizer, tensor):
        role = next(role for role, given in agreement.tensors().items() if torch.equal(given, tensor))
        read[role] = float(quantizer.scale)
        cast = next(cast for slot, cast in slots_of(recipe).items() if slot.endswith(f".{role}"))
        return laid_out(tensor, cast, 1, quantizer.scale)

    monkeypatch.setattr(engine.Linear, "quantizers", property(quantizers), raising=False)
    monkeypatch.setattr(agreement, "quantised_by", quantised_by)
    found = list(agreement.operands(recipe))
    assert [row.status for row in found] == ["ok"] * 12
    largest = {role: tensor.abs().amax().item() for role, tensor in agreement.tensors().items()}
    assert read == {role: pytest.approx((57344 if role == "dy" else 448) / largest[role]) for role in ("x", "w", "dy")}
    assert [row.status for row in agreement.products(recipe)] == ["ok"] * 3


def forget_casts() -> None:
    for kept in (inductor.stages, inductor._scale, inductor._round_blocks, inductor.tensor_amax):
        kept.cache_clear()


@pytest.mark.parametrize("name", ["fp8_subchannel_fp32scales", "nvfp4", "mxfp4_sr_fp8"])
def test_g2_sees_a_compiled_cast_that_is_not_eagers(name, on_cpu, monkeypatch):
    """Compilation is stood for by nothing at all, then by scales that are an ulp off."""
    monkeypatch.setattr(inductor, "why_not", lambda device_type: None)
    for wrong in (False, True):
        forget_casts()

        def plain(function, identity, wrong=wrong):
            def off(*args):
                made = function(*args)
                return made._replace(multiplier=made.multiplier.nextafter(torch.tensor(torch.inf)))

            return off if wrong and function.__name__ == "scale" else function

        monkeypatch.setattr(inductor, "compiled", plain)
        (row,) = agreement.compiled_casts(load(name))
        assert row.status == ("off" if wrong else "ok"), row
    forget_casts()
    monkeypatch.setattr(inductor, "why_not", lambda device_type: "no compiler")
    (row,) = agreement.compiled_casts(load(name))
    assert (row.status, row.note) == ("not available", "no compiler")


def test_g4_measures_layers_and_training(hopper_on_cpu):
    found = list(speed.check(Clock(1000)))
    assert [row.note for row in found if row.status == "error"] == []
    trained = [row.what for row in found if row.unit == "tokens/s"]
    assert [what.split(" tokens, ")[1] for what in trained] == [
        "bf16, compiled", "fp8_current, native", "fp8_subchannel, native", "fp8_delayed, native", "mxfp8, emulated",
    ]  # fmt: skip
    ratios = [row for row in found if "bf16's time over it" in row.what]
    assert len(ratios) == 7 + 4  # a layer under six native recipes and one emulated, and a step
    assert {row.status for row in ratios} == {"ok"}
    late = list(speed.check(Clock(0)))
    assert {row.note for row in late[1:]} == {"out of time"}


def test_no_recipe_is_measured_against_itself(hopper_on_cpu, monkeypatch):
    """Where bf16's own measurement broke there is no ratio, of layers, of steps and of G1's product."""
    recipes = speed.recipes()
    broken = {**recipes, "bf16": None}
    monkeypatch.setattr(speed, "recipes", lambda: broken)
    found = list(speed.check(Clock(1000)))
    assert sorted(row.what for row in found if row.status == "error") == ["layers in bf16", "llama_1b under bf16"]
    ratios = [row for row in found if "bf16's time over it" in row.what]
    assert len(ratios) == 11
    assert {(row.status, row.value, row.note.split(";")[0]) for row in ratios} == {
        ("not available", None, "no bf16 baseline")
    }
    monkeypatch.setattr(library, "milliseconds", speed.milliseconds)
    _, ratio = library.speed("fp8_current", recipes["fp8_current"], {})
    assert (ratio.status, ratio.note) == ("not available", "no bf16 baseline")


def test_what_is_timed_is_warm_and_takes_turns(on_cpu, monkeypatch):
    monkeypatch.setattr(setting, "WARMUP_SECONDS", 0.02)
    calls = []

    def work(name, seconds):
        calls.append(name)
        time.sleep(seconds)

    contenders = {"a": lambda: work("a", 0.004), "b": lambda: work("b", 0.001)}
    taken = setting.milliseconds(contenders, repeats=1, rounds=3)
    assert "".join(calls[-6:]) == "abbaab"
    assert calls[:-6].count("b") > calls[:-6].count("a") >= 3
    assert taken["a"] >= 4
    assert 1 <= taken["b"] < taken["a"]


def test_the_given_tensors_reach_every_corner(on_cpu):
    given = agreement.tensors()
    assert given["x"].shape == (agreement.TOKENS, agreement.INPUTS)
    assert given["x"].abs().amax() > 2000
    assert given["w"].abs().amax(1).min() == 0
    assert library.relative(given["x"] * 2, given["x"]) == 1


@pytest.mark.parametrize("name", ["fp8_delayed", "fp16"])
def test_steps_of_a_recipe_end_near_bf16s(name, on_cpu, monkeypatch):
    monkeypatch.setattr(setting, "capability_here", lambda accelerator: DEVICES["cpu"])
    losses = {"bf16": steps.train(load("bf16"))}
    (row,) = steps.one_recipe(load(name), losses)
    assert row.status == "ok", row


HIDING = """
import sys
class Hide:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("mlflow", "datasets", "lightning", "tokenizers", "hydra", "omegaconf"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Hide())
"""


def test_tests_marked_gpu_are_collected_where_only_torch_and_pydantic_are(tmp_path, monkeypatch):
    """Each is skipped here, for there is no GPU: not one fails to be imported."""
    assert [file.name for file in steps.marked_files()] == ["test_attention_gpu.py", "test_gpu.py"]
    (tmp_path / "sitecustomize.py").write_text(HIDING)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(steps.ROOT)]))
    (row,) = steps.marked_tests(Clock(100))
    assert row.status == "not available"
    assert "no CUDA device" in row.note
    monkeypatch.setattr(steps, "marked_files", lambda: [tmp_path / "not_there.py"])
    (row,) = steps.marked_tests(Clock(100))
    assert (row.status, row.value) == ("off", 0)


def test_settings_are_those_of_conf(monkeypatch):
    assert set(setting.recipes()) == set(RECIPES)
    assert setting.model_config("llama_1b") == compose_config(["model=llama_1b"]).model
    monkeypatch.setattr(setting, "capability_here", lambda accelerator: Capability.of_gpu(9, 0))
    assert set(setting.native_recipes()) == {
        "fp8_current", "fp8_current_e4m3", "fp8_delayed", "fp8_delayed_micro_batch", "fp8_subchannel",
        "fp8_subchannel_fp32scales",
    }  # fmt: skip


def test_the_runs_of_g5_compose_and_their_gap_is_read(tmp_path):
    config = compose_config(curves.words("fp8_current", tmp_path, "one"))
    assert config.run.dir == str(tmp_path / "one")
    assert config.trainer.max_steps == curves.STEPS
    for name, loss, status in (
        ("bf16", 2.0, "ok"),
        ("near", 2.01, "ok"),
        ("far", 2.1, "off"),
        ("nan", float("nan"), "off"),
    ):
        (tmp_path / name).mkdir()
        lines = [json.dumps({"step": step, "loss": loss}) for step in range(50)]
        (tmp_path / name / "metrics.jsonl").write_text("\n".join([*lines, '{"val_loss": 1}']))
        (tmp_path / name / "summary.json").write_text('{"precision": {"runs": "native"}}')
        (row,) = curves.gap(name, tmp_path)
        assert row.status == status
    (tmp_path / "near/summary.json").write_text('{"precision": {"runs": "emulated"}}')
    (row,) = curves.gap("near", tmp_path)
    assert (row.status, row.what.split(":")[0]) == ("off", "near (emulated)")
    assert curves.finish(
        curves.subprocess.Popen([sys.executable, "-c", "1/0"], stdout=-1, stderr=-2, text=True), 60
    ) == ("exit code 1: ZeroDivisionError: division by zero")
    assert Path(curves.ROOT, "Makefile").is_file()


def test_g5_asks_compare_for_the_verdict(small_run, tmp_path):
    """A run that fell back is off; one that ran natively is what compare says of its validation."""
    for name in ("bf16", "fp8_current"):
        words = [f"precision={name}", "precision.casts=eager", "model.num_layers=3", "checkpoint.every_steps=null"]
        assert main(["train", *small_run(tmp_path, *words, f"run.dir={tmp_path / name}")]) == 0
    summary = tmp_path / "fp8_current/summary.json"
    summary.write_text(summary.read_text().replace('"runs": "emulated"', '"runs": "native"'))
    (row,) = curves.verdicts(["fp8_current"], tmp_path, Clock(100))
    assert (row.status, row.note.split(":")[0]) == ("measured", "inconclusive")  # a single pair
    ours, base = (
        [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()][-1]["val_loss"]
        for name in ("fp8_current", "bf16")
    )
    assert row.value == pytest.approx(ours - base)
    for runs, verdict, status in (
        ("native", "lossless", "ok"),
        ("native", "lossy", "off"),
        ("emulated", "lossless", "off"),
        ("emulated", "inconclusive", "off"),
    ):
        row = curves.verdict_row("one", runs, {"verdict": verdict, "gap": 0.1, "reason": ""})
        assert (row.status, row.value) == (status, 0.1)
    assert curves.verdict_row("one", "native", None).status == "not available"


def test_the_hand_written_loop_runs_as_the_run_does(tmp_path, on_cpu, monkeypatch):
    seen = []

    def loop(*_, **__):
        seen.append(torch.are_deterministic_algorithms_enabled())
        return 0.1

    monkeypatch.setattr(speed, "plain_loop", loop)
    (tmp_path / "bf16").mkdir()
    lines = [json.dumps({"step": step, "step_seconds": 0.104}) for step in range(curves.STEPS)]
    (tmp_path / "bf16/metrics.jsonl").write_text("\n".join(lines))
    config = compose_config(curves.words("bf16", tmp_path, "one"))
    (row,) = curves.overhead(tmp_path)
    assert (row.status, row.value) == ("ok", pytest.approx(1.04))
    assert seen == [config.trainer.deterministic]
