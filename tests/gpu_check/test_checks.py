"""The checks on a CPU, the emulation or a stand-in on both sides: what they compare, time and read. 20 s."""

import json
import os
import time
from types import SimpleNamespace

import pytest
import torch
from precision.recipes import RECIPES, load

from gpu_check import agreement, apart, curves, emulation, layers, library, memory, runs, setting, speed, steps
from gpu_check.aims import MFU, NATIVE_STEP, closing
from gpu_check.call import Call
from gpu_check.checks import RUN
from gpu_check.journal import Journal
from gpu_check.machine import Machine
from gpu_check.plain_llama import PlainBlock, PlainLlama, plain_step
from gpu_check.rows import Clock, Row
from lightning_llm.__main__ import main
from lightning_llm.config.compose import compose_config
from lightning_llm.config.schema.precision import slots_of
from lightning_llm.model.decoder import Decoder
from lightning_llm.model.init import initialise
from lightning_llm.precision import inductor
from lightning_llm.precision.linear import LinearPlan
from lightning_llm.precision.native.capability import DEVICES, Capability
from lightning_llm.precision.native.transformer_engine import NativeLinear


@pytest.mark.parametrize("name", ["fp8_current", "fp8_subchannel", "mxfp8"])
@pytest.mark.parametrize("shape", [(256, 384), (128, 640)])
def test_operands_are_compared_in_one_layout(name, shape, engine):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    recipe = load(name)
    engine.device(10 if name == "mxfp8" else 9)
    quantizers = agreement.quantizers_of(ran(recipe))
    for slot, cast in slots_of(recipe).items():
        axis = agreement.axis_of(slot)
        made = agreement.quantised_by(quantizers[slot.split(".")[1]], x)
        theirs, ours = agreement.stored(made, cast, axis, shape), agreement.emulated(x, cast, axis)
        assert [row.status for row in agreement.compare(slot, theirs, ours)] == ["ok", "ok"]
        wrong = agreement.Stored(theirs.codes ^ 1, theirs.scales * 2)
        assert [row.status for row in agreement.compare(slot, wrong, ours)] == ["off", "off"]
        (first, _) = agreement.compare(slot, agreement.Stored(theirs.codes[:5], theirs.scales), ours)
        assert (first.status, first.value) == ("off", None)


def ran(recipe):
    """Return a native layer after a forward and a backward pass, which make its quantisers."""
    layer = NativeLinear("x", torch.nn.Linear(128, 128, bias=False), LinearPlan.of(recipe, "eager"))
    layer(torch.ones(128, 128, dtype=torch.bfloat16)).sum().backward()
    return layer


@pytest.fixture
def on_cpu(monkeypatch):
    """The checks' device is the CPU."""
    monkeypatch.setattr(setting, "DEVICE", "cpu")


@pytest.fixture
def hopper_on_cpu(engine, on_cpu, monkeypatch):
    """An H100 with Transformer Engine's Python, whose arithmetic is the CPU's, and every size small."""
    monkeypatch.setattr(setting, "capability_here", lambda accelerator: Capability.of_gpu(9, 0))
    for place, names in {
        library: {"SHAPES": ((64, 128, 256),)},
        agreement: {"TOKENS": 128, "INPUTS": 256, "OUTPUTS": 128},
        layers: {"TOKENS": 128, "LAYERS": {"o_proj": (128, 128)}},
        speed: {"LENGTH": 64, "sequences": lambda: 2},
    }.items():
        for name, value in names.items():
            monkeypatch.setattr(place, name, value)
    tiny = setting.model_config("llama_tiny", **steps.SIZES)
    eager = {name: recipe.model_copy(update={"casts": "eager"}) for name, recipe in setting.recipes().items()}
    once = lambda contenders, **_: {name: work() or 1.0 for name, work in contenders.items()}  # noqa: E731
    for place in (speed, emulation):
        monkeypatch.setattr(place, "model_config", lambda name, **keys: tiny)
    for place in (speed, layers, emulation):
        monkeypatch.setattr(place, "recipes", lambda: eager)
    for place in (speed, layers):
        monkeypatch.setattr(place, "milliseconds", once)
    monkeypatch.setattr(speed, "peak_flops_per_second", lambda device, dtype: 1e9)
    monkeypatch.setattr(torch, "compile", lambda layer, **_: layer)
    monkeypatch.setattr(PlainBlock, "compile", lambda block: None)
    monkeypatch.setattr(speed, "compile_blocks", lambda blocks: None)


@pytest.fixture
def call(tmp_path):
    """What a check is given: no rows yet, and time enough."""
    return Call(Journal(tmp_path / "rows.jsonl", Machine("d", "1", "2", None)), Clock(1000), tmp_path)


def measured(name, module, call, wanted=lambda item: True):
    """Return a check's rows, all its items measured, or those `wanted`."""
    apart.measure(name, [item for item in module.items(call) if wanted(item.name)], call.journal, call.clock)
    return [row for found in call.journal.results(name).values() for row in found]


def statuses(found):
    return {row.what: row.note for row in found if row.status in ("off", "error")}


def test_the_library_is_exact_and_as_able_as_we_say(hopper_on_cpu, monkeypatch):
    found = list(library.admitted())
    found += [row for name in setting.native_recipes() for row in library.exactness(name, load(name))]
    assert statuses(found) == {}
    assert len([row for row in found if "both say yes" in row.what]) == 3
    assert len([row for row in found if "largest error" in row.what]) == 7
    monkeypatch.setattr(library, "LIMITS", {"e4m3": 1e-3})
    assert statuses(library.exactness("fp8_current_e4m3", load("fp8_current_e4m3"))) != {}


def test_agreement_where_both_sides_are_the_emulation(hopper_on_cpu):
    for name in ("fp8_current", "fp8_subchannel"):
        found = list(agreement.operands(load(name)))
        assert statuses(found) == {}
        assert len(found) == 12
    assert [row.status for row in agreement.start_up_check(load("fp8_current"))] == ["ok", "ok"]
    found = list(agreement.products(load("fp8_current"))) + list(agreement.history(load("fp8_delayed")))
    assert [row.status for row in found] == ["ok"] * 5
    assert [row.value for row in found[:3]] == [0, 0, 0]
    (row,) = agreement.fallback(load("mxfp8"))
    assert row.status == "ok"
    assert "needs compute capability >= 10.0" in row.note


def test_agreement_compares_delayed_scaling_at_scales_that_moved(hopper_on_cpu, monkeypatch):
    recipe, read = load("fp8_delayed"), {}

    def quantised_by(quantizer, tensor):
        role = next(role for role, given in agreement.tensors().items() if torch.equal(given, tensor))
        read[role] = float(quantizer.scale)
        return right(quantizer, tensor)

    right = agreement.quantised_by
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
def test_agreement_sees_a_compiled_cast_that_is_not_eagers(name, on_cpu, monkeypatch):
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


def test_agreement_has_every_recipe_that_quantises(hopper_on_cpu, call, monkeypatch):
    names = [item.name for item in agreement.items(call)]
    quantising = {name for name, recipe in setting.recipes().items() if recipe.quantises}
    assert names[1:7] == list(setting.native_recipes())
    assert {f"{name}: compiled casts" for name in quantising} <= set(names)
    assert {name for name in quantising if f"{name}: fallback" in names} == quantising - set(setting.native_recipes())
    monkeypatch.setattr(setting, "capability_here", lambda accelerator: Capability.none("no GPU"))
    (row,) = next(item for item in agreement.items(call) if item.name == "native recipes").work()
    assert row.status == "not available"


def planted_run(monkeypatch, rates):
    """Have runs of `lightning-llm train` leave these tokens/s, without one."""

    def finish(self, clock, steps=None):
        self.folder.mkdir()
        lines = [
            {"step": i, "loss": 1.0, "tokens_per_second": rate, "data_seconds": 0.0, "timing_warmup": rate == 1}
            for i, rate in enumerate(rates)
        ]
        (self.folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + '\n{"torn')

    monkeypatch.setattr(runs.subprocess, "Popen", lambda *_, **__: SimpleNamespace())
    monkeypatch.setattr(runs.Run, "finish", finish)


def test_speed_holds_train_against_a_hand_written_loop_and_native_fp8_against_bf16(hopper_on_cpu, call, monkeypatch):
    planted_run(monkeypatch, [1, 1, 400_000, 300_000, 500_000])
    found = {row.what: row for row in measured("speed", speed, call)}
    assert [row.note for row in found.values() if row.status == "error"] == []
    rates = {what: row.value for what, row in found.items() if row.unit == "tokens/s"}
    assert list(rates) == [
        "llama_1b, bf16, train", "llama_1b, bf16, hand-written loop", "llama_1b, bf16, our model in a loop",
        *(f"llama_1b, {name}, native, our model in a loop" for name in speed.ORDER),
    ]  # fmt: skip
    assert list(rates.values()) == [400_000] + [2 * 64 / 1e-3] * 5
    over = found["llama_1b, bf16: train's tokens/s over a hand-written loop's"]
    assert (over.status, over.value) == ("ok", 400_000 / 128_000)
    per_token = speed.flops_per_token(speed.model_config("llama_1b"), 64)
    assert found[f"{MFU} train"].value == pytest.approx(100 * 400_000 * per_token / 1e9)
    assert {found[f"{NATIVE_STEP} {name}"].value for name in speed.ORDER} == {1}
    assert closing(call.journal, ())[2].endswith("not met, 1 times (fp8_current)")
    ratios = [row for row in found.values() if "native: bf16's time over it" in row.what]
    assert (len(ratios), {row.status for row in ratios}) == (6, {"ok"})


def test_emulation_prices_every_recipe_and_two_training_steps(hopper_on_cpu, call, monkeypatch):
    monkeypatch.setattr(emulation, "FIRST", ("mxfp8",))
    monkeypatch.setattr(emulation, "TRAINED", ("mxfp8",))
    items = [item.name for item in emulation.items(call)]
    assert items[:2] == ["layers, mxfp8", "a step, mxfp8"]
    assert len(items) == 1 + len([name for name, recipe in setting.recipes().items() if recipe.quantises])
    wanted = {"layers, mxfp8", "layers, fp8_current", "a step, mxfp8"}.__contains__
    found = {row.what: row for row in measured("emulation", emulation, call, wanted)}
    step = "llama_1b, a step, mxfp8, emulated: time over bf16's"
    assert found[step].note == "no bf16 baseline: speed measures it"
    assert found["8b-class layers, mxfp8, emulated: time over bf16's"].value == 1
    call.journal.begin("speed", "x")
    call.journal.add("speed", "x", Row(speed.LOOP_RATE, 2 * 128_000))
    (row,) = [row for row in measured("emulation", emulation, call, wanted) if row.what == step]
    assert (row.value, row.status) == (2, "off")


def test_no_recipe_is_measured_against_itself(hopper_on_cpu, call, monkeypatch):
    """Where bf16's own measurement broke there is no ratio, of layers and of steps."""
    eager = speed.recipes()
    for place in (speed, layers):
        monkeypatch.setattr(place, "recipes", lambda: {**eager, "bf16": None})
    monkeypatch.setattr(speed, "lacking", lambda modules: ["hydra"])
    found = measured("speed", speed, call)
    broken = {row.what for row in found if row.status == "error"}
    assert broken == {"our model in a loop", *(f"layers, {name}" for name in setting.native_recipes())}
    ratios = [row for row in found if " over " in row.what or row.what.startswith(NATIVE_STEP)]
    assert [(row.status, row.value) for row in ratios] == [("not available", None)] * (1 + len(speed.ORDER))


@pytest.mark.parametrize("tied", [True, False])
def test_the_hand_written_model_is_the_same_llama(tied):
    """Same parameters, same logits: by weights copied from one to the other, in fp32."""
    sizes = {**steps.SIZES, "num_kv_heads": 2, "tie_embeddings": tied, "rope_scaling": None}
    config = setting.model_config("llama_tiny", **sizes)
    ours, plain = Decoder(config, torch.float32), PlainLlama(config, 32, "cpu")
    initialise(ours, 0)
    blocks = {
        "attention.q_proj": "q", "attention.k_proj": "k", "attention.v_proj": "v", "attention.o_proj": "o",
        "feed_forward.gate_proj": "gate", "feed_forward.up_proj": "up", "feed_forward.down_proj": "down",
        "attention_norm": "attention_norm", "feed_forward_norm": "ffn_norm",
    }  # fmt: skip
    given, state = ours.state_dict(), plain.state_dict()
    named = {"embedding.weight": given["embedding.weight"], "norm.weight": given["norm.weight"]}
    named["head.weight"] = given["embedding.weight" if tied else "head.weight"]
    for layer in range(config.num_layers):
        for theirs, his in blocks.items():
            named[f"blocks.{layer}.{his}.weight"] = given[f"layers.{layer}.{theirs}.weight"]
    assert named.keys() == state.keys()
    assert len(given) == len(named) - tied
    plain.load_state_dict(named)
    tokens = torch.randint(config.vocab_size, (2, 32), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(plain(tokens), ours(tokens), rtol=1e-4, atol=1e-5)
    step = plain_step(config, 2, 16, "cpu", compiled=False)
    step()
    step()


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


@pytest.mark.parametrize("name", [pytest.param("fp8_delayed", marks=pytest.mark.full), "fp16"])
def test_steps_of_a_recipe_end_near_bf16s(name, on_cpu, call, monkeypatch):
    monkeypatch.setattr(setting, "capability_here", lambda accelerator: DEVICES["cpu"])
    (row,) = steps.one_recipe(load(name), call.journal)
    assert (row.status, row.note) == ("measured", f"{row.note.partition(';')[0]}; no bf16 baseline")
    call.journal.begin("steps", "bf16")
    (row,) = steps.one_recipe(load("bf16"), call.journal)
    call.journal.add("steps", "bf16", row)
    (row,) = steps.one_recipe(load(name), call.journal)
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


def written_run(folder, name, loss, ran="native"):
    run = runs.Run.__new__(runs.Run)
    run.folder = folder / name
    run.folder.mkdir()
    lines = [json.dumps({"step": step, "loss": loss}) for step in range(50)]
    (run.folder / "metrics.jsonl").write_text("\n".join([*lines, '{"val_loss": 1}']))
    (run.folder / "summary.json").write_text(json.dumps({"precision": {"runs": ran}}))
    return run


def test_the_runs_of_curves_compose_and_their_gap_is_read(hopper_on_cpu, call, tmp_path):
    config = compose_config(curves.overrides("fp8_current", call))
    assert config.run.dir == str(tmp_path / "fp8_current")
    assert config.trainer.max_steps == curves.STEPS
    assert [item.name for item in curves.items(call)] == list(setting.native_recipes())
    base = written_run(tmp_path, "bf16", 2.0)
    for name, loss, status in (("near", 2.01, "ok"), ("far", 2.1, "off"), ("nan", float("nan"), "off")):
        assert curves.gap(name, written_run(tmp_path, name, loss), base).status == status
    row = curves.gap("near", written_run(tmp_path, "fell", 2.01, "emulated"), base)
    assert (row.status, row.what.split(":")[0]) == ("off", "near (emulated)")


def test_curves_ask_compare_for_the_verdict(small_run, call, tmp_path):
    """A run that fell back is off; one that ran natively is what compare says of its validation."""
    made = {}
    for name in ("bf16", "fp8_current"):
        words = [f"precision={name}", "precision.casts=eager", "model.num_layers=3", "checkpoint.every_steps=null"]
        assert main(["train", *small_run(tmp_path, *words, f"run.dir={tmp_path / name}")]) == 0
        made[name] = runs.Run.__new__(runs.Run)
        made[name].folder = tmp_path / name
    summary = tmp_path / "fp8_current/summary.json"
    summary.write_text(summary.read_text().replace('"runs": "emulated"', '"runs": "native"'))
    (row,) = curves.verdict("fp8_current", made["fp8_current"], made["bf16"], call)
    assert (row.status, row.note.split(":")[0]) == ("measured", "inconclusive")  # a single pair
    ours, base = (made[name]._lines()[-1]["val_loss"] for name in ("fp8_current", "bf16"))
    assert row.value == pytest.approx(ours - base)
    for ran, verdict, status in (
        ("native", "lossless", "ok"),
        ("native", "lossy", "off"),
        ("emulated", "lossless", "off"),
        ("emulated", "inconclusive", "off"),
    ):
        row = curves.verdict_row("one", ran, {"verdict": verdict, "gap": 0.1, "reason": ""})
        assert (row.status, row.value) == (status, 0.1)
    assert curves.verdict_row("one", "native", None).status == "not available"


@pytest.mark.parametrize(("gigabytes", "processes"), [(151, 1), (85, len(memory.CASES))])
def test_memorys_runs_go_side_by_side_where_the_device_holds_them(gigabytes, processes, call, monkeypatch):
    monkeypatch.setattr(setting, "memory_bytes_here", lambda device: gigabytes * 10**9)
    monkeypatch.setattr(memory, "compared", lambda name, runs, words: iter([Row(name, float(id(runs)))]))
    found = measured("memory", memory, call)
    assert [row.what for row in found] == list(memory.CASES)
    assert len({row.value for row in found}) == processes
    assert speed.sequences() == (8 if processes == 1 else 4)


def test_memory_is_held_against_what_plan_says(call, monkeypatch):
    for name in memory.CASES:
        assert compose_config(memory.overrides(name, call)).trainer.max_steps == memory.STEPS
    name = "llama_160m, bf16"
    planned = runs.printed("plan", "--json", "hardware=h100", *memory.overrides(name, call))["memory_bytes"]
    assert planned["allocator_reserve"] > 0
    allocated = planned["total"] - planned["allocator_reserve"]
    monkeypatch.setattr(memory, "printed", lambda *verb: {"memory_bytes": planned})
    for share, status in ((1.0, "ok"), (1.09, "ok"), (1.11, "off"), (0.89, "off")):
        run = SimpleNamespace(
            records=lambda share=share: [{"loss": 1.0}, {"device_memory_peak_bytes": share * allocated}]
        )
        stands_for = SimpleNamespace(finished=lambda name, steps, run=run: run)
        (row,) = memory.compared(name, stands_for, [])
        assert (row.status, row.value) == (status, pytest.approx(share))


TRAINS = """
import sys, time
folder = next(word for word in sys.argv if word.startswith("run.dir=")).removeprefix("run.dir=")
import pathlib; pathlib.Path(folder).mkdir()
out = open(folder + "/metrics.jsonl", "w")
if "model=broken" in sys.argv: sys.exit("no such model")
for step in range(3): print('{"step": %d, "loss": 1.5}' % step, file=out, flush=True)
if "trainer.max_steps=3" not in sys.argv: time.sleep(60)
"""


def test_runs_go_side_by_side_and_end_with_their_steps_or_with_the_time(call, monkeypatch, tmp_path):
    module = tmp_path / "lightning_llm"
    module.mkdir()
    (module / "__main__.py").write_text(TRAINS)
    monkeypatch.setattr(runs, "ROOT", tmp_path)
    made = {
        name: (name, runs.words(tmp_path, name, 1, 8, steps, f"model={name}"))
        for name, steps in (("base", 3), ("has_rows", 3), ("whole", 3), ("cut", 9), ("broken", 3))
    }
    call.journal.plan("c", list(made), ["whole", "cut", "broken"])
    side_by_side = runs.SideBySide(call, "c", made, ("base",))
    assert len(side_by_side.finished("whole").records()) == 3
    assert len(side_by_side.finished("cut", steps=3).records()) == 3
    assert side_by_side.finished("base").timed()[0]["loss"] == 1.5
    with pytest.raises(runs.RunError, match="exit code 1: no such model"):
        side_by_side.finished("broken")
    assert not (tmp_path / "has_rows").exists()
    late = runs.Run(tmp_path / "late", runs.words(tmp_path, "late", 1, 8, 9))
    with pytest.raises(runs.OutOfTimeError, match="out of time after"):
        late.finish(Clock(0))
    assert set(RUN) >= {"hydra", "omegaconf", "lightning", "pydantic"}
