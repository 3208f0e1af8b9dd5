"""`report.html`: one file with everything in it, to read without the runs at hand; its pictures also as SVG files."""

import base64
from collections.abc import Iterator
from pathlib import Path

from jinja2 import Environment, PackageLoader

from lightning_llm.compare.comparison import Comparison
from lightning_llm.compare.figures import COLOURS, draw_curves, draw_intervals, draw_speed
from lightning_llm.compare.pairing import Family
from lightning_llm.compare.table import COLUMNS, baseline_cells, cells
from lightning_llm.compare.wording import line_of, nats
from lightning_llm.terminal.waiting import Waiting

TEMPLATE = "report.html.jinja"
JUDGED = COLUMNS.index("loss") + 1
"""Columns of the first table, of what was judged; the others are of what it cost."""


def write_report(comparison: Comparison, folder: Path) -> None:
    """Write `report.html`, which appears whole, and each of its pictures as an SVG file. Raises OSError."""
    pictures, waiting = {}, Waiting("drawing the settings' pictures")
    for words, family in _families(comparison):
        pictures[words] = dict(_pictures(comparison, family))
        waiting.tell(len(pictures))
    for stale in folder.glob("figure-*.svg"):
        stale.unlink()
    for number, found in enumerate(pictures.values()):
        for name, svg in found.items():
            suffix = f"-{number}" if len(pictures) > 1 else ""
            (folder / f"figure-{name}{suffix}.svg").write_text(svg, encoding="utf-8")
    file = folder / "report.html"
    partial = file.with_suffix(".partial")
    partial.write_text(_page(comparison, pictures), encoding="utf-8")
    partial.replace(file)


def _families(comparison: Comparison) -> list[tuple[str, Family]]:
    return [(family.words, family) for family in comparison.families if comparison.verdicts_of(family)]


def _pictures(comparison: Comparison, family: Family) -> Iterator[tuple[str, str]]:
    verdicts, baseline, terms = comparison.verdicts_of(family), comparison.factor.baseline_label, comparison.terms
    yield "gaps", draw_intervals(verdicts, baseline, terms)
    yield "curves", draw_curves(verdicts, baseline, terms)
    if speed := draw_speed(verdicts, baseline, terms):
        yield "speed", speed


def _page(comparison: Comparison, pictures: dict[str, dict[str, str]]) -> str:
    environment = Environment(
        loader=PackageLoader("lightning_llm.compare", "."), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["line"] = line_of
    environment.filters["nats"] = nats
    environment.filters["image"] = lambda svg: f"data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()}"
    return environment.get_template(TEMPLATE).render(
        comparison=comparison,
        title=f"{comparison.factor.name} against {comparison.factor.baseline_label}",
        methods=comparison.as_data()["methods"],
        colours=COLOURS,
        columns=COLUMNS,
        judged=JUDGED,
        baselines=[
            (baseline, baseline_cells(baseline), [(each, cells(each)) for each in comparison.verdicts_of(family)])
            for baseline, family in zip(comparison.baselines, comparison.families, strict=True)
            if comparison.verdicts_of(family)
        ],
        sources=sorted({source for verdict in comparison.verdicts for source in verdict.gap_by_source}),
        settings=any(family.words for family in comparison.families),
        pictures=pictures,
    )
