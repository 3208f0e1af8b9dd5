"""The verdict on spikes: exact tests of paired counts, at their level however the counts scatter."""

from itertools import product

import numpy as np
import pytest
from scipy import special

from lightning_llm.compare.statistics.stability import judge_spikes, sign_flip
from tests.compare.run_folders import make_run, verdicts


@pytest.mark.parametrize("values", [[1, 2, 3], [4, -1, 2, 7], [0, 0, 5, 1, -2], [-1, -2]])
def test_all_signs_are_enumerated(values):
    kept = [value for value in values if value]
    every = [sum(s * abs(v) for s, v in zip(signs, kept, strict=True)) for signs in product((1, -1), repeat=len(kept))]
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
def test_one_recipe(counts, verdict):
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
