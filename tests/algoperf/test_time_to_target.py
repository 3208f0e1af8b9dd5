"""AlgoPerf's score, `compare --time-to-target`, and time to a target where runs never arrive."""

import json
import math
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from lightning_llm.algoperf import median_times, profiles, ratios, scores
from lightning_llm.compare.runs.pairing import Pair
from lightning_llm.compare.time_to_target import Reached, of_times, read_targets, time_to_target
from lightning_llm.compare.time_to_target import reached as first_at
from lightning_llm.tracking.reading import Run
from tests.compare.run_folders import STEP_TOKENS, main, make_run, refusal, verdicts

pytestmark = pytest.mark.usefixtures("undrawn")
WORKLOADS = {"a": (4.4, 3.9), "b": (3.0, 2.6), "c": (2.5, 2.3)}
"""{name: (target, where curves end)}."""


def table(last: int, sgd: float) -> dict:
    """Return steps to target of curves over `last` steps; `sgd`: that one's rate on the first workload.

    The same curves were given to mlcommons' `scoring/performance_profile.py` (algorithmic-efficiency at 2c90454f), with
    3 base workloads, 3 studies and 2 trials in place of its numbers, min_tau 1, max_tau 4, 100 points; what it returned
    is below.
    """
    rates = {"a": (0.020, 0.031, sgd), "b": (0.016, 0.009, 0.004), "c": (0.012, 0.014, 0.0035)}
    steps = np.arange(10, last + 1, 10)
    times: dict = {}
    for (place, name), workload, study, trial in product(
        enumerate(("adamw", "muon", "sgd")), WORKLOADS, range(3), range(2)
    ):
        target, end = WORKLOADS[workload]
        rate = rates[workload][place] * (1 + 0.13 * ((study * 7 + trial * 3 + place) % 4 - 1.5) / 1.5)
        reached = steps[np.round(end + (6 - end) * np.exp(-rate * steps), 6) <= target]
        studies = times.setdefault(name, {}).setdefault(workload, {})
        studies.setdefault(study, []).append(float(reached[0]) if len(reached) else math.inf)
    return times


@pytest.mark.parametrize(
    ("last", "sgd", "medians", "scored", "rho"),
    [
        (
            200, 0.011,
            {"adamw": [70, 120, math.inf], "muon": [50, math.inf, 190], "sgd": [130, math.inf, math.inf]},
            {"adamw": 0.6212121212121204, "muon": 0.6666666666666657, "sgd": 0.15656565656565666},
            {"adamw": [1 / 3, 1 / 3, 2 / 3, 2 / 3, 2 / 3], "muon": [2 / 3] * 5, "sgd": [0, 0, 0, 1 / 3, 1 / 3]},
        ),
        (  # of the third 230 steps are above 4 times the fastest
            400, 0.0062,
            {"adamw": [70, 120, 220], "muon": [50, 220, 190], "sgd": [230, math.inf, math.inf]},
            {"adamw": 0.936026936026936, "muon": 0.9074074074074073, "sgd": 0.0},
            {"adamw": [1 / 3, 2 / 3, 1, 1, 1], "muon": [2 / 3, 2 / 3, 1, 1, 1], "sgd": [0] * 5},
        ),
    ],
)  # fmt: skip
def test_the_score_is_mlcommons_own(last, sgd, medians, scored, rho):
    found = median_times(table(last, sgd))
    assert {name: list(each.values()) for name, each in found.items()} == medians
    tau, shares = profiles(ratios(found))
    assert (tau[0], tau[-1], len(tau)) == (1, 4, 100)
    for name in medians:
        assert scores(found)[name] == pytest.approx(scored[name], abs=1e-12)
        assert [shares[name][place] for place in (0, 10, 30, 60, 99)] == pytest.approx(rho[name])


def test_a_workload_without_any_finisher_does_not_count():
    medians = {"one": {"a": 10.0, "b": math.inf}, "two": {"a": 20.0, "b": math.inf}}
    assert scores(medians)["one"] == pytest.approx(0.5)
    exact = 0.5 * (4 - 2) / 3  # of the step at 2, which no point of the grid lies on
    assert scores(medians)["two"] == pytest.approx(exact, abs=0.5 / 99)


@pytest.fixture(scope="module")
def race(tmp_path_factory):
    """Two optimizers, rates, seeds and models: muon's faster run takes half the steps; on gla_tiny it misses."""
    folder = tmp_path_factory.mktemp("outputs") / "race"
    runs = product(("llama_tiny", "gla_tiny"), ("adamw", "muon"), ("1e-3", "2e-3"), (0, 1))
    for number, (model, optim, rate, seed) in enumerate(runs):
        speed = (2 if optim == "muon" else 1) * (0.5 if rate == "1e-3" else 1)
        never = model == "gla_tiny" and optim == "muon"
        losses = {step: 5.0 if never else 5 - 0.02 * speed * step for step in range(5, 101, 5)}
        words = [f"model={model}", f"optim={optim}", f"optim.learning_rate={rate}", f"seed={seed}"]
        make_run(folder / str(number), *words, losses=losses)
    return folder


def test_runs_are_scored_over_settings_trials_and_seeds(race, capsys):
    words = ["--target", "4.0", "--baseline", "optim=adamw", "--json"]
    assert main(["algoperf", str(race), *words]) == 0
    printed = capsys.readouterr().out
    assert main(["compare", str(race), "--time-to-target", *words]) == 0  # as in earlier releases
    out, err = capsys.readouterr()
    assert out == printed
    assert err.startswith("note   compare --time-to-target: deprecated, use `lightning-llm algoperf` instead\n")
    found = json.loads(printed)
    assert (found["submissions"], found["trial_keys"]) == (["adamw", "muon"], ["optim.learning_rate"])
    assert found["targets"] == {"model=llama_tiny": 4.0, "model=gla_tiny": 4.0}
    assert found["medians"]["steps"] == {
        "adamw": {"model=llama_tiny": 50, "model=gla_tiny": 50},
        "muon": {"model=llama_tiny": 25, "model=gla_tiny": None},
    }
    assert found["medians"]["tokens"]["adamw"]["model=llama_tiny"] == 50 * STEP_TOKENS
    assert found["scores"]["steps"]["adamw"] == pytest.approx((2 / 3 + 1) / 2, abs=0.5 / 99)
    assert found["scores"]["steps"]["muon"] == pytest.approx(0.5)
    assert "Seconds are noisy" in " ".join(found["notes"])
    assert json.loads((race / "compare" / "time_to_target.json").read_text())["scores"] == found["scores"]
    words = ["--target", "model=llama_tiny:4.0", "--target", "model=gla_tiny:4.95", "--baseline", "optim=adamw"]
    assert main(["algoperf", str(race), *words]) == 0
    printed = capsys.readouterr().out
    assert "steps to 4.95: model=gla_tiny" in printed
    assert "never" in printed


def test_unequal_numbers_of_trials_are_reported(race, capsys, tmp_path):
    (tmp_path / "s").mkdir()
    for run in race.iterdir():
        if run.name not in ("3", "compare"):
            (tmp_path / "s" / run.name).symlink_to(run)
    said = refusal(capsys, tmp_path / "s", "--target", "4", "--baseline", "optim=muon", verb="algoperf")
    assert (
        "adamw: has fewer trials than others, model=llama_tiny at seed 1: 1 of 2: the scores are not comparable."
        in said
    )


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("--time-to-target", "no target is given for 'model=llama_tiny'. Use --target 'model=llama_tiny:VALUE'."),
        ("--time-to-target", "The runs' best val_loss: model=llama_tiny from 1 to 4"),
        ("--time-to-target --target fast", "=fast: must be a number above 0 such as 4.4, or SETTING:NUMBER"),
        ("--time-to-target --target -1", "=-1: must be a number above 0"),
        (
            "--time-to-target --target model=gpt:4",
            "'model=gpt' is no setting of these runs. Allowed: 'model=llama_tiny'",
        ),
        ("--time-to-target --target 4 --trials optim.beta1", "'optim.beta1' does not vary over these runs"),
        ("--time-to-target --target 4 --best-of seed", "so --best-of has no effect"),
        ("--trials optim.learning_rate", "an option of `lightning-llm algoperf`"),
    ],
)
def test_unusable_benchmarks_are_refused(race, capsys, words, text):
    assert text in refusal(capsys, race, *words.split(), "--baseline", "optim=adamw")


def test_models_that_differ_in_their_blocks_alone_go_by_their_names(tmp_path, capsys):
    """As the workloads of `sweep/time_to_target`, which gives both one shape."""
    shape = ["num_layers=2", "hidden_size=64", "num_heads=2", "num_kv_heads=2", "ffn_hidden_size=172"]
    for number, (model, optim) in enumerate(product(("llama_tiny", "gla_tiny"), ("adamw", "muon"))):
        words = [f"model={model}", f"optim={optim}", *(f"model.{each}" for each in shape)]
        make_run(tmp_path / "race" / str(number), *words)
    targets = ["--target", "model=llama_tiny:4.4", "--target", "model=gla_tiny:4"]
    asked = ["algoperf", str(tmp_path / "race"), "--baseline", "optim=adamw", "--json"]
    assert main([*asked, *targets]) == 0
    assert json.loads(capsys.readouterr().out)["targets"] == {"model=llama_tiny": 4.4, "model=gla_tiny": 4.0}


def test_a_single_setting_has_no_name():
    (problem,) = read_targets(["model=foo:3"]).check([""])
    assert (
        problem.text == "'model=foo:3' names a setting, but these runs have only one, which needs no name: --target 3."
    )
    assert read_targets(["3"]).check([""]) == []


def reached(tokens: float, ended: float = 100.0) -> Reached:
    return Reached(tokens, tokens, tokens, ended)


@pytest.mark.parametrize(
    ("times", "low", "high", "words"),
    [
        ([(50, 40), (60, 40), (40, 40)], 1.25, 1.25, "1.25x"),
        ([(50, 40), (math.inf, 40), (44, 40)], 1.25, 1.25, "1.25x"),  # beyond the middle it does not matter
        ([(math.inf, 40), (math.inf, 50), (44, 40)], 2.0, math.inf, ">= 2.00x"),
        ([(40, math.inf), (50, math.inf), (44, 40)], 0.0, 0.5, "<= 0.50x"),
        ([(math.inf, math.inf)], 0.0, math.inf, "unknown"),
    ],
)
def test_a_run_that_misses_the_target_bounds_the_ratio(times, low, high, words):
    found = of_times([(reached(ours), reached(theirs)) for ours, theirs in times], 4.0, 0.95)
    assert (found.low, found.high, found.text) == (pytest.approx(low), pytest.approx(high), words)


def test_without_a_difference_slower_is_as_likely_as_faster():
    """Times of one law on both sides, a third of them never: the ratio leans to neither side, and the test holds 5 %.

    Of the pairs that both arrived alone the earlier half would be faster for whichever side misses more.
    """
    rng = np.random.default_rng(0)
    found = []
    for _ in range(1500):
        drawn = rng.lognormal(4, 0.5, (7, 2))
        drawn[drawn > 70] = math.inf
        found.append(of_times([(reached(a, 70), reached(b, 70)) for a, b in drawn], 4.0, 0.95))
    slower, faster = sum(each.low > 1 for each in found), sum(each.high < 1 for each in found)
    assert abs(slower - faster) < 3 * math.sqrt(slower + faster)
    assert np.mean([each.p <= 0.05 for each in found]) <= 0.05
    held = [each.interval[0] <= 1 <= each.interval[1] for each in found if each.interval]
    assert len(held) == 1500  # 7 pairs are enough for an interval, and it holds
    assert np.mean(held) >= 0.95


def test_verdicts_have_the_time_to_a_target_censored(tmp_path, capsys):
    for seed in range(3):
        for place, (precision, floor) in enumerate((("bf16", 3.0), ("mxfp4_sr", 3.2))):
            losses = {step: floor + 3 * math.exp(-step / 20) + 1e-4 * seed * place for step in range(5, 101, 5)}
            make_run(tmp_path / "s" / f"{place}{seed}", f"precision={precision}", f"seed={seed}", losses=losses)
    (row,) = verdicts(capsys, tmp_path / "s", "--target", "3.1")["verdicts"]
    found = row["time_to_target"]
    assert (found["arrived"], found["baseline_arrived"], found["tokens"]) == (0, 3, None)
    assert found["tokens_ratio_bounds"] == [pytest.approx(100 / 70), None]
    assert "tokens to 3.1: >= 1.43x the baseline's, reached by 0 of 3, the baseline's 3" in row["line"]


def test_a_target_met_before_the_first_step_takes_no_time():
    assert ratios({"one": {"w": 0.0}, "other": {"w": 0.0}, "third": {"w": 5.0}}) == {
        "one": {"w": 1.0},
        "other": {"w": 1.0},
        "third": {"w": math.inf},
    }


def test_the_median_of_six_pairs_lies_between_their_extremes_and_of_nine_a_pair_further_in():
    """By the binomial law of how many lie below it: 1 - 2 / 2^n, and 1 - 2 (1 + 9) / 2^9 for the second of nine."""

    def ratios_of(*found):
        return of_times([(reached(40 * each), reached(40)) for each in found], 4.0, 0.95)

    assert ratios_of(1.1, 1.2, 1.3, 1.4, 1.5).interval is None  # 0.9375
    six = ratios_of(1.4, 0.9, 1.2, 1.6, 1.0, 1.1)
    assert six.interval == pytest.approx((0.9, 1.6))
    assert (six.slower, six.faster, six.p) == (4, 1, pytest.approx(2 * 6 / 32))  # a ratio of 1 is neither
    nine = ratios_of(1.9, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7, 1.8)
    assert nine.interval == pytest.approx((1.2, 1.8))
    assert nine.p == pytest.approx(2 / 2**9)


def curve_of(losses, seed=0, lost=False):
    """A run with a validation every 10 steps, of 4 tokens each."""
    values = {10 * place: loss for place, loss in enumerate(losses, 1)}
    tokens, seconds = ({step: rate * step for step in values} for rate in (4, 0.5))
    summary = {"status": "failed", "detail": "NonFiniteError: ..."} if lost else {"status": "finished"}
    return Run(Path(), {"seed": seed}, summary, {"val_loss": values}, tokens, seconds, first_step=1)


@pytest.mark.parametrize(("target", "higher", "step"), [
    (3.5, False, 20), (3.4, False, 40), (2.9, False, math.inf), (4.0, True, 10), (4.1, True, math.inf),
])  # fmt: skip
def test_a_target_is_met_by_the_first_validation_that_is_at_it(target, higher, step):
    found = first_at(curve_of([4.0, 3.5, math.nan, 3.0, 3.2]), "val_loss", target, higher_is_better=higher)
    assert (found.steps, found.tokens, found.seconds) == (step, 4 * step, step / 2)
    assert found.ended_tokens == 200


def test_a_diverged_run_misses_the_target_up_to_the_other_runs_end():
    arrives, lost = curve_of([4.0, 3.0, 2.9, 2.8, 2.7]), curve_of([4.0, 3.5], lost=True)
    late = curve_of([4.0, 3.9, 3.8])
    slower = time_to_target([Pair(lost, arrives, {})], "val_loss", 3.0, 0.95)
    assert (slower.low, slower.high) == (pytest.approx(200 / 80), math.inf)
    faster = time_to_target([Pair(arrives, lost, {})], "val_loss", 3.0, 0.95)
    assert (faster.low, faster.high) == (0.0, pytest.approx(80 / 200))
    missed = time_to_target([Pair(late, arrives, {})], "val_loss", 3.0, 0.95)
    assert (missed.low, missed.arrived, missed.baseline_arrived) == (pytest.approx(120 / 80), 0, 1)
