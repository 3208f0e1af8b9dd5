"""Runs that diverged, failed, were stopped or are missing: none is passed over in silence. 8 seconds."""

import json
import shutil

import pytest
from run_folders import NOISE, STEPS, curve, make_run, make_sweep, verdicts

from lightning_llm.__main__ import main
from lightning_llm.compare.reading import read_run

pytestmark = pytest.mark.usefixtures("undrawn")


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


def test_a_run_that_failed_before_its_first_record_is_missed(tmp_path, capsys):
    sweep = make_sweep(tmp_path / "s", {"precision=bf16": 0.0, "precision=mxfp8": 0.0})
    early = make_run(sweep / "20", "precision=mxfp8", "seed=3")
    make_run(sweep / "21", "precision=bf16", "seed=3", noise=0.3)
    for name in ("metrics.jsonl", "summary.json"):
        (early / name).unlink()
    assert verdicts(capsys, sweep)["by_name"]["mxfp8"]["missing_seeds"] == []  # config.yaml alone is no run
    (early / "tokenizer.json").write_text("{}")  # one began
    found = verdicts(capsys, sweep, expect=2)
    assert "is not finished: never begun. Left out" in found["stderr"]
    row = found["by_name"]["mxfp8"]
    assert (row["missing_seeds"], row["verdict"]) == ([3], "inconclusive")


def test_an_update_left_out_at_the_last_step_is_no_divergence(tmp_path, capsys):
    sweep = make_sweep(tmp_path / "s", {"precision=bf16": 0.0, "precision=mxfp8": 0.0})
    last = {"step": STEPS, "tokens": 1, "time": 0.0, "loss": "nan", "event": "non_finite", "skipped": True}
    for folder in sorted(sweep.iterdir())[3:6]:
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(last) + "\n")
    row = verdicts(capsys, sweep)["by_name"]["mxfp8"]
    assert (row["diverged_seeds"], row["verdict"], row["skipped_steps"]) == ([], "lossless", 3)


@pytest.mark.parametrize("loss", ["config.yaml", "metrics.jsonl", "summary.json", "all of it"])
def test_a_job_of_a_sweep_that_is_gone_or_damaged_is_a_missing_seed(loss, tmp_path, capsys):
    sweep = make_sweep(tmp_path / "s", {"precision=bf16": 0.0, "precision=mxfp8": 0.0})
    levels = [(name, seed) for name in ("bf16", "mxfp8") for seed in range(3)]
    jobs = [
        {"number": number, "words": [f"precision={name}", f"seed={seed}"], "key": str(number)}
        for number, (name, seed) in enumerate(levels)
    ]
    (sweep / "sweep.json").write_text(json.dumps({"jobs": jobs}))
    assert verdicts(capsys, sweep)["by_name"]["mxfp8"]["verdict"] == "lossless"
    if loss == "all of it":
        shutil.rmtree(sweep / "4")
    elif loss == "summary.json":
        (sweep / "4" / loss).write_text('{"status": "fin')
    else:
        (sweep / "4" / loss).unlink()
    found = verdicts(capsys, sweep, expect=2)
    assert f"{sweep / '4'}" in found["stderr"]
    row = found["by_name"]["mxfp8"]
    assert (row["missing_seeds"], row["pairs"], row["verdict"]) == ([1], 2, "inconclusive")
    assert ("unreadable" in found["stderr"]) == (loss != "all of it")
    (sweep / "sweep.json").write_text('{"jobs')
    assert "a job may be missing unseen" in verdicts(capsys, sweep, expect=2)["stderr"]
    some = [sweep / str(number) for number in (0, 2, 3, 5)]
    assert verdicts(capsys, *some)["by_name"]["mxfp8"]["missing_seeds"] == []  # the sweep was not named


@pytest.mark.parametrize("twin", ["data.micro_batch_size=1", "seed=0"])
def test_a_run_that_diverged_is_not_passed_over_for_a_twin_that_did_not(twin, tmp_path, capsys):
    sweep = make_sweep(tmp_path / "s", {"precision=bf16": 0.0, "precision=mxfp4_sr": 0.0})
    losses = {step: curve(step) for step in range(5, 31, 5)}
    ended = {"status": "failed", "detail": "NonFiniteError: the loss of step 31 is nan. ..."}
    make_run(sweep / "20", "precision=bf16", "seed=0", twin, noise=NOISE[0])
    make_run(sweep / "21", "precision=mxfp4_sr", "seed=0", twin, losses=losses, summary=ended)
    row = verdicts(capsys, sweep)["by_name"]["mxfp4_sr"]
    assert (row["verdict"], row["diverged_seeds"], row["controlled"]) == ("lossy", [0], True)


def test_a_lost_job_is_known_by_its_config_whatever_its_words(tmp_path, capsys):
    """The words of a job are those of the command that last named it, relative to the others of that command."""
    sweep = make_sweep(tmp_path / "s", {"precision=bf16": 0.0, "precision=mxfp8": 0.0})
    jobs = [
        {"number": n, "words": ["precision=mxfp8"], "key": str(n), "kind": "ab"[n // 3], "seed": n % 3}
        for n in range(6)
    ]
    (sweep / "sweep.json").write_text(json.dumps({"jobs": jobs}))
    shutil.rmtree(sweep / "5")
    row = verdicts(capsys, sweep, expect=2)["by_name"]["mxfp8"]
    assert (row["missing_seeds"], row["verdict"]) == ([2], "inconclusive")


def test_a_run_whose_records_begin_later_has_no_time_to_loss(tmp_path, capsys):
    sweep = make_sweep(tmp_path / "s", {"precision=bf16": 0.0, "precision=mxfp8": -0.01})
    for number in (3, 4, 5):
        lines = (sweep / str(number) / "metrics.jsonl").read_text().splitlines(keepends=True)
        (sweep / str(number) / "metrics.jsonl").write_text("".join(lines[60:]))  # resume=PATH, into this folder
    found = verdicts(capsys, sweep)
    assert found["by_name"]["mxfp8"]["time_to_loss"] == {"reached": 0}
    assert "went on from another folder at step 51" in " ".join(found["notes"])
