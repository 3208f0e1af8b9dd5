"""Writes the report and all that goes with it into a folder: what fails is said, and leaves the rest as it is."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from lightning_llm.base.terminal import Waiting
from lightning_llm.compare.comparison import Comparison
from lightning_llm.compare.report.latex import bibliography, document, methods_latex
from lightning_llm.compare.report.page import page, title_of
from lightning_llm.compare.report.pdf import pdf
from lightning_llm.compare.report.picture import Picture
from lightning_llm.compare.report.pictures import pictures_of
from lightning_llm.compare.report.supplement import NOTHING, Supplement, Table, tables_of
from lightning_llm.compare.report.tables import curves_csv, sources_latex, verdicts_csv, verdicts_latex

FILES = {
    "report.pdf": "the same to print and send",
    "verdicts.csv": "the tables in full",
    "curves.csv": "the curves of differences",
    "verdicts.tex": "the table for LaTeX",
    "sources.tex": "the gaps by source for LaTeX",
    "methods.tex": "the methods for LaTeX",
    "references.bib": "what they cite",
    "pairs.csv": "the gaps of all pairs",
    "pairs.tex": "the same for LaTeX",
    "ladder.csv": "the ladder: gaps over sizes and tokens",
    "ladder.tex": "the same for LaTeX",
    "report.tex": "all of it for LaTeX",
    "compare.json": "everything for a program",
}
"""What lies beside `report.html`, and what for; and the pictures, `figure-*.svg` and `.pdf`."""
OPTIONAL = ("pairs.", "ladder.")
"""Beginnings of the names of those that not every report has."""


def write_report(comparison: Comparison, folder: Path, supplement: Supplement = NOTHING) -> list[str]:
    """Write everything but `compare.json` to `folder`; return what could not be made, a sentence each.

    `supplement`: what stands beside the verdicts, its pictures behind that of the gaps.

    Raises:
        OSError: the folder cannot be written to.
    """
    gaps, *others = pictures_of(comparison)
    pictures = [gaps, *supplement.pictures, *others]
    tables = [*tables_of(comparison), *supplement.tables]
    for pattern in ("figure-*.svg", "figure-*.pdf"):
        for stale in folder.glob(pattern):
            stale.unlink()
    failed: list[str] = []
    drawn: list[Picture] = []
    with Waiting(f"drawing {len(pictures)} pictures") as waiting:
        for picture in pictures:
            svg = _made(f"figure-{picture.name}.svg", partial(_svg, picture), folder, failed)
            drawn += [picture] if svg else []
            _made(f"figure-{picture.name}.pdf", partial(_pdf, picture), folder, failed)
            waiting.tell(len(drawn))
    methods = comparison.methods
    of_tables = {f"{table.name}.{ending}" for table in tables for ending in ("csv", "tex")}
    absent = {name for name in FILES if name.startswith(OPTIONAL) and name not in of_tables}
    for name in absent:  # of an earlier look
        (folder / name).unlink(missing_ok=True)
    files = {name: purpose for name, purpose in FILES.items() if name not in absent}
    makers: dict[str, Callable[[], str | bytes]] = {
        "report.html": lambda: page(comparison, drawn, files, tables),
        "verdicts.csv": lambda: verdicts_csv(comparison),
        "curves.csv": lambda: curves_csv(comparison),
        "verdicts.tex": lambda: verdicts_latex(comparison),
        "sources.tex": lambda: sources_latex(comparison),
        "methods.tex": lambda: methods_latex(methods),
        "references.bib": lambda: bibliography(methods.references),
        "report.tex": lambda: document(title_of(comparison), drawn, [table.latex_float for table in tables]),
        "report.pdf": lambda: pdf(comparison, drawn, tables),
    }
    for table in tables:
        makers |= {f"{table.name}.csv": partial(_csv, table), f"{table.name}.tex": partial(_latex, table)}
    for name, make in makers.items():
        _made(name, make, folder, failed)
    return failed


def _csv(table: Table) -> str:
    return table.csv


def _latex(table: Table) -> str:
    return table.latex


def _svg(picture: Picture) -> str:
    return picture.svg


def _pdf(picture: Picture) -> bytes:
    return picture.pdf


def _made(name: str, make: Callable[[], str | bytes], folder: Path, failed: list[str]) -> bool:
    """Write one file, which appears whole; whether it could be made. Raises OSError where it cannot be written."""
    try:
        made = make()
    except Exception as error:  # whatever a drawing or a template may raise: the verdict stands without it
        failed.append(f"{name} could not be made ({type(error).__name__}: {error}); the rest of the report is there.")
        (folder / name).unlink(missing_ok=True)  # of an earlier look
        return False
    partial = folder / f"{name}.partial"
    partial.write_bytes(made.encode() if isinstance(made, str) else made)
    partial.replace(folder / name)
    return True
