"""Failures and spikes: exact rates and tests, outlier seeds; the error rates of verdicts over simulated sweeps."""

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import simulate_verdicts as simulation
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special, stats

from lightning_llm.compare.cost import time_ratio
from lightning_llm.compare.recorded_looks import FALSE_LOSSLESS_BY_LOOKS
from lightning_llm.compare.runs.pairing import Pair
from lightning_llm.compare.statistics.stability import (
    judge_spikes,
    judge_stability,
    mcnemar,
    outlier_seeds,
    rate_interval,
    sign_flip,
    upper_bound,
)
from lightning_llm.tracking.reading import Run
from tests.compare.run_folders import make_run, verdicts

SCENARIOS = {scenario.name: scenario for scenario in simulation.SCENARIOS}


@pytest.mark.parametrize(("failed", "runs"), [(0, 3), (1, 3), (3, 3), (2, 10), (1, 46)])
def test_rates_have_the_interval_of_clopper_and_pearson(failed, runs):
    theirs = stats.binomtest(failed, runs).proportion_ci(0.95, "exact")
    assert rate_interval(failed, runs) == pytest.approx((theirs.low, theirs.high))
    one_sided = stats.binomtest(failed, runs, alternative="less").proportion_ci(0.95, "exact")
    assert upper_bound(failed, runs) == pytest.approx(one_sided.high)


def brute_force(recipe_alone, baseline_alone, seeds, highest):
    """Sum over every fate of every seed: 1 the recipe alone, -1 the baseline alone, 0 neither or both."""

    def z(fates):
        a, b = fates.count(1), fates.count(-1)
        return (a - b) / math.sqrt(a + b) if a + b else 0.0

    seen = (recipe_alone - baseline_alone) / math.sqrt(recipe_alone + baseline_alone)
    worst = 0.0
    for r in np.linspace(0, highest * (1 - highest), 101)[1:]:
        chance = {1: r, -1: r, 0: 1 - 2 * r}
        fates = itertools.product((1, -1, 0), repeat=seeds)
        worst = max(worst, sum(math.prod(chance[f] for f in each) for each in fates if z(each) >= seen - 1e-9))
    return worst


@pytest.mark.parametrize(
    ("recipe", "baseline", "seeds"), [(1, 0, 1), (3, 0, 3), (2, 0, 3), (2, 1, 4), (4, 0, 5), (3, 1, 5)]
)
def test_mcnemars_test_is_what_counting_every_outcome_gives(recipe, baseline, seeds):
    assert mcnemar(recipe, baseline, seeds) == pytest.approx(brute_force(recipe, baseline, seeds, 0.3), rel=1e-3)
    assert mcnemar(baseline, recipe, seeds) == 1.0


@pytest.mark.parametrize(("seeds", "recipes"), [(3, 1), (3, 5), (5, 4), (10, 4)])
@pytest.mark.parametrize("rate", [0.02, 0.1, 0.3])
def test_arms_of_one_failure_rate_are_called_unstable_in_at_most_one_of_twenty_sweeps(seeds, recipes, rate):
    failed = np.random.default_rng(seeds).random((4000, recipes + 1, seeds)) < rate
    wrong = 0
    for arms in failed:
        fates = [[s for s in range(seeds) if arm[s]] for arm in arms]
        wrong += any(judge_stability(seeds, each, fates[0], recipes, 0.95).verdict == "unstable" for each in fates[1:])
    assert wrong / 4000 <= 0.05


def test_at_three_seeds_a_recipe_that_always_fails_is_unstable_beside_four_others():
    assert judge_stability(3, [0, 1, 2], [], 5, 0.95).verdict == "unstable"
    assert judge_stability(3, [0, 1], [], 1, 0.95).verdict == "open"
    assert not judge_stability(3, [0], [], 1, 0.95).allows_lossless
    assert judge_stability(3, [0], [1], 1, 0.95).allows_lossless  # so did the baseline
    assert judge_stability(46, [0], [], 1, 0.95).verdict == "as stable"
    assert judge_stability(45, [0], [], 1, 0.95).verdict == "open"


gaps = st.lists(st.floats(-0.02, 0.02), min_size=2, max_size=8)


@settings(max_examples=200, derandomize=True)
@given(near=gaps, far=st.floats(0.25, 5), favour=st.booleans())
def test_catastrophic_seeds_are_outliers_and_ordinary_scatter_is_not(near, far, favour):
    differences = dict(enumerate(near))
    assert outlier_seeds(differences, [], 0.01, 0.0) == []  # none is ten margins out
    differences[99] = -far if favour else far
    assert outlier_seeds(differences, [], 0.01, 0.0) == [99]
    assert outlier_seeds(differences, [], 0.01, floor=1.0) == []  # where rounding alone does that


def test_outliers_are_fewer_than_half_of_the_seeds():
    assert outlier_seeds({0: 0.001, 1: -0.002, 2: 0.9, 3: -0.8}, [], 0.01, 0.0) == []  # two of four
    assert outlier_seeds({0: 0.001, 1: -0.002, 5: 0.003, 2: 0.9, 3: -0.8}, [], 0.01, 0.0) == [2, 3]  # of five
    assert outlier_seeds({0: 0.001, 1: 0.9}, [0.001, 0.002], 0.01, 0.0) == []  # one of two


def test_no_failure_rate_bound_is_assumed_for_a_failing_baseline():
    """Up to 3 of 10 the common rate is at most 0.3; above, any is possible, and p is the larger for it."""
    often = judge_stability(10, [*range(8)], [0, 1, 2, 3], 1, 0.95)
    rarely = judge_stability(10, [*range(8)], [0, 1, 2], 1, 0.95)
    assert often.p == mcnemar(4, 0, 10, 0.5)
    assert rarely.p == mcnemar(5, 0, 10, 0.3)
    assert mcnemar(4, 0, 10, 0.5) > mcnemar(4, 0, 10, 0.3)
    assert mcnemar(5, 0, 10, 0.5) > mcnemar(5, 0, 10, 0.3)


def test_equally_large_differences_are_a_gap_not_outliers():
    assert outlier_seeds({0: 1.0, 1: 1.2, 2: 0.9}, [], 0.01, 0.0) == []
    assert outlier_seeds({0: 0.001, 1: 1.2, 2: 0.9}, [], 0.01, 0.0) == []  # the most: no outliers
    assert outlier_seeds({0: 0.001, 1: 0.9}, [], 0.01, 0.0) == []  # nothing to stand out from
    assert outlier_seeds({0: 0.001, 1: 0.002, 2: 0.9}, [0.5, 0.8, 0.6], 0.01, 0.0) == []


QUICK = [
    ("every run diverges at 5 %", 3), ("one recipe has a catastrophe at one seed", 5),
    ("curves wander (AR 0.9), 5 % diverge", 5),
]  # fmt: skip


@pytest.mark.parametrize(("name", "seeds"), QUICK)
def test_verdicts_are_wrong_in_at_most_one_of_twenty_sweeps(name, seeds):
    assert simulation.false_lossy(SCENARIOS[name], seeds, 150) <= 0.05
    assert simulation.false_lossless(SCENARIOS[name], seeds, 150) <= 0.05


@pytest.mark.full
@pytest.mark.parametrize("seeds", [3, 5, 10])
@pytest.mark.parametrize("name", SCENARIOS)
def test_verdicts_are_wrong_in_at_most_one_of_twenty_sweeps_of_many(name, seeds):
    assert simulation.false_lossy(SCENARIOS[name], seeds) <= 0.05
    assert simulation.false_lossless(SCENARIOS[name], seeds) <= 0.05


@pytest.mark.parametrize(("plan", "trials"), [(simulation.PLANS[0], 100), (simulation.PLANS[2], 60)])
def test_the_number_of_seeds_that_is_advised_mostly_decides(plan, trials):
    assert simulation.decided_as_planned(*plan, trials) >= 0.78


@pytest.mark.full
@pytest.mark.parametrize("plan", simulation.PLANS)
def test_the_number_of_seeds_that_is_advised_decides_with_the_probability_that_is_named(plan):
    assert 0.78 <= simulation.decided_as_planned(*plan, 2000) <= 0.97


@pytest.mark.parametrize(("looks", "rate"), FALSE_LOSSLESS_BY_LOOKS.items())
def test_repeated_looks_have_the_stated_error_rate(looks, rate):
    assert simulation.false_lossless_over_looks(looks[1]) == pytest.approx(rate, abs=0.006)


def made(losses):
    """A run with a validation every 10 steps of 100 tokens and 1 second each."""
    steps = range(10, 10 * len(losses) + 1, 10)
    found = dict(zip(steps, map(float, losses), strict=True))
    seen = {step: 100 * step for step in steps}
    return Run(Path(), {}, {}, {"val_loss": found}, seen, {step: float(step) for step in steps}, first_step=1)


def test_without_a_difference_time_to_loss_is_as_often_above_one_as_below():
    rng = np.random.default_rng(0)
    curve = 3 + 3 * np.exp(-np.arange(1, 41) / 8)
    ratios, to_the_baselines_last = [], []
    for _ in range(400):
        ours, theirs = (made(curve + 0.003 * rng.standard_normal() + 0.004 * rng.standard_normal(40)) for _ in "ab")
        ratio = time_ratio(Pair(ours, theirs, {}), "val_loss")
        ratios.append(math.log(ratio.tokens))
        assert ratio.seconds == pytest.approx(ratio.tokens)
        losses, target = ours.validations["val_loss"], theirs.validations["val_loss"][400]
        to_the_baselines_last.append(next((step / 400 for step in losses if losses[step] <= target), None))
    assert abs(np.mean(ratios)) < 3 * np.std(ratios) / math.sqrt(len(ratios))
    assert np.mean(np.array(ratios) > 0) == pytest.approx(0.5, abs=0.08)
    arrived = [each for each in to_the_baselines_last if each]
    assert max(arrived) <= 1  # as before: each that arrives does so in time
    assert np.mean(arrived) < 0.98


def test_time_to_loss_is_the_ratio_at_a_loss_that_both_reached():
    steady, slow = made([6 - 0.1 * n for n in range(30)]), made([6 - 0.05 * n for n in range(30)])
    assert time_ratio(Pair(slow, steady, {}), "val_loss").tokens == pytest.approx(300 / 155)
    assert time_ratio(Pair(steady, slow, {}), "val_loss").tokens == pytest.approx(155 / 300)
    assert time_ratio(Pair(made([math.nan]), steady, {}), "val_loss") is None


@pytest.mark.parametrize("values", [[1, 2, 3], [4, -1, 2, 7], [0, 0, 5, 1, -2], [-1, -2]])
def test_all_signs_of_spike_counts_are_enumerated(values):
    kept = [value for value in values if value]
    choices = itertools.product((1, -1), repeat=len(kept))
    every = [sum(s * abs(v) for s, v in zip(signs, kept, strict=True)) for signs in choices]
    share = sum(total >= sum(kept) for total in every) / len(every)
    assert sign_flip(np.array(values, dtype=float)) == pytest.approx(share if sum(kept) > 0 else 1.0)


def test_drawn_signs_come_near_what_the_normal_law_says():
    rng = np.random.default_rng(1)
    differences = rng.normal(0.4, 1, 40)
    z = differences.sum() / np.sqrt((differences**2).sum())
    assert sign_flip(differences) == pytest.approx(special.ndtr(-z), abs=0.01)


@pytest.mark.parametrize(
    ("counts", "verdict"),
    [
        ([(3, 0), (4, 0), (2, 0)], "more spikes"),  # McNemar's p of 3 of 3 is 0.009, below half of 5 %
        ([(30, 0), (0, 0), (0, 0)], "open"),  # one run that spiked thirty times is one run
        ([(5, 2), (6, 1), (4, 2), (7, 3), (9, 1), (5, 0)], "more spikes"),  # all signs equal: 1 / 64
        ([(2, 5), (1, 6), (2, 4)], "open"),
        ([(0, 0)] * 40, "as calm"),
        ([(0, 0)] * 20, "open"),
    ],
)
def test_a_recipe_has_more_spikes_by_its_counts_or_is_as_calm(counts, verdict):
    assert judge_spikes(dict(enumerate(counts)), 1000, 1, 0.95).verdict == verdict


@pytest.mark.parametrize("law", ["poisson", "clusters", "rare"])
@pytest.mark.parametrize("seeds", [3, 6, 10])
def test_equal_recipes_are_seldom_said_to_have_more_spikes(law, seeds):
    rng = np.random.default_rng(2)
    shape = (500, seeds, 2)
    mean = {"poisson": 4.0, "clusters": rng.gamma(0.2, 20, shape), "rare": 20.0 * (rng.random(shape) < 0.1)}[law]
    drawn = rng.poisson(mean, shape)
    found = [judge_spikes({s: (int(a), int(b)) for s, (a, b) in enumerate(each)}, 100, 1, 0.95) for each in drawn]
    assert np.mean([each.verdict == "more spikes" for each in found]) <= 0.05


@pytest.mark.usefixtures("undrawn")
def test_a_verdict_has_its_spikes_beside_it(tmp_path, capsys):
    for seed in range(3):
        for precision, count in (("bf16", 0), ("mxfp4_sr", 2 + seed)):
            noise = 0.1 * seed + 1e-4 * seed * (precision != "bf16")
            events = [{"step": step, "tokens": step, "loss": 5.0, "event": "spike"} for step in range(1, count + 1)]
            words = [f"precision={precision}", f"seed={seed}"]
            make_run(tmp_path / "s" / f"{precision}{seed}", *words, noise=noise, records=events)
    (row,) = verdicts(capsys, tmp_path / "s")["verdicts"]
    found = row["spike_verdict"]
    assert (found["verdict"], found["spiked_runs"], found["baseline_spiked_runs"]) == ("more spikes", 3, 0)
    assert found["spiked_runs_ci"] == [pytest.approx(0.2924, abs=1e-4), 1.0]  # Clopper and Pearson, 3 of 3
    assert "9 spikes, the baseline 0: more spikes, p = 0.019" in row["line"]
    assert row["verdict"] == "lossless"  # of the loss, which is another question
