"""Write a report's files into a folder. A file that cannot be made is reported; the others are still written."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from lightning_llm.base.terminal import Waiting
from lightning_llm.compare.comparison import Comparison
from lightning_llm.compare.report.latex import (
    bibliography,
    document,
    methods_latex,
    sources_latex,
    table_latex,
    verdicts_latex,
)
from lightning_llm.compare.report.page import page, title_of
from lightning_llm.compare.report.picture import Picture
from lightning_llm.compare.report.pictures import pictures_of
from lightning_llm.compare.report.tables import NOTHING, Supplement, curves_csv, tables_of, verdicts_csv

FILES = {
    "verdicts.csv": "the tables with all digits",
    "curves.csv": "the gaps along the run",
    "verdicts.tex": "the table for LaTeX",
    "sources.tex": "the gaps by source for LaTeX",
    "methods.tex": "the methods for LaTeX",
    "references.bib": "the references of the methods",
    "pairs.csv": "the gaps of all pairs",
    "pairs.tex": "the gaps of all pairs for LaTeX",
    "ladder.csv": "the ladder: gaps over sizes and tokens",
    "ladder.tex": "the ladder for LaTeX",
    "report.tex": "a document with everything for LaTeX",
    "compare.json": "everything for programs, the output of --json",
}
"""Files written together with `report.html`, and their purposes; the pictures, `figure-*.svg` and `.pdf`, are not
listed."""
OPTIONAL = ("pairs.", "ladder.")
"""Prefixes of files that not every report has."""


def write_report(comparison: Comparison, folder: Path, supplement: Supplement = NOTHING) -> list[str]:
    """Write everything except `compare.json` to `folder`; return a sentence for each file that could not be made.

    `supplement`: further parts; its pictures follow that of the gaps.

    Raises:
        OSError: the folder cannot be written to.
    """
    gaps, *others = pictures_of(comparison)
    pictures = [gaps, *supplement.pictures, *others]
    tables = [*tables_of(comparison), *supplement.tables]
    of_tables = {f"{table.name}.{ending}" for table in tables for ending in ("csv", "tex")}
    files = {name: purpose for name, purpose in FILES.items() if not name.startswith(OPTIONAL) or name in of_tables}
    # Files of an earlier look or release.
    stale = [folder / name for name in ("report.pdf", *(FILES.keys() - files.keys()))]
    for file in [*stale, *folder.glob("figure-*.svg"), *folder.glob("figure-*.pdf")]:
        file.unlink(missing_ok=True)
    failed: list[str] = []
    drawn: list[Picture] = []
    with Waiting(f"drawing {len(pictures)} pictures") as waiting:
        for picture in pictures:
            if _write(f"figure-{picture.name}.svg", partial(getattr, picture, "svg"), folder, failed):
                drawn.append(picture)
            _write(f"figure-{picture.name}.pdf", partial(getattr, picture, "pdf"), folder, failed)
            waiting.tell(len(drawn))
    methods = comparison.methods
    makers: dict[str, Callable[[], str | bytes]] = {
        "report.html": lambda: page(comparison, drawn, files, tables),
        "verdicts.csv": lambda: verdicts_csv(comparison),
        "curves.csv": lambda: curves_csv(comparison),
        "verdicts.tex": lambda: verdicts_latex(comparison),
        "sources.tex": lambda: sources_latex(comparison),
        "methods.tex": lambda: methods_latex(methods),
        "references.bib": lambda: bibliography(methods.references),
        "report.tex": lambda: document(title_of(comparison), drawn, tables),
    }
    for table in tables:
        makers |= {
            f"{table.name}.csv": partial(getattr, table, "csv"),
            f"{table.name}.tex": partial(table_latex, table),
        }
    for name, make in makers.items():
        _write(name, make, folder, failed)
    return failed


def _write(name: str, make: Callable[[], str | bytes], folder: Path, failed: list[str]) -> bool:
    """Write one file atomically; return whether it could be made. Raises OSError if it cannot be written."""
    try:
        made = make()
    except Exception as error:  # drawings, templates: the verdict needs neither
        failed.append(f"{name} could not be made ({type(error).__name__}: {error}); the rest was written.")
        (folder / name).unlink(missing_ok=True)  # of an earlier look
        return False
    partial_file = folder / f"{name}.partial"
    partial_file.write_bytes(made.encode() if isinstance(made, str) else made)
    partial_file.replace(folder / name)
    return True
