"""`compare --best-of`: each recipe at its own best rate, chosen by seeds that are not judged."""

import shutil

import pytest
from run_folders import curve, main, make_run, verdicts

RATES = ["1e-3", "2e-3", "4e-3"]
BEST = {"adamw": "2e-3", "muon": "4e-3"}


@pytest.fixture
def sweep(tmp_path):
    """Two optimizers, three rates, four seeds; at seed 0 each is best at the rate of BEST, at others at another."""
    for optim in BEST:
        for rate in RATES:
            for seed in range(4):
                chosen = rate == BEST[optim]
                gap = (0.0 if chosen else 0.2) if seed == 0 else (0.05 if chosen else 0.0)
                gap += 0.02 if optim == "muon" and seed else 0.0
                words = [f"optim={optim}", f"optim.learning_rate={rate}", f"seed={seed}"]
                noise = 0.1 * seed + 1e-4 * (seed % 2) * (optim == "muon")
                make_run(tmp_path / "s" / f"{optim}-{rate}-{seed}", *words, gap=gap, noise=noise)
    return tmp_path / "s"


def test_recipes_are_judged_at_the_rates_that_other_seeds_chose(sweep, capsys):
    found = verdicts(capsys, sweep, "--best-of", "optim.learning_rate", "--baseline", "optim=adamw")
    assert found["selection"]["seeds"] == [0]
    assert {each["recipe"]: each["value"] for each in found["selection"]["choices"]} == {
        "optim=adamw": 0.002, "optim=muon": 0.004,
    }  # fmt: skip
    for each in found["selection"]["choices"]:
        assert len(each["losses"]) == 3
        assert min(each["losses"].values()) == pytest.approx((curve(95) + curve(100)) / 2, abs=1e-3)
    (row,) = found["verdicts"]
    assert (row["name"], row["pairs"], row["controlled"]) == ("muon", 3, True)
    assert row["gap"] == pytest.approx(0.02 * 0.975, abs=2e-4)  # of seeds 1 to 3, not of the one that chose
    assert {run["seed"] for run in found["runs"]} == {1, 2, 3}
    notes = "\n".join(found["notes"])
    assert "by the loss at seed 0; verdicts are over the other seeds" in notes
    assert "optim=muon: learning_rate=0.004 of 0.001: 3.2" in notes
    assert notes.count("It is the last of the grid") == 1


def test_other_seeds_choose_other_rates(sweep, capsys):
    found = verdicts(capsys, sweep, "--best-of", "optim.learning_rate", "--choose-by", "2,3")
    assert found["selection"]["seeds"] == [2, 3]
    assert {each["value"] for each in found["selection"]["choices"]} == {0.001}
    assert {run["seed"] for run in found["runs"]} == {0, 1}


def test_a_rate_chosen_outside_the_factor_is_part_of_it(tmp_path, capsys):
    for precision, best in (("bf16", "1e-3"), ("mxfp8", "2e-3")):
        for rate in RATES[:2]:
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
                make_run(folder, *words, losses=losses, summary=summary if lost else None)
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


def test_where_all_diverged_nothing_is_chosen(sweep, capsys):
    for rate in RATES:
        diverge(sweep, "muon", rate, 0)
    words = ["compare", str(sweep), "--best-of", "optim.learning_rate", "--choose-by", "0"]
    assert main(words) == 2
    told = capsys.readouterr().err
    assert "optim=muon: no learning_rate can be chosen, all diverged (0.001: diverged, 0.002: diverged, 0" in told
    assert "Try lower values, or give other --choose-by seeds." in told


def test_a_choice_that_diverged_at_judging_seeds_says_so(sweep, capsys):
    diverge(sweep, "adamw", BEST["adamw"], 2)
    found = verdicts(capsys, sweep, "--best-of", "optim.learning_rate", "--choose-by", "0")
    assert "At seed 2, which chose nothing, it diverged." in "\n".join(found["notes"])


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("--best-of optim.learning_rat", "'optim.learning_rat' does not vary over these runs. Did you mean"),
        ("--best-of optim.name", "'optim.name' holds no numbers"),
        ("--best-of optim.learning_rate --choose-by 9", "has no finished run of optim=adamw at 0.001 and seed 9"),
        ("--best-of optim.learning_rate --choose-by 0,1,2,3", "Run others: optim=adamw optim.learning_rate="),
        ("--best-of optim.learning_rate --choose-by all", "must be seeds, such as 0 or 0,1"),
        ("--choose-by 0", "says by which seeds --best-of KEY chooses"),
    ],
)  # fmt: skip
def test_what_cannot_be_chosen_is_said(sweep, capsys, words, text):
    assert main(["compare", str(sweep), *words.split()]) == 2
    assert text in capsys.readouterr().err
