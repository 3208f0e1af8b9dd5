"""The ladder in the report, without a folder's name, and recipes without a fitted gap."""

import csv
import json
import math
import re
import shutil
from dataclasses import replace

import numpy as np
import pytest
from matplotlib.figure import Figure

from lightning_llm.__main__ import main
from lightning_llm.compare.judge import compare_runs
from lightning_llm.compare.report.pictures import pictures_of
from lightning_llm.compare.terms import Terms
from lightning_llm.ladder.fit import effect_at, fit_ladder
from lightning_llm.ladder.measured import ladder_of
from lightning_llm.ladder.predictions import is_of, read_ledger
from lightning_llm.ladder.report import Report
from lightning_llm.ladder.supplement import supplement_of
from lightning_llm.tracking.reading import read_run
from tests.ladder.test_command import SIZES, STEP_TOKENS, STEPS, add_rung

pytestmark = pytest.mark.usefixtures("undrawn")
PLACE = ["model=llama_tiny", f"data.tokens={16 * STEP_TOKENS}"]


@pytest.fixture(scope="module")
def ladder(tmp_path_factory):
    folder, rng = tmp_path_factory.mktemp("outputs") / "experiment" / "ladder", np.random.default_rng(0)
    for model, parameters in SIZES.items():
        for steps in STEPS:
            add_rung(folder, model, parameters, steps, "2026-11-21T10:00:00+00:00", rng, 1 + (model == "ladder_690k"))
    return folder


@pytest.fixture
def at_home(ladder, monkeypatch):
    """The outputs folder contains the ladder and a newer sweep that is not a ladder."""
    root = ladder.parent.parent
    monkeypatch.setenv("LIGHTNING_LLM_OUTPUTS", str(root))
    other = root / "experiment" / "sweep"
    for number, run in enumerate(sorted(ladder.glob("ladder_240k-*-8-0"))):
        shutil.copytree(run, other / str(number), dirs_exist_ok=True)
        (other / str(number) / "config.yaml").touch()
    return root


def said(capsys, *words, expect=0):
    assert main(["ladder", *map(str, words)]) == expect
    return "".join(capsys.readouterr())


def test_a_ladder_report_has_the_ladder_in_every_form(ladder, at_home, capsys):
    told = said(capsys, "--predict", *PLACE)
    assert "% more tokens [" in told
    assert "at 2.16M / 32.8K (llama_tiny), not shown to grow with tokens per parameter (p = " in told
    assert f"predictions {ladder}/compare/predictions.jsonl" in told
    assert f"report {ladder}/compare/ladder/report.html" in told
    assert "not run yet" in said(capsys, "--grade")
    folder = ladder / "compare" / "ladder"
    rows = list(csv.DictReader((folder / "ladder.csv").open()))
    assert [row["kind"][:9] for row in rows] == ["measured"] * 9 + ["predicted"]
    data = json.loads((folder / "compare.json").read_text())["ladder"]
    for row, rung in zip(rows, data["recipes"][0]["rungs"], strict=False):
        assert float(row["measured_gap"]) == pytest.approx(rung["measured_gap"])
        assert [float(row["more_tokens_low"]), float(row["more_tokens_high"])] == pytest.approx(rung["more_tokens_ci"])
    (made,) = read_ledger(ladder / "compare" / "predictions.jsonl")
    assert float(rows[-1]["more_tokens"]) == pytest.approx(made.claim["more_tokens"])
    assert (folder / "ladder.tex").read_text().startswith("\\begin{tabular}{lrrrrrr}")
    assert "\\input{ladder}" in (folder / "report.tex").read_text()
    assert "hoffmann2022" in (folder / "references.bib").read_text()
    page = (folder / "report.html").read_text()
    assert "<h2>The ladder: cost of a recipe in tokens</h2>" in page
    assert "<h2>The ladder, rung by rung</h2>" in page
    assert "<strong>Ladder.</strong> The baseline" in page
    assert "mxfp4_sr, predicted" in page
    headings = re.findall("<h2>(.*?)</h2>", page)
    assert headings.index("Gaps") < headings.index("Verdicts") < headings.index("Methods")  # of nine rungs
    assert headings.index("Verdicts") < headings.index("Along the run, by model, trainer.max_steps")
    assert (folder / "figure-ladder-0-tokens.svg").is_file()
    assert len(json.loads((ladder / "compare" / "looks.json").read_text())["looks"]) == 1  # its verdicts were seen


@pytest.mark.parametrize(
    ("order", "runs"),
    [
        (["--predict", *PLACE, "--json"], []),
        (["--predict", *PLACE, "mine"], ["mine"]),
        (["mine", "--beyond", "2", "--predict", *PLACE[::-1]], ["mine"]),
    ],
)
def test_words_may_come_in_any_order(order, runs, monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(
        "lightning_llm.cli.ladder.ladder_named", lambda words, *rest, **_: asked.append((words, rest[-1]))
    )
    said(capsys, *order)
    ((words, what),) = asked
    assert (words, what.predict.parameters, what.predict.tokens) == (runs, 2_164_416, 16 * STEP_TOKENS)


def test_without_a_ladder_or_a_prediction_one_line_says_what_to_do(at_home, monkeypatch, tmp_path, capsys):
    told = said(capsys, "sweep", "--grade", expect=2)
    assert "--grade: there is no prediction yet in" in told
    assert "Make one before its runs: lightning-llm ladder --predict model=NAME data.tokens=NUMBER." in told
    assert "0 of 0" not in told
    monkeypatch.setenv("LIGHTNING_LLM_OUTPUTS", str(tmp_path))
    assert "is a ladder, of 3 model sizes and 3 token counts. Name its folder, or" in said(capsys, expect=2)


@pytest.fixture(scope="module")
def compared(ladder):
    return [read_run(each) for each in sorted(ladder.iterdir()) if (each / "config.yaml").is_file()]


@pytest.fixture
def predictions(ladder, capsys):
    """Predictions from the ladder; equal ones are recorded once."""
    said(capsys, ladder, "--predict", *PLACE)
    return read_ledger(ladder / "compare" / "predictions.jsonl")


def test_predictions_of_another_metric_are_not_graded(compared, predictions):
    (made,), ladder = predictions, ladder_of(compare_runs(compared, Terms()))
    assert is_of(made, ladder)
    assert not is_of(replace(made, claim={**made.claim, "metric": "val_loss/code"}), ladder)
    assert not is_of(replace(made, claim={**made.claim, "baseline": "fp32"}), ladder)


@pytest.mark.full
def test_the_pictures_draw_fit_rungs_and_prediction(compared, predictions):
    comparison = compare_runs(compared, Terms())
    report = Report(ladder_of(comparison), 0.95)
    report.fit = fit_ladder(report.ladder)
    over_tokens, over_sizes = supplement_of(report, predictions).pictures
    for picture, lines, axis in ((over_tokens, 4, 1), (over_sizes, 3, 0)):
        axes = Figure().subplots()
        picture.paint(axes)
        names = [text.get_text() for text in axes.get_legend().get_texts()]
        assert len(names) == lines + 1
        drawn = {line.get_label(): line for line in axes.get_lines()}
        first = drawn[names[0]]
        place = [237_888, 8192]
        at = effect_at(report.fit, "mxfp4_sr", *place)
        assert first.get_xdata()[0] == pytest.approx(place[axis])
        assert first.get_ydata()[0] == pytest.approx(100 * at.more_tokens)
        assert drawn["predicted"].get_ydata()[0] == pytest.approx(100 * predictions[0].claim["more_tokens"])


def test_each_setting_is_drawn_with_its_own_margin(compared):
    comparison = compare_runs(compared, Terms(math.nan, token_margin=0.05))
    margins = [verdict.terms.margin for verdict in comparison.verdicts]
    assert max(margins) > 1.5 * min(margins)
    forest = next(each for each in pictures_of(comparison) if each.name == "gaps")
    axes = Figure().subplots()
    forest.paint(axes)
    dashed = [line for line in axes.get_lines() if line.get_linestyle() == "--"]
    assert [line.get_xdata()[0] for line in dashed] == pytest.approx(margins)
    assert dashed[0].get_label() == "margin 5 % of tokens"
    (curves,) = (each for each in pictures_of(comparison) if each.name.startswith("curve"))
    axes = Figure().subplots()
    curves.paint(axes)
    for panel, margin in zip(axes.child_axes, margins, strict=True):
        (line,) = [line for line in panel.get_lines() if str(line.get_label()).startswith("margin")]
        assert line.get_ydata()[0] == pytest.approx(margin)


def test_many_settings_are_panels_of_a_few_pictures(compared):
    """As many of one kind as there are rungs would be a hundred on a ladder of four recipes."""
    comparison = compare_runs(compared, Terms())
    pictures = pictures_of(comparison)
    assert len(comparison.families) == 9
    assert [each.name for each in pictures if each.folded] == ["curve-mxfp4_sr", "loss", "speed"]
    assert len(pictures) == 6  # those, the gaps, and over size and tokens
    curve = next(each for each in pictures if each.name == "curve-mxfp4_sr")
    figure = Figure(figsize=(curve.width, curve.height))
    axes = figure.subplots()
    curve.paint(axes)
    panels = axes.child_axes
    titles = [panel.get_title("left") for panel in panels]
    assert sorted(titles) == sorted(f"{model}, {steps}" for model in SIZES for steps in STEPS)
    assert len({panel.get_ylim() for panel in panels}) == 1  # one scale
    assert axes.get_legend().get_texts()[0].get_text() == "margin 0.01"
    for verdict, panel in zip(comparison.verdicts, panels, strict=True):
        (mean,) = (line for line in panel.get_lines() if str(line.get_label()).startswith(("mean", "one pair")))
        assert mean.get_ydata()[-1] == pytest.approx(verdict.judged.estimate.gap)
    assert curve.alt.count("at the last validation") == 9
    assert curve.narrow.height > curve.height  # two columns


def test_gaps_of_many_settings_are_panels_on_one_scale(compared, monkeypatch):
    monkeypatch.setattr("lightning_llm.compare.report.pictures.MOST_ROWS", 8)  # as if it were of several recipes
    comparison = compare_runs(compared, Terms())
    gaps, *_ = pictures_of(comparison)
    axes = Figure().subplots()
    gaps.paint(axes)
    assert gaps.height < 7
    assert len({panel.get_xlim() for panel in axes.child_axes}) == 1
    for verdict, panel in zip(comparison.verdicts, axes.child_axes, strict=True):
        gap = verdict.judged.estimate.gap
        assert gap in [line.get_xdata()[0] for line in panel.get_lines() if line.get_marker() in ("o", "D", "s")]
        assert panel.get_title("left") in gaps.alt.replace("model=", "").replace("trainer.max_steps=", "")


def test_a_recipe_with_few_pairs_stays_in_the_data(ladder, capsys, tmp_path):
    folder = tmp_path / "some"
    shutil.copytree(ladder, folder, ignore=shutil.ignore_patterns("compare"))
    for run in [*folder.glob("*-mxfp4_sr-16-*"), *folder.glob("*-mxfp4_sr-4-*")]:
        shutil.rmtree(run)
    assert main(["ladder", str(folder), "--json"]) == 2
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert "mxfp4_sr: its gap cannot be fitted: it was run on 3 rungs of 3 sizes" in err
    (recipe,) = found["recipes"]
    assert (recipe["name"], recipe["terms"], len(recipe["rungs"])) == ("mxfp4_sr", None, 3)
    assert "it was run on 3 rungs" in recipe["refused"][0]
    assert len([row for row in found["runs"] if row["recipe"] == "mxfp4_sr"]) == 4
    tokens = 8 * STEP_TOKENS
    assert recipe["rungs"][0]["measured_gap"] == pytest.approx(0.03 * 110 * tokens**-0.45, abs=0.004)
