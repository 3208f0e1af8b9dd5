"""Runs that diverged, failed, were stopped or are missing: none is passed over in silence."""

import json
import shutil

import pytest
from scipy import stats

from lightning_llm.__main__ import main
from lightning_llm.tracking.reading import read_run
from tests.compare.run_folders import NOISE, STEPS, curve, make_run, make_sweep, rewritten, verdicts

pytestmark = pytest.mark.usefixtures("undrawn")
FULL = pytest.mark.full


def test_a_recipe_without_a_finished_run_is_named(tmp_path, capsys):
    sweep = make_sweep(tmp_path / "s", {"precision=bf16": 0.0, "precision=mxfp8": 0.0})
    for seed in range(2):
        failed = {"status": "failed", "detail": "RuntimeError: shapes"}
        make_run(sweep / f"2{seed}", "precision=fp8_subchannel", f"seed={seed}", steps=30, summary=failed)
    found = verdicts(capsys, sweep, expect=2)
    assert "fp8_subchannel: has no verdict: none of its runs is finished (seeds 0, 1)." in found["stderr"]
    assert found["by_name"]["mxfp8"]["pairs"] == 3


def test_a_step_not_made_before_a_stop_is_not_counted(tmp_path):
    losses = {step: curve(step) for step in range(5, 31, 5)}
    run = make_run(tmp_path / "run", losses=losses, summary={"status": "failed", "detail": "SpikeStop: step 31 is ..."})
    stop = {"step": 31, "tokens": 1, "time": 0.0, "loss": "nan", "event": "non_finite", "event_action": "stop"}
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(stop) + "\n")
    rewritten(run)
    read = read_run(run)
    assert (read.last_step, read.last_loss, read.spikes, read.non_finite) == (30, 5.0, 1, True)


def diverge(folder, *words):
    """Write, or overwrite, a run that diverges at step 31."""
    shutil.rmtree(folder, ignore_errors=True)
    ended = {"status": "failed", "detail": "NonFiniteError: the loss of step 31 is nan. ..."}
    return make_run(folder, *words, losses={step: curve(step) for step in range(5, 31, 5)}, summary=ended)


def test_one_divergence_of_three_is_a_result_and_not_lossy_by_itself(tmp_path, capsys):
    names = ("bf16", "mxfp8", "nvfp4", "fp8_current")  # two pairs alone know too little of their spread
    sweep = make_sweep(tmp_path / "s", {f"precision={name}": 0.0 for name in names})
    diverge(sweep / "4", "precision=mxfp8", "seed=1")
    shutil.rmtree(sweep / "11")
    make_run(sweep / "11", "precision=fp8_current", "seed=2", losses=dict.fromkeys(range(5, STEPS + 1, 5), 9.0))
    rows = verdicts(capsys, sweep)["by_name"]
    for name, seed in (("mxfp8", 1), ("fp8_current", 2)):
        row = rows[name]
        assert (row["verdict"], row["loss_verdict"], row["loss_pairs"]) == ("inconclusive", "lossless", 2)
        assert (row["diverged_seeds"], row["stability"]["verdict"]) == ([seed], "open")
        assert row["stability"]["rate_ci"] == pytest.approx(stats.binomtest(1, 3).proportion_ci())
        assert "1 of 3 failed: failure rate 1 to 91 %), diverged at seed " + str(seed) in row["line"]
        assert "so the remaining 2 pairs cannot make it lossless" in row["line"]
    assert "205K tokens" in rows["mxfp8"]["line"]


def test_a_recipe_that_diverges_at_every_seed_is_lossy_and_no_interval_is_needed(tmp_path, capsys):
    sweep = make_sweep(tmp_path / "s", {"precision=bf16": 0.0, "precision=mxfp8": 0.0})
    for seed in range(3):
        diverge(sweep / str(3 + seed), "precision=mxfp8", f"seed={seed}")
    row = verdicts(capsys, sweep)["by_name"]["mxfp8"]
    assert (row["verdict"], row["stability"]["verdict"], row["gap"]) == ("lossy", "unstable", None)
    assert "unstable: it fails more often than the baseline (p = 0.0093)" in row["line"]


def test_a_diverged_baseline_is_counted_like_a_diverged_recipe(tmp_path, capsys):
    sweep = make_sweep(tmp_path / "s", {"precision=bf16": 0.0, "precision=mxfp8": 0.0, "precision=fp8_current": 0.0})
    diverge(sweep / "1", "precision=bf16", "seed=1")
    diverge(sweep / "5", "precision=mxfp8", "seed=2")
    rows = verdicts(capsys, sweep)["by_name"]  # exit code 0: a result, no input that could not be used
    row = rows["fp8_current"]
    assert (row["verdict"], row["loss_pairs"], row["baseline_diverged_seeds"]) == ("lossless", 2, [1])
    assert "of the baseline's 1 of 3 failed" in row["line"]
    row = rows["mxfp8"]
    assert (row["stability"]["discordant"], row["loss_pairs"], row["verdict"]) == ([1, 1], 1, "inconclusive")
    assert "one pair shows no spread" in row["line"]


def test_a_catastrophic_seed_is_named_and_the_others_are_judged(tmp_path, capsys):
    sweep = make_sweep(tmp_path / "s", {"precision=bf16": 0.0, "precision=mxfp8": 0.0}, seeds=4)
    make_run(sweep / "20", "precision=bf16", "seed=9")
    make_run(sweep / "21", "precision=mxfp8", "seed=9", noise=1.7)  # not diverged: still below guessing
    row = verdicts(capsys, sweep)["by_name"]["mxfp8"]
    assert (row["outlier_seeds"], row["stability"]["failed_seeds"], row["diverged_seeds"]) == ([9], [9], [])
    assert (row["verdict"], row["loss_verdict"], row["loss_pairs"]) == ("inconclusive", "lossless", 4)
    assert "seed 9 is an outlier, +1.7 (170 margins)" in row["line"]
    assert row["seeds_if_stable"] == 46  # by which one failure in all has a rate below 10 %
    flipped = verdicts(capsys, sweep, "--baseline", "precision=mxfp8")["by_name"]["bf16"]
    assert (flipped["verdict"], flipped["stability"]["baseline_failed_seeds"]) == ("lossless", [9])


def test_a_single_diverged_pair_without_validation_is_reported(tmp_path, capsys):
    make_run(tmp_path / "s" / "0", "precision=bf16", "seed=0")
    lost = make_run(
        tmp_path / "s" / "1", "precision=mxfp8", "seed=0", summary={"status": "failed", "detail": "NonFiniteError: ..."}
    )
    lines = [json.loads(line) for line in (lost / "metrics.jsonl").read_text().splitlines()]
    (lost / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines if line["step"] < 5))
    rewritten(lost)
    row = verdicts(capsys, tmp_path / "s")["by_name"]["mxfp8"]
    assert (row["verdict"], row["diverged_seeds"]) == ("inconclusive", [0])
    assert "1 of 1 failed: failure rate 3 to 100 %), diverged at seed 0" in row["line"]


def test_a_baseline_that_has_not_learned_gives_no_verdict(tmp_path, capsys):
    """As 20 steps of one layer do: 7.267, where guessing one of 1,024 tokens is 6.931."""
    worse = dict.fromkeys(range(5, STEPS + 1, 5), 7.267)
    sweep = tmp_path / "s"
    for seed in range(3):
        for number, words in enumerate(("bf16", "mxfp8", "bf16 data.micro_batch_size=1")):
            losses = {step: loss + NOISE[(seed + 2 * number) % 5] for step, loss in worse.items()}
            make_run(sweep / f"{seed}{number}", *f"precision={words} seed={seed}".split(), losses=losses)
    found = verdicts(capsys, sweep, "--all-pairs")
    assert any("No table of all pairs" in note for note in found["notes"])
    row = found["by_name"]["mxfp8"]
    assert (row["verdict"], row["loss_verdict"], row["baseline_learned"]) == ("inconclusive", "lossless", False)
    assert (
        "the baseline has not learned: its best run ends at 7.267 nats, where 0.9 ln(vocabulary) is 6.238"
        in row["line"]
    )
    assert (row["diverged_seeds"], row["more_seeds"], found["advice"]) == ([], None, None)
    (floor,) = found["aa"]
    assert (floor["floor"], floor["unlearned"]) == (None, 6)


def test_a_loss_reachable_without_context_is_not_learned(tmp_path, capsys):
    """A model of the tokens' frequencies alone is far below guessing where tokens are not equally frequent."""
    sweep = make_sweep(tmp_path / "s", {"precision=bf16": 0.0, "precision=mxfp8": 0.0})
    assert verdicts(capsys, sweep)["by_name"]["mxfp8"]["baseline_learned"]
    for folder in sweep.glob("[0-9]*"):
        rewritten(folder, validation_unigram_nats=2.9)
    row = verdicts(capsys, sweep)["by_name"]["mxfp8"]
    assert (row["verdict"], row["baseline_learned"]) == ("inconclusive", False)
    assert "at 3.023 nats, where the frequencies of the tokens alone give 2.900" in row["line"]


def stop(step, event):
    """The record of a step whose update did not happen, because the spike policy ended the run."""
    return json.dumps({"step": step, "tokens": 1, "time": 0.0, "loss": 6.5, "event": event, "event_action": "stop"})


@pytest.mark.parametrize(
    ("policy", "event", "diverged"),
    [
        ("stop", "divergence", True), ("skip", "non_finite", True), ("stop", "spike", False),
        pytest.param("skip", "spike", True, marks=pytest.mark.full),
        pytest.param("stop", "plateau_shift", False, marks=pytest.mark.full),
    ],
)  # fmt: skip
def test_seeds_that_a_policy_ended_are_not_dropped_from_the_verdict(policy, event, diverged, tmp_path, capsys):
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
        rewritten(folder)
    row = verdicts(capsys, sweep, expect=0 if diverged else 2)["by_name"]["mxfp8"]
    assert row["verdict"] == "inconclusive"
    assert (row["diverged_seeds"], row["missing_seeds"]) == (([0, 1], []) if diverged else ([], [0, 1]))
    assert ("diverged at seeds 0, 1" if diverged else "seeds 0, 1 missing: crashed or unfinished") in row["line"]
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


def test_non_finite_losses_are_skipped_and_the_output_stays_json(tmp_path, capsys):
    for seed in range(2):
        make_run(tmp_path / "s" / f"0{seed}", "precision=bf16", f"seed={seed}", noise=NOISE[seed])
        losses = {step: curve(step) - 0.01 if step > 90 else curve(step) + 1 for step in range(5, STEPS + 1, 5)}
        losses[90] = "nan"
        make_run(tmp_path / "s" / f"1{seed}", "precision=mxfp8", f"seed={seed}", losses=losses)
    assert main(["compare", "--json", str(tmp_path / "s")]) == 0
    printed = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    json.loads((tmp_path / "s" / "compare" / "compare.json").read_text(), parse_constant=pytest.fail)
    # Reached on the straight line over the one left out, where the baseline's lowest loss is its last.
    assert 85 / 100 < printed["verdicts"][0]["time_to_loss"]["tokens_ratio"] < 95 / 100
    bad = {step: curve(step) for step in range(5, STEPS + 1, 5)} | {95: "nan"}
    make_run(tmp_path / "s" / "02", "precision=bf16", "seed=2", losses=bad)
    make_run(tmp_path / "s" / "12", "precision=mxfp8", "seed=2")
    row = verdicts(capsys, tmp_path / "s")["by_name"]["mxfp8"]
    assert (row["pairs"], row["loss_pairs"], row["baseline_diverged_seeds"]) == (3, 2, [2])


def test_a_run_that_failed_before_its_first_record_is_missing(tmp_path, capsys):
    sweep = make_sweep(tmp_path / "s", {"precision=bf16": 0.0, "precision=mxfp8": 0.0})
    early = make_run(sweep / "20", "precision=mxfp8", "seed=3")
    make_run(sweep / "21", "precision=bf16", "seed=3", noise=0.3)
    for name in ("metrics.jsonl", "summary.json"):
        (early / name).unlink()
    assert verdicts(capsys, sweep)["by_name"]["mxfp8"]["missing_seeds"] == []  # config.yaml alone is no run
    (early / "tokenizer.json").write_text("{}")  # one began
    found = verdicts(capsys, sweep, expect=2)
    assert "is not finished: not started. Left out" in found["stderr"]
    row = found["by_name"]["mxfp8"]
    assert (row["missing_seeds"], row["verdict"]) == ([3], "inconclusive")


def test_an_update_left_out_at_the_last_step_is_no_divergence(tmp_path, capsys):
    sweep = make_sweep(tmp_path / "s", {"precision=bf16": 0.0, "precision=mxfp8": 0.0})
    last = {"step": STEPS, "tokens": 1, "time": 0.0, "loss": "nan", "event": "non_finite", "skipped": True}
    for folder in sorted(sweep.iterdir())[3:6]:
        *before, _, validation = (folder / "metrics.jsonl").read_text().splitlines()
        (folder / "metrics.jsonl").write_text("\n".join([*before, json.dumps(last), validation]) + "\n")
        rewritten(folder)
    row = verdicts(capsys, sweep)["by_name"]["mxfp8"]
    assert (row["diverged_seeds"], row["verdict"], row["skipped_steps"]) == ([], "lossless", 3)


@pytest.mark.parametrize(
    "loss", ["summary.json", "all of it", *(pytest.param(f, marks=FULL) for f in ("config.yaml", "metrics.jsonl"))]
)
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
    assert "missing jobs cannot be detected" in verdicts(capsys, sweep, expect=2)["stderr"]
    some = [sweep / str(number) for number in (0, 2, 3, 5)]
    assert verdicts(capsys, *some)["by_name"]["mxfp8"]["missing_seeds"] == []  # the sweep was not named


@pytest.mark.parametrize("twin", ["data.micro_batch_size=1", pytest.param("seed=0", marks=FULL)])
def test_a_diverged_run_is_not_replaced_by_its_rerun(twin, tmp_path, capsys):
    sweep = make_sweep(tmp_path / "s", {"precision=bf16": 0.0, "precision=mxfp4_sr": 0.0})
    losses = {step: curve(step) for step in range(5, 31, 5)}
    ended = {"status": "failed", "detail": "NonFiniteError: the loss of step 31 is nan. ..."}
    make_run(sweep / "20", "precision=bf16", "seed=0", twin, noise=NOISE[0])
    make_run(sweep / "21", "precision=mxfp4_sr", "seed=0", twin, losses=losses, summary=ended)
    row = verdicts(capsys, sweep)["by_name"]["mxfp4_sr"]
    assert (row["verdict"], row["diverged_seeds"], row["controlled"]) == ("inconclusive", [0], True)


def test_a_lost_job_is_identified_by_its_config(tmp_path, capsys):
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


def described(jobs):
    return json.dumps({"jobs": [{"number": n, "words": words.split(), "key": str(n)} for n, words in enumerate(jobs)]})


def test_a_level_matches_in_any_notation_of_its_number(tmp_path, capsys):
    """Only the overrides of these jobs are known: no run has their model."""
    key = "optim.learning_rate"
    sweep = make_sweep(tmp_path / "s", {f"{key}=1e-3": 0.0, f"{key}=0.01": 0.0})
    jobs = [f"{key}={value} seed={seed}" for value in ("1e-3", "1e-2") for seed in range(3)]
    lost = [f"{key}={value} model=llama_small seed=1" for value in ("1e-2", "0.0010", "4e-2", "step_law")]
    (sweep / "sweep.json").write_text(described([*jobs, *lost]))
    told = verdicts(capsys, sweep, "--baseline", f"{key}=1e-3", expect=2)["stderr"]
    (line,) = (line for line in told.splitlines() if "has no verdict" in line)
    assert line == f"  - {key}=4e-2: has no verdict: none of its runs is finished (seed 1)."


def test_integers_and_equal_floats_are_one_level(tmp_path, capsys):
    key = "optim.weight_decay"
    sweep = make_sweep(tmp_path / "s", {f"{key}=0.5": 0.0, f"{key}=1.0": 0.0})
    lost = [f"{key}=1 seed=3", f"{key}=2 seed=4"]
    jobs = [f"{key}={value} seed={seed}" for value in (0.5, 1) for seed in range(3)]
    make_run(sweep / "20", f"{key}=0.5", "seed=3", noise=0.3)
    about = json.loads(described([*jobs, *lost]))
    about["jobs"].append({"number": 20, "words": [f"{key}=0.5", "seed=3"], "key": "20"})
    (sweep / "sweep.json").write_text(json.dumps(about))
    found = verdicts(capsys, sweep, expect=2)
    assert found["by_name"]["weight_decay=1.0"]["missing_seeds"] == [3]
    (line,) = (line for line in found["stderr"].splitlines() if "has no verdict" in line)
    assert line == f"  - {key}=2.0: has no verdict: none of its runs is finished (seed 4)."


def test_a_run_whose_records_begin_later_has_no_time_to_loss(tmp_path, capsys):
    sweep = make_sweep(tmp_path / "s", {"precision=bf16": 0.0, "precision=mxfp8": -0.01})
    for number in (3, 4, 5):
        lines = (sweep / str(number) / "metrics.jsonl").read_text().splitlines(keepends=True)
        (sweep / str(number) / "metrics.jsonl").write_text("".join(lines[60:]))  # resume=PATH, into this folder
        rewritten(sweep / str(number))
    found = verdicts(capsys, sweep)
    assert found["by_name"]["mxfp8"]["time_to_loss"]["pairs"] == 0
    assert "was resumed from another folder at step 51" in " ".join(found["notes"])


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        '{"jobs":[{"number":7,"key":"a"}]}',
        *(pytest.param(text, marks=FULL) for text in ("{}", "null", '{"jobs":5}', '{"jobs":[5]}')),
    ],
)
def test_beside_a_sweeps_file_of_another_form_nothing_is_lossless(content, tmp_path, capsys):
    sweep = make_sweep(tmp_path / "s", {"precision=bf16": 0.0, "precision=mxfp8": 0.0})
    assert verdicts(capsys, sweep)["by_name"]["mxfp8"]["verdict"] == "lossless"
    (sweep / "sweep.json").write_text(content)
    found = verdicts(capsys, sweep, expect=2)
    assert f"{sweep / 'sweep.json'}: cannot be read, so missing jobs cannot be detected" in found["stderr"]
    row = found["by_name"]["mxfp8"]  # a missing seed may be one that was lossy
    assert (row["verdict"], row["damaged"]) == ("inconclusive", [str(sweep / "sweep.json")])
    assert main(["compare", str(sweep)]) == 2
    assert "sweep.json is damaged, so no recipe is called lossless" in " ".join(capsys.readouterr().out.split())
