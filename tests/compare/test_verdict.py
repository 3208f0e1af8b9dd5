"""`compare` and `diff` over folders as runs leave them: pairs, confounders, bad input, the report. 20 seconds."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from run_folders import NOISE, STEPS, curve, make_run, make_sweep, verdicts
from scipy import stats

from lightning_llm.__main__ import main

pytestmark = pytest.mark.usefixtures("undrawn")


@pytest.fixture(scope="module")
def sweep(tmp_path_factory) -> Path:
    gaps = {
        "precision=bf16": 0.0,
        "precision=mxfp4_sr": 0.002,
        "precision=mxfp4_rne": 0.06,
        "precision=fp8_current": 0.0097,
    }
    return make_sweep(tmp_path_factory.mktemp("outputs") / "exp" / "sweep", gaps)


def test_each_kind_of_verdict_with_what_the_contract_names(sweep, capsys):
    found = verdicts(capsys, sweep)
    assert (found["baseline"], found["margin"], found["factor"]) == ("bf16", 0.01, "precision")
    rows = found["by_name"]
    assert {name: row["verdict"] for name, row in rows.items()} == {
        "mxfp4_sr": "lossless", "mxfp4_rne": "lossy", "fp8_current": "inconclusive",
    }  # fmt: skip
    row = rows["mxfp4_sr"]
    assert (row["pairs"], row["controlled"], row["confounders"]) == (3, True, [])
    assert row["parameters"] == 2_164_416
    assert row["tokens"] == STEPS * 2048
    assert row["ci"][0] < row["gap"] < row["ci"][1] < 0.01
    assert "lossless against bf16 at margin 0.01" in row["line"]
    assert "2.16M parameters, 205K tokens" in row["line"]
    assert rows["fp8_current"]["more_seeds"] is None  # told to 0.001, and 0.0003 from the margin
    assert "the gap is likely near the margin" in rows["fp8_current"]["line"]
    written = json.loads((sweep / "compare" / "compare.json").read_text())
    assert written["verdicts"] == found["verdicts"]


@pytest.mark.parametrize("gap", [-0.001, 0.0099])
def test_more_seeds_are_planned_for_fixed_gaps_by_the_spread_alone(gap, tmp_path, capsys):
    for seed, noise in enumerate((0.011, -0.009, 0.001, -0.003)):
        make_run(tmp_path / "s" / str(seed), "precision=bf16", f"seed={seed}")
        make_run(tmp_path / "s" / f"1{seed}", "precision=mxfp8", f"seed={seed}", gap=gap, noise=noise)
    row = verdicts(capsys, tmp_path / "s")["by_name"]["mxfp8"]
    assert row["sd"] == pytest.approx(0.00835, abs=1e-4)  # of 11, -9, 1 and -3 thousandths
    # By scipy: the least n with P(T > t(0.975, n - 1)) >= 0.8, at (0.01, 0.02) / sd sqrt(n), over what sd may be.
    needed = []
    for distance in (0.01, 0.02):
        enough = (n for n in range(2, 99) if assured_power(distance / row["sd"], n) >= 0.8)
        needed.append(next(enough))
    assert [row["seeds_if_no_gap"], row["seeds_if_lossy"]] == pytest.approx(needed, abs=1)
    assert row["more_seeds"] == row["seeds_if_no_gap"] - 4
    no_gap, lossy = row["seeds_if_no_gap"], row["seeds_if_lossy"]
    said = f"{no_gap} in all) would decide if the true gap is 0, {lossy} in all if it is 3 margins"
    assert said in row["line"]


def assured_power(effect, pairs):
    """By quadrature over the variance that four pairs, of chi^2 with 3 degrees of freedom, know so little of."""
    chi2 = stats.chi2(3).ppf((np.arange(2000) + 0.5) / 2000)
    shifts = effect * pairs**0.5 * np.sqrt(chi2 / 3)
    return stats.nct.sf(stats.t.ppf(0.975, pairs - 1), pairs - 1, shifts).mean()


def test_the_gap_is_the_mean_paired_difference_of_the_tail(sweep, capsys):
    row = verdicts(capsys, sweep)["by_name"]["mxfp4_rne"]
    assert row["tail_steps"] == [95, 100]
    losses = {}
    for folder in sweep.glob("[0-9]*"):
        config = yaml.safe_load((folder / "config.yaml").read_text())
        records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        tail = [each["val_loss"] for each in records if "val_loss" in each and each["step"] > 90]
        losses[config["precision"]["name"], config["seed"]] = sum(tail) / len(tail)
    by_hand = [losses["mxfp4_rne", seed] - losses["bf16", seed] for seed in range(3)]
    assert [each["gap"] for each in row["differences"]] == pytest.approx(by_hand)
    assert row["gap"] == pytest.approx(sum(by_hand) / 3)


def test_an_experiment_an_id_and_the_newest_sweep_name_the_same_runs(sweep, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("LIGHTNING_LLM_OUTPUTS", str(sweep.parents[1]))
    whole = verdicts(capsys, sweep)["verdicts"]
    assert verdicts(capsys, "exp")["verdicts"] == whole
    assert verdicts(capsys)["verdicts"] == whole
    assert verdicts(capsys, sweep.name)["verdicts"] == whole
    (sweep / "0" / "mlflow_run_id").write_text("ab" * 16 + "\n")
    found = verdicts(capsys, "ab" * 16, sweep / "3", "--output", tmp_path / "here")
    assert len(found["runs"]) == 2
    assert (tmp_path / "here" / "report.html").exists()


def test_a_baseline_is_named_by_its_value_however_it_is_written(tmp_path, capsys):
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
    assert "held against itself" not in " ".join(found["notes"])


def test_what_is_no_rounding_is_not_called_one(tmp_path, capsys):
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


def test_of_two_usual_baselines_none_is_chosen_silently(tmp_path, capsys):
    sweep = make_sweep(tmp_path / "s", {"precision=bf16": 0.0, "precision=bf16 precision.optimizer.eps=1e-6": 0.001})
    make_sweep(sweep / "more", {"precision=mxfp8": 0.001})
    error = say(capsys, sweep)
    assert "2 levels are called bf16 (bf16 (optimizer.eps=null) and bf16 (optimizer.eps=1e-06)). Choose one" in error
    found = verdicts(capsys, sweep, "--baseline", "precision=bf16 (optimizer.eps=1e-06)")
    assert found["baseline"] == "bf16 (optimizer.eps=1e-06)"
    make_sweep(sweep / "fp32", {"precision=fp32": 0.001})
    found = verdicts(capsys, sweep)
    assert found["baseline"] == "fp32"
    assert "The baseline is fp32, for 2 levels are called bf16 (bf16 (optimizer.eps=null)" in " ".join(found["notes"])


def test_jobs_that_shared_the_machine_and_a_tail_of_one_validation_are_said(tmp_path, capsys):
    once = {step: curve(step) for step in range(20, STEPS + 1, 20)}
    words = ("launcher.at_once=2",)
    for seed in range(2):
        for number, name in enumerate(("bf16", "mxfp8")):
            losses = {step: loss + NOISE[seed + number] for step, loss in once.items()}
            make_run(tmp_path / "s" / f"{number}{seed}", f"precision={name}", f"seed={seed}", *words, losses=losses)
    notes = " ".join(verdicts(capsys, tmp_path / "s")["notes"])
    assert "at once" not in notes  # each was started alone, with a config that a sweep's job had
    assert "The tail is one validation (step 100)" in notes
    assert "trainer.validate_every_steps=2" in notes
    (tmp_path / "s" / "sweep.json").write_text("{}")
    found = verdicts(capsys, tmp_path / "s")
    assert "2 at once (launcher.at_once)" in " ".join(found["notes"])
    assert "launcher.at_once" not in found["verdicts"][0]["speed_confounders"]
    wide = verdicts(capsys, tmp_path / "s", "--tail", "0.5")
    assert "The tail is one validation" not in " ".join(wide["notes"])


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


def test_time_to_loss_speed_memory_and_skipped_steps(tmp_path, capsys):
    make_run(tmp_path / "s" / "0", "precision=bf16", "seed=0", speed=1000.0)
    faster = {step: curve(2 * step) for step in range(5, STEPS + 1, 5)}
    skipped = [
        {"step": 0, "tokens": 0, "loss": 7.0, "skipped": True, "event": "spike", "event_action": "skip", "time": 999.0}
    ]
    make_run(
        tmp_path / "s" / "1", "precision=mxfp8", "seed=0", speed=500.0, losses=faster, records=skipped,
        summary={"host_memory_peak_bytes": 2**31},
    )  # fmt: skip
    row = verdicts(capsys, tmp_path / "s")["by_name"]["mxfp8"]
    # At step 2n of the baseline the loss is that of step n here; both reach the baseline's last.
    assert row["time_to_loss"] == pytest.approx({"pairs": 1, "tokens_ratio": 0.5, "seconds_ratio": 1.0}, rel=1e-3)
    slower = verdicts(capsys, tmp_path / "s", "--baseline", "precision=mxfp8")["by_name"]["bf16"]["time_to_loss"]
    assert slower == pytest.approx({"pairs": 1, "tokens_ratio": 2.0, "seconds_ratio": 1.0}, rel=1e-3)
    assert row["tokens_per_second_ratio"] == pytest.approx(0.5)
    assert row["peak_memory_ratio"] == pytest.approx(2.0)
    assert (row["skipped_steps"], row["spikes"]) == (1, 1)


BAD = {
    "unfinished": (("precision=mxfp8", "seed=9"), {"summary": {"status": "stopped"}}, "is not finished: stopped"),
    "no baseline": (("precision=mxfp8", "seed=9"), {}, "has no run of bf16 at that seed"),
    "tokenizer": (("precision=mxfp8", "seed=0"), {"summary": {"validation_hash": "w" * 32}}, "not comparable"),
    "steps": (
        ("precision=fp32", "seed=0"),
        {"losses": {7: 4.0, 13: 3.5}},
        "no validation of 'val_loss' at a common step",
    ),
}


@pytest.mark.parametrize("kind", BAD)
def test_what_cannot_be_used_is_said_and_the_rest_is_judged(kind, tmp_path, capsys):
    words, more, said = BAD[kind]
    sweep = make_sweep(tmp_path / "s", {"precision=bf16": 0.0, "precision=mxfp4_sr": 0.001})
    make_run(sweep / "30", *words, **more)
    found = verdicts(capsys, sweep, expect=2)
    assert said in found["stderr"]
    assert [row["verdict"] for row in found["verdicts"]] == ["lossless"]
    assert said in (sweep / "compare" / "report.html").read_text().replace("&#39;", "'")


def test_mixes_of_data_are_compared_where_they_score_the_same_sequences(tmp_path, capsys):
    mixes = {f"data.sources.code.weight={weight}": 0.001 * weight for weight in (1, 3)}
    sweep = make_sweep(tmp_path / "s", dict.fromkeys(mixes, 0.0))
    for folder in sorted(sweep.iterdir())[3:]:  # of the second mix: what is learned from is another thing
        summary = json.loads((folder / "summary.json").read_text())
        (folder / "summary.json").write_text(json.dumps({**summary, "data_hash": "e" * 32}))
    found = verdicts(capsys, sweep)
    (row,) = found["verdicts"]
    assert (found["factor"], row["controlled"]) == ("data", True)
    for folder in sorted(sweep.iterdir())[3:6]:
        summary = json.loads((folder / "summary.json").read_text())
        (folder / "summary.json").write_text(json.dumps({**summary, "validation_hash": "w" * 32}))
    assert main(["compare", str(sweep)]) == 2
    assert "data.validation.weights" in capsys.readouterr().err


def test_without_hashes_the_configs_decide_what_is_comparable(tmp_path, capsys):
    sweep = tmp_path / "s"
    bare = {"summary": {"validation_hash": None, "data_hash": None}}
    make_run(sweep / "0", "precision=bf16", **bare)
    make_run(sweep / "1", "precision=mxfp8", "data.tokenizer.kind=bytes", **bare)
    make_run(sweep / "2", "precision=mxfp4_sr", "data.sources.code.weight=9", **bare)  # other sequences are scored
    assert main(["compare", str(sweep)]) == 2
    said = capsys.readouterr().err
    assert "data.tokenizer.kind" in said
    assert "data.sources.code.weight" in said


def say(capsys, *words) -> str:
    assert main(["compare", *map(str, words)]) == 2
    return capsys.readouterr().err


def test_nothing_to_compare_is_said(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("LIGHTNING_LLM_OUTPUTS", str(tmp_path / "outputs"))
    make_run(tmp_path / "outputs" / "precision_study" / "alone", "precision=bf16")
    (tmp_path / "outputs" / "mlartifacts").mkdir()  # MLflow's: no experiment
    assert "no sweep in" in say(capsys)
    assert "Did you mean 'precision_study'?" in say(capsys, "precision_stud")
    assert "Known here: precision_study." in say(capsys, "zzz")
    assert "there is no run in this folder" in say(capsys, tmp_path / "outputs" / "mlartifacts")
    one = make_run(tmp_path / "one", "precision=bf16")
    assert "1 finished run: a verdict needs a baseline and another" in say(capsys, one)
    two = make_run(tmp_path / "two", "precision=bf16", "seed=1")
    assert "all 2 runs have the same config, but for the seed; a verdict needs" in say(capsys, one, two)
    three = make_run(tmp_path / "three", "precision=mxfp8")
    assert "'fp23' is the level of no run. Known here" in say(capsys, one, three, "--baseline", "precision=fp23")
    assert "there is no group or key 'precison'" in say(capsys, one, three, "--baseline", "precison=bf16")
    assert "--baseline precision=NAME, of mxfp8, nvfp4" in say(
        capsys, three, make_run(tmp_path / "four", "precision=nvfp4")
    )
    problems = say(capsys, one, three, "--margin", "-1", "--confidence", "1", "--tail", "1")
    assert all(word in problems for word in ("--margin", "--confidence", "--tail"))
    (three / "metrics.jsonl").write_text('{"step": 1}\nnonsense\n{"step": 2}\n')
    assert "line 2 is damaged" in say(capsys, one, three)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    assert "could not be asked" in say(capsys, "0" * 32)


def test_metrics_that_end_early_and_a_metric_that_no_run_has_are_named(tmp_path, capsys):
    sweep = make_sweep(tmp_path / "s", {"precision=bf16": 0.0, "precision=mxfp4_sr": 0.001})
    told = say(capsys, sweep, "--metric", "nosuch")
    assert (
        "--metric: no run has a validation of 'nosuch'. These runs' validations have: val_loss, val_loss/code" in told
    )
    lines = (sweep / "4" / "metrics.jsonl").read_text().splitlines(keepends=True)
    (sweep / "4" / "metrics.jsonl").write_text("".join(lines[:60]))
    found = verdicts(capsys, sweep, expect=2)
    assert "metrics.jsonl ends at step 50 of 100" in found["stderr"]
    assert [row["pairs"] for row in found["verdicts"]] == [2]


def test_diff_says_what_differs(tmp_path, capsys, monkeypatch):
    one = make_run(tmp_path / "one", "precision=bf16", "optim.eps=1e-8")
    other = make_run(tmp_path / "other", "precision=bf16", "optim.eps=1e-6", summary={"device": "NVIDIA H100, 80 GiB"})
    assert main(["diff", "--json", str(one), str(other)]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "optim.eps": [1e-8, 1e-6], "device": ["AMD EPYC", "NVIDIA H100"],
    }  # fmt: skip
    assert main(["diff", str(one), str(other)]) == 0
    assert "optim.eps  1e-08 | 1e-06" in capsys.readouterr().out
    assert main(["diff", str(one), str(one)]) == 0
    assert "no difference" in capsys.readouterr().out
    assert main(["diff", str(one), str(tmp_path)]) == 2
    assert "holds 2 runs; name one" in capsys.readouterr().err
    monkeypatch.setenv("LIGHTNING_LLM_OUTPUTS", str(tmp_path / "outputs"))
    for number in (0, 1):
        make_run(tmp_path / "outputs" / "study" / "20261121-170000" / str(number), f"seed={number}")
    assert main(["diff", "20261121-170000/0", "20261121-170000/1"]) == 0  # as verdicts and `diff` call them
    assert "seed  0 | 1" in capsys.readouterr().out
    make_run(tmp_path / "outputs" / "other" / "20261121-170000" / "0", "seed=0")
    assert main(["diff", "20261121-170000/0", "study"]) == 2
    assert "is the name of 2. Say which: other/20261121-170000/0, study/20261121-170000/0." in capsys.readouterr().err


def test_the_report_holds_everything_itself(sweep, capsys):
    assert main(["compare", str(sweep)]) == 0
    out = capsys.readouterr().out
    assert "mxfp4_sr at 2.16M parameters" in out
    html = (sweep / "compare" / "report.html").read_text()
    assert html.count('src="data:image/svg+xml;base64,') == html.count("<img") == 3
    assert "http" not in html.replace("http://www.w3.org", "")
    assert all(word in html for word in ("Dunnett", "ICH E9", "inconclusive", "mxfp4_rne at"))
    found = json.loads((sweep / "compare" / "compare.json").read_text())
    assert all(f'<td class="number">{row["sd"]:.4f}</td>' in html for row in found["verdicts"])
    assert f'<td class="number">{found["baselines"][0]["loss"]:.4f}</td>' in html
    assert all(f'<td class="number">{row["gap_by_source"]["code"]:+.4f}</td>' in html for row in found["verdicts"])
    assert all(text.replace("'", "&#39;") in html for text in found["methods"])
    assert max(len(re.findall("<th", table)) for table in re.findall("<table>.*?</tr>", html, re.DOTALL)) <= 10


def test_every_key_of_a_verdict_is_in_the_document(sweep, capsys):
    text = (Path(__file__).parents[2] / "docs" / "compare.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(\w+)`", text.split("## `compare.json`")[1]))
    assert set(verdicts(capsys, sweep)["verdicts"][0]) - {"confidence"} <= named


def test_neither_torch_nor_mlflow_is_imported(sweep):
    code = (
        "import sys; from lightning_llm.__main__ import main; code = main(sys.argv[1:]); "
        "print(sorted({'torch', 'mlflow', 'lightning', 'hydra', 'scipy.stats', 'pandas'} & sys.modules.keys()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "compare", str(sweep)], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"


def test_the_high_precision_gap_is_that_of_the_metric_asked_for(tmp_path, capsys):
    sweep = make_sweep(tmp_path / "s", {"precision=bf16": 0.0, "precision=mxfp8": 0.004})
    for number in (3, 4, 5):
        lines = [json.loads(line) for line in (sweep / str(number) / "metrics.jsonl").read_text().splitlines()]
        for line in lines:
            if "val_loss" in line:
                line["val_loss_high_precision"] = line["val_loss"] - 0.5
                line["val_loss_high_precision/code"] = line["val_loss/code"] - 0.001
        (sweep / str(number) / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    by = {key: verdicts(capsys, sweep, "--metric", key)["by_name"]["mxfp8"] for key in ("val_loss", "val_loss/code")}
    gaps = {key: row["gap_high_precision"] - row["gap"] for key, row in by.items()}
    assert gaps == pytest.approx({"val_loss": -0.5, "val_loss/code": -0.001})
