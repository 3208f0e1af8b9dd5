"""The factor and its baseline, further settings, and the backend of casts."""

import re
import shlex
import shutil
from itertools import product

import pytest
import yaml

from lightning_llm.__main__ import main
from tests.compare.run_folders import make_run, make_sweep, refusal, rewritten, verdicts

pytestmark = pytest.mark.usefixtures("undrawn")


def test_a_baseline_value_matches_in_any_notation(tmp_path, capsys):
    for weight in (0, 0.5):
        for seed in range(3):
            words = [
                f"data.sources.prose.weight={weight}",
                "data.validation.weights={code: 1, prose: 1}",
                f"seed={seed}",
            ]
            make_run(tmp_path / "s" / f"{weight}-{seed}", *words, noise=0.1 * seed)
    found = verdicts(capsys, tmp_path / "s", "--baseline", "data.sources.prose.weight=0")
    assert (found["factor"], found["baseline"]) == ("data.sources.prose.weight", "data.sources.prose.weight=0.0")


def test_another_level_can_be_the_baseline(sweep, capsys):
    found = verdicts(capsys, sweep, "--baseline", "precision=mxfp4_rne")
    assert found["by_name"]["bf16"]["gap"] == pytest.approx(-0.0585, abs=0.002)
    assert found["by_name"]["bf16"]["verdict"] == "lossless"


def test_another_factor_and_a_key(tmp_path, capsys):
    sweep = make_sweep(tmp_path / "s", {"optim.learning_rate=1e-3": 0.0, "optim.learning_rate=2e-3": 0.05})
    found = verdicts(capsys, sweep)
    assert (found["factor"], found["baseline"]) == ("optim", "learning_rate=0.001")
    assert found["by_name"]["learning_rate=0.002"]["verdict"] == "lossy"
    other = verdicts(capsys, sweep, "--baseline", "optim.learning_rate=2e-3")
    assert other["baseline"] == "optim.learning_rate=0.002"
    assert other["verdicts"][0]["gap"] == pytest.approx(-found["verdicts"][0]["gap"])


def test_students_are_held_against_their_teachers_by_what_tells_them_apart(tmp_path, capsys):
    """Runs without `distil` and runs of one ensemble: the ensemble's path is neither a label nor a setting."""
    for seed, weight in product(range(3), (0.5, 1.0, None)):
        folder = make_run(tmp_path / "s" / f"{weight}-{seed}", f"seed={seed}", noise=0.001 * seed * (weight or 0))
        if weight:
            config = yaml.safe_load((folder / "config.yaml").read_text())
            distil = {"teachers": ["/runs/a", "/runs/b"], "weight": weight, "temperature": 1.0}
            (folder / "config.yaml").write_text(yaml.safe_dump({**config, "distil": distil}))
            rewritten(folder)
    found = verdicts(capsys, tmp_path / "s")
    assert (found["factor"], found["baseline"]) == ("distil", "no distil")
    assert list(found["by_name"]) == ["weight=0.5", "weight=1.0"]
    (said,) = (
        note for note in found["notes"] if "The baseline is no distil, the runs without distil. Choose another" in note
    )
    other = verdicts(capsys, tmp_path / "s", *shlex.split(said.partition("another with ")[2].removesuffix(".")))
    assert other["baseline"] == "weight=0.5"
    by_weight = verdicts(capsys, tmp_path / "s", "--baseline", "distil.weight=null")
    assert [(row["name"], row["setting"], row["controlled"]) for row in by_weight["verdicts"]] == [
        ("distil.weight=0.5", {}, True),
        ("distil.weight=1.0", {}, True),
    ]
    for folder in (tmp_path / "s").glob("0.5-*"):
        shutil.rmtree(folder)
    assert list(verdicts(capsys, tmp_path / "s")["by_name"]) == ["distil"]


def test_a_level_whose_varying_keys_are_null_is_not_without_the_group(tmp_path, capsys):
    for seed, given in product(range(3), (True, False)):
        folder = make_run(tmp_path / "s" / f"{given}-{seed}", f"seed={seed}", noise=0.001 * seed * given)
        config = yaml.safe_load((folder / "config.yaml").read_text())
        distil = {"teachers": ["/runs/a"], "weight": 0.5 if given else None, "temperature": 1.0 if given else None}
        (folder / "config.yaml").write_text(yaml.safe_dump({**config, "distil": distil}))
        rewritten(folder)
    found = verdicts(capsys, tmp_path / "s")
    assert found["factor"] == "distil"
    assert found["baseline"].endswith("temperature=null, weight=null")


def test_two_default_baselines_are_reported(tmp_path, capsys):
    sweep = make_sweep(tmp_path / "s", {"precision=bf16": 0.0, "precision=bf16 precision.optimizer.eps=1e-6": 0.001})
    make_sweep(sweep / "more", {"precision=mxfp8": 0.001})
    error = refusal(capsys, sweep)
    assert "2 levels are called bf16 (bf16 (optimizer.eps=null) and bf16 (optimizer.eps=1e-06)). Choose" in error
    assert ". For example --baseline 'precision=bf16 (optimizer.eps=null)'." in error  # as a shell takes it
    found = verdicts(capsys, sweep, "--baseline", "precision=bf16 (optimizer.eps=1e-06)")
    assert found["baseline"] == "bf16 (optimizer.eps=1e-06)"
    make_sweep(sweep / "fp32", {"precision=fp32": 0.001})
    found = verdicts(capsys, sweep)
    assert found["baseline"] == "fp32"
    wanted = "The baseline is fp32, because 2 levels are called bf16 (bf16 (optimizer.eps=null)"
    assert wanted in " ".join(found["notes"])


def test_two_factors_are_judged_apart(tmp_path, capsys):
    words = {f"precision={p} optim.learning_rate={r}": 0.0 for p in ("bf16", "mxfp8") for r in ("1e-3", "2e-3")}
    words["precision=mxfp8 optim.learning_rate=2e-3"] = 0.05
    found = verdicts(capsys, make_sweep(tmp_path / "s", words))
    by_rate = {row["setting"]["optim.learning_rate"]: row["verdict"] for row in found["verdicts"]}
    assert by_rate == {1e-3: "lossless", 2e-3: "lossy"}
    assert all(row["controlled"] for row in found["verdicts"])


def test_layouts_are_compared_with_a_single_rank(tmp_path, capsys):
    words = {f"parallel={name} trainer.devices=2 data.micro_batch_size=1": 0.0 for name in ("ddp", "zero3")}
    sweep = make_sweep(tmp_path / "s", {**words, "parallel=single data.micro_batch_size=1": 0.0})
    found = verdicts(capsys, sweep)
    assert (found["factor"], found["baseline"]) == ("parallel", "single")
    assert {name: row["controlled"] for name, row in found["by_name"].items()} == {"ddp": True, "zero3": True}


def test_emulation_is_the_recipes_doing_and_another_backend_is_not(tmp_path, capsys):
    sweep = make_sweep(tmp_path / "s", {"precision=bf16": 0.0})
    make_sweep(sweep / "emulated", {"precision=mxfp8": 0.001}, summary={"backend": "emulated"})
    assert verdicts(capsys, sweep)["by_name"]["mxfp8"]["controlled"]
    make_sweep(sweep / "native", {"precision=fp8_current": 0.001}, summary={"backend": "native"})
    rows = verdicts(capsys, sweep, "--baseline", "precision=mxfp8")["by_name"]
    assert [each["key"] for each in rows["fp8_current"]["confounders"]] == ["backend"]
    assert rows["bf16"]["controlled"]


def test_a_speed_of_emulation_is_marked_and_each_verdict_is_one_line_in_a_pipe(tmp_path, capsys):
    sweep = make_sweep(tmp_path / "s", {"precision=bf16": 0.0})
    make_sweep(sweep / "emulated", {"precision=mxfp8": 0.001}, summary={"backend": "emulated"})
    make_sweep(sweep / "native", {"precision=fp8_current": 0.001}, summary={"backend": "native"})
    rows = verdicts(capsys, sweep)["by_name"]
    assert (rows["mxfp8"]["emulated"], rows["fp8_current"]["emulated"]) == (True, False)
    assert main(["compare", str(sweep)]) == 0
    lines = capsys.readouterr().out.splitlines()
    table = {line.split()[0]: line for line in lines if re.match("(mxfp8|fp8_current) ", line)}
    assert "x emulated" in table["mxfp8"]
    assert "emulated" not in table["fp8_current"]
    for name in ("mxfp8", "fp8_current"):
        assert f"  {rows[name]['line']}" in lines


def test_backends_alone_can_be_compared_and_are_no_confounder_of_themselves(tmp_path, capsys):
    for number, backend in enumerate(("emulated", "native")):
        words = {f"precision=fp8_current precision.backend={backend}": 0.001 * number}
        make_sweep(tmp_path / "s" / backend, words, summary={"backend": backend})
    found = verdicts(capsys, tmp_path / "s")
    assert (found["factor"], found["baseline"]) == ("precision.backend", "precision.backend=emulated")
    (row,) = found["verdicts"]
    assert (row["controlled"], row["confounders"]) == (True, [])
    assert "All runs have the same recipe" not in " ".join(found["notes"])


def test_differences_beyond_rounding_are_not_called_rounding(tmp_path, capsys):
    sweep = make_sweep(tmp_path / "s", {"spikes.policy=log": 0.0, "spikes.policy=skip": 0.05})
    found = verdicts(capsys, sweep)
    assert (found["factor"], found["verdicts"][0]["verdict"]) == ("spikes.policy", "lossy")
    assert "no gap here is real" not in " ".join(found["notes"])
    make_sweep(sweep / "more", {"spikes.policy=skip spikes.window_steps=64": 0.05})
    assert verdicts(capsys, sweep)["factor"] == "spikes"
    make_sweep(sweep / "other", {"spikes.policy=skip data.micro_batch_size=2": 0.05})
    found = verdicts(capsys, sweep)
    assert found["factor"] == "configuration"
    assert "no gap here is real" not in " ".join(found["notes"])


def test_a_setting_is_named_by_its_groups_where_the_baselines_is_another(tmp_path, capsys):
    """A recipe with only one mix: its line has precision=..., not every key of it."""
    mixed = "data.validation.weights={code: 1, prose: 1}"
    for index, words in enumerate([("0", "bf16"), ("0.5", "bf16"), ("0.5", "fp8_delayed")]):
        for seed in range(3):
            chosen = [f"data.sources.prose.weight={words[0]}", f"precision={words[1]}", mixed, f"seed={seed}"]
            make_run(tmp_path / "s" / f"{index}-{seed}", *chosen, noise=0.1 * seed)
    assert main(["compare", str(tmp_path / "s"), "--baseline", "data.sources.prose.weight=0"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if " at margin " in line]
    assert len(lines) == 2
    assert all("precision.fprop" not in line.partition(": ")[0] for line in lines)
    assert "tokens, precision=bf16: " in lines[0]
    assert "tokens, precision=fp8_delayed: " in lines[1]


def test_copies_that_mlflow_keeps_are_no_runs(tmp_path, capsys):
    sweep = make_sweep(tmp_path / "outputs/s", {"precision=bf16": 0.0, "precision=mxfp8": 0.001})
    kept = tmp_path / "outputs/mlartifacts/0123456789abcdef0123456789abcdef/artifacts"
    kept.mkdir(parents=True)
    for name in ("config.yaml", "summary.json"):
        (kept / name).write_bytes((sweep / "0" / name).read_bytes())
    assert len(verdicts(capsys, tmp_path / "outputs")["verdicts"]) == 1
