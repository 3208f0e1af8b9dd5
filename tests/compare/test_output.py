"""Output of a verdict: settings, colors, warnings, the command for more seeds, looks, tables. 8 seconds."""

import csv
import itertools
import json
import math
import shlex
import shutil

import pytest
from matplotlib.figure import Figure

from lightning_llm.__main__ import main
from lightning_llm.base import terminal
from lightning_llm.compare.format import more_or_fewer, nats, per_parameter
from lightning_llm.compare.judge import compare_runs
from lightning_llm.compare.report.pictures import pictures_of
from lightning_llm.compare.runs.read_runs import read_all
from lightning_llm.compare.terms import Terms
from lightning_llm.config import workspace
from lightning_llm.tracking.reading import read_run
from lightning_llm.tracking.sweep_file import write_results
from tests.compare.run_folders import make_run, make_sweep, refusal, verdicts

pytestmark = pytest.mark.usefixtures("undrawn")


def test_every_line_names_the_setting(tmp_path, capsys):
    rates = {f"precision={p} optim.learning_rate={r}": 0.0 for p in ("bf16", "mxfp8") for r in ("1e-2", "2e-3")}
    found = verdicts(capsys, make_sweep(tmp_path / "s", rates))
    lines = [row["line"].partition(": ")[0] for row in found["verdicts"]]
    scale = "mxfp8 at 2.16M parameters, 205K tokens"
    assert lines == [f"{scale}, optim.learning_rate=0.002", f"{scale}, optim.learning_rate=0.01"]
    models = {
        f"precision={p} {model}": 0.0
        for p in ("bf16", "mxfp8")
        for model in ("model=llama_tiny", "model=llama_20m model.vocab_size=1024")
    }
    found = verdicts(capsys, make_sweep(tmp_path / "m", models))
    assert [row["line"].partition(": ")[0].rpartition(", ")[2] for row in found["verdicts"]] == [
        "model=llama_tiny", "model=llama_20m",
    ]  # fmt: skip
    assert len(found["baselines"]) == 2


def test_qualified_verdicts_are_marked_and_not_green(tmp_path, capsys):
    runs = []
    for seed in (0, 1, 2):
        noise = 0.001 * seed
        runs.append(make_run(tmp_path / f"a{seed}", "precision=bf16", f"seed={seed}", noise=noise))
        runs.append(make_run(tmp_path / f"b{seed}", "precision=mxfp8", f"seed={seed}", noise=noise))
        words = ("precision=mxfp4_sr", "optim.eps=1e-6", f"seed={seed}")
        runs.append(make_run(tmp_path / f"c{seed}", *words, noise=noise + 0.0001 * seed))
    same, other = compare_runs([read_run(run) for run in runs], Terms()).verdicts
    if same.name != "mxfp8":
        same, other = other, same
    assert (same.decision, same.colour, same.qualified) == ("lossless", "inconclusive", "lossless (may not have acted)")
    assert (other.decision, other.colour, other.qualified) == ("lossless", "inconclusive", "lossless (not controlled)")
    row = verdicts(capsys, *runs, "--output", tmp_path / "out")["by_name"]["mxfp8"]
    assert "the recipe may not have acted at all" in row["line"]
    assert row["may_not_have_acted"]
    html = (tmp_path / "out" / "report.html").read_text()
    assert 'class="verdict lossless"' not in html
    assert '<span class="verdict inconclusive">✓ lossless</span> <small>not controlled</small>' in html


def test_layouts_that_equal_each_other_to_the_last_bit_are_as_they_should_be(tmp_path, capsys):
    words = ("data.micro_batch_size=1",)
    make_run(tmp_path / "s" / "0", "parallel=single", *words)
    make_run(tmp_path / "s" / "1", "parallel=ddp", "trainer.devices=2", *words)
    row = verdicts(capsys, tmp_path / "s")["by_name"]["ddp"]
    assert (row["verdict"], row["identical"], row["may_not_have_acted"]) == ("lossless", True, False)
    assert row["reason"] == ""


def test_a_gap_that_may_be_below_the_margin_is_reported_as_worse(tmp_path, capsys):
    sweep = make_sweep(tmp_path / "s", {"precision=bf16": 0.0, "precision=mxfp8": 0.0097})
    row = verdicts(capsys, sweep)["by_name"]["mxfp8"]
    assert 0 < row["ci"][0] < 0.01 < row["ci"][1]
    assert row["qualified"] == "inconclusive (worse; by more than the margin: open)"
    assert "worse; by more than the margin: open" in row["line"]


@pytest.mark.parametrize(
    ("gaps", "seeds", "reason"),
    [
        ({"precision=bf16": 0.0, "precision=mxfp8": 0.005}, 1, "one pair"),
        ({"precision=bf16": 4.0, "precision=mxfp8": 4.0}, 3, "the baseline has not learned"),
    ],
)
def test_the_reason_for_no_verdict_is_in_its_cell(gaps, seeds, reason, tmp_path, capsys):
    sweep = make_sweep(tmp_path / "s", gaps, seeds)
    assert main(["compare", str(sweep)]) == 0
    out = capsys.readouterr().out
    assert f"inconclusive ({reason})" in out
    html = (sweep / "compare" / "report.html").read_text()
    assert f'<span class="verdict inconclusive">? inconclusive</span> <small>{reason}</small>' in html


def test_many_runs_give_a_sign_of_life(tmp_path, monkeypatch, capsys):
    sweep = make_sweep(tmp_path / "s", {"precision=bf16": 0.0, "precision=mxfp8": 0.0})
    clock = itertools.count(step=31.0)
    monkeypatch.setattr(terminal.time, "monotonic", lambda: next(clock))
    read_all(sorted(sweep.iterdir()))
    assert "note   reading 6 runs: 5 so far" in capsys.readouterr().err


def test_numbers_that_no_table_has_room_for():
    words = {3.14159: "3.1416", -1e300: "-1.00e+300", 99999.5: "99999.5000", 123456.0: "1.23e+05", math.inf: "inf"}
    assert {value: nats(value) for value in words} == words
    assert (nats(0.5, signed=True), nats(1e6, signed=True)) == ("+0.5000", "+1.00e+06")


def test_a_loss_below_zero_takes_its_run_out_and_is_named(tmp_path, capsys):
    sweep = make_sweep(tmp_path / "s", {"precision=bf16": 0.0, "precision=mxfp8": 0.0})
    make_run(sweep / "10", "precision=mxfp8", "seed=7", losses={5: 3.0, 10: -1e300})
    found = verdicts(capsys, sweep, expect=2)
    assert "metrics.jsonl has val_loss = -1e+300 at step 10; no cross-entropy is below 0" in found["stderr"]
    row = found["by_name"]["mxfp8"]
    assert (row["verdict"], row["qualified"]) == ("inconclusive", "inconclusive (damaged runs)")
    assert (row["damaged"], row["ci"][1] < 0.01) == ([str(sweep / "10")], True)


@pytest.mark.filterwarnings("error")
def test_pictures_without_a_pair_that_is_left_warn_of_nothing(tmp_path):
    for seed in (0, 1, 2):
        for place, precision in enumerate(("bf16", "mxfp8")):
            losses = {5: 5.0, 10: math.nan}
            make_run(tmp_path / f"{seed}-{place}", f"precision={precision}", f"seed={seed}", losses=losses)
    comparison = compare_runs([read_run(folder) for folder in sorted(tmp_path.iterdir())], Terms())
    (verdict,) = comparison.verdicts
    assert not verdict.sound_pairs
    (gaps, curve) = pictures_of(comparison)  # and none of speed or mean loss
    assert "no gap" in gaps.alt
    assert "seed 0 diverged; seed 1 diverged; seed 2 diverged" in curve.alt
    for picture in (gaps, curve):
        axes = Figure().subplots()
        picture.paint(axes)
        assert not [line for line in axes.lines if line.get_label().startswith("mean")]


def write_sweep(sweep, overrides):
    """Write the sweep's file, as a start of it does."""
    jobs = [
        {
            "number": int(folder.name),
            "words": [],
            "key": folder.name,
            "kind": "x",
            "seed": read_run(folder).config["seed"],
        }
        for folder in sweep.glob("[0-9]*")
    ]
    typed = [{"overrides": overrides, "config_dir": None}]
    (sweep / "sweep.json").write_text(json.dumps({"jobs": jobs, "typed": typed}))


def test_the_advice_is_a_command_that_adds_seeds_to_the_same_sweep(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("LIGHTNING_LLM_OUTPUTS", str(tmp_path))
    sweep = make_sweep(tmp_path / "exp" / "sweep-0", {"precision=bf16": 0.0, "precision=mxfp8": 0.0}, seeds=2)
    make_run(sweep / "20", "precision=bf16", "seed=2")
    make_run(sweep / "21", "precision=mxfp8", "seed=2", noise=0.02)
    write_sweep(sweep, ["recipe=sweep/precision_shootout", "precision=bf16,mxfp8"])
    found = verdicts(capsys, sweep)
    row, advice = found["by_name"]["mxfp8"], found["advice"]
    assert advice["more_seeds"] == row["more_seeds"] > 0
    words = shlex.split(advice["command"])
    assert words[1:5] == ["train", "-m", "recipe=sweep/precision_shootout", "precision=bf16,mxfp8"]
    assert words[5] == f"seed={','.join(map(str, range(3 + row['more_seeds'])))}"
    assert words[6:] == ["run.name=sweep-0"]
    assert main(["compare", str(sweep)]) == 0
    assert advice["command"] in capsys.readouterr().out
    some = [sweep / name for name in ("0", "2", "20", "21")]
    assert verdicts(capsys, *some)["advice"] is None  # no sweep was named
    (sweep / "sweep.json").write_text('{"jobs')  # and the verdicts stand where it does not say how it was begun
    damaged = verdicts(capsys, sweep, expect=2)
    assert (damaged["by_name"]["mxfp8"]["verdict"], damaged["advice"]) == (row["verdict"], None)
    assert "sweep.json: cannot be read" in damaged["stderr"]
    assert "run.name" not in damaged["stderr"]


def test_only_looks_at_new_runs_are_recorded(tmp_path, capsys):
    sweep = make_sweep(tmp_path / "s", {"precision=bf16": 0.0, "precision=mxfp8": 0.0}, seeds=2)
    assert len(verdicts(capsys, sweep)["looks"]) == 1
    found = verdicts(capsys, sweep, "--output", tmp_path / "elsewhere")
    assert len(found["looks"]) == 1
    assert "This is look" not in " ".join(found["notes"])
    make_run(sweep / "20", "precision=bf16", "seed=2")
    make_run(sweep / "21", "precision=mxfp8", "seed=2", noise=0.0003)
    found = verdicts(capsys, sweep)
    assert [look["pairs"] for look in found["looks"]] == [{"mxfp8": 2}, {"mxfp8": 3}]
    assert "This is look 2 at these runs. Every look at a growing sweep" in " ".join(found["notes"])
    assert [look["margin"] for look in verdicts(capsys, sweep, "--margin", "0.05")["looks"]] == [0.01, 0.01, 0.05]
    (sweep / "compare" / "looks.json").write_text("{}")
    assert "is not recorded in" in " ".join(verdicts(capsys, sweep)["notes"])


def test_tables_for_a_paper_have_the_baseline_the_sources_and_no_letter_that_latex_would_take(tmp_path, capsys):
    sweep = make_sweep(tmp_path / "s", {"precision=bf16": 0.0, "precision=mxfp4_sr": 0.06})
    row = verdicts(capsys, sweep)["by_name"]["mxfp4_sr"]
    with (sweep / "compare" / "verdicts.csv").open(newline="") as file:
        base, recipe = csv.DictReader(file)
    assert (base["recipe"], base["verdict"], recipe["verdict"]) == ("bf16", "baseline", "lossy")
    assert float(recipe["gap"]) == row["gap"]
    assert float(recipe["gap/code"]) == row["gap_by_source"]["code"]
    assert float(recipe["gap/code/low"]) < float(recipe["gap/code"]) < float(recipe["gap/code/high"])
    latex = (sweep / "compare" / "verdicts.tex").read_text()
    lines = [line for line in latex.splitlines() if line.endswith(r"\\")]
    assert [line.count(" & ") for line in lines] == [7, 7, 7]
    assert r"mxfp4\_sr" in lines[2]
    sources = (sweep / "compare" / "sources.tex").read_text()
    assert sources.count(r"mxfp4\_sr & ") == 1
    assert f"{row['gap_by_source']['code']:+.4f} [" in sources
    assert f"{row['gap']:+.4f}" in lines[2]


def test_pictures_are_also_files_and_those_of_an_earlier_report_go(tmp_path, capsys):
    rates = {f"precision={p} optim.learning_rate={r}": 0.0 for p in ("bf16", "mxfp8") for r in ("1e-3", "2e-3")}
    sweep = make_sweep(tmp_path / "s", rates, seeds=2)
    verdicts(capsys, sweep)
    names = {file.name for file in (sweep / "compare").glob("*.svg")}
    each = {f"figure-{name}-{place}.svg" for name in ("curve-mxfp8", "loss", "speed") for place in (0, 1)}
    assert names == {"figure-gaps.svg", "figure-over-optim-learning_rate-0.svg", *each}
    for number in (2, 3, 6, 7):
        shutil.rmtree(sweep / str(number))
    verdicts(capsys, sweep)
    assert {file.name for file in (sweep / "compare").glob("*.svg")} == {
        "figure-gaps.svg", "figure-curve-mxfp8.svg", "figure-loss.svg", "figure-speed.svg",
    }  # fmt: skip


def test_settings_go_by_parameters_and_not_by_the_first_key_that_differs(tmp_path, capsys):
    sizes = {"smaller": "model.num_layers=1 model.ffn_hidden_size=512", "larger": "model.ffn_hidden_size=256"}
    words = {f"precision={p} model=llama_tiny {size}": 0.0 for p in ("bf16", "mxfp8") for size in sizes.values()}
    parameters = [row["parameters"] for row in verdicts(capsys, make_sweep(tmp_path / "s", words, seeds=2))["verdicts"]]
    assert parameters[0] < parameters[1]


@pytest.mark.parametrize(
    ("share", "interval", "words"),
    [
        (0.041, (0.02, 0.065), "4.1 % more tokens [2.0, 6.5]"),
        (-0.002, (-0.003, -0.001), "0.2 % fewer tokens [0.1, 0.3]"),
        (-0.001, (-0.008, 0.006), "0.1 % fewer tokens [-0.6, 0.8]"),
        (-0.0001, (-0.0004, 0.006), "0.0 % more tokens [0.0, 0.6]"),
        (1.0, (1.0, math.inf), "100.0 % more tokens [100.0, beyond]"),
        (-0.2, (-1.0, 0.1), "20.0 % fewer tokens [-10.0, beyond]"),
        (0.01, (math.nan, math.nan), "1.0 % more tokens"),
    ],
)
def test_tokens_are_more_or_fewer_and_bounds_go_with_the_word(share, interval, words):
    assert more_or_fewer(share, interval) == words


def test_tokens_per_parameter_are_no_powers_of_ten():
    assert [per_parameter(n, 1000) for n in (23, 5_500, 158_000)] == ["0.023", "5.5", "160"]


def test_a_key_that_does_not_vary_cannot_be_tuned_and_those_of_the_factor_are_not_offered(tmp_path, capsys):
    sweep = make_sweep(tmp_path / "s", {"precision=bf16": 0.0, "precision=mxfp8": 0.0}, seeds=2)
    said = refusal(capsys, sweep, "--best-of", "optim.learning_rate")
    assert "No key can be tuned here: only precision varies" in said
    assert "block" not in said


def test_an_unreached_target_is_reported(tmp_path, capsys):
    sweep = make_sweep(tmp_path / "s", {"precision=bf16": 0.0, "precision=mxfp8": 0.0}, seeds=2)
    (row,) = verdicts(capsys, sweep, "--target", "1.0")["verdicts"]
    assert "no run of its 2 pairs reached 1, nor any of the baseline's" in row["line"]
    assert main(["compare", str(sweep), "--time-to-target", "--target", "1.0"]) == 0
    assert "reached by bf16 in 0 of 2, by mxfp8 in 0 of 2 studies" in capsys.readouterr().out


def test_the_methods_report_seeds_that_both_chose_and_judged(tmp_path, capsys):
    sweep = make_sweep(tmp_path / "s", {f"precision={p}": 0.0 for p in ("bf16", "mxfp8", "mxfp4_sr")}, seeds=2)
    assert "A search stopped other recipes early" not in " ".join(verdicts(capsys, sweep)["methods"])
    write_results(sweep, [], {4: "worse", 5: "worse"})
    axes = {"precision": ["bf16", "mxfp8", "mxfp4_sr"], "optim.learning_rate": ["2e-3", "3e-3"], "seed": ["0", "1"]}
    (sweep / "sweep.json").write_text(json.dumps({"axes": axes, "jobs": []}))
    found = verdicts(capsys, sweep)
    assert "A search stopped other recipes early" in " ".join(found["methods"])
    rate = read_run(sweep / "0").config["optim.learning_rate"]
    assert f"205K tokens, optim.learning_rate={rate}: " in found["verdicts"][0]["line"]


def test_without_a_sweep_those_of_other_folders_are_listed(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("LIGHTNING_LLM_OUTPUTS", str(tmp_path / "empty"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(workspace, "checkout", lambda: None)  # the checkout may have sweeps of the developer
    artifacts = tmp_path / "here" / "mlartifacts" / "0" / "artifacts"  # MLflow's copy of a sweep.json is no sweep
    artifacts.mkdir(parents=True)
    (artifacts / "sweep.json").write_text("{}")
    assert "of a sweep with run.root=DIR: compare DIR" in refusal(capsys)
    for root in ("here/mine", "home/lightning-llm/outputs"):
        sweep = tmp_path / root / "exp" / "sweep-0"
        sweep.mkdir(parents=True)
        (sweep / "sweep.json").write_text("{}")
        assert f"compare {sweep}" in refusal(capsys)
