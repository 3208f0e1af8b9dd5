"""Boundaries of declared looks against published ones and simulated truth; verdicts that stop when they like."""

from dataclasses import replace

import numpy as np
import pytest
import simulate_looks as simulation
from scipy import special

from lightning_llm.base.errors import ConfigError
from lightning_llm.compare.estimate import Measured
from lightning_llm.compare.judge import compare_runs
from lightning_llm.compare.looks import SPENDINGS, boundary, declare, increments, read_design, spent
from lightning_llm.compare.report.panels import curve_panels
from lightning_llm.compare.sequential_verdicts import replay
from lightning_llm.compare.statistics.intervals import simultaneous_intervals
from lightning_llm.compare.statistics.paired_curves import paired_curves, source_gaps
from lightning_llm.compare.terms import Terms
from lightning_llm.config.schema.sweep import SweepConfig
from lightning_llm.tracking.reading import read_run
from tests.compare.run_folders import make_sweep

LOOKS = SweepConfig().looks


@pytest.mark.parametrize("spending", SPENDINGS)
def test_all_of_the_error_is_spent_and_no_more(spending):
    assert sum(increments(LOOKS, 0.05, spending)) == pytest.approx(0.05)
    assert all(each > 0 for each in increments(LOOKS, 0.05, spending))
    assert spent(spending, 1.0, 0.05) == pytest.approx(0.05)


@pytest.mark.parametrize(("spending", "published"), [("pocock", (2.157, 2.201)), ("obrien_fleming", (2.963, 1.969))])
def test_boundaries_are_those_of_lan_and_demets(spending, published):
    """Two looks of equal size, two-sided 5 %: z in D. L. DeMets and K. K. G. Lan, Stat. Med. 13 (1994) 1341-1352.

    Over 60 and 120 pairs t is nearly normal: the nominal level of the look is to be that of the published z.
    """
    found = boundary((60, 120), 1, 0.95, spending, 20_000)
    assert 1 - np.array(found) == pytest.approx(2 * special.ndtr(-np.array(published)), abs=0.003)


@pytest.mark.parametrize("recipes", [1, 3])
def test_one_look_gives_the_usual_interval(recipes):
    assert boundary((5,), recipes, 0.95, "linear", 2000) == pytest.approx((0.95,))


@pytest.mark.parametrize(
    "spending", ["linear", *(pytest.param(each, marks=pytest.mark.full) for each in SPENDINGS[1:])]
)
def test_at_the_margin_just_the_error_that_is_named_is_made_over_all_looks(spending):
    confidences = boundary(LOOKS, 1, 0.95, spending)
    differences = np.random.default_rng(11).standard_normal((20_000, 1, LOOKS[-1]))
    looks = [simultaneous_intervals(differences[..., :n], q) for n, q in zip(LOOKS, confidences, strict=True)]
    beyond = [((found.low > 0) | (found.high < 0))[:, 0] for found in looks]
    assert np.any(beyond, axis=0).mean() == pytest.approx(0.05, abs=0.006)
    one_look = [simultaneous_intervals(differences[..., :n]) for n in LOOKS]
    unpaid = np.any([((found.low > 0) | (found.high < 0))[:, 0] for found in one_look], axis=0).mean()
    assert unpaid > 0.11  # the error of the looks without it


def simulated(place: int, gaps: list[float], sd: float = 0.0005):
    """Return the arguments of `replay`: recipes of these gaps, differences drawn by `place`."""
    differences = np.random.default_rng(place).normal(0, sd, (len(gaps), LOOKS[-1])) + np.array(gaps)[:, None]

    def measured(label, seeds):
        return Measured(label, differences={seed: float(differences[int(label), seed]) for seed in seeds})

    return [str(place) for place in range(len(gaps))], measured


def design(recipes: int = 2):
    return declare(LOOKS, tuple(range(LOOKS[-1])), Terms(), "linear", recipes, None)


def test_a_decided_recipe_keeps_its_interval():
    labels, measured = simulated(0, [0.0, 0.01])
    until = {
        n: replay(labels, lambda label, seeds, n=n: len(seeds) <= n, measured, lambda _: None, design()) for n in LOOKS
    }
    first = until[3]["0"][0].estimate
    assert all(found["0"][0].decision == "lossless" for found in until.values())
    assert all(found["0"][0].estimate == first for found in until.values())
    assert [found["1"][1].look.seeds for found in until.values()] == list(LOOKS)
    assert [found["1"][1].coming and found["1"][1].coming.seeds for found in until.values()] == [4, 5, 6, 8, 10, None]


def test_a_look_waits_for_all_runs_that_are_open_and_for_no_others():
    labels, measured = simulated(0, [0.0, 0.01])
    there = {"0": 3, "1": 5}  # the first was decided at 3 and has no more
    found = replay(labels, lambda label, seeds: len(seeds) <= there[label], measured, lambda _: None, design())
    assert found["1"][1].look.seeds == 5
    none = replay(labels, lambda label, seeds: label == "0", measured, lambda _: None, design())
    assert {label: judged.decision for label, (judged, _) in none.items()} == dict.fromkeys(labels, "inconclusive")
    assert none["0"][1].look is None
    assert none["0"][1].coming.seeds == 3


def test_failures_are_tested_look_by_look_within_their_error():
    def measured(label, seeds):
        return Measured(label, differences={}, diverged_seeds=list(seeds))

    found = replay(["0"], lambda label, seeds: True, measured, lambda _: None, design(1))
    judged, state = found["0"]
    assert (judged.decision, judged.stability.verdict) == ("lossy", "unstable")
    assert (
        judged.stability.p
        <= judged.stability.level
        == pytest.approx(increments(LOOKS, 0.05, "linear")[state.look.number - 1])
    )


def test_a_design_that_was_changed_is_refused():
    about = {"sequential": design().as_data()}
    assert read_design(about, "sweep.json") == design()
    assert read_design({}, "sweep.json") is None
    about["sequential"]["margin"] = 0.02
    with pytest.raises(ConfigError, match="changed after it was declared"):
        read_design(about, "sweep.json")


SCENARIOS = {scenario.name: scenario for scenario in simulation.SCENARIOS}
QUICK = ("normal, one recipe", "heavy tails (t with 3 df)", "every run diverges at 5 %")
"""Of one recipe, because its critical values are cheap."""


@pytest.mark.parametrize("name", QUICK)
def test_verdicts_that_stop_when_they_like_are_seldom_wrong(name):
    found = simulation.errors(replace(SCENARIOS[name], recipes=1), 0.01, 300)
    assert max(found.lossless, found.lossy) <= 0.055  # 0.05 of many, below
    assert found.coverage >= 0.92


@pytest.mark.full
@pytest.mark.parametrize("spending", SPENDINGS)
@pytest.mark.parametrize("name", SCENARIOS)
def test_verdicts_that_stop_when_they_like_are_wrong_in_at_most_one_of_twenty_sweeps(name, spending):
    """2,000 sweeps know a rate of 5 % to 0.5 %."""
    found = simulation.errors(SCENARIOS[name], 0.01, 2000, spending)
    assert max(found.lossless, found.lossy) <= 0.055
    assert simulation.errors(SCENARIOS[name], 0.0, 2000, spending).lossy <= 0.05
    assert found.coverage >= 0.925


def test_seeds_are_saved_where_pairs_scatter_less_than_was_feared():
    own, base, right = simulation.seeds_used(0.005, 0.0, 1, "linear", 80)
    assert own == base == pytest.approx(5.4, abs=0.45)
    assert right > 0.98
    assert simulation.seeds_used(0.002, 0.0, 1, "linear", 30)[0] < 4


def declared():
    return replace(design(), terms=Terms(tail_share=0.0))


def test_bands_sources_and_spikes_are_at_the_confidence_of_the_look(tmp_path):
    """Two recipes that were decided at different looks: at the last validation each band is its verdict's interval."""
    names = {"precision=bf16": 0, "precision=mxfp8": 0.0, "precision=mxfp4_sr": 0.0097}
    folder = make_sweep(tmp_path / "s", names, seeds=5)
    found = compare_runs(
        [read_run(each) for each in sorted(folder.iterdir())], Terms(tail_share=0.0), design=declared()
    )
    late, early = found.verdicts
    assert (early.sequential.look.number, late.sequential.look.number) == (1, 3)
    curves, sources = paired_curves(found.verdicts), source_gaps(found.verdicts)
    for verdict, curve, gaps in zip(found.verdicts, curves, sources, strict=True):
        levels, own = verdict.sequential.look.levels, verdict.judged.estimate
        assert curve.confidence == verdict.interval_confidence == levels.intervals > 0.95
        assert (curve.gap[-1], curve.low[-1], curve.high[-1]) == pytest.approx((own.gap, own.low, own.high))
        assert (gaps["code"].low, gaps["code"].high) == pytest.approx((own.low, own.high))
        assert verdict.spikes.level == pytest.approx(levels.failures / 2 / 2)
    assert early.judged.estimate.pairs == 3
    panel = curve_panels(found, found.families[0])[0]
    assert panel.band == f"{100 * late.interval_confidence:.3g} % at each step (look 3 of 6)"
