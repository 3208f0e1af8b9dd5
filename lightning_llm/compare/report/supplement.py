"""Further tables and pictures of a report: all pairs, and what a package above this one has to add (a ladder)."""

import csv
import io
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lightning_llm.compare.comparison import Comparison
from lightning_llm.compare.data import finite
from lightning_llm.compare.report.latex import escape, latex_row
from lightning_llm.compare.report.picture import Picture
from lightning_llm.compare.table import pair_cells


@dataclass(frozen=True)
class Table:
    """A table: `rows` in words under `columns`, of which the first `names` are text and the others figures.

    `name`: of its files, `name.csv` and `name.tex`; `figures`: a row each for the CSV, numbers in full.
    """

    name: str
    heading: str
    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    figures: tuple[Mapping[str, Any], ...]
    names: int = 1

    @property
    def csv(self) -> str:
        """One line per row; empty where there is no number."""
        text = io.StringIO()
        writer = csv.DictWriter(text, list(self.figures[0]), restval="", lineterminator="\n")
        writer.writeheader()
        for row in self.figures:
            writer.writerow({key: finite(value) if isinstance(value, float) else value for key, value in row.items()})
        return text.getvalue()

    @property
    def latex(self) -> str:
        r"""A `tabular` (booktabs)."""
        columns = "l" * self.names + "r" * (len(self.columns) - self.names)
        body = [latex_row(self.columns), r"\midrule", *map(latex_row, self.rows)]
        return "\n".join([rf"\begin{{tabular}}{{{columns}}}", r"\toprule", *body, r"\bottomrule", r"\end{tabular}", ""])

    @property
    def latex_float(self) -> str:
        r"""The table in a `table` with its caption, read in from `name.tex`, made smaller to fit the page."""
        lead, end = r"\begin{table}[htbp]\centering\small", r"\end{table}"
        fitted = rf"\resizebox{{\ifdim\width>\linewidth\linewidth\else\width\fi}}{{!}}{{\input{{{self.name}}}}}"
        return rf"{lead}{fitted}\caption{{{escape(self.caption)}}}{end}"


@dataclass(frozen=True)
class Supplement:
    """What stands in a report beside the verdicts; `data`: further keys of its `compare.json`."""

    tables: tuple[Table, ...] = ()
    pictures: tuple[Picture, ...] = ()
    data: Mapping[str, Any] = field(default_factory=dict)


NOTHING = Supplement()


def tables_of(comparison: Comparison) -> list[Table]:
    """Return the tables beside that of the verdicts, by the comparison alone: all pairs, where they were asked for."""
    found = comparison.all_pairs
    if not found:
        return []
    settings = any(each.setting for each in found)
    where = ("setting",) if settings else ()
    level = f"{100 * comparison.terms.confidence:g} %"
    caption = (
        f"Every recipe against every other by loss alone: the gap of the first to the second, {comparison.terms.unit}, "
        f"with {level} intervals that hold together over all pairs (Tukey), and so are wider than the verdicts' own."
    )
    figures = tuple(
        {
            "recipe": each.recipe, "against": each.other, "setting": each.setting, "verdict": each.decision,
            "controlled": each.controlled, "margin": each.margin, "gap": each.gap, "ci_low": each.low,
            "ci_high": each.high, "pairs": each.pairs,
        }
        for each in found
    )  # fmt: skip
    rows = tuple(pair_cells(each, settings=settings) for each in found)
    columns = ("recipe", "against", *where, "verdict", "gap", "interval", "pairs")
    return [Table("pairs", "Each against each", caption, columns, rows, figures, 3 + settings)]
