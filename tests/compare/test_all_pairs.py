"""`--all-pairs`: every recipe against every other, with intervals that hold together."""

from itertools import combinations

import numpy as np
import pytest
from scipy import stats

from lightning_llm.compare.statistics.all_pairs import pairwise_intervals, range_critical_value
from tests.compare.run_folders import main, verdicts

pytestmark = pytest.mark.usefixtures("undrawn")


@pytest.mark.parametrize(("levels", "df"), [(3, 2.0), (5, 8.0), (9, 16.0), (2, 3.0)])
def test_the_critical_value_is_tukeys(levels, df):
    """Over sqrt(2), since a pair's variance is twice a run's."""
    expected = stats.studentized_range.ppf(0.95, levels, df) / 2**0.5
    assert range_critical_value(levels, df) == pytest.approx(expected, rel=5e-5)


def test_levels_of_equal_spread_have_the_intervals_of_a_two_way_layout():
    """With pairs of one spread the pool is the residual of recipes by seeds, of (M - 1) (S - 1) degrees of freedom."""
    losses = np.random.default_rng(3).normal(0, 1, (4, 6))
    gap, low, high, pairs = pairwise_intervals(losses)
    residual = losses - losses.mean(0) - losses.mean(1, keepdims=True) + losses.mean()
    variance = 2 * (residual**2).sum() / (3 * 5)
    own = [np.var(losses[b] - losses[a], ddof=1) for a, b in combinations(range(4), 2)]
    half = range_critical_value(4, 15.0) * np.sqrt(np.maximum(own, variance) / 6)  # none below its own
    half[0] = range_critical_value(4, 5.0) * np.sqrt(own[0] / 6)  # 2.5 times the variance of all: p < 0.25
    assert max(own) == own[0] == pytest.approx(2.516 * variance, rel=0.01)
    assert gap == pytest.approx([losses[b].mean() - losses[a].mean() for a, b in combinations(range(4), 2)])
    assert (high - low) / 2 == pytest.approx(half, rel=1e-6)
    assert list(pairs) == [6] * 6


@pytest.mark.parametrize(
    ("noise", "seeds", "least"),
    [((1, 1, 1, 1), 3, 0.94), ((1, 1, 1, 1), 2, 0.94), ((1, 1, 1, 5), 5, 0.92), ((5, 1, 1, 1), 3, 0.89)],
)
def test_all_intervals_hold_together(noise, seeds, least):
    rng = np.random.default_rng(4)
    losses = np.array(noise)[:, None] * rng.standard_normal((2000, len(noise), seeds))
    losses += 10 * rng.standard_normal((2000, 1, seeds))  # of the seeds, which pairs cancel
    _, low, high, _ = pairwise_intervals(losses)
    assert ((low <= 0) & (high >= 0)).all(-1).mean() >= least


def test_heavy_tails_and_missing_seeds():
    rng = np.random.default_rng(5)
    losses = rng.standard_t(3, (2000, 4, 4))
    losses[:, 1, 3] = np.nan
    _, low, high, pairs = pairwise_intervals(losses)
    assert ((low <= 0) & (high >= 0)).all(-1).mean() >= 0.95
    assert pairs[0].tolist() == [3, 4, 4, 3, 3, 4]


def test_bitwise_equal_levels_are_not_pooled():
    losses = np.random.default_rng(6).normal(0, 1, (3, 4))
    losses[2] = losses[0]
    gap, low, high, _ = pairwise_intervals(losses)
    assert (gap[1], low[1], high[1]) == (0, 0, 0)
    assert np.isfinite(low).all()


def test_compare_prints_and_writes_all_pairs(sweep, capsys, tmp_path):
    words = ["--all-pairs", "--output", tmp_path]
    found = verdicts(capsys, sweep, *words)
    rows = {(row["recipe"], row["other"]): row for row in found["all_pairs"]}
    assert len(rows) == 6
    assert rows["mxfp4_rne", "mxfp4_sr"]["verdict"] == "lossy"
    for name, row in found["by_name"].items():
        assert rows[name, "bf16"]["gap"] == pytest.approx(row["gap"])
    assert main(["compare", str(sweep), *map(str, words)]) == 0
    assert "every recipe against every other, by loss alone; simultaneous intervals" in capsys.readouterr().out
    assert verdicts(capsys, sweep, "--output", tmp_path)["all_pairs"] == []
    assert main(["compare", str(sweep), "--all-pairs", "--best-of", "optim.learning_rate"]) == 2
    assert "--all-pairs: cannot be combined with --best-of optim.learning_rate" in capsys.readouterr().err
