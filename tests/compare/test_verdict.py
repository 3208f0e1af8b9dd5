"""`compare` and `diff` over folders as runs leave them: pairs, confounders, A/A, divergence, bad input. 35 seconds."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from run_folders import STEPS, curve, make_run
from scipy import stats

from lightning_llm.__main__ import main
from lightning_llm.compare import report
from lightning_llm.compare.reading import read_run

NOISE = [0.0004, -0.0003, 0.0001, 0.0006, -0.0005]


def make_sweep(folder: Path, gaps: dict[str, float], seeds: int = 3, **more) -> Path:
    number = 0
    for place, (words, gap) in enumerate(gaps.items()):
        for seed in range(seeds):
            noise = 0.1 * seed + NOISE[(seed + 2 * place) % len(NOISE)]
            make_run(folder / str(number), *words.split(), f"seed={seed}", gap=gap, noise=noise, **more)
            number += 1
    return folder


def verdicts(capsys, *words, expect=0) -> dict:
    """Run `compare --json`; return what it printed, and on stderr, by key."""
    assert main(["compare", "--json", *map(str, words)]) == expect
    out, err = capsys.readouterr()
    found = json.loads(out)
    return {**found, "by_name": {row["name"]: row for row in found["verdicts"]}, "stderr": err}


@pytest.fixture(autouse=True)
def _undrawn(monkeypatch, request):
    """Leave the pictures out, half a second each time, but where the report itself is looked at."""
    if "report_holds" not in request.node.name:
        for name in ("draw_curves", "draw_intervals", "draw_speed"):
            monkeypatch.setattr(report, name, lambda *_: "<svg/>")


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
    assert "lossless at margin 0.01" in row["line"]
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
    # By scipy: the least n with a noncentral t's P(T > t(0.975, n - 1)) >= 0.8, at (0.01, 0.02) / sd sqrt(n).
    needed = []
    for distance in (0.01, 0.02):
        enough = (n for n in range(2, 99) if t_test_power(distance / row["sd"], n) >= 0.8)
        needed.append(next(enough))
    assert [row["seeds_if_no_gap"], row["seeds_if_lossy"]] == needed
    assert row["more_seeds"] == needed[0] - 4
    said = f"{needed[0]} in all) would decide if the true gap is 0, {needed[1]} in all if it is 3 margins"
    assert said in row["line"]


def t_test_power(effect, pairs):
    return stats.nct.sf(stats.t.ppf(0.975, pairs - 1), pairs - 1, effect * pairs**0.5)


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
    (sweep / "0" / "mlflow_run_id").write_text("ab" * 16 + "\n")
    found = verdicts(capsys, "ab" * 16, sweep / "3", "--output", tmp_path / "here")
    assert len(found["runs"]) == 2
    assert (tmp_path / "here" / "report.html").exists()


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


def test_runs_of_one_recipe_are_the_noise_floor(tmp_path, capsys):
    sweep = make_sweep(tmp_path / "s", {"precision=bf16": 0.0, "precision=mxfp8": 0.001})
    for seed in range(3):
        words = ("precision=bf16", "data.micro_batch_size=2", f"seed={seed}")
        make_run(sweep / str(10 + seed), *words, noise=0.1 * seed + NOISE[seed % 5] + 0.002)
    found = verdicts(capsys, sweep)
    (floor,) = found["aa"]
    assert (floor["pairs"], floor["keys"]) == (3, ["data.micro_batch_size"])
    assert floor["floor"] == pytest.approx(0.002, abs=1e-6)
    assert found["by_name"]["mxfp8"]["aa_floor"] == floor["floor"]
    assert found["by_name"]["mxfp8"]["controlled"]
    alone = make_sweep(tmp_path / "alone", {"precision=bf16": 0.0, "precision=bf16 data.micro_batch_size=2": 0.0})
    itself = verdicts(capsys, alone)
    assert itself["factor"] == "data.micro_batch_size"
    assert itself["verdicts"][0]["verdict"] == "lossless"
    make_sweep(alone / "more", {"precision=bf16 trainer.threads=1": 0.0}, summary={"threads": 1})
    make_sweep(alone / "other", {"precision=bf16 parallel.reduction=native": 0.0})
    every = verdicts(capsys, alone)  # these two equal the first to the last bit
    assert (every["factor"], every["baseline"], every["aa"][0]["pairs"]) == ("rounding", "bf16", 3)
    assert {name: (row["verdict"], row["controlled"]) for name, row in every["by_name"].items()} == {
        "data.micro_batch_size=2": ("lossless", True), "trainer.threads=1": ("lossless", True),
        "parallel.reduction=native": ("lossless", True),
    }  # fmt: skip


def test_layouts_are_compared_with_a_single_rank(tmp_path, capsys):
    words = {f"parallel={name} trainer.devices=2 data.micro_batch_size=1": 0.0 for name in ("ddp", "zero3")}
    sweep = make_sweep(tmp_path / "s", {**words, "parallel=single data.micro_batch_size=1": 0.0})
    found = verdicts(capsys, sweep)
    assert (found["factor"], found["baseline"]) == ("parallel", "single")
    assert {name: row["controlled"] for name, row in found["by_name"].items()} == {"ddp": True, "zero3": True}


def test_runs_with_equal_bits_are_lossless_by_one_pair(tmp_path, capsys):
    layouts = {name: (f"parallel={name}", "trainer.devices=2", "data.micro_batch_size=1") for name in ("ddp", "zero3")}
    sweep = tmp_path / "s"
    make_run(sweep / "0", "parallel=single", "data.micro_batch_size=1")
    make_run(sweep / "1", *layouts["ddp"])
    make_run(sweep / "2", *layouts["zero3"], noise=0.001)
    rows = verdicts(capsys, sweep)["by_name"]
    assert (rows["ddp"]["verdict"], rows["ddp"]["ci"], rows["ddp"]["identical"]) == ("lossless", [0.0, 0.0], True)
    assert "equal to the last bit" in rows["ddp"]["line"]
    assert (rows["zero3"]["verdict"], rows["zero3"]["identical"]) == ("inconclusive", False)
    shutil.rmtree(sweep / "1")
    early = {step: curve(step) + 1e-12 * (step < 50) for step in range(5, STEPS + 1, 5)}
    make_run(sweep / "1", *layouts["ddp"], losses=early)  # equal in the tail alone
    assert not verdicts(capsys, sweep)["by_name"]["ddp"]["identical"]


def test_an_interleaved_pipeline_with_the_same_bits_is_no_confounder(tmp_path, capsys):
    base = "precision=bf16 data.micro_batch_size=1"
    pipeline = "precision=mxfp8 data.micro_batch_size=1 parallel=pp_interleaved trainer.devices=2"
    row = verdicts(capsys, make_sweep(tmp_path / "s", {base: 0.0, pipeline: 0.001}))["by_name"]["mxfp8"]
    assert (row["controlled"], row["confounders"]) == (True, [])
    assert {"parallel.schedule", "parallel.virtual_stages"} <= set(row["speed_confounders"])


def test_equal_bits_are_no_noise(tmp_path, capsys):
    sweep = make_sweep(tmp_path / "s", {"precision=bf16": 0.0, "precision=mxfp8": 0.001}, seeds=2)
    make_run(sweep / "9", "precision=bf16", "trainer.threads=1", "seed=0", noise=NOISE[0])
    found = verdicts(capsys, sweep)
    assert found["aa"][0]["floor"] is None
    assert found["aa"][0]["identical"] == 1


def test_a_run_made_again_is_dropped_if_equal_and_noise_if_not(tmp_path, capsys):
    sweep = make_sweep(tmp_path / "s", {"precision=bf16": 0.0, "precision=mxfp8": 0.001})
    later = {"started_at": "2026-11-22T10:00:00+00:00"}
    make_run(sweep / "20", "precision=bf16", "seed=0", noise=NOISE[0], summary=later)
    found = verdicts(capsys, sweep)
    assert found["aa"] == []
    assert "left out: s/0" in " ".join(found["notes"])
    make_run(sweep / "21", "precision=bf16", "seed=1", noise=0.1 + NOISE[1] + 0.003, summary=later)
    assert verdicts(capsys, sweep)["aa"][0]["floor"] == pytest.approx(0.003)


def test_one_pair_is_inconclusive_unless_the_floor_stands_in(tmp_path, capsys):
    sweep = make_sweep(tmp_path / "s", {"precision=bf16": 0.0, "precision=mxfp8": 0.05}, seeds=1)
    row = verdicts(capsys, sweep)["by_name"]["mxfp8"]
    assert (row["verdict"], row["ci"]) == ("inconclusive", [None, None])
    assert "one pair alone" in row["line"]
    for number, size in enumerate((1, 2)):
        words = ("precision=bf16", f"data.micro_batch_size={size}", "seed=0")
        make_run(sweep / str(5 + number), *words, noise=NOISE[0] + 0.001 * (number + 1))
    row = verdicts(capsys, sweep)["by_name"]["mxfp8"]
    assert row["verdict"] == "lossy"
    assert row["floor_stands_in"]
    assert "stands in" in row["line"]
    assert "against noise within a seed only" in row["line"]


def test_a_floor_does_not_overrule_the_spread_that_others_show(tmp_path, capsys):
    """Real runs of the quickstart's kind: the floor is a fraction of what recipes scatter from seed to seed."""
    base, other = [0.01, -0.02, 0.03, -0.01, 0.0], [-0.02, 0.02, 0.0, 0.025, -0.02]
    for seed in range(5):
        make_run(tmp_path / "s" / f"0{seed}", "precision=bf16", f"seed={seed}", noise=base[seed])
        make_run(tmp_path / "s" / f"1{seed}", "precision=mxfp8", f"seed={seed}", noise=other[seed])
        words = ("precision=bf16", "data.micro_batch_size=2", f"seed={seed}")
        make_run(tmp_path / "s" / f"2{seed}", *words, noise=base[seed] + 0.001)
    make_run(tmp_path / "s" / "30", "precision=fp8_current", "seed=0", noise=base[0] + 0.022)
    rows = verdicts(capsys, tmp_path / "s")["by_name"]
    row = rows["fp8_current"]
    assert (row["verdict"], row["stand_in"], row["floor_stands_in"]) == ("inconclusive", "family", False)
    assert row["aa_floor"] == pytest.approx(0.001)
    assert row["sd"] == pytest.approx(rows["mxfp8"]["sd"])
    assert row["ci"][0] < -0.05
    assert "the spread of the other recipes stands in" in row["line"]


def test_layouts_with_the_same_bits_are_no_confounder_and_others_are(tmp_path, capsys):
    base = make_sweep(tmp_path / "s", {"precision=bf16 data.micro_batch_size=1": 0.0})
    layout = "precision=mxfp8 data.micro_batch_size=1 parallel=ddp trainer.devices=2"
    same = make_sweep(tmp_path / "same", {layout: 0.001})
    row = verdicts(capsys, base, same)["by_name"]["mxfp8"]
    assert row["controlled"]
    assert "trainer.devices" in row["speed_confounders"]
    other = make_sweep(tmp_path / "other", {f"{layout} parallel.reduction=native": 0.001})
    row = verdicts(capsys, base, other)["by_name"]["mxfp8"]
    assert {each["key"] for each in row["confounders"]} == {
        "parallel.dp_replicate", "parallel.reduction", "trainer.devices",
    }  # fmt: skip


def test_a_recipe_without_a_finished_run_is_named(tmp_path, capsys):
    sweep = make_sweep(tmp_path / "s", {"precision=bf16": 0.0, "precision=mxfp8": 0.0})
    for seed in range(2):
        failed = {"status": "failed", "detail": "RuntimeError: shapes"}
        make_run(sweep / f"2{seed}", "precision=fp8_subchannel", f"seed={seed}", steps=30, summary=failed)
    found = verdicts(capsys, sweep, expect=2)
    assert "fp8_subchannel: has no verdict: none of its runs is finished (seeds 0, 1)." in found["stderr"]
    assert found["by_name"]["mxfp8"]["pairs"] == 3


def test_the_step_that_a_stop_left_unmade_is_no_step_of_the_run(tmp_path):
    losses = {step: curve(step) for step in range(5, 31, 5)}
    run = make_run(tmp_path / "run", losses=losses, summary={"status": "failed", "detail": "SpikeStop: step 31 is ..."})
    stop = {"step": 31, "tokens": 1, "time": 0.0, "loss": "nan", "event": "non_finite", "event_action": "stop"}
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(stop) + "\n")
    read = read_run(run)
    assert (read.last_step, read.last_loss, read.spikes, read.non_finite) == (30, 5.0, 1, True)


def test_a_run_that_loses_its_loss_is_lossy(tmp_path, capsys):
    sweep = make_sweep(tmp_path / "s", {"precision=bf16": 0.0, "precision=mxfp8": 0.0, "precision=fp8_current": 0.0})
    shutil.rmtree(sweep / "4")
    shutil.rmtree(sweep / "8")
    ended = {"status": "failed", "detail": "NonFiniteError: the loss of step 31 is nan. ..."}
    losses = {step: curve(step) for step in range(5, 31, 5)}
    make_run(sweep / "4", "precision=mxfp8", "seed=1", losses=losses, summary=ended)
    make_run(sweep / "8", "precision=fp8_current", "seed=2", losses=dict.fromkeys(range(5, STEPS + 1, 5), 9.0))
    rows = verdicts(capsys, sweep)["by_name"]
    for name, seed in (("mxfp8", 1), ("fp8_current", 2)):
        assert rows[name]["verdict"] == "lossy"
        assert rows[name]["diverged_seeds"] == [seed]
        assert f"diverged at seed {seed}" in rows[name]["line"]
    assert "205K tokens" in rows["mxfp8"]["line"]
    make_run(sweep / "20", "precision=bf16", "seed=5", losses=losses, summary=ended)
    make_run(sweep / "21", "precision=mxfp8", "seed=5")
    found = verdicts(capsys, sweep, expect=2)
    assert "the baseline bf16 itself diverged" in found["stderr"]
    assert found["by_name"]["mxfp8"]["pairs"] == 3


def test_one_pair_that_diverged_before_its_first_validation_is_lossy(tmp_path, capsys):
    make_run(tmp_path / "s" / "0", "precision=bf16", "seed=0")
    lost = make_run(
        tmp_path / "s" / "1", "precision=mxfp8", "seed=0", summary={"status": "failed", "detail": "NonFiniteError: ..."}
    )
    lines = [json.loads(line) for line in (lost / "metrics.jsonl").read_text().splitlines()]
    (lost / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines if line["step"] < 5))
    assert verdicts(capsys, tmp_path / "s")["by_name"]["mxfp8"]["verdict"] == "lossy"


def stop(step, event):
    """The record of a step before whose update the spike policy ended the run."""
    return json.dumps({"step": step, "tokens": 1, "time": 0.0, "loss": 6.5, "event": event, "event_action": "stop"})


@pytest.mark.parametrize(
    ("policy", "event", "lossy"),
    [
        ("stop", "divergence", True), ("skip", "spike", True), ("skip", "non_finite", True),
        ("stop", "spike", False), ("stop", "plateau_shift", False),
    ],
)  # fmt: skip
def test_seeds_that_a_policy_ended_are_not_dropped_from_the_verdict(policy, event, lossy, tmp_path, capsys):
    recipes = {f"precision={name} spikes.policy={policy}": 0.0 for name in ("bf16", "mxfp8")}
    sweep = make_sweep(tmp_path / "s", recipes, seeds=5)
    assert verdicts(capsys, sweep)["by_name"]["mxfp8"]["verdict"] == "lossless"
    for number in (5, 6):  # mxfp8 at seeds 0 and 1
        shutil.rmtree(sweep / str(number))
        ended = {"status": "failed", "detail": "SpikeStop: step 51 is out of the ordinary"}
        words = ("precision=mxfp8", f"spikes.policy={policy}", f"seed={number - 5}")
        losses = {step: curve(step) for step in range(5, 51, 5)}
        folder = make_run(sweep / str(number), *words, losses=losses, summary=ended)
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(stop(51, event) + "\n")
    row = verdicts(capsys, sweep, expect=0 if lossy else 2)["by_name"]["mxfp8"]
    assert row["verdict"] == ("lossy" if lossy else "inconclusive")
    assert (row["diverged_seeds"], row["missing_seeds"]) == (([0, 1], []) if lossy else ([], [0, 1]))
    assert ("diverged at seeds 0, 1" if lossy else "seeds 0, 1 missing: failed or unfinished") in row["line"]
    assert row["ci"][1] < 0.01  # which the survivors alone would be called lossless for


def test_a_seed_is_missing_only_where_the_baseline_came_to_its_end_and_no_other_run_did(tmp_path, capsys):
    sweep = make_sweep(tmp_path / "s", {"precision=bf16": 0.0, "precision=mxfp8": 0.06, "precision=fp8_current": 0.0})
    running = {"summary": {"status": "running"}, "losses": {5: curve(5)}}
    make_run(sweep / "20", "precision=mxfp8", "seed=7", **running)  # no baseline
    make_run(sweep / "21", "precision=mxfp8", "seed=1", "data.micro_batch_size=2", **running)  # made otherwise
    make_run(sweep / "22", "precision=fp8_current", "seed=1", "optim.eps=1e-6", **running)  # another recipe
    rows = verdicts(capsys, sweep, expect=2)["by_name"]
    assert {name: row["missing_seeds"] for name, row in rows.items()} == {"mxfp8": [], "fp8_current": []}
    assert rows["fp8_current"]["verdict"] == "lossless"
    make_run(sweep / "23", "precision=bf16", "seed=7")
    row = verdicts(capsys, sweep, expect=2)["by_name"]["mxfp8"]
    assert (row["verdict"], row["missing_seeds"]) == ("lossy", [7])
    assert "seed 7 missing" in row["line"]


def test_of_runs_that_differ_in_rounding_each_way_has_its_own_missing_seeds(tmp_path, capsys):
    sweep = make_sweep(tmp_path / "s", {f"data.micro_batch_size={size}": 0.0 for size in (4, 2, 1)})
    make_run(sweep / "20", "data.micro_batch_size=4", "seed=9")
    make_run(sweep / "21", "data.micro_batch_size=1", "seed=9", summary={"status": "stopped"}, losses={5: curve(5)})
    rows = verdicts(capsys, sweep, expect=2)["by_name"]
    assert {name.rpartition("=")[2]: row["missing_seeds"] for name, row in rows.items()} == {"2": [], "1": [9]}


def test_what_is_not_finite_on_the_way_is_passed_over_and_the_output_stays_json(tmp_path, capsys):
    for seed in range(2):
        make_run(tmp_path / "s" / f"0{seed}", "precision=bf16", f"seed={seed}", noise=NOISE[seed])
        losses = {step: curve(step) - 0.01 if step > 90 else curve(step) + 1 for step in range(5, STEPS + 1, 5)}
        losses[90] = "nan"
        make_run(tmp_path / "s" / f"1{seed}", "precision=mxfp8", f"seed={seed}", losses=losses)
    assert main(["compare", "--json", str(tmp_path / "s")]) == 0
    printed = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    json.loads((tmp_path / "s" / "compare" / "compare.json").read_text(), parse_constant=pytest.fail)
    times = printed["verdicts"][0]["time_to_loss"]
    assert 85 * 2048 < times["tokens"] < 95 * 2048  # on the straight line over the one left out
    bad = {step: curve(step) for step in range(5, STEPS + 1, 5)} | {95: "nan"}
    make_run(tmp_path / "s" / "02", "precision=bf16", "seed=2", losses=bad)
    make_run(tmp_path / "s" / "12", "precision=mxfp8", "seed=2")
    found = verdicts(capsys, tmp_path / "s", expect=2)
    assert "its 'val_loss' is not finite in the tail" in found["stderr"]
    assert found["by_name"]["mxfp8"]["pairs"] == 2


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
    times = row["time_to_loss"]
    assert (times["tokens"], times["tokens_ratio"]) == pytest.approx((50 * 2048, 0.5))
    assert (times["seconds"], times["seconds_ratio"]) == pytest.approx((50 * 2048 / 500, 1.0))
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
    assert said in (sweep / "compare" / "report.html").read_text().replace("&#x27;", "'")


def test_without_hashes_the_configs_decide_what_is_comparable(tmp_path, capsys):
    sweep = tmp_path / "s"
    bare = {"summary": {"validation_hash": None, "data_hash": None}}
    make_run(sweep / "0", "precision=bf16", **bare)
    make_run(sweep / "1", "precision=mxfp8", "data.tokenizer.kind=bytes", **bare)
    assert main(["compare", str(sweep)]) == 2
    assert "data.tokenizer.kind" in capsys.readouterr().err


def say(capsys, *words) -> str:
    assert main(["compare", *map(str, words)]) == 2
    return capsys.readouterr().err


def test_nothing_to_compare_is_said(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("LIGHTNING_LLM_OUTPUTS", str(tmp_path / "outputs"))
    (tmp_path / "outputs" / "precision_study").mkdir(parents=True)
    assert "no sweep in" in say(capsys)
    assert "Did you mean 'precision_study'?" in say(capsys, "precision_stud")
    assert "there is no run in this folder" in say(capsys, tmp_path)
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


def test_diff_says_what_differs(tmp_path, capsys):
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


def test_the_report_holds_everything_itself(sweep, capsys):
    assert main(["compare", str(sweep)]) == 0
    out = capsys.readouterr().out
    assert "mxfp4_sr at 2.16M parameters" in out
    html = (sweep / "compare" / "report.html").read_text()
    assert html.count("src='data:image/svg+xml;base64,") == html.count("<img") == 3
    assert "http" not in html.replace("http://www.w3.org", "")
    assert all(word in html for word in ("Dunnett", "ICH E9", "inconclusive", "mxfp4_rne at"))


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
