r"""LaTeX files of a report: tables, methods with `\cite`, the entries they cite, and a document that has it all.

`pdflatex report && bibtex report && pdflatex report && pdflatex report` makes a PDF of it; in a paper of one's own,
`verdicts.tex`, `sources.tex` and `methods.tex` are to `\input`.
"""

import re
from collections.abc import Iterable, Sequence
from functools import cache

from jinja2 import Environment, PackageLoader, StrictUndefined

from lightning_llm.compare.comparison import Comparison
from lightning_llm.compare.format import interval_text
from lightning_llm.compare.report.methods import Methods
from lightning_llm.compare.report.picture import Picture
from lightning_llm.compare.report.references import CITATION, CONTAINERS, Reference, citations_in
from lightning_llm.compare.report.tables import Table, gap_text, sources_of
from lightning_llm.compare.verdict import Verdict
from lightning_llm.compare.verdict_text import nats, short

ESCAPED = {"&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
           "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "\\": r"\textbackslash{}", "<": r"\textless{}",
           ">": r"\textgreater{}"}  # fmt: skip


def escape(text: str) -> str:
    """Return `text` with all characters that are special in LaTeX escaped."""
    return "".join(ESCAPED.get(letter, letter) for letter in text)


def verdicts_latex(comparison: Comparison) -> str:
    r"""Return a `tabular` (booktabs) of recipe, loss, gap, interval, pairs, failures, speed and verdict.

    Each of several settings is a separate row above its baseline.
    """
    lines: list[str] = []
    for baseline in comparison.baselines:
        verdicts = comparison.verdicts_of(baseline.family)
        if not verdicts:
            continue
        if baseline.family.text:
            lines += [r"\midrule"] if lines else []
            setting = _row([baseline.family.text]).removesuffix(r" \\")
            lines.append(rf"\multicolumn{{8}}{{l}}{{\emph{{{setting}}}}} \\")
        loss = "" if baseline.loss is None else nats(baseline.loss)
        lines.append(_row([baseline.label, loss, "", "", str(len(baseline.runs)), "", "", "baseline"]))
        lines += [_row(_verdict_cells(verdict)) for verdict in verdicts]
    terms, first = comparison.terms, comparison.verdicts[0]
    comment = (
        f"% {first.name} and others at {short(first.parameters)} parameters, {short(first.tokens)} tokens: "
        f"{terms.metric}, margin {terms.margin_text}, {100 * terms.confidence:g} % "
        f"{'repeated' if comparison.design else 'simultaneous'} intervals\n"
    )
    head = ["recipe", "loss", "gap", "interval", "pairs", "failed", "speed", "verdict"]
    return comment + _tabular("lrrrrrrp{3.6cm}", head, lines)


def sources_latex(comparison: Comparison) -> str:
    r"""Return a `tabular` (booktabs) of each recipe's gap and interval on each source, if any."""
    gaps = sources_of(comparison)
    sources = sorted({source for found in gaps.values() for source in found})
    if not sources:
        return "% no source was scored by itself\n"
    settings = any(family.text for family in comparison.families)
    lines = [
        _row([
            verdict.name,
            *([verdict.family.text] if settings else []),
            *(gap_text(gaps[id(verdict)][name]) if name in gaps[id(verdict)] else "" for name in sources),
        ])
        for verdict in comparison.verdicts
    ]  # fmt: skip
    head = ["recipe", *(["setting"] if settings else []), *sources]
    return _tabular("l" * (1 + settings) + "r" * len(sources), head, lines)


def table_latex(table: Table) -> str:
    r"""Return a table of the report other than the verdicts as a `tabular` (booktabs)."""
    columns = "l" * table.names + "r" * (len(table.columns) - table.names)
    return _tabular(columns, table.columns, [_row(row) for row in table.rows])


def _tabular(columns: str, head: Iterable[str], lines: Iterable[str]) -> str:
    body = [_row(head), r"\midrule", *lines]
    return "\n".join([rf"\begin{{tabular}}{{{columns}}}", r"\toprule", *body, r"\bottomrule", r"\end{tabular}", ""])


def _row(cells: Iterable[str]) -> str:
    return " & ".join(re.sub(r"(?<![\w.])-(?=\d)", "$-$", escape(cell)) for cell in cells) + r" \\"


def _verdict_cells(verdict: Verdict) -> list[str]:
    estimate, stability, speed = verdict.judged.estimate, verdict.judged.stability, verdict.cost.tokens_per_second_ratio
    return [
        verdict.name,
        "" if verdict.loss is None else nats(verdict.loss),
        nats(estimate.gap, signed=True) if estimate.pairs else "",
        "" if estimate.low != estimate.low else interval_text(estimate.low, estimate.high),
        str(estimate.pairs),
        f"{len(stability.failed)}/{stability.seeds}",
        "" if speed is None else "emulated" if verdict.emulated else f"{speed:.2f}x",
        verdict.qualified,
    ]


def methods_latex(methods: Methods) -> str:
    r"""Return the methods section as LaTeX: a `\paragraph` each, with `\cite` for citations."""
    return "\n\n".join(rf"\paragraph{{{heading}.}} {cited(text)}" for heading, text in methods.paragraphs) + "\n"


def cited(text: str) -> str:
    r"""Return `text` for LaTeX, "[@key, section 3]" as `\cite[section 3]{key}`."""
    parts, end = [], 0
    for found in CITATION.finditer(text):
        parts += [escape(text[end : found.start()]), f"~{_cite(citations_in(found[0]))}"]
        end = found.end()
    whole = "".join([*parts, escape(text[end:])])
    return re.sub(r"(\d) \\%", r"\1~\\%", whole)  # a number and its % stay on one line


def _cite(citations: Sequence[tuple[str, str]]) -> str:
    r"""Return one `\cite` of all keys; one for each where any of them names a place."""
    if not any(place for _, place in citations):
        return rf"\cite{{{','.join(key for key, _ in citations)}}}"
    places = [f"[{{{escape(place)}}}]" if set(place) & set("[],") else f"[{escape(place)}]" for _, place in citations]
    return ", ".join(
        rf"\cite{at if place else ''}{{{key}}}" for at, (key, place) in zip(places, citations, strict=True)
    )


def bibliography(references: Sequence[Reference]) -> str:
    """Return the content of the report's `references.bib`."""
    return "\n\n".join(map(_bibtex, references)) + "\n"


def _bibtex(reference: Reference) -> str:
    """Return one entry.

    The number at arXiv is part of `howpublished`: plain styles ignore `eprint`, and others would print it twice.
    """
    volume, _, pages = reference.place.partition(":")
    volume, _, number = volume.partition("(")
    where = ", ".join(filter(None, (reference.container, f"arXiv:{reference.eprint}" if reference.eprint else "")))
    article = {"volume": volume, "number": number.rstrip(")"), "pages": pages.replace("-", "--")}
    fields = {
        "author": reference.authors,
        "title": f"{{{escape(reference.title)}}}",
        "year": reference.year,
        CONTAINERS[reference.kind]: escape(where),
        **(article if reference.kind == "article" else {"note": escape(reference.place)}),
        "doi": reference.doi,
        "key": "" if reference.authors else escape(reference.title),  # to sort by
    }
    lines = [f"  {key} = {{{value}}}," for key, value in fields.items() if value]
    return "\n".join([f"@{reference.kind}{{{reference.key},", *lines, "}"])


def document(title: str, pictures: Sequence[Picture], tables: Sequence[Table] = ()) -> str:
    """Return the content of `report.tex`, a document with the `pictures` and the report's other .tex files.

    It inputs `verdicts.tex`, `sources.tex`, `methods.tex`, and `NAME.tex` of each of `tables`.
    """
    return _environment().get_template("report.tex.jinja").render(title=title, pictures=pictures, tables=tables)


@cache
def _environment() -> Environment:
    """Return the environment of the template, which compiles it once."""
    environment = Environment(
        loader=PackageLoader("lightning_llm.compare.report", "."), undefined=StrictUndefined, trim_blocks=True,
        block_start_string="<%", block_end_string="%>", variable_start_string="<<", variable_end_string=">>",
        keep_trailing_newline=True, autoescape=False,
    )  # fmt: skip
    environment.filters["tex"] = escape
    return environment
