"""A margin in tokens, judged seed by seed: by simulated truth, and against the interval of effective data."""

import re
from dataclasses import replace

import numpy as np
import pytest

from lightning_llm.base.errors import ConfigError
from lightning_llm.compare.effective_data import Curve, effective_data
from lightning_llm.compare.estimate import Measured, judge_all
from lightning_llm.compare.judge import compare_runs
from lightning_llm.compare.looks import declare
from lightning_llm.compare.sequential_verdicts import replay
from lightning_llm.compare.terms import Terms
from lightning_llm.compare.token_margin import _shows_with
from lightning_llm.compare.verdict_text import line_of
from lightning_llm.config.schema.sweep import SweepConfig
from lightning_llm.tracking.provenance import process_mark
from lightning_llm.tracking.reading import read_run
from tests.compare.run_folders import curve, make_run

E, B, BETA = 1.5, 300.0, 0.45
AT = 66_000.0
COUNTS = np.array([0.5, 1.0, 2.0])


def level(ratio):
    return E + B * (ratio * AT) ** -BETA


def drawn(rng, seeds: int, share: float, run_sd: float, pair_sd: float = 0.003) -> tuple[Curve, dict[int, float]]:
    """Return the baseline's curve and a recipe's losses that needs just `share` more tokens, with noise in all runs."""
    effects = 0.02 * rng.standard_normal(seeds)
    losses = level(COUNTS) + effects[:, None] + run_sd * rng.standard_normal((seeds, 3))
    own = losses[:, 1] + level(1 / (1 + share)) - level(1.0) + pair_sd * rng.standard_normal(seeds)
    return Curve((0.5, 1.0, 2.0), dict(enumerate(losses)), 1.0), dict(enumerate(own.tolist()))


def judged(curve: Curve, losses: dict[int, float], share: float, margins: dict[int, float]):
    measured = Measured("x", differences={s: loss - curve.losses[s][1] for s, loss in losses.items()}, margins=margins)
    (found,) = judge_all([measured], None, Terms(np.nan, token_margin=share))
    return found


@pytest.mark.parametrize("run_sd", [0.002, 0.02])
def test_verdicts_agree_with_the_interval_of_effective_data(run_sd):
    """Fieller's interval in tokens, found there by going through ratios: on which side of the margin does it lie?"""
    rng = np.random.default_rng(4)
    seen = []
    for truth in np.repeat([0.0, 0.02, 0.06, 0.1, 0.2], 12):
        curve, losses = drawn(rng, 4, truth, run_sd)
        found = judged(curve, losses, 0.1, curve.margins(0.1))
        low, high = effective_data(losses, curve).more_tokens_interval
        seen.append("lossless" if high < 0.1 else "lossy" if low > 0.1 else "inconclusive")
        assert found.loss == seen[-1]
        assert found.estimate.gap == pytest.approx(np.mean(list(found.measured.differences.values())))
        assert found.margin == pytest.approx(np.mean(curve.shares(range(4), 1 / 1.1)))
    assert set(seen) == {"lossless", "lossy", "inconclusive"}


def errors(share: float, seeds: int, trials: int, run_sd: float) -> tuple[float, float, float]:
    """Return how often a recipe at just the margin is called lossless, lossy, and either by the mean margin alone."""
    rng = np.random.default_rng(5)
    found = []
    for _ in range(trials):
        curve, losses = drawn(rng, seeds, share, run_sd, pair_sd=0.001)
        margins = curve.margins(share)
        here = judged(curve, losses, share, margins).loss
        mean = dict.fromkeys(margins, float(np.mean(list(margins.values()))))
        plain = judged(curve, losses, share, mean).loss
        found.append((here == "lossless", here == "lossy", plain != "inconclusive"))
    return tuple(np.mean(found, axis=0))


def test_at_the_margin_a_wrong_verdict_is_as_rare_as_promised():
    lossless, lossy, by_the_mean = errors(0.1, 4, 400, run_sd=0.02)
    assert max(lossless, lossy) <= 0.025 + 3.1 * (0.025 * 0.975 / 400) ** 0.5
    assert by_the_mean > 0.15  # the effect of leaving out the margin's noise


@pytest.mark.full
@pytest.mark.parametrize("share", [0.02, 0.1, 0.3])
@pytest.mark.parametrize("seeds", [2, 3, 5])
@pytest.mark.parametrize("run_sd", [0.003, 0.02])
def test_at_the_margin_over_all_cells(share, seeds, run_sd):
    lossless, lossy, _ = errors(share, seeds, 2000, run_sd)
    assert max(lossless, lossy) <= 0.025 + 3.1 * (0.025 * 0.975 / 2000) ** 0.5


def test_a_seed_without_other_baseline_lengths_is_left_out():
    curve, losses = drawn(np.random.default_rng(6), 4, 0.0, 0.002)
    some = curve.within([0, 1, 2])
    assert sorted(some.margins(0.05)) == [0, 1, 2]
    whole = judged(some, {s: losses[s] for s in range(3)}, 0.05, some.margins(0.05))
    measured = replace(whole.measured, unpriced_seeds=[3])
    (found,) = judge_all([measured], None, Terms(np.nan, token_margin=0.05))
    assert (found.estimate, found.loss) == (whole.estimate, whole.loss)
    assert found.measured.seeds == [0, 1, 2, 3]


def errors_at_looks(looks: tuple[int, ...], trials: int, share: float = 0.1) -> tuple[float, float]:
    """Return how often a recipe at just the margin is called lossless, or lossy, at any look, stopping at the first."""
    rng = np.random.default_rng(7)
    terms = Terms(np.nan, token_margin=share)
    design = declare(looks, tuple(range(looks[-1])), terms, "linear", 1, None)
    found = []
    for _ in range(trials):
        curve, losses = drawn(rng, looks[-1], share, 0.02, pair_sd=0.001)

        def measured(label, seeds, curve=curve, losses=losses):
            own = curve.within(seeds)
            differences = {seed: losses[seed] - curve.losses[seed][1] for seed in seeds}
            return Measured(label, differences=differences, margins=own.margins(share))

        ((judged_last, _),) = replay(["0"], lambda *_: True, measured, lambda _: None, design).values()
        found.append((judged_last.decision == "lossless", judged_last.decision == "lossy"))
    return tuple(np.mean(found, axis=0))


def test_the_error_rate_holds_at_declared_looks():
    assert max(errors_at_looks((3, 4, 5), 200)) <= 0.025 + 3.1 * (0.025 * 0.975 / 200) ** 0.5


@pytest.mark.full
def test_the_error_rate_holds_over_all_looks():
    assert max(errors_at_looks(SweepConfig().looks, 2000)) <= 0.025 + 3.1 * (0.025 * 0.975 / 2000) ** 0.5


def test_a_look_waits_for_other_baseline_lengths_unless_one_diverged(tmp_path):
    terms = Terms(np.nan, token_margin=0.5, tail_share=0.0)
    design = declare((3, 4, 5), tuple(range(5)), terms, "linear", 1, None)
    for seed in range(5):
        for name, steps in (("bf16", 50), ("bf16", 100), ("bf16", 200), ("mxfp8", 100)):
            lost = seed == 1 and steps == 200
            losses = {step: curve(step) + 0.1 * seed for step in range(10, steps + 1, 10)}
            losses |= {steps: float("nan")} if lost else {}
            words = (f"precision={name}", f"seed={seed}")
            gap = 1e-4 * (name == "mxfp8") * (1 + seed)
            make_run(tmp_path / f"{name}-{steps}-{seed}", *words, losses={s: v + gap for s, v in losses.items()})
    runs = [read_run(each) for each in sorted(tmp_path.iterdir())]

    def judged_at(kept):
        (found,) = compare_runs(kept, terms, design=design).verdicts
        return found

    whole = judged_at(runs)
    assert (whole.sequential.look.number, whole.decision) == (1, "lossless")
    assert whole.judged.measured.unpriced_seeds == [1]
    assert whole.judged.estimate.pairs == 2
    assert "seed 1 left out: the baseline has no usable runs of other lengths there" in line_of(whole)
    waits = judged_at([run for run in runs if run.folder.name != "bf16-200-2"])
    assert (waits.sequential.look, waits.decision) == (None, "inconclusive")


@pytest.fixture
def said(tmp_path):
    """Return the message of `compare` on a margin in tokens that the baseline's lengths do not cover; 50 is useless."""

    def refused(steps_of_recipe: int, *lengths: int, share: float = 0.05, summary: dict | None = None) -> str:
        """`summary`: of the runs at the last of `lengths`."""
        folder = tmp_path / f"{steps_of_recipe}-{lengths}-{share}"
        for seed in range(2):
            for name, steps in (*(("bf16", each) for each in lengths), ("mxfp8", steps_of_recipe)):
                losses = {step: curve(step) + 0.1 * seed for step in range(10, steps + 1, 10)}
                of_run = {"validation_unigram_nats": 2.0 if steps == 50 else 9.0}
                of_run |= summary or {} if steps == lengths[-1] else {}
                words = (f"precision={name}", f"seed={seed}", f"trainer.max_steps={steps}")
                make_run(folder / f"{name}-{steps}-{seed}", *words, losses=losses, summary=of_run)
        with pytest.raises(ConfigError) as error:
            compare_runs(
                [read_run(each) for each in sorted(folder.iterdir())], Terms(np.nan, token_margin=share, tail_share=0.0)
            )
        return next(each.text for each in error.value.problems if each.key == "--margin")

    return refused


def test_unlearned_baseline_lengths_are_reported_as_useless(said):
    told = said(100, 50, 100, 200)
    assert (
        "Usable runs exist at 100, 200 steps. At 50 steps the baseline has not learned, so these runs cannot be used"
        in told
    )
    assert "Add 400 to the sweep (trainer.max_steps), at seeds 0, 1, or run by run: " in told
    assert "Add 200 and 400 to the sweep" in said(100, 50, 100)
    assert "is not known: at 50 steps the baseline has not learned" in said(50, 50, 100)


@pytest.mark.parametrize("lengths", [(50, 100), (50, 100, 200), (50, 100, 200, 300), (50, 100, 200, 300, 400, 600)])
def test_no_length_is_asked_for_that_cannot_show_the_margin(said, lengths):
    told = said(100, *lengths, share=0.3)
    assert "Add " not in told
    assert "No longer run can determine 30%. Train longer, or give a margin of at most 25%, or one in nats" in told


@pytest.mark.parametrize("lengths", [(100,), (100, 200), (100, 80), (50, 100), (50, 100, 200), (50, 100, 200, 300)])
@pytest.mark.parametrize("share", [0.05, 0.25, 0.5])
def test_proposed_lengths_suffice(said, lengths, share):
    """Or the existing runs suffice, or the message names the largest margin that they allow."""
    sound = {length for length in lengths if length != 50}
    if _shows_with(100, sound, share):
        return
    told = said(100, *lengths, share=share)
    if asked := re.search(r"Add ([\d and]+) to the sweep", told):
        assert _shows_with(100, {*sound, *map(int, asked[1].split(" and "))}, share)
    else:
        most = int(re.search(r"at most (\d+)%", told)[1]) / 100
        assert most < share
        assert _shows_with(100, {*sound, 200, 400}, most)
        assert not _shows_with(100, {*sound, 200, 400}, most + 0.01)


def test_runs_that_are_running_are_waited_for_and_those_that_a_search_ended_are_not(said):
    alive = {"status": "running", "process": process_mark()}
    told = said(100, 100, 200, 50, summary=alive)
    assert "At 50 steps (seeds 0, 1) its runs are running: wait for them" in told
    assert "resume=auto" not in told
    assert "Add " not in told
    told = said(100, 100, 50, summary=alive)
    assert "wait for them. Add 200 to the sweep" in told
    told = said(100, 100, 50, 200, summary={"status": "stopped", "ended_by": "halving"})
    assert "At 200 steps (seeds 0, 1) a search stopped its runs early. Add 200 and 400 to the sweep" in told
    assert "resume=auto" not in told
    told = said(100, 100, 200, 70, summary={"status": "stopped"})
    assert "At 70 steps (seeds 0, 1) its runs are not finished. Resume them: " in told
    assert "resume=auto" in told
