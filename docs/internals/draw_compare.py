"""Draw docs/pictures/compare.svg, the README's picture, with the report's own drawings.

`python docs/internals/draw_compare.py` draws it from compare.json beside this file, the parts of a `compare.json` that
it shows. With a folder, `python docs/internals/draw_compare.py outputs/precision_shootout/NAME/compare`, it takes the
numbers of your own sweep (`make sweep RECIPE=sweep/precision_shootout && make compare`) and writes both files.
"""

import argparse
import io
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from lightning_llm.compare.report.draw import curve_limits, draw_curve, draw_forest
from lightning_llm.compare.report.panels import CurvePanel, ForestRow, Frame, Interval
from lightning_llm.compare.report.picture import drawing_style
from lightning_llm.compare.statistics.paired_curves import Curve
from lightning_llm.compare.terms import Terms

FOLDER = Path(__file__).resolve().parent
PICTURE = FOLDER.parent / "pictures" / "compare.svg"
SHOWN = ("factor", "baseline", "margin", "confidence", "metric")
SHOWN_OF_A_VERDICT = (
    "name", "verdict", "qualified", "gap", "ci", "controlled", "may_not_have_acted", "setting", "aa_floor",
    "outlier_seeds", "diverged_seeds", "baseline_diverged_seeds", "differences", "curve",
)  # fmt: skip


def shown(found: dict[str, Any]) -> dict[str, Any]:
    """Return the parts of a `compare.json` that the picture shows."""
    verdicts = [{key: verdict[key] for key in SHOWN_OF_A_VERDICT} for verdict in found["verdicts"]]
    return {**{key: found[key] for key in SHOWN}, "verdicts": verdicts}


def number(value: float | None) -> float:
    """Return a number of JSON, NaN for null."""
    return math.nan if value is None else value


def row_of(verdict: dict[str, Any], terms: Terms) -> ForestRow:
    """Return the row of a verdict."""
    seeds = {each["seed"]: each["gap"] for each in verdict["differences"]}
    clean = verdict["controlled"] and not verdict["may_not_have_acted"]
    return ForestRow(
        name=verdict["name"],
        setting=", ".join(f"{key}={value}" for key, value in verdict["setting"].items()),
        decision="inconclusive" if verdict["verdict"] == "lossless" and not clean else verdict["verdict"],
        qualified=verdict["qualified"],
        interval=Interval(number(verdict["gap"]), *map(number, verdict["ci"])),
        seeds={seed: gap for seed, gap in seeds.items() if seed not in verdict["outlier_seeds"]},
        outliers={seed: gap for seed, gap in seeds.items() if seed in verdict["outlier_seeds"]},
        diverged_seeds=(*verdict["diverged_seeds"], *verdict["baseline_diverged_seeds"]),
        floor=verdict["aa_floor"],
        margin=terms.margin,
    )


def panel_of(verdict: dict[str, Any], terms: Terms) -> CurvePanel:
    """Return the panel of a verdict's curve."""
    row, curve = row_of(verdict, terms), verdict["curve"]
    gap, low, high = (tuple(map(number, curve[key])) for key in ("gap", "low", "high"))
    found = Curve(tuple(curve["steps"]), tuple(curve["tokens"]), gap, low, high, len(row.seeds), terms.confidence)
    return CurvePanel(row.name, row.decision, found, (), row.floor, row.margin)


def draw(found: dict[str, Any]) -> str:
    """Return the picture as SVG text: the gaps, and below them each recipe's difference along the run."""
    terms = Terms(margin=found["margin"], metric=found["metric"], confidence=found["confidence"])
    frame = Frame(found["baseline"], terms.margin, terms.unit, terms.metric, terms.confidence, terms.margin_text)
    panels = [panel_of(verdict, terms) for verdict in found["verdicts"]]
    with drawing_style():
        figure = Figure(figsize=(9.6, 1.4 + 0.34 * len(panels) + 2.3), layout="constrained")
        above, below = figure.subfigures(2, 1, height_ratios=[1.4 + 0.34 * len(panels), 2.3])
        draw_forest(above.subplots(), [row_of(verdict, terms) for verdict in found["verdicts"]], frame)
        draw_curves(below, panels, frame)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()


def draw_curves(figure: Any, panels: Sequence[CurvePanel], frame: Frame) -> None:
    """Draw the panels in one row, with one legend and one label of their common axis."""
    limits = curve_limits(panels, frame)
    for place, (axes, panel) in enumerate(zip(figure.subplots(1, len(panels), sharey=True), panels, strict=True)):
        draw_curve(axes, panel, frame, limits)
        axes.get_legend().remove()
        axes.xaxis.get_major_locator().set_params(nbins=3)
        axes.set_title(panel.name, fontsize=8.5, loc="left")
        if place:
            axes.set_ylabel("")


def main(argv: list[str] | None = None) -> int:
    """Write docs/pictures/compare.svg."""
    parser = argparse.ArgumentParser(description="Draw docs/pictures/compare.svg.")
    parser.add_argument("folder", nargs="?", type=Path, help="of a compare.json to take the numbers from")
    folder = parser.parse_args(argv).folder
    if folder is not None:
        found = shown(json.loads((folder / "compare.json").read_text(encoding="utf-8")))
        (FOLDER / "compare.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    found = json.loads((FOLDER / "compare.json").read_text(encoding="utf-8"))
    PICTURE.write_text(draw(found), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
