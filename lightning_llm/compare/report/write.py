"""Writes the report and all that goes with it into a folder: what fails is said, and leaves the rest as it is."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from lightning_llm.compare.comparison import Comparison
from lightning_llm.compare.report.latex import bibliography, document, methods_latex
from lightning_llm.compare.report.page import page, title_of
from lightning_llm.compare.report.pdf import pdf
from lightning_llm.compare.report.pictures import Picture, pictures_of
from lightning_llm.compare.report.tables import curves_csv, sources_latex, verdicts_csv, verdicts_latex
from lightning_llm.terminal.waiting import Waiting

FILES = {
    "report.pdf": "the same to print and send",
    "verdicts.csv": "the tables in full",
    "curves.csv": "the curves of differences",
    "verdicts.tex": "the table for LaTeX",
    "sources.tex": "the gaps by source for LaTeX",
    "methods.tex": "the methods for LaTeX",
    "references.bib": "what they cite",
    "report.tex": "all of it for LaTeX",
    "compare.json": "everything for a program",
}
"""What lies beside `report.html`, and what for; and the pictures, `figure-*.svg` and `.pdf`."""


def write_report(comparison: Comparison, folder: Path) -> list[str]:
    """Write everything but `compare.json` to `folder`; return what could not be made, a sentence each.

    Raises:
        OSError: the folder cannot be written to.
    """
    pictures = pictures_of(comparison)
    for pattern in ("figure-*.svg", "figure-*.pdf"):
        for stale in folder.glob(pattern):
            stale.unlink()
    failed: list[str] = []
    waiting = Waiting(f"drawing {len(pictures)} pictures")
    drawn: list[Picture] = []
    for picture in pictures:
        svg = _made(f"figure-{picture.name}.svg", partial(_svg, picture), folder, failed)
        drawn += [picture] if svg else []
        _made(f"figure-{picture.name}.pdf", partial(_pdf, picture), folder, failed)
        waiting.tell(len(drawn))
    methods = comparison.methods
    makers: dict[str, Callable[[], str | bytes]] = {
        "report.html": lambda: page(comparison, drawn, FILES),
        "verdicts.csv": lambda: verdicts_csv(comparison),
        "curves.csv": lambda: curves_csv(comparison),
        "verdicts.tex": lambda: verdicts_latex(comparison),
        "sources.tex": lambda: sources_latex(comparison),
        "methods.tex": lambda: methods_latex(methods),
        "references.bib": lambda: bibliography(methods.references),
        "report.tex": lambda: document(title_of(comparison), drawn),
        "report.pdf": lambda: pdf(comparison, drawn),
    }
    for name, make in makers.items():
        _made(name, make, folder, failed)
    return failed


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
