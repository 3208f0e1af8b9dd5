"""The fit against scipy's, closed forms and a law without noise; the ledger's arithmetic."""

import json
import math
from io import StringIO

import numpy as np
import pytest
from rich.console import Console
from scipy import stats
from scipy.optimize import least_squares

from lightning_llm.base.errors import ConfigError
from lightning_llm.compare.effective_data import Curve, _crossing, effective_data
from lightning_llm.ladder.fit import effect_at, fit_ladder
from lightning_llm.ladder.law import PRIOR_EXPONENT, PRIOR_WIDTH, Rungs, fit_law, own_variance, unequal_lack_of_fit
from lightning_llm.ladder.measured import Ladder, Rung, ladder_of_rows
from lightning_llm.ladder.predictions import Prediction, add_predictions, grade, read_ledger
from lightning_llm.ladder.refusal import refusals, too_few_pairs, too_small
from lightning_llm.ladder.report import Report, print_report
from lightning_llm.ladder.supplement import supplement_of

SIZES, TOKENS = (240e3, 690e3, 1.1e6, 2.2e6), (33e3, 66e3, 131e3)


def law(n, d):
    return 1.5 + 60 * n**-0.3 + 300 * d**-0.45


def ladder(costs=(0.03, 0.01, 0.02), noise=0.0, seeds=2) -> Ladder:
    rng = np.random.default_rng(3)
    rungs = []
    for n in SIZES:
        for d in TOKENS:
            gap = np.dot(costs, (300 * d**-0.45, 60 * n**-0.3, d / n))
            losses = {seed: law(n, d) + noise * rng.standard_normal() for seed in range(seeds)}
            pairs = {seed: gap + 0.3 * noise * rng.standard_normal() for seed in range(seeds)}
            began = {"recipe": "2026-11-02T00:00:00+00:00"}
            rungs.append(Rung(int(n), int(d), losses, {"recipe": pairs}, began=began))
    return Ladder("bf16", "val_loss", rungs)


def test_the_law_is_scipys_least_squares():
    n, d = np.repeat(SIZES, 3), np.tile(TOKENS, 4)
    losses = law(n, d) + np.random.default_rng(0).normal(0, 0.01, 12)
    found = fit_law(Rungs(n, d, np.full(12, 1e4)), losses)

    def residuals(theta):
        level, a, b, alpha, beta = theta
        n0, d0 = np.exp(np.log(n).mean()), np.exp(np.log(d).mean())
        fitted = level + np.exp(a) * (n / n0) ** -np.exp(alpha) + np.exp(b) * (d / d0) ** -np.exp(beta)
        prior = (np.array([alpha, beta]) - np.log(PRIOR_EXPONENT)) / PRIOR_WIDTH
        return np.concatenate([100 * (fitted - losses), prior])

    best = min((least_squares(residuals, [start, 0, 0, -1, -1]) for start in (0.5, 2, 3)), key=lambda each: each.cost)
    assert (residuals(found.theta[0]) ** 2).sum() == pytest.approx(2 * best.cost, rel=1e-6)
    assert found.theta[0] == pytest.approx(best.x, abs=1e-3)


def test_without_noise_the_cost_is_found_and_predicted_a_decade_beyond():
    fit = fit_ladder(ladder())
    n, d = 22_000_000, 1_310_000
    gap = 0.03 * 300 * d**-0.45 + 0.01 * 60 * n**-0.3 + 0.02 * d / n
    effect = effect_at(fit, "recipe", n, d)
    assert effect.gap == pytest.approx(gap, rel=0.02)
    # By the identity of two losses, after D and after D / (1 + x), above all but the tokens' term.
    assert effect.more_tokens == pytest.approx((1 + gap / (300 * d**-0.45)) ** (1 / 0.45) - 1, rel=0.05)


def test_the_gaps_terms_are_numpys_least_squares_on_pairs():
    made = ladder(noise=0.01, seeds=3)
    fit = fit_ladder(made)
    n, d = np.repeat(SIZES, 9), np.tile(np.repeat(TOKENS, 3), 4)
    constants = fit.law.constants()
    columns = [constants["B"] * d ** -constants["beta"], constants["A"] * n ** -constants["alpha"], d / n]
    pairs = [value for rung in made.rungs for value in rung.differences["recipe"].values()]
    expected, squares, *_ = np.linalg.lstsq(np.stack(columns, 1), np.array(pairs), rcond=None)
    gap = fit.gaps["recipe"]
    assert gap.terms == pytest.approx(expected, rel=1e-5)
    assert gap.sd == pytest.approx(np.sqrt(squares[0] / (36 - 3)), rel=1e-6)
    groups = np.array(pairs).reshape(12, 3)
    within = ((groups - groups.mean(1, keepdims=True)) ** 2).sum()
    ratio = ((squares[0] - within) / 9) / (within / 24)
    terms = np.stack(columns, 1)[::3]
    assert unequal_lack_of_fit(terms, groups, np.zeros(12)) == pytest.approx(stats.f.sf(ratio, 9, 24), rel=1e-4)
    assert gap.lack_of_fit == pytest.approx(unequal_lack_of_fit(terms, groups, n[::3]), rel=1e-4)


def test_residuals_that_the_bootstrap_draws_are_as_large_as_the_pairs_scatter():
    """The fit makes a residual smaller than the pair's error: it is divided by 1 minus its leverage (HC3)."""
    made = ladder(noise=0.01, seeds=3)
    fit = fit_ladder(made)
    gap, n, d = fit.gaps["recipe"], np.repeat(SIZES, 3), np.tile(TOKENS, 4)
    constants = fit.law.constants()
    columns = [constants["B"] * d ** -constants["beta"], constants["A"] * n ** -constants["alpha"], d / n]
    terms = np.stack(columns, 1)
    leverage = np.diag(terms @ np.linalg.inv(3 * terms.T @ terms) @ terms.T)  # of one pair of three
    assert leverage.max() < 0.8  # beyond which it is bounded
    assert leverage.max() > 0.05
    pairs = np.array([list(rung.differences["recipe"].values()) for rung in made.rungs])
    expected = (pairs - (terms @ gap.terms)[:, None]) / (1 - leverage)[:, None]
    assert gap.residuals == pytest.approx(expected.ravel(), rel=1e-4)


def test_the_bootstrap_scatters_as_rungs_of_unequal_pairs_do():
    """A rung of one pair has a third of the weight of one of three, and its mean moves more: the sandwich's formula."""
    made = ladder(noise=0.01, seeds=3)
    for place, rung in enumerate(made.rungs):
        rung.losses = dict.fromkeys(rung.losses, float(law(rung.parameters, rung.tokens)))  # the law itself stays
        if place % 3:
            rung.differences["recipe"] = {0: rung.differences["recipe"][0]}
    fit = fit_ladder(made)
    gap, n, d = fit.gaps["recipe"], np.repeat(SIZES, 3), np.tile(TOKENS, 4)
    constants = fit.law.constants()
    columns = [constants["B"] * d ** -constants["beta"], constants["A"] * n ** -constants["alpha"], d / n]
    terms, counts = np.stack(columns, 1), np.array([len(rung.differences["recipe"]) for rung in made.rungs])
    means = np.array([np.mean(list(rung.differences["recipe"].values())) for rung in made.rungs])
    inverse = np.linalg.inv(terms.T @ (counts[:, None] * terms))
    assert gap.terms == pytest.approx(inverse @ terms.T @ (counts * means), rel=1e-4)
    pairs = [(place, gap_of) for place, rung in enumerate(made.rungs) for gap_of in rung.differences["recipe"].values()]
    places, values = np.array([place for place, _ in pairs]), np.array([value for _, value in pairs])
    leverage = np.einsum("ri,ij,rj->r", terms, inverse, terms)
    residuals = (values - (terms @ gap.terms)[places]) / np.maximum(1 - leverage, 0.2)[places]
    assert gap.residuals == pytest.approx(residuals, rel=1e-3)
    squares = np.zeros(12)
    np.add.at(squares, places, residuals**2)
    spread = np.sqrt(np.diag(inverse @ (terms.T * squares) @ terms @ inverse))
    assert gap.drawn.std(0) == pytest.approx(spread, rel=0.1)
    assert gap.df == len(pairs) - 3


def test_a_test_of_fit_holds_its_level_where_sizes_scatter_unlike():
    rng = np.random.default_rng(0)
    n, d = np.repeat(SIZES, 3), np.tile(TOKENS, 4)
    terms, sd = np.stack([300 * d**-0.45, 60 * n**-0.3, d / n], 1), np.repeat(np.geomspace(1, 5, 4), 3)[:, None]
    p = np.array([unequal_lack_of_fit(terms, sd * rng.standard_normal((12, 2)), n) for _ in range(2000)])
    fishers = np.array([unequal_lack_of_fit(terms, sd * rng.standard_normal((12, 2)), 0 * n) for _ in range(2000)])
    assert (p < 0.05).mean() < 0.05 + 3.1 * np.sqrt(0.05 * 0.95 / 2000)
    assert (fishers < 0.05).mean() > 0.08, "one variance for all sizes would do, and this test shows nothing"


def test_the_largest_sizes_variance_is_moderated_by_the_smaller_ones():
    pairs = np.array([[0.1, 0.3], [0.0, math.nan], [0.5, 0.1]])
    miss = np.array([0.2, 0.0, 0.3])
    # About the mean miss of five pairs, 0.2, the five are 0.1, 0.1, 0.2, 0.3 and 0.1 off.
    squares = 0.01 + 0.01 + 0.04 + 0.09 + 0.01
    assert own_variance(miss, pairs, 0.004) == pytest.approx(((3 * 0.004 + squares) / 7, 7))
    assert own_variance(miss, pairs, 0.04) == pytest.approx((0.04, 7)), "no quieter than the smaller sizes"


def test_gaps_that_do_not_fit_the_terms_are_refused():
    assert refusals(fit_ladder(ladder(noise=0.003)), "recipe") == []
    jumped = ladder(noise=0.003)
    for rung in jumped.rungs[-3:]:
        rung.differences["recipe"] = {seed: gap + 0.05 for seed, gap in rung.differences["recipe"].items()}
    reasons = " ".join(refusals(fit_ladder(jumped), "recipe"))
    assert "do not follow the terms" in reasons
    assert "smaller sizes do not predict its own largest" in reasons
    bent = ladder(noise=0.003)
    for rung in bent.rungs[:3]:
        rung.losses = {seed: loss + 0.8 * (rung.tokens < 40e3) for seed, loss in rung.losses.items()}
    assert "do not follow E + A N^-alpha" in refusals(fit_ladder(bent), "recipe")[0]
    for made, says_what_it_costs in ((bent, False), (ladder(noise=0.003), True)):
        report = Report(made, 0.95, fit_ladder(made))
        with StringIO() as told:
            print_report(report, Console(file=told, width=200))
            assert ("% more tokens [" in told.getvalue()) == says_what_it_costs
            assert ("No cost is computed from this fit: the baseline's losses do not follow" in told.getvalue()) != (
                says_what_it_costs
            )
        (table,) = supplement_of(report, []).tables
        assert any("% more tokens [" in row[-1] for row in table.rows) == says_what_it_costs
        assert ("No cost is computed from" in table.caption) != says_what_it_costs


def test_too_few_or_unlearned_rungs_make_no_ladder():
    made = ladder()
    few = made.without(rung.place for rung in made.rungs if rung.parameters > 700e3)
    assert "These runs have 2 model sizes (" in too_small(few)
    assert "and 6 rungs. Missing: 1 model size, 2 rungs" in too_small(few)
    rows = made.rows()
    for row in rows:
        if row["recipe"] == "bf16" and row["tokens"] == 33_000:
            row["learned"] = False
    read = ladder_of_rows(rows, "bf16")
    assert set(read.left_out.values()) == {"the baseline has not learned there"}
    said = too_small(read)
    assert "These runs have 4 model sizes (" in said
    assert ", 3 token counts (33K, 66K, 131K) and 12 rungs, but only 4 model sizes" in said
    assert "2 token counts (66K, 131K) and 8 rungs can be used" in said
    assert "has not learned" in said
    assert said.endswith("Missing: 1 token count")
    none = ladder_of_rows([{**row, "learned": False} for row in rows], "bf16")
    assert "and 12 rungs, but only 0 model sizes, 0 token counts and 0 rungs can be used" in too_small(none)
    assert too_few_pairs(made.without(rung.place for rung in made.rungs[4:]), "recipe")


def test_rows_are_read_as_they_were_written():
    made = ladder(noise=0.01)
    read = ladder_of_rows(json.loads(json.dumps(made.rows())), "bf16")
    for one, other in zip(made.rungs, read.rungs, strict=True):
        assert (one.place, one.losses) == (other.place, other.losses)
        assert other.differences["recipe"] == pytest.approx(one.differences["recipe"])


def prediction(gap=0.01, se=0.003) -> Prediction:
    claim = {"recipe": "recipe", "baseline": "bf16", "metric": "val_loss", "parameters": 240_000, "tokens": 33_200,
             "gap": gap, "line": "said"}  # fmt: skip
    terms = {"confidence": 0.95, "gap_se": se, "pair_sd": 0.004, "df": 6, "fitted_to": {"digest": "x"}}
    return Prediction("2026-11-01T00:00:00+00:00", claim, terms)


def test_a_prediction_is_graded_once():
    made = ladder()
    made.rungs[0].differences["recipe"] = {0: 0.017, 1: 0.013}
    said = prediction()
    assert grade(said, made)
    spread = np.hypot(0.003, 0.004 / 2**0.5)
    assert said.outcome["z"] == pytest.approx(0.005 / spread)
    assert said.outcome["interval"][1] == pytest.approx(0.01 + stats.t.ppf(0.975, 6) * spread)
    assert (said.outcome["inside"], said.outcome["made_before_the_runs"]) == (True, True)
    before = dict(said.outcome)
    made.rungs[0].differences["recipe"][2] = 0.9
    assert not grade(said, made)  # its outcome stays
    assert said.outcome == before
    far = prediction(gap=-0.02)
    assert grade(far, made)
    assert not far.outcome["inside"]
    other = prediction()
    other.claim["recipe"] = "another"
    assert not grade(other, made)
    assert other.outcome is None


def test_the_ledger_keeps_the_first_and_finds_what_was_changed(tmp_path):
    file = tmp_path / "predictions.jsonl"
    first = add_predictions(file, [prediction()])
    again = prediction()
    again.date = "2026-12-01T00:00:00+00:00"
    assert add_predictions(file, [again])[0].date == first[0].date
    assert len(read_ledger(file)) == 1
    file.write_text(file.read_text().replace('"gap": 0.01', '"gap": 0.02'))
    with pytest.raises(ConfigError, match="changed after it was made"):
        read_ledger(file)


def test_effective_data_is_the_ratio_of_a_law_and_fiellers_near_one():
    curve = Curve((0.5, 1.0, 2.0), {seed: law(1e6, np.array([33e3, 66e3, 132e3])) for seed in range(3)}, 1.0)
    for ratio in (0.7, 0.98, 1.3):
        found = effective_data({seed: law(1e6, ratio * 66e3) for seed in range(3)}, curve)
        assert found.ratio == pytest.approx(ratio, rel=1e-4)
    # Fieller by hand for a line in ln(D): gap g and slope s per unit of ln(D), ratio exp(-g / s).
    rng = np.random.default_rng(1)
    slope, gaps = rng.normal(0.3, 0.02, 4), rng.normal(0.006, 0.002, 4)
    losses = {k: np.array([3.0 + slope[k] * np.log(2), 3.0, 3.0 - slope[k] * np.log(2)]) for k in range(4)}
    found = effective_data({k: 3.0 + gaps[k] for k in range(4)}, Curve((0.5, 1.0, 2.0), losses, 1.0))
    t2 = stats.t.ppf(0.975, 3) ** 2 / 4
    a = slope.mean() ** 2 - t2 * slope.var(ddof=1)
    b = -2 * (slope.mean() * gaps.mean() - t2 * np.cov(slope, gaps)[0, 1])
    c = gaps.mean() ** 2 - t2 * gaps.var(ddof=1)
    roots = sorted(np.roots([a, b, c]))
    assert [found.low, found.high] == pytest.approx([np.exp(-roots[1]), np.exp(-roots[0])], rel=1e-4)


def test_gaps_beyond_the_baselines_runs_have_no_ratio():
    curve = Curve((0.5, 1.0, 2.0), {seed: np.array([4.0, 3.5, 3.1]) for seed in range(2)}, 1.0)
    worse = effective_data({0: 6.0, 1: 6.1}, curve)
    assert (worse.ratio, worse.high, worse.as_data()["more_tokens"]) == (0, 0, np.inf)
    assert effective_data({0: 1.0, 1: 1.1}, curve).ratio == np.inf


def test_a_bound_is_the_first_or_the_last_crossing_between_the_ratios_that_were_tried():
    """Over the logarithm of the ratio; 0 below the first, infinite beyond the last."""
    ratios = np.array([0.5, 1.0, 2.0, 4.0, 8.0])
    twice = np.array([-1.0, 1.0, -3.0, 1.0, 2.0])
    assert _crossing(ratios, twice) == pytest.approx(0.5 * 2**0.5)
    assert _crossing(ratios, twice, last=True) == pytest.approx(2 * 2**0.75)
    assert _crossing(ratios, -twice) == 0.0
    assert _crossing(ratios, -twice, last=True) == math.inf
    for last in (False, True):
        assert _crossing(ratios, np.abs(twice), last=last) == 0.0
        assert _crossing(ratios, -np.abs(twice), last=last) == math.inf
        assert _crossing(ratios, np.array([-1.0, -1, 0, 1, 1]), last=last) == pytest.approx(2.0)
