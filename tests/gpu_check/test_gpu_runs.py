"""Curves, memory, steps and settings on a CPU: the started runs and the use of their results."""

import json
import os
from types import SimpleNamespace

import pytest

from gpu_check import curves, memory, runs, setting, speed, steps
from gpu_check.checks import RUN_PACKAGES
from gpu_check.journal import Clock, Row
from lightning_llm.__main__ import main
from lightning_llm.config.compose import compose_config
from lightning_llm.precision.native.decide import DEVICES, Capability
from tests.compare.run_folders import rewritten
from tests.gpu_check.check_rows import measured
from tests.precision.recipes import RECIPES, load


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


@pytest.mark.full
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
        "fp8_subchannel_fp32scales", "fp8_mlp",
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
    """A run that fell back is off; one that ran natively has compare's verdict on its validation."""
    made = {}
    for name in ("bf16", "fp8_current"):
        words = [f"precision={name}", "precision.casts=eager", "model.num_layers=3", "checkpoint.every_steps=null"]
        assert main(["train", *small_run(tmp_path, *words, f"run.dir={tmp_path / name}")]) == 0
        made[name] = runs.Run.__new__(runs.Run)
        made[name].folder = tmp_path / name
    found = json.loads((tmp_path / "fp8_current/summary.json").read_text())["precision"]
    rewritten(tmp_path / "fp8_current", precision=found | {"runs": "native"})
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


def test_memory_is_compared_with_the_plan(call, monkeypatch):
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
    assert set(RUN_PACKAGES) >= {"hydra", "omegaconf", "lightning", "pydantic"}
