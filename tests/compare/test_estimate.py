"""From pairs to verdicts, over groups of three different recipes: a failure counts only for its own recipe."""

import math
from pathlib import Path

import pytest

from lightning_llm.compare.estimate import Measured, judge_all, measure
from lightning_llm.compare.runs.pairing import Pair
from lightning_llm.compare.terms import LookLevels, Terms
from lightning_llm.tracking.reading import Run

NEAR = {0: 0.001, 1: -0.002, 2: 0.0005, 3: 0.0015}
TERMS = Terms(margin=0.01, confidence=0.95)


def family() -> list[Measured]:
    """Three recipes: far below at a seed; far above at another, diverged at a third; with a diverged baseline."""
    return [
        Measured("below", differences={**NEAR, 4: -1.5}),
        Measured("above", differences={**NEAR, 5: 1.5}, diverged_seeds=[6]),
        Measured("calm", differences=NEAR, baseline_diverged_seeds=[7, 6], diverged_seeds=[7]),
    ]


def test_a_seed_far_below_is_the_baselines_failure_and_one_far_above_the_recipes():
    below, above, calm = judge_all(family(), None, TERMS)
    assert (below.stability.failed, below.stability.baseline_failed, below.stability.seeds) == ((), (4,), 5)
    assert (above.stability.failed, above.stability.baseline_failed, above.stability.seeds) == ((5, 6), (), 6)
    assert (calm.stability.failed, calm.stability.baseline_failed, calm.stability.seeds) == ((7,), (6, 7), 6)
    assert [each.estimate.outlier_seeds for each in (below, above, calm)] == [(4,), (5,), ()]
    assert [each.estimate.pairs for each in (below, above, calm)] == [4, 4, 4]
    assert [each.estimate.gap for each in (below, above, calm)] == [pytest.approx(0.00025)] * 3
    assert [each.decision for each in (below, above, calm)] == ["lossless", "inconclusive", "lossless"]


def test_the_error_is_shared_by_the_recipes_of_a_family_and_by_declared_looks():
    assert [each.stability.level for each in judge_all(family(), None, TERMS)] == [pytest.approx(0.05 / 3)] * 3
    looks = judge_all(family(), None, TERMS, LookLevels(intervals=0.99, failures=0.024))
    assert [each.stability.level for each in looks] == [pytest.approx(0.008)] * 3
    for wide, narrow in zip(looks, judge_all(family(), None, TERMS), strict=True):
        assert wide.estimate.low < narrow.estimate.low < narrow.estimate.high < wide.estimate.high
        assert wide.estimate.comparisons == 3


def test_a_wide_noise_floor_prevents_outliers():
    assert [each.estimate.outlier_seeds for each in judge_all(family(), 0.2, TERMS)] == [(), (), ()]


def test_a_margin_in_tokens_is_the_mean_over_the_seeds_that_the_gap_is_of():
    """Seed 4 is an outlier, so that its margin counts for no one."""
    margins = {0: 0.010, 1: 0.012, 2: 0.011, 3: 0.015, 4: 0.100}
    recipe = Measured("recipe", differences={**NEAR, 4: 2.5}, margins=margins)
    unpriced = Measured("unpriced", unpriced_seeds=[0, 1], margins={})
    priced, other = judge_all([recipe, unpriced], None, Terms(margin=math.nan, token_margin=0.02))
    assert priced.margin == pytest.approx(0.012)
    assert other.margin == pytest.approx(sum(margins.values()) / 5)  # the usual one, where it has none
    assert (other.decision, other.stability.seeds, other.estimate.pairs) == ("inconclusive", 2, 0)
    # The margins' own scatter is in the spread: differences less how far each margin lies above their mean.
    spread = [NEAR[seed] - (margins[seed] - 0.012) for seed in NEAR]
    mean = sum(spread) / 4
    own = math.sqrt(sum((each - mean) ** 2 for each in spread) / 3)
    assert priced.estimate.gap == pytest.approx(0.00025)
    assert priced.estimate.sd == pytest.approx(own)


def test_unlearned_baselines_are_inconclusive_and_missing_runs_forbid_lossless():
    unlearned = Measured("unlearned", differences={seed: 0.5 + gap for seed, gap in NEAR.items()}, unlearned=(7.0, 6.2))
    missing = Measured("missing", differences=NEAR, missing_seeds=[9])
    lossy = Measured("lossy", differences={seed: 0.5 + gap for seed, gap in NEAR.items()}, missing_seeds=[9])
    found = judge_all([unlearned, missing, lossy], None, TERMS)
    assert [each.loss for each in found] == ["lossy", "lossless", "lossy"]
    assert [each.decision for each in found] == ["inconclusive", "inconclusive", "lossy"]


def test_a_single_pair_does_not_widen_other_intervals():
    one = Measured("one", differences={0: 0.001})
    found = judge_all([*family(), one], None, TERMS)
    assert [each.estimate.comparisons for each in found] == [3] * 4
    assert math.isnan(found[3].estimate.low)


def run_of(seed: int, last: float, status: str = "finished") -> Run:
    """Return a run of 20 steps, validated twice."""
    losses = {"val_loss": {10: 4.0 + seed / 10, 20: last}}
    return Run(
        Path(), {"seed": seed, "model.vocab_size": 1024}, {"status": status}, losses, last_step=20, last_loss=3.0
    )


@pytest.mark.parametrize(
    ("ours", "theirs", "differences", "diverged", "baseline_diverged", "identical"),
    [
        ((3.0, 3.1, 3.2), (3.0, 3.1, 3.2), {0: 0.0, 1: 0.0, 2: 0.0}, [], [], True),
        ((3.0, 3.1, 3.3), (3.0, 3.1, 3.2), {0: 0.0, 1: 0.0, 2: 0.1}, [], [], False),
        ((3.0, math.nan, 3.2), (3.0, 3.1, 3.2), {0: 0.0, 2: 0.0}, [1], [], False),
        ((3.0, 3.1, 3.2), (3.0, 3.1, math.inf), {0: 0.0, 1: 0.0}, [], [2], True),
        ((9.0, 3.1, math.nan), (3.0, math.nan, math.nan), {}, [0, 2], [1, 2], False),  # 9.0 is worse than guessing
    ],
)
def test_pairs_of_which_a_run_diverged_are_counted_and_left_out(
    ours, theirs, differences, diverged, baseline_diverged, identical
):
    pairs = [
        Pair(run_of(seed, our), run_of(seed, their), {})
        for seed, (our, their) in enumerate(zip(ours, theirs, strict=True))
    ]
    found = measure("recipe", pairs, [7], TERMS)
    assert found.differences == pytest.approx(differences)
    assert (found.diverged_seeds, found.baseline_diverged_seeds) == (diverged, baseline_diverged)
    assert (found.identical, found.seeds, found.missing_seeds) == (identical, [0, 1, 2], [7])


def test_seeds_without_a_margin_are_not_in_the_differences():
    pairs = [Pair(run_of(seed, 3.0 + seed / 100), run_of(seed, 3.0), {}) for seed in range(4)]
    found = measure("recipe", pairs, [], TERMS, margins={1: 0.01, 3: 0.02, 9: 0.5})
    assert found.differences == pytest.approx({1: 0.01, 3: 0.03})
    assert (found.margins, found.unpriced_seeds, found.seeds) == ({1: 0.01, 3: 0.02}, [0, 2], [0, 1, 2, 3])
