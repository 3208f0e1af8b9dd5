r"""The report for LaTeX: methods with `\cite`, the entries they cite, and a document that has it all.

`pdflatex report && bibtex report && pdflatex report && pdflatex report` makes a PDF of it; in a paper of one's own,
`verdicts.tex`, `sources.tex` and `methods.tex` are to `\input`.
"""

import re
from collections.abc import Iterable, Sequence

from lightning_llm.compare.report.methods import Methods
from lightning_llm.compare.report.picture import Picture
from lightning_llm.compare.report.references import CITATION, Reference, citations_in

ESCAPED = {"&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
           "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "\\": r"\textbackslash{}", "<": r"\textless{}",
           ">": r"\textgreater{}"}  # fmt: skip


def escape(text: str) -> str:
    """Return `text` with every letter that LaTeX would take for its own spelled out."""
    return "".join(ESCAPED.get(letter, letter) for letter in text)


def latex_row(cells: Iterable[str]) -> str:
    """Return a row of a `tabular`."""
    return " & ".join(re.sub(r"(?<![\w.])-(?=\d)", "$-$", escape(cell)) for cell in cells) + r" \\"


def methods_latex(methods: Methods) -> str:
    r"""Return the paragraphs, each headed by a `\paragraph`, with `\cite` for citations."""
    return "\n\n".join(rf"\paragraph{{{heading}.}} {cited(text)}" for heading, text in methods.paragraphs) + "\n"


def cited(text: str) -> str:
    r"""Return `text` for LaTeX, "[@key, section 3]" as `\cite[section 3]{key}`."""
    parts, end = [], 0
    for found in CITATION.finditer(text):
        parts += [escape(text[end : found.start()]), f"~{_cite(citations_in(found[0]))}"]
        end = found.end()
    return _unbroken("".join([*parts, escape(text[end:])]))


def _cite(citations: Sequence[tuple[str, str]]) -> str:
    r"""Return a `\cite` of all keys; one for each where a place in any of them is said."""
    if not any(place for _, place in citations):
        return rf"\cite{{{','.join(key for key, _ in citations)}}}"
    places = [f"[{{{escape(place)}}}]" if set(place) & set("[],") else f"[{escape(place)}]" for _, place in citations]
    return ", ".join(
        rf"\cite{at if place else ''}{{{key}}}" for at, (key, place) in zip(places, citations, strict=True)
    )


def _unbroken(text: str) -> str:
    """Keep a number and its % together."""
    return re.sub(r"(\d) \\%", r"\1~\\%", text)


def bibliography(references: Sequence[Reference]) -> str:
    """Return `references.bib`."""
    return "\n\n".join(reference.as_bibtex(ESCAPED) for reference in references) + "\n"


def document(title: str, pictures: Sequence[Picture], tables: Sequence[str] = ()) -> str:
    """Return `report.tex`: the tables, the pictures that lie beside it as PDF files, the methods and the references.

    `tables`: further floats, beside those that each report has.
    """
    figures = [
        "\n".join([
            r"\begin{figure}[htbp]\centering",
            rf"\includegraphics[width={'' if picture.width > 6 else '0.6'}\linewidth]{{figure-{picture.name}.pdf}}",
            rf"\caption{{{escape(picture.caption)}}}",
            r"\end{figure}",
        ])
        for picture in pictures
    ]  # fmt: skip
    return "\n".join([
        r"\documentclass{article}",
        r"\usepackage[utf8]{inputenc}\usepackage[margin=2.2cm]{geometry}",
        r"\usepackage{booktabs,graphicx}",
        rf"\title{{{escape(title)}}}\date{{}}",
        r"\begin{document}\maketitle",
        r"\begin{table}[htbp]\centering\small\input{verdicts}\caption{The verdicts.}\end{table}",
        r"\begin{table}[htbp]\centering\small\input{sources}\caption{Gaps by source of the validation set, nats per",
        r"token, with intervals that hold together over recipes.}\end{table}",
        *tables,
        r"\section*{Methods}",
        r"\input{methods}",
        *figures,
        r"\bibliographystyle{plain}\bibliography{references}",
        r"\end{document}",
        "",
    ])  # fmt: skip
