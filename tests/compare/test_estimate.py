"""From pairs to verdicts, over families of three recipes that are unlike each other: whose failure counts for whom."""

import math

import pytest

from lightning_llm.compare.estimate import LookLevels, Measured, Terms, judge_all

NEAR = {0: 0.001, 1: -0.002, 2: 0.0005, 3: 0.0015}
TERMS = Terms(margin=0.01, confidence=0.95)


def family() -> list[Measured]:
    """One far below at a seed, one far above at another and diverged at a third, and one whose baseline diverged."""
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


def test_a_floor_that_is_wide_makes_no_outliers():
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


def test_what_has_not_learned_is_inconclusive_and_a_missing_run_forbids_lossless():
    unlearned = Measured("unlearned", differences={seed: 0.5 + gap for seed, gap in NEAR.items()}, unlearned=(7.0, 6.2))
    missing = Measured("missing", differences=NEAR, missing_seeds=[9])
    lossy = Measured("lossy", differences={seed: 0.5 + gap for seed, gap in NEAR.items()}, missing_seeds=[9])
    found = judge_all([unlearned, missing, lossy], None, TERMS)
    assert [each.loss for each in found] == ["lossy", "lossless", "lossy"]
    assert [each.decision for each in found] == ["inconclusive", "inconclusive", "lossy"]
