"""gpu_check on a CPU: its words, its clock, its report, and its comparisons with the emulation on both sides. 6 s."""

import json
import os
import sys
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from precision.recipes import RECIPES, load

from gpu_check import __main__ as gpu_check
from gpu_check import agreement, curves, library, rows, setting, speed, steps, wheels
from gpu_check.rows import Clock, Row
from lightning_llm.__main__ import main
from lightning_llm.compose import compose_config
from lightning_llm.precision import inductor
from lightning_llm.precision.capability import DEVICES, Capability
from lightning_llm.precision.quantize import quantise
from lightning_llm.schema.precision import slots_of

SUBCHANNEL = slots_of(load("fp8_subchannel"))
CURRENT = slots_of(load("fp8_current"))
MXFP8 = slots_of(load("mxfp8"))


def test_without_a_gpu_every_check_says_so_and_nothing_fails(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu_check, "DRIVER_FILES", ())
    assert gpu_check.main(["--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    (file,) = tmp_path.glob("*-no-gpu.json")
    found = json.loads(file.read_text())["checks"]
    assert list(found) == ["G1", "G2", "G3", "G4", "G5"]
    assert all(row["status"] == "not available" for each in found.values() for row in each["rows"])
    assert said.count("no NVIDIA driver") == 5
    assert gpu_check.main(["G2", "G4"]) == 0
    assert gpu_check.main(["G9"]) == 2


def test_the_budgets_fit_nine_minutes():
    assert sum(check.seconds for check in gpu_check.CHECKS.values()) <= 510
    names = list(gpu_check.CHECKS)
    assert gpu_check.budgets(names, 3.0) == {name: check.seconds for name, check in gpu_check.CHECKS.items()}
    for spent in (60, wheels.INSTALL_SECONDS):
        assert spent + sum(gpu_check.budgets(names, spent).values()) <= 535
    assert gpu_check.budgets(["G1"], wheels.INSTALL_SECONDS) == {"G1": gpu_check.CHECKS["G1"].seconds}
    for check in gpu_check.CHECKS.values():
        assert callable(__import__(f"gpu_check.{check.module}", fromlist=["check"]).check)


def test_a_check_runs_apart_and_says_what_is_missing_or_how_it_ended(monkeypatch):
    (row,) = gpu_check.run_apart("G1", {**dict(__import__("os").environ)}, seconds=120)
    assert (row.status, "finds no CUDA device" in row.note) == ("not available", True)
    (row,) = gpu_check.run_apart("G1", {}, seconds=0.01)
    assert "stopped after 0.01 s" in row.note
    monkeypatch.setattr(gpu_check.sys, "executable", "/bin/false")
    (row,) = gpu_check.run_apart("G1", {})
    assert (row.status, "exit code 1" in row.note) == ("error", True)


def test_a_package_that_is_not_there_is_a_row(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_check, "lacking", lambda modules: ["hydra"])
    assert gpu_check.run_here("G5", 10, tmp_path / "rows") == 0
    (row,) = rows.read(tmp_path / "rows")
    assert row.status == "not available"
    assert "hydra not installed: put the wheels" in row.note
    assert wheels.lacking(("torch", "surely_not_there")) == ["surely_not_there"]


def test_what_breaks_is_reported_beside_what_was_found(tmp_path):
    def work():
        yield Row("first", 1.0)
        raise RuntimeError("no kernel\nimage")

    for row in rows.guarded("it", work):
        rows.append(tmp_path / "rows", row)
    with (tmp_path / "rows").open("a") as file:
        file.write('{"what": "torn')
    first, second = rows.read(tmp_path / "rows")
    assert first == Row("first", 1.0)
    rows.append(tmp_path / "rest", Row("far", float("inf")))
    assert '"inf"' in (tmp_path / "rest").read_text()
    assert rows.read(tmp_path / "rest") == [Row("far", float("inf"))]
    assert (second.status, second.note) == ("error", "RuntimeError: no kernel image")
    text = rows.table("G1", "title", [first, second])
    assert "measured" in text
    assert "RuntimeError" in text
    assert rows.read(tmp_path / "none") == []


def test_off_rows_make_the_exit_code(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu_check, "DRIVER_FILES", ("/",))
    for status, code in (("off", 1), ("error", 1), ("ok", 0), ("not available", 0)):
        found = [Row("device", None, note="NVIDIA H100 80GB HBM3, 9.0"), Row("x", 1.0, status=status)]
        monkeypatch.setattr(gpu_check, "run_apart", lambda name, environment, seconds, found=found: found)
        assert gpu_check.main(["G1", "--out", str(tmp_path)]) == code
    (file,) = tmp_path.glob("*-nvidia-h100-80gb-hbm3.json")
    assert json.loads(file.read_text())["machine"]["device"] == "NVIDIA H100 80GB HBM3"


def test_what_was_measured_is_kept(tmp_path, monkeypatch, capsys):
    """A single check takes its own place in the day's file, and a run that dies leaves the checks before."""
    monkeypatch.setattr(gpu_check, "DRIVER_FILES", ("/",))
    monkeypatch.setattr(gpu_check, "wheel_folder", lambda given, root: None)
    device = Row("device", None, note="NVIDIA H100, 9.0")

    def of(value):
        return lambda name, environment, seconds: [device, Row(name, value)]

    def in_the_file():
        (file,) = tmp_path.iterdir()

        def refuse(word):
            raise ValueError(f"{word} is no JSON")

        checks = json.loads(file.read_text(), parse_constant=refuse)["checks"]
        return {name: check["rows"][1]["value"] for name, check in checks.items()}

    monkeypatch.setattr(gpu_check, "run_apart", of(1.0))
    assert gpu_check.main(["--out", str(tmp_path)]) == 0
    monkeypatch.setattr(gpu_check, "run_apart", of(float("nan")))
    assert gpu_check.main(["G2", "--out", str(tmp_path)]) == 0
    assert in_the_file() == {"G1": 1, "G2": "nan", "G3": 1, "G4": 1, "G5": 1}

    def dies_in_g4(name, environment, seconds):
        if name == "G4":
            raise KeyboardInterrupt
        return [device, Row(name, float("-inf"))]

    monkeypatch.setattr(gpu_check, "run_apart", dies_in_g4)
    with pytest.raises(KeyboardInterrupt):
        gpu_check.main(["--out", str(tmp_path)])
    assert in_the_file() == {"G1": "-inf", "G2": "-inf", "G3": "-inf", "G4": 1, "G5": 1}


GRANDCHILD = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
open("{file}", "w").write(str(child.pid))
{then}
"""


@pytest.mark.parametrize(("then", "status"), [("time.sleep(60)", "not available"), ("1 / 0", "error")])
def test_a_check_ends_with_all_that_it_started(then, status, tmp_path, monkeypatch):
    (tmp_path / "gpu_check.py").write_text(GRANDCHILD.format(file=tmp_path / "pid", then=then))
    monkeypatch.setattr(gpu_check, "ROOT", tmp_path)
    began = time.monotonic()
    (row,) = gpu_check.run_apart("G1", {**os.environ, "PYTHONPATH": str(tmp_path)}, seconds=3)
    assert row.status == status
    assert time.monotonic() - began < 20
    stat = Path("/proc", (tmp_path / "pid").read_text(), "stat")
    deadline = time.monotonic() + 5
    while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z":  # ended, if not reaped
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_the_clock():
    seconds = iter([0.0, 1.0, 9.5, 11.0])
    clock = Clock(10, lambda: next(seconds))
    assert clock.allows(5)
    assert not clock.allows(5)
    assert clock.left == 0


def test_wheels_are_found_and_installed_without_a_network(tmp_path, monkeypatch):
    monkeypatch.delenv("GPU_CHECK_WHEELS", raising=False)
    assert wheels.wheel_folder(None, tmp_path) is None
    folder = tmp_path / "carry"
    folder.mkdir()
    info = "tiny_thing-1.0.dist-info"
    with zipfile.ZipFile(folder / "tiny_thing-1.0-py3-none-any.whl", "w") as made:
        made.writestr("tiny_thing.py", "answer = 42\n")
        made.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-thing\nVersion: 1.0\n")
        made.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        made.writestr(f"{info}/RECORD", "")
    assert wheels.wheel_folder(None, tmp_path) == folder
    assert wheels.wheel_folder(str(tmp_path), tmp_path) is None
    monkeypatch.setattr(wheels.tempfile, "gettempdir", lambda: str(tmp_path))
    site, said = wheels.install(folder)
    assert (site / "tiny_thing.py").read_text() == "answer = 42\n"
    assert said.startswith("1 wheels of")
    assert wheels.install(folder) == (site, f"{said}, installed earlier")
    (folder / "broken-1.0-py3-none-any.whl").write_text("no archive")
    site, said = wheels.install(folder)
    assert site is None
    assert "could not be installed" in said


def as_native(x, cast, axis, delayed=None):
    """Lay out what the emulation makes as Transformer Engine lays it out (its 2.20 `get_scale_shape`)."""
    made = quantise(x, cast, axis, delayed=delayed)
    codes, scales = made.codes, made.stored_scale.float()
    if cast.block == "tensor":
        inverse = torch.div(torch.ones(()), scales).reshape(1)
        return SimpleNamespace(_data=codes, _transpose=codes.T.contiguous(), _scale_inv=inverse)
    side = "rowwise" if axis == 1 else "columnwise"
    if cast.block == "1x32":
        padded = torch.zeros(-(-scales.shape[0] // 128) * 128, -(-scales.shape[1] // 128) * 128)
        padded[: scales.shape[0], : scales.shape[1]] = scales
        return SimpleNamespace(**{f"_{side}_data": codes, f"_{side}_scale_inv": padded.to(torch.uint8)})
    if cast.block == "1x128" and axis == 1:
        scales = scales.T
    if cast.block == "128x128" and axis == 0:
        scales = scales.T
    scales = torch.nn.functional.pad(scales, (0, -scales.shape[1] % 4))
    return SimpleNamespace(**{f"_{side}_data": codes if axis == 1 else codes.T, f"_{side}_scale_inv": scales})


@pytest.mark.parametrize("slots", [CURRENT, SUBCHANNEL, MXFP8])
@pytest.mark.parametrize("shape", [(256, 384), (128, 640)])
def test_operands_are_compared_in_one_layout(slots, shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    for slot, cast in slots.items():
        axis = 0 if slot.startswith("wgrad") or slot == "dgrad.w" else 1
        theirs, ours = agreement.stored(as_native(x, cast, axis), cast, axis, shape), agreement.emulated(x, cast, axis)
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
    assert len([row for row in found if "largest error" in row.what]) == 6
    assert len([row for row in found if row.unit == "TFLOP/s"]) == 6
    late = list(library.check(Clock(0)))
    assert [row.note for row in late if row.status == "not available"] == ["out of time"] * 6
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
            **vars(as_native(tensor, casts[rows_], 1)),
            **({} if casts[rows_].block == "tensor" else vars(as_native(tensor, casts[columns], 0))),
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
        return as_native(tensor, cast, 1, quantizer.scale)

    monkeypatch.setattr(engine.Linear, "quantizers", property(quantizers), raising=False)
    monkeypatch.setattr(agreement, "quantised_by", quantised_by)
    found = list(agreement.operands(recipe))
    assert [row.status for row in found] == ["ok"] * 12
    largest = {role: tensor.abs().amax().item() for role, tensor in agreement.tensors().items()}
    assert read == {role: pytest.approx((57344 if role == "dy" else 448) / largest[role]) for role in ("x", "w", "dy")}
    assert [row.status for row in agreement.products(recipe)] == ["ok"] * 3


@pytest.mark.parametrize("name", ["fp8_subchannel_fp32scales", "nvfp4", "mxfp4_sr_fp8"])
def test_g2_sees_a_compiled_cast_that_is_not_eagers(name, on_cpu, monkeypatch):
    """Compilation is stood for by nothing at all, then by scales that are an ulp off."""
    monkeypatch.setattr(inductor, "why_not", lambda device_type: None)
    for wrong in (False, True):
        inductor.stages.cache_clear()
        inductor.tensor_amax.cache_clear()

        def plain(function, wrong=wrong):
            def off(*args):
                made = function(*args)
                return made._replace(multiplier=made.multiplier.nextafter(torch.tensor(torch.inf)))

            return off if wrong and function.__name__ == "scale" else function

        monkeypatch.setattr(inductor, "compiled", plain)
        (row,) = agreement.compiled_casts(load(name))
        assert row.status == ("off" if wrong else "ok"), row
    inductor.stages.cache_clear()
    inductor.tensor_amax.cache_clear()
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
    assert len(ratios) == 6 + 4  # a layer under five native recipes and one emulated, and a step
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
    assert len(ratios) == 10
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
        "fp8_current", "fp8_current_e4m3", "fp8_delayed", "fp8_subchannel", "fp8_subchannel_fp32scales",
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


def test_the_hand_written_loop_is_deterministic_as_the_run_is(tmp_path, on_cpu, monkeypatch):
    seen = []

    def loop(*_, **__):
        seen.append((torch.are_deterministic_algorithms_enabled(), os.environ.get("CUBLAS_WORKSPACE_CONFIG")))
        return 0.1

    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setattr(speed, "plain_loop", loop)
    torch.use_deterministic_algorithms(False)
    (tmp_path / "bf16").mkdir()
    lines = [json.dumps({"step": step, "step_seconds": 0.104}) for step in range(curves.STEPS)]
    (tmp_path / "bf16/metrics.jsonl").write_text("\n".join(lines))
    config = compose_config(curves.words("bf16", tmp_path, "one"))
    (row,) = curves.overhead(tmp_path)
    assert (row.status, row.value) == ("ok", pytest.approx(1.04))
    assert seen == [(config.trainer.deterministic, ":4096:8")]
    assert not torch.are_deterministic_algorithms_enabled()
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
