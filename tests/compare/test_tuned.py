"""Error rates of verdicts at each recipe's own best rate, by simulation (docs/internals/simulate_rates.py)."""

import math

import numpy as np
import pytest
import simulate_rates as simulate

from lightning_llm.compare.tuned import grid_bounds, plateau

NOMINAL = 0.025
"""Of a one-sided claim by the bound of a 95 % interval."""


def most(trials: int) -> float:
    return NOMINAL + 3 * (NOMINAL / trials) ** 0.5


@pytest.mark.parametrize("scenario", simulate.SCENARIOS, ids=lambda each: each.name)
def test_neither_claim_errs_more_often_than_it_may(scenario):
    hold(scenario, 3, 250)


def hold(scenario, seeds, trials):
    equal, at_margin = (simulate.errors(scenario, seeds, gap, trials) for gap in (0.0, 1.001 * simulate.MARGIN))
    for way in ("split", "all"):
        assert equal[f"{way} lossy"] <= most(trials)
        assert at_margin[f"{way} lossless"] <= most(trials)


@pytest.mark.full
@pytest.mark.parametrize("scenario", simulate.SCENARIOS, ids=lambda each: each.name)
def test_neither_claim_errs_over_two_thousand(scenario):
    for seeds in (3, 5):
        hold(scenario, seeds, 2000)


def test_only_tests_over_the_whole_grid_keep_the_error_rate():
    """A baseline that is loud chooses badly, and looks worse than it is: false lossless is above its level."""
    scenario = next(each for each in simulate.SCENARIOS if each.baseline_noise > 1)
    found = simulate.errors(scenario, 5, 1.001 * simulate.MARGIN, 400)
    assert found["chosen lossless"] > 2 * NOMINAL
    assert found["split lossless"] < NOMINAL


def test_five_seeds_show_that_there_is_no_gap():
    assert simulate.errors(simulate.SCENARIOS[0], 5, 0.0, 200)["split lossless"] > 0.85


def test_grid_bounds_match_values_computed_by_hand():
    """One recipe: the interval at each value is the one-sample t interval of the differences."""
    rng = np.random.default_rng(0)
    losses = rng.normal(0, 0.01, (2, 3, 4))
    losses[1, 0] = np.inf  # diverges there, so it is not the best
    losses[0, 2, 1:] = np.nan  # one pair decides nothing
    bounds = grid_bounds(losses, np.array([1, 1]))
    q = 3.182446305283709  # t of 3 degrees of freedom at 0.975
    for value, own in ((1, losses[1, 1] - losses[0, 1]), (2, losses[1, 2] - losses[0, 1])):
        assert bounds.low[0, value] == pytest.approx(own.mean() - q * own.std(ddof=1) / 2)
    against = losses[1, 1] - losses[0, 0]
    assert bounds.high[0, 0] == pytest.approx(against.mean() + q * against.std(ddof=1) / 2)
    assert bounds.worse[0].tolist() == [True, False, False]
    assert bounds.baseline_judged[0].tolist() == [True, True, False]
    assert not bounds.lossy(0.5)[0]
    assert bounds.lossless(0.5)[0]


def test_a_plateau_ends_where_the_loss_crosses_the_margin_over_the_logarithm_of_the_value():
    ends = plateau({1e-3: 3.04, 1e-2: 3.0, 1e-1: 3.005, 1.0: 3.025, 10.0: math.inf}, 0.02)
    assert ends == pytest.approx((10**-2.5, 10**-0.25))
    assert plateau({0.1: 3.0, 0.2: 3.001}, 0.01) == (0.1, 0.2)  # the grid's own ends
    assert plateau({0.1: math.nan, 0.2: math.inf}, 0.01) is None


def test_a_plateau_that_ends_beside_zero_is_of_straight_lines():
    assert plateau({0.0: 3.04, 0.1: 3.0, 0.2: 3.04}, 0.02) == pytest.approx((0.05, 0.1 * 2**0.5))
    assert plateau({0.0: 3.0, 0.1: 3.04}, 0.02) == pytest.approx((0.0, 0.05))
    assert plateau({-0.1: 3.0, 0.1: 3.04}, 0.02) == pytest.approx((-0.1, 0.0))
