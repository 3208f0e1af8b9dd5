"""Pictures show the results: the drawn objects are inspected on axes that are not saved."""

import math

import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from scipy import stats

from lightning_llm.compare.judge import compare_runs
from lightning_llm.compare.report.panels import curve_panels, forest_rows, trends
from lightning_llm.compare.report.picture import COLOURS, FAILED, FLOOR
from lightning_llm.compare.report.pictures import pictures_of
from lightning_llm.compare.statistics.paired_curves import paired_curves, source_gaps
from lightning_llm.compare.terms import Terms
from lightning_llm.tracking.reading import read_run
from tests.compare.run_folders import EVERY, STEP_TOKENS, STEPS, curve, make_run, make_sweep

RNG = np.random.default_rng(0)


def losses(gap=0.0, spread=0.001):
    return {step: curve(step) + gap * step / STEPS + RNG.normal(0, spread) for step in range(EVERY, STEPS + 1, EVERY)}


def compared(folder, terms=None):
    return compare_runs([read_run(each) for each in sorted(folder.iterdir())], terms or Terms())


@pytest.fixture(scope="module")
def comparison(tmp_path_factory):
    """bf16, a quiet recipe, and one that fails at two of its five seeds; bf16 once more in another order of sums."""
    folder = tmp_path_factory.mktemp("s")
    for seed in range(5):
        make_run(folder / f"a{seed}", "precision=bf16", f"seed={seed}", losses=losses())
        make_run(folder / f"b{seed}", "precision=mxfp8", f"seed={seed}", losses=losses(0.002), speed=700.0)
        broken = losses(0.03)
        if seed == 1:
            broken = {step: loss if step < 50 else math.nan for step, loss in broken.items()}
        if seed == 2:
            broken = {step: loss + (step > 50) for step, loss in broken.items()}
        summary = {"backend": "native"}
        words = ("precision=mxfp4_rne", f"seed={seed}")
        make_run(folder / f"c{seed}", *words, losses=broken, speed=1500.0, summary=summary)
        if seed < 2:
            words = ("precision=bf16", "data.micro_batch_size=1", f"seed={seed}")
            make_run(folder / f"d{seed}", *words, losses=losses())
    return compared(folder)


def painted(comparison, name):
    (picture,) = [each for each in pictures_of(comparison) if each.name == name]
    axes = Figure().subplots()
    picture.paint(axes)
    return axes


def lines(axes, colour, **wanted):
    found = [line for line in axes.lines if to_hex(line.get_color()) == colour]
    return [line for line in found if all(getattr(line, f"get_{key}")() == value for key, value in wanted.items())]


def words(axes):
    return " ".join(text.get_text() for text in axes.texts)


def test_the_forest_has_each_interval_seed_failure_and_the_floor(comparison):
    axes = painted(comparison, "gaps")
    quiet, loud = comparison.verdicts
    for verdict, colour in ((quiet, COLOURS["lossless"]), (loud, COLOURS["lossy"])):
        estimate = verdict.judged.estimate
        assert [[*line.get_xdata()] for line in lines(axes, colour, linewidth=2)] == [[estimate.low, estimate.high]]
        assert [*lines(axes, colour, marker="s" if colour == COLOURS["lossy"] else "o")[0].get_xdata()] == [
            estimate.gap
        ]
    ticks = sorted(float(line.get_xdata()[0]) for line in axes.lines if line.get_marker() == "|")
    kept = [quiet.judged.measured.differences[seed] for seed in range(5)]
    kept += [loud.judged.measured.differences[seed] for seed in (0, 3, 4)]
    assert ticks == sorted(kept)
    floor = quiet.floor.sd
    assert [[*line.get_xdata()] for line in lines(axes, FLOOR)] == [[-floor, floor]] * 2
    assert "seed 2 outlier +1" in words(axes)
    assert "seed 1 diverged" in words(axes)
    assert [label.get_text() for label in axes.get_yticklabels()] == ["mxfp8", "mxfp4_rne"]
    low, high = axes.get_xlim()
    assert low < quiet.judged.estimate.low < loud.judged.estimate.high < high < 0.2  # the outlier squeezes nobody


def test_a_curve_is_the_mean_of_the_pairs_that_did_not_fail_within_students_interval(comparison):
    family = comparison.families[0]
    quiet, loud = curve_panels(comparison, family)
    pairs = {pair.run.seed: pair for pair in comparison.verdicts[1].pairs}
    kept = [pairs[seed] for seed in (0, 3, 4)]
    assert loud.curve.pairs == 3
    assert loud.curve.tokens == tuple(step * STEP_TOKENS for step in loud.curve.steps)
    own = [
        [pair.run.validations["val_loss"][step] - pair.baseline.validations["val_loss"][step] for pair in kept]
        for step in loud.curve.steps
    ]
    np.testing.assert_allclose(loud.curve.gap, np.mean(own, 1))
    (alone,) = paired_curves([comparison.verdicts[1]])
    half = stats.t.ppf(0.975, 2) * stats.sem(own, axis=1)
    np.testing.assert_allclose(alone.high, np.mean(own, 1) + half)
    np.testing.assert_allclose(alone.low, np.mean(own, 1) - half)
    assert [(seed.seed, seed.fate) for seed in loud.seeds] == [
        (0, ""), (1, "diverged"), (2, "outlier"), (3, ""), (4, ""),
    ]  # fmt: skip
    assert loud.seeds[1].tokens[-1] == 45 * STEP_TOKENS  # the last validation that it had a loss at
    assert quiet.floor == comparison.verdicts[0].floor.sd


def test_at_its_last_step_a_curve_has_the_interval_of_the_verdict_on_that_step(tmp_path):
    folder = make_sweep(tmp_path / "s", {"precision=bf16": 0, "precision=mxfp8": 0.001, "precision=mxfp4_sr": 0.02})
    comparison = compared(folder, Terms(tail_share=0.0))
    for verdict, found in zip(comparison.verdicts, paired_curves(comparison.verdicts), strict=True):
        estimate = verdict.judged.estimate
        assert (found.gap[-1], found.low[-1], found.high[-1]) == pytest.approx(
            (estimate.gap, estimate.low, estimate.high)
        )
    for verdict, found in zip(comparison.verdicts, source_gaps(comparison.verdicts), strict=True):
        estimate = verdict.judged.estimate  # the made-up runs have the same loss on their one source
        assert vars(found["code"]) == pytest.approx({"gap": estimate.gap, "low": estimate.low, "high": estimate.high})
    (one, _, _) = [{**row["curve"]} for row in [*comparison.as_data()["verdicts"], {"curve": {}}]]
    assert [*one] == ["steps", "tokens", "gap", "low", "high", "confidence"]


def test_only_pictures_with_an_aa_floor_mention_shading(comparison, tmp_path):
    def said(judged):
        return {picture.name for picture in pictures_of(judged) if "A/A floor" in picture.caption + picture.alt}

    assert {"gaps", "curve-mxfp4_rne"} <= said(comparison)
    for seed in range(2):
        make_run(tmp_path / f"a{seed}", "precision=bf16", f"seed={seed}", losses=losses())
        make_run(tmp_path / f"b{seed}", "precision=mxfp8", f"seed={seed}", losses=losses(0.002))
    assert not said(compared(tmp_path))


def test_seeds_that_failed_are_marked_on_the_curve(comparison):
    axes = painted(comparison, "curve-mxfp4_rne")
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels == ["A/A floor", "margin 0.01", "seed 1 (diverged)", "seed 2 (outlier)", "mean, 95 % at each step"]
    crosses = [line for line in lines(axes, FAILED) if line.get_marker() == "x"]
    assert [*crosses[0].get_xdata()] == [45 * STEP_TOKENS]
    assert max(cross.get_ydata()[0] for cross in crosses) <= axes.get_ylim()[1]
    (band,) = [each for each in axes.collections if len(each.get_paths()[0].vertices) > 10]
    panel = curve_panels(comparison, comparison.families[0])[1]
    assert band.get_paths()[0].vertices[:, 1].max() == pytest.approx(max(panel.curve.high))


def test_a_speed_that_is_emulated_is_hollow(comparison):
    axes = painted(comparison, "speed")
    assert "mxfp8 (emulated)" in words(axes)
    assert "mxfp4_rne (emulated)" not in words(axes)
    faces = {
        round(float(line.get_xdata()[0]), 2): to_hex(line.get_markerfacecolor())
        for line in axes.lines
        if line.get_marker() in ("o", "s")
    }
    assert faces == {0.7: "#ffffff", 1.5: COLOURS["lossy"]}


def words_of(kind, size):
    model = f"model=llama_tiny model.hidden_size={size} model.ffn_hidden_size={2 * size}"
    return f"precision={kind} {model}"


def test_the_gap_is_drawn_over_what_varies(tmp_path):
    """A grid of sizes and rates: over each, at every value of the other; tokens do not vary."""
    grid = {
        f"{words_of(kind, size)} optim.learning_rate={rate}": (kind == "mxfp8") * (size / 1e4 + rate)
        for kind in ("bf16", "mxfp8")
        for size in (96, 192)
        for rate in (1e-3, 4e-3)
    }
    comparison = compared(make_sweep(tmp_path / "s", grid, seeds=2))
    found = {(trend.key, trend.setting): trend for trend in trends(comparison)}
    at_size = ["566K parameters", "1.87M parameters"]
    assert found.keys() == {
        *(("parameters", f"optim.learning_rate={rate}") for rate in (0.001, 0.004)),
        *(("optim.learning_rate", setting) for setting in at_size),
    }
    (line,) = found["optim.learning_rate", at_size[1]].lines
    assert [point.x for point in line.points] == [0.001, 0.004]
    assert [point.interval.gap for point in line.points] == pytest.approx([0.0202, 0.0232], abs=2e-3)
    (line,) = found["parameters", "optim.learning_rate=0.004"].lines
    assert [point.x for point in line.points] == sorted({float(each.parameters) for each in comparison.verdicts})
    axes = painted(comparison, "over-parameters-0")
    assert [label.get_text() for label in axes.get_xticklabels()] == ["566K", "1.87M"]
    assert axes.get_xscale() == "log"


def test_over_sizes_that_train_longer_lines_are_at_equal_tokens_per_parameter(tmp_path):
    runs = 0
    for size, parameters in ((96, 566_000), (192, 1_870_000)):
        for ratio in (1, 2):
            steps = round(ratio * parameters / STEP_TOKENS / 10)
            for kind in ("bf16", "mxfp8"):
                for seed in (0, 1):
                    runs += 1
                    own = dict.fromkeys((steps - 1, steps), 3 + seed * 0.001 * (kind == "mxfp8"))
                    make_run(tmp_path / str(runs), *words_of(kind, size).split(), f"seed={seed}", losses=own)
    comparison = compared(tmp_path)
    found = [trend for trend in trends(comparison) if trend.key == "parameters"]
    assert [trend.setting for trend in found] == ["0.1 tokens per parameter", "0.2 tokens per parameter"]
    assert [len(trend.xs) for trend in found] == [2, 2]
    tokens = [trend for trend in trends(comparison) if trend.key == "tokens"]
    assert [trend.setting for trend in tokens] == ["566K parameters", "1.87M parameters"]  # each at its two lengths


def test_one_setting_has_no_trend(comparison):
    assert trends(comparison) == []
    assert [row.setting for row in forest_rows(comparison)] == ["", ""]
