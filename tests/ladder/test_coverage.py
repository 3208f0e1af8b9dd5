"""The ladder's statistical promises, simulated by docs/internals/simulate_ladder.py with fewer trials than its tables.

Rates are held to bounds that so few trials of a sound method pass with a probability of about 0.999.
"""

import numpy as np
import pytest
import simulate_ladder as simulate

FEW = 30
CELLS = [(noise, seeds) for noise in simulate.NOISES for seeds in (2, 3)]


def least(share: float, trials: int) -> float:
    """Return the lower bound of a rate of `share`, 3.1 standard errors below it."""
    return share - 3.1 * np.sqrt(share * (1 - share) / trials)


def most(share: float, trials: int) -> float:
    return share + 3.1 * np.sqrt(share * (1 - share) / trials)


@pytest.mark.parametrize("noise", simulate.NOISES, ids=lambda noise: noise.name)
def test_intervals_cover_and_growth_is_seldom_found_where_there_is_none(noise):
    found = simulate.errors(noise, 2, FEW, refuse=False)
    assert found.on_ladder >= least(0.92, FEW)
    assert found.beyond >= least(0.92, FEW)
    assert found.grows <= most(0.07, FEW)


def test_growth_is_found_where_it_is():
    assert simulate.errors(simulate.NOISES[0], 3, 20, simulate.GROWING, refuse=False).grows > 0.9


@pytest.mark.parametrize("noise", simulate.NOISES[:2], ids=lambda noise: noise.name)
def test_a_change_of_phase_at_the_largest_size_is_refused(noise):
    assert simulate.errors(noise, 2, 6, jump=0.03).refused > 0.8
    assert simulate.errors(noise, 2, 12).refused <= most(0.04, 12)


@pytest.mark.parametrize(("noise", "run_sd"), [(simulate.NOISES[0], 0.01), (simulate.Noise("loud", 0.05), 0.1)])
@pytest.mark.parametrize("ratio", [0.98, 0.7, 1.1])
def test_effective_data_covers(noise, run_sd, ratio):
    held, _ = simulate.effective_coverage(noise, 3, ratio, 150, run_sd)
    assert held >= least(0.95, 150)


@pytest.mark.full
@pytest.mark.parametrize(("noise", "seeds"), CELLS, ids=[f"{noise.name}, {seeds} seeds" for noise, seeds in CELLS])
def test_all_cells_of_the_table(noise, seeds):
    trials = 2000
    found = simulate.errors(noise, seeds, trials)
    assert found.on_ladder >= least(0.92, trials)
    assert found.beyond >= least(0.92, trials)
    assert found.grows <= most(0.07, trials)
    assert found.refused <= most(0.04, trials)
    assert simulate.errors(noise, seeds, trials // 10, jump=0.03).refused >= 0.9


@pytest.mark.full
@pytest.mark.parametrize("ratio", [0.98, 0.8, 1.1])
@pytest.mark.parametrize("seeds", [2, 3, 5])
def test_all_cells_of_effective_data(seeds, ratio):
    for noise in simulate.NOISES[:2]:
        held, _ = simulate.effective_coverage(noise, seeds, ratio, 2000)
        assert held >= least(0.94, 2000)
