"""Pages of `report.pdf`: no text runs out of them, nor into its neighbour, however long names are. 3 seconds."""

from dataclasses import replace
from itertools import combinations

import pytest
from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg

from lightning_llm.compare.comparison import compare_runs
from lightning_llm.compare.estimate import Terms
from lightning_llm.compare.report import typesetting
from lightning_llm.compare.report.pdf import pages
from lightning_llm.compare.report.style import drawing_style
from lightning_llm.compare.report.supplement import Table, tables_of
from lightning_llm.compare.report.typesetting import PAGE_HEIGHT, PAGE_WIDTH, SIDE, TOP, Line, pages_of, table
from lightning_llm.tracking.reading import read_run
from tests.compare.run_folders import make_sweep

ROUNDING = 0.03
"""Inches by which a text may be wider as it is drawn than as it was measured: a pixel either side."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    names = ("bf16", "mxfp8", "mxfp4_sr", "fp8_current")
    folder = make_sweep(tmp_path_factory.mktemp("s") / "s", {f"precision={name}": 0.001 for name in names})
    return [read_run(each) for each in sorted(folder.iterdir())]


def named(runs, longer):
    """Return the comparison of runs, each against each, of which the recipes have these names."""
    renamed = [
        replace(run, config={**run.config, "precision.name": longer.format(run.config["precision.name"])})
        for run in runs
    ]
    return compare_runs(renamed, replace(Terms(), all_pairs=True), "precision=" + longer.format("bf16"))


def extents(figure):
    """Return {words: (left, right, bottom, top)} of the texts of a page, inches from its lower left corner."""
    with rc_context({"text.hinting": "no_hinting"}):  # as in a PDF, whose letters lie on no grid
        renderer = FigureCanvasAgg(figure).get_renderer()
        boxes = [(each.get_text(), each.get_window_extent(renderer)) for each in figure.texts]
    return [(words, *(edge / figure.dpi for edge in (b.x0, b.x1, b.y0, b.y1))) for words, b in boxes if words]


def wide_table():
    columns = ("recipe", "against", "verdict", *(f"gap on source {number}" for number in range(9)))
    row = (
        "a_recipe_with_a_long_name",
        "b_recipe_with_a_long_name",
        "inconclusive",
        *9 * ["-0.0012 [-0.0135, +0.0112]"],
    )
    return Table("wide", "Wide", "A caption.", columns, (row, row), ({},), names=3)


def test_nothing_runs_out_of_its_page_or_into_another(runs):
    comparison = named(runs, "layers.0-7.attention.{}/" + 7 * "x_y." + " and the head in bf16")
    tables = [*tables_of(comparison), wide_table()]
    assert len(tables[0].rows) == 6
    with drawing_style():
        found = [extents(page) for page in pages(comparison, [], tables)]
    for texts in found:
        for words, left, right, bottom, top in texts:
            assert left > SIDE - ROUNDING, words
            assert right < PAGE_WIDTH - SIDE + ROUNDING, words
            assert bottom > TOP - 0.1, words
            assert top < PAGE_HEIGHT - TOP + 0.1, words
        for one, other in combinations(texts, 2):
            apart = one[2] <= other[1] + ROUNDING or other[2] <= one[1] + ROUNDING
            above = one[3] >= other[4] - ROUNDING or other[3] >= one[4] - ROUNDING
            assert apart or above, (one, other)
    said = "".join(words for texts in found for words, *_ in texts).replace(" ", "")
    for row in tables[0].rows:
        assert row[0].replace(" ", "") in said  # broken, and whole


def test_a_table_that_fits_has_a_line_per_row(runs):
    (pairs,) = tables_of(named(runs, "{}"))
    with drawing_style():
        (page,) = pages_of(table(pairs.columns, [Line(row) for row in pairs.rows], pairs.names))
        texts = extents(page)
    assert len(texts) == (1 + len(pairs.rows)) * len(pairs.columns)
    for row in pairs.rows:
        assert set(row) <= {words for words, *_ in texts}


def test_labels_without_blanks_are_measured_in_few_steps(monkeypatch):
    """A row per pair of 6 recipes of 140 letters: letters that are measured, over those that there are."""
    measured, width_of = [], typesetting._METRICS.get_text_width_height_descent

    def counting(words, *more, **options):
        measured.append(len(words))
        return width_of(words, *more, **options)

    monkeypatch.setattr(typesetting._METRICS, "get_text_width_height_descent", counting)
    names = [f"recipe{number}" + 22 * "abcdef" for number in range(6)]
    rows = [Line([one, other, "inconclusive", "-0.0012 [-0.0135, +0.0112]"]) for one, other in combinations(names, 2)]
    with drawing_style():
        blocks = table(("recipe", "against", "verdict", "gap"), rows, 3)
    assert len(blocks) > 2 * len(rows)  # names of several lines each
    assert sum(measured) < 12 * sum(len(word) for row in rows for word in row.words)


def test_a_table_that_goes_on_has_its_head_on_every_page_and_its_rows_whole():
    rows = [Line([f"recipe {number} " + 5 * "has_a_long_name ", "same", "0.1"]) for number in range(150)]
    rows[100:100] = ["a setting"]
    with drawing_style():
        found = [[each.get_text() for each in page.texts] for page in pages_of(table(("recipe", "is", "gap"), rows, 2))]
    assert len(found) > 2
    for words in found:
        assert words[:3] == ["recipe", "is", "gap"]
        assert words.count("gap") == 1
        assert words[3].startswith("recipe ")
        assert words[-1] != "a setting"
    assert sum(word == "0.1" for words in found for word in words) == 150


def test_a_row_that_is_higher_than_a_page_goes_on_on_the_next():
    name = 150 * "layers.0-7.attention/"
    row = Line([name, *9 * ["-0.0012 [-0.0135, +0.0112]"]])
    with drawing_style():
        columns = ("recipe", *(f"gap on source {number}" for number in range(9)))
        found = [extents(page) for page in pages_of(table(columns, [row, Line(["next", *9 * ["0"]])], 1))]
    assert len(found) > 2
    for texts in found:
        assert min(bottom for *_, bottom, _ in texts) > TOP - 0.1
        assert max(top for *_, top in texts) < PAGE_HEIGHT - TOP + 0.1
        assert texts[0][0] == "recipe"
    said = "".join(words for texts in found for words, left, *_ in texts if left < SIDE + 0.01)
    assert said.replace("recipe", "") == name + "next"
