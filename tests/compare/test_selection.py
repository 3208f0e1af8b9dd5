"""`compare --best-of`: each recipe at its own best rate, chosen by seeds that are not judged."""

import json
import math
import shlex
import shutil
from pathlib import Path

import pytest

from lightning_llm.compare.looks import declare
from lightning_llm.compare.terms import Terms
from lightning_llm.compare.tuned import plateau
from lightning_llm.tracking.sweep_definition import command_with_values
from tests.compare.run_folders import curve, main, make_run, verdicts

pytestmark = pytest.mark.usefixtures("undrawn")
RATES = ["1e-3", "2e-3", "4e-3", "8e-3"]
BEST = {"adamw": "2e-3", "muon": "4e-3"}
"""Of seed 0; of the other seeds it is the other's."""


@pytest.fixture
def sweep(made, tmp_path):
    """A copy of `made` that a test may change."""
    return Path(shutil.copytree(made, tmp_path / "s"))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Two optimizers, four rates, four seeds; at seed 0 each is best at the rate of BEST, at others at another."""
    folder = tmp_path_factory.mktemp("made") / "s"
    for optim in BEST:
        for rate in RATES:
            for seed in range(4):
                chosen, end = rate == BEST[optim], rate in (RATES[0], RATES[-1])
                gap = 0.3 if end else (0.0 if chosen else 0.2) if seed == 0 else (0.05 if chosen else 0.0)
                gap += 0.02 if optim == "muon" and seed else 0.0
                words = [f"optim={optim}", f"optim.learning_rate={rate}", f"seed={seed}"]
                noise = 0.1 * seed + 1e-4 * (seed % 2) * (optim == "muon")
                make_run(folder / f"{optim}-{rate}-{seed}", *words, gap=gap, noise=noise)
    return folder


def test_recipes_are_judged_at_the_rates_that_other_seeds_chose(sweep, capsys):
    found = verdicts(capsys, sweep, "--best-of", "optim.learning_rate", "--baseline", "optim=adamw")
    assert found["selection"]["seeds"] == [0]
    assert {each["recipe"]: each["value"] for each in found["selection"]["choices"]} == {
        "optim=adamw": 0.002, "optim=muon": 0.004,
    }  # fmt: skip
    for each in found["selection"]["choices"]:
        assert len(each["losses"]) == 4
        assert min(each["losses"].values()) == pytest.approx((curve(95) + curve(100)) / 2, abs=1e-3)
    (row,) = found["verdicts"]
    assert (row["name"], row["pairs"], row["controlled"]) == ("muon", 3, True)
    assert row["gap"] == pytest.approx(0.02 * 0.975, abs=2e-4)  # of seeds 1 to 3, not of the one that chose
    assert {run["seed"] for run in found["runs"]} == {1, 2, 3}
    notes = "\n".join(found["notes"])
    assert "by the loss at seed 0; verdicts are over the other seeds" in notes
    assert "optim=muon: best at learning_rate=0.004 (loss 3.3" in notes
    assert "a factor of " in notes
    assert "Over all seeds the loss is within the margin of its best from 0.00" in notes
    assert not any("To compare each at its best value" in note for note in found["notes"])


def test_each_setting_has_a_best_of_its_own_and_its_own_baseline(tmp_path, capsys):
    """Two widths with different best rates, also of adamw: it is one recipe in both, and the baseline in both."""
    best = {(96, "adamw"): "2e-3", (96, "muon"): "4e-3", (192, "adamw"): "4e-3", (192, "muon"): "2e-3"}
    for (width, optim), rate in best.items():
        for tried in RATES:
            for seed in range(3):
                gap = (0.0 if tried == rate else 0.5) + (0.02 if optim == "muon" else 0.0)
                words = [f"optim={optim}", f"optim.learning_rate={tried}", f"seed={seed}", f"model.hidden_size={width}"]
                noise = 0.1 * seed + width / 1000 + 1e-4 * seed * (optim == "muon")
                make_run(tmp_path / "s" / f"{width}-{optim}-{tried}-{seed}", *words, gap=gap, noise=noise)
    found = verdicts(capsys, tmp_path / "s", "--best-of", "optim.learning_rate", "--baseline", "optim=adamw")
    assert [(row["name"], row["setting"]["model.hidden_size"]) for row in found["verdicts"]] == [
        ("muon", 96), ("muon", 192),
    ]  # fmt: skip
    for row in found["verdicts"]:
        assert (row["baseline"], row["pairs"], row["controlled"]) == ("adamw", 2, True)
        assert row["gap"] == pytest.approx(0.02 * 0.975, abs=3e-4)


def test_a_plateau_says_whose_it_is_where_the_choosing_seed_chose_another_value(sweep, capsys):
    asked = ("--best-of", "optim.learning_rate", "--baseline", "optim=adamw", "--choose-by", "1")
    notes = "\n".join(verdicts(capsys, sweep, *asked)["notes"])
    assert "optim=muon: best at learning_rate=0.002 " in notes
    assert notes.count("Over all seeds the loss is within the margin of its best, 0.004, from 0.00") == 1
    assert notes.count("Over all seeds the loss is within the margin of its best, 0.002, from 0.00") == 1


def test_lossy_at_the_chosen_rates_alone_is_not_lossy(sweep, capsys):
    """At 2e-3, which its choosing seed did not choose, muon is better than adamw at the rate it chose."""
    found = verdicts(capsys, sweep, "--best-of", "optim.learning_rate", "--baseline", "optim=adamw")
    (row,) = found["verdicts"]
    assert (row["loss_verdict"], row["verdict"]) == ("lossy", "inconclusive")
    assert row["qualified"] == "inconclusive (lossy at the chosen values alone)"
    assert row["tuned"]["because"] == [{"whose": "own", "value": 0.002}]
    assert (
        "lossy at learning_rate=0.004, but not shown to be lossy at its own 0.002: the best value is not known"
        in row["line"]
    )


def test_lossless_at_the_chosen_rates_alone_is_not_lossless(sweep, capsys):
    """Held against muon at the rate that it chose, adamw is better; against muon at 2e-3 it is not."""
    found = verdicts(capsys, sweep, "--best-of", "optim.learning_rate", "--baseline", "optim=muon")
    (row,) = found["verdicts"]
    assert (row["loss_verdict"], row["verdict"]) == ("lossless", "inconclusive")
    assert row["tuned"]["because"] == [{"whose": "baseline's", "value": 0.002}]


def test_decisions_supported_by_the_whole_grid_are_kept(sweep, capsys):
    words = [sweep, "--best-of", "optim.learning_rate", "--choose-by", "0,1,2"]
    words += ["--baseline", "optim=adamw", "--margin", "0.001"]
    for seed in (4, 5, 6):  # at which both are best where the sum of the first three says
        for optim in BEST:
            for rate in RATES:
                gap = 0.1 * abs(RATES.index(rate) - RATES.index(BEST[optim])) + 0.02 * (optim == "muon")
                words_of = [f"optim={optim}", f"optim.learning_rate={rate}", f"seed={seed}"]
                noise = 1e-5 * (seed % 2) * (optim == "muon")
                make_run(sweep / f"{optim}-{rate}-{seed}", *words_of, gap=gap, noise=noise)
    for seed in (3,):
        for folder in sweep.glob(f"*-{seed}"):
            shutil.rmtree(folder)
    row = verdicts(capsys, *words)["by_name"]["muon"]
    assert (row["verdict"], row["tuned"]["withheld"]) == ("lossy", None)


def test_a_best_rate_at_the_end_of_the_grid_is_not_judged(sweep, capsys):
    words = ["compare", str(sweep), "--best-of", "optim.learning_rate"]
    for folder in sweep.glob("muon-8e-3-*"):
        shutil.rmtree(folder)
    assert main([*words, "--baseline", "optim=muon"]) == 2
    told = capsys.readouterr().err
    assert "optim=muon (at 0.004) is best at the largest value of the grid" in told
    assert "Extend the grid above, for example to 0.008." in told
    assert "fewer than two recipes have their best value inside the grid" in told
    for folder in sweep.glob("adamw-[48]e-3-*"):
        shutil.rmtree(folder)
    for folder in sweep.glob("muon-4e-3-*"):
        shutil.rmtree(folder)
    assert main([*words, "--baseline", "optim=muon"]) == 2
    (line, _) = (each for each in capsys.readouterr().err.splitlines() if "--best-of optim" in each)
    assert "optim=adamw (at 0.002) and optim=muon (at 0.002) are best at the largest value" in line


@pytest.mark.full
def test_best_of_is_not_suggested_with_declared_looks(sweep, capsys):
    design = declare((3, 4), tuple(range(4)), Terms(), "linear", 7, None)
    (sweep / "sweep.json").write_text(json.dumps({"jobs": [], "sequential": design.as_data()}))
    found = verdicts(capsys, sweep)
    assert found["sequential"] is not None
    assert not any("--best-of" in each for each in found["notes"])
    found = verdicts(capsys, sweep, "--margin", "0.02")  # no look of those that were declared
    assert found["sequential"] is None
    assert sum("--best-of optim.learning_rate --margin 0.02" in each for each in found["notes"]) == 1


@pytest.mark.full
def test_a_comparison_over_a_grid_of_rates_suggests_best_of(sweep, capsys):
    (note,) = (each for each in verdicts(capsys, sweep)["notes"] if "To compare each at its best value" in each)
    program, *words = shlex.split(note.partition("best value: ")[2])
    assert program.endswith("lightning-llm")
    assert main(words) == 0
    told = capsys.readouterr().out
    assert "optim against adamw " in told
    assert "Choose another with --baseline optim=muon." in told
    given = [
        "--metric", "val_loss/code", "--margin", "0.5", "--confidence", "0.9", "--tail", "0.3", "--target", "3.5",
        "--baseline", "optim=muon",
    ]  # fmt: skip
    asked = verdicts(capsys, sweep, *given[:-1], "optim=muon (learning_rate=0.004)")
    (note,) = (each for each in asked["notes"] if "To compare each at its best value" in each)
    pasted = shlex.split(note.partition("best value: ")[2])[2:]
    found = verdicts(capsys, *pasted)
    assert found["baseline"] == "muon"
    same = verdicts(capsys, sweep, "--best-of", "optim.learning_rate", *given)
    assert [found[key] for key in ("verdicts", "selection")] == [same[key] for key in ("verdicts", "selection")]
    assert (found["metric"], found["margin"], found["confidence"]) == ("val_loss/code", 0.5, 0.9)
    asked = verdicts(capsys, sweep, "--baseline", "optim.learning_rate=2e-3")  # the rate is the factor
    assert not any("To compare each at its best value" in each for each in asked["notes"])
    for folder in sweep.glob("*-[18]e-3-*"):
        shutil.rmtree(folder)
    notes = verdicts(capsys, sweep)["notes"]
    assert not any("To compare each at its best value" in each for each in notes)  # both are at an end


def test_the_grid_is_extended_by_a_command_that_repeats_nothing(sweep, tmp_path):
    begun = {"overrides": ["recipe=sweep/optimizers", "optim.learning_rate=1e-3,2e-3"], "config_dir": None}
    (tmp_path / "s" / "sweep.json").write_text(json.dumps({"jobs": [], "typed": [begun]}))
    command = command_with_values(tmp_path / "s", "optim.learning_rate", [0.016], [0, 1])
    assert "recipe=sweep/optimizers optim.learning_rate=0.016 seed=0,1 run.name=s" in command


def test_the_plateau_is_where_the_loss_is_within_the_margin():
    losses = {1e-3: 3.1, 2e-3: 3.0, 4e-3: 3.0 + 0.005, 8e-3: 3.2}
    low, high = plateau(losses, 0.01)
    assert low == pytest.approx(2e-3 * 0.5**0.1)  # a tenth of the way, in the logarithm, up to 3.1
    assert high == pytest.approx(4e-3 * 2 ** (0.005 / 0.195))
    assert plateau({1e-3: 3.0, 2e-3: 3.001}, 0.01) == (1e-3, 2e-3)
    assert plateau({1e-3: math.inf, 2e-3: 3.0, 4e-3: math.inf}, 0.01) == (2e-3, 2e-3)
    assert plateau({1e-3: math.inf}, 0.01) is None


def test_other_seeds_choose_other_rates(sweep, capsys):
    words = ["--best-of", "optim.learning_rate", "--choose-by", "2,3", "--baseline", "optim=adamw"]
    found = verdicts(capsys, sweep, *words)
    assert found["selection"]["seeds"] == [2, 3]
    assert {each["recipe"]: each["value"] for each in found["selection"]["choices"]} == {
        "optim=adamw": 0.004, "optim=muon": 0.002,
    }  # fmt: skip
    assert {run["seed"] for run in found["runs"]} == {0, 1}
    found = verdicts(capsys, sweep, *words[:2], "--choose-by", "all", "--baseline", "optim=adamw")
    assert found["selection"]["seeds"] == [0, 1, 2, 3]
    assert found["verdicts"][0]["pairs"] == 4
    assert "verdicts are over all of them" in "\n".join(found["notes"])


def test_a_rate_chosen_outside_the_factor_is_part_of_it(tmp_path, capsys):
    for precision, best in (("bf16", "2e-3"), ("mxfp8", "4e-3")):
        for rate in RATES:
            for seed in range(3):
                words = [f"precision={precision}", f"optim.learning_rate={rate}", f"seed={seed}"]
                make_run(tmp_path / "s" / f"{precision}{rate}{seed}", *words, gap=0.0 if rate == best else 0.1)
    found = verdicts(capsys, tmp_path / "s", "--best-of", "optim.learning_rate")
    (row,) = found["verdicts"]
    assert (found["factor"], found["baseline"], row["name"], row["controlled"]) == ("precision", "bf16", "mxfp8", True)


def test_a_diverged_rate_is_never_the_best(sweep, capsys):
    summary = {"status": "diverged", "steps": 40}
    for seed in (7, 8):
        for optim in BEST:
            for rate in RATES:
                lost = rate == BEST[optim]
                words = [f"optim={optim}", f"optim.learning_rate={rate}", f"seed={seed}"]
                losses = {5: 3.0, 10: float("nan")} if lost else None
                folder = sweep / f"{optim}-{rate}-{seed}"
                gap = 0.0 if rate in BEST.values() else 0.1
                make_run(folder, *words, gap=gap, losses=losses, summary=summary if lost else None)
    found = verdicts(capsys, sweep, "--best-of", "optim.learning_rate", "--choose-by", "7")
    for each in found["selection"]["choices"]:
        rate = BEST[each["recipe"].removeprefix("optim=")]
        assert each["losses"][str(float(rate))] is None
        assert each["value"] != float(rate)


def diverge(sweep, optim, rate, seed):
    words = [f"optim={optim}", f"optim.learning_rate={rate}", f"seed={seed}"]
    shutil.rmtree(sweep / f"{optim}-{rate}-{seed}")
    losses, summary = {5: 3.0, 10: float("nan")}, {"status": "diverged", "steps": 40}
    make_run(sweep / f"{optim}-{rate}-{seed}", *words, losses=losses, summary=summary)


def test_no_value_is_chosen_if_all_diverged(sweep, capsys):
    for rate in RATES:
        diverge(sweep, "muon", rate, 0)
    words = ["compare", str(sweep), "--best-of", "optim.learning_rate", "--choose-by", "0"]
    assert main(words) == 2
    told = capsys.readouterr().err
    assert "optim=muon: no learning_rate can be chosen, all diverged (diverged at 0.001, diverged at 0.002, " in told
    assert "Try lower values, or choose other --choose-by seeds." in told


def test_a_choice_that_diverged_at_judging_seeds_says_so(sweep, capsys):
    diverge(sweep, "adamw", BEST["adamw"], 2)
    found = verdicts(capsys, sweep, "--best-of", "optim.learning_rate", "--choose-by", "0")
    assert "At the judging seed 2 it diverged." in "\n".join(found["notes"])


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("--best-of optim.learning_rat", "'optim.learning_rat' does not vary over these runs. Did you mean"),
        ("--best-of optim.name", "'optim.name' is not numeric"),
        ("--best-of optim.learning_rate --choose-by 9", "has no finished run of optim=adamw at 0.001 and seed 9"),
        ("--best-of optim.learning_rate --choose-by 0,1,2,3", "Run other seeds of optim=adamw optim.learning_rate="),
        ("--best-of optim.learning_rate --choose-by some", "must be seeds such as 0 or 0,1, or all"),
        ("--choose-by 0", "requires --best-of KEY"),
    ],
)  # fmt: skip
def test_invalid_baselines_are_reported(sweep, capsys, words, text):
    assert main(["compare", str(sweep), *words.split()]) == 2
    assert text in capsys.readouterr().err


@pytest.mark.full
def test_a_margin_in_tokens_is_tested_over_the_whole_grid(sweep, capsys):
    """The baseline's other lengths have the same slope at each seed here, so that the two margins are one."""
    for steps in (50, 200):
        for rate in RATES[:3]:
            for seed in range(4):
                words = ["optim=adamw", f"optim.learning_rate={rate}", f"seed={seed}", f"trainer.max_steps={steps}"]
                gap = 0.0 if rate == BEST["adamw"] else 0.3
                make_run(sweep / f"{steps}-{rate}-{seed}", *words, gap=gap, noise=0.1 * seed, steps=steps)
    words = ("--best-of", "optim.learning_rate", "--baseline", "optim=adamw")
    seen = set()
    for margin in ("1%", "50%"):
        (tokens,) = verdicts(capsys, sweep, *words, "--margin", margin)["verdicts"]
        (nats,) = verdicts(capsys, sweep, *words, "--margin", repr(tokens["margin"]))["verdicts"]
        assert tokens["token_margin"] == float(margin[:-1]) / 100
        assert (tokens["verdict"], tokens["tuned"]) == (nats["verdict"], nats["tuned"])
        assert tokens["ci"] == pytest.approx(nats["ci"])
        seen.add((tokens["verdict"], tokens["tuned"]["withheld"]))
    assert len(seen) > 1
