"""Write a report's files into a folder; `report.html` is one self-contained page for screens, phones and paper.

A file that cannot be made is reported; the others are still written.
"""

import base64
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import groupby
from pathlib import Path

from jinja2 import Environment, PackageLoader
from markupsafe import Markup, escape

from lightning_llm.base.terminal import Waiting
from lightning_llm.compare.comparison import Comparison
from lightning_llm.compare.format import minus, nats
from lightning_llm.compare.report.latex import (
    bibliography,
    document,
    methods_latex,
    sources_latex,
    table_latex,
    verdicts_latex,
)
from lightning_llm.compare.report.methods import Methods
from lightning_llm.compare.report.picture import COLOURS, DARK_COLOURS, SYMBOLS, Picture
from lightning_llm.compare.report.pictures import pictures_of
from lightning_llm.compare.report.references import CITATION, citations_in
from lightning_llm.compare.report.tables import (
    NOTHING,
    Supplement,
    Table,
    curves_csv,
    gap_text,
    sources_of,
    tables_of,
    verdicts_csv,
)
from lightning_llm.compare.statistics.intervals import Decision
from lightning_llm.compare.table import COST, JUDGED, LONG, baseline_row, verdict_row
from lightning_llm.compare.verdict_text import line_of

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
"""{file written together with `report.html`: its purpose}, without the pictures, `figure-*.svg` and `.pdf`."""
OPTIONAL = ("pairs.", "ladder.")
"""Prefixes of files that not every report has."""
TEMPLATE = "report.html.jinja"
ORDER: tuple[Decision, ...] = ("lossless", "lossy", "inconclusive")


def write_report(comparison: Comparison, folder: Path, supplement: Supplement = NOTHING) -> list[str]:
    """Write all files of the report except `compare.json` to `folder`; return a sentence per file that failed.

    `supplement`: further parts of the report; its pictures follow the picture of the gaps.

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


def page(
    comparison: Comparison, pictures: Sequence[Picture], files: Mapping[str, str], tables: Sequence[Table] = ()
) -> str:
    """Return the HTML of the report.

    `files`: {name of a file in the same folder: its purpose}, to link; `tables`: tables besides that of the verdicts.
    """
    methods = comparison.methods
    sources = sources_of(comparison)
    template = _environment().get_template(TEMPLATE)
    return template.render(
        comparison=comparison,
        title=title_of(comparison),
        sentence=sentence(comparison),
        headlines=headlines(comparison),
        symbols=SYMBOLS,
        colours=COLOURS,
        dark_colours=DARK_COLOURS,
        judged=JUDGED,
        cost=COST,
        long=LONG,
        settings=[
            (baseline.family.text, baseline_row(baseline), [verdict_row(each) for each in verdicts])
            for baseline in comparison.baselines
            if (verdicts := comparison.verdicts_of(baseline.family))
        ],
        pictures=[(group, list(found)) for group, found in groupby(pictures, key=lambda each: each.group)],
        many=any(picture.folded for picture in pictures),  # then its table is for looking things up
        sources=sorted({source for found in sources.values() for source in found}),
        source_gaps=[(verdict, sources[id(verdict)]) for verdict in comparison.verdicts],
        paragraphs=[(heading, _with_numbers(text, methods)) for heading, text in methods.paragraphs],
        references=methods.references,
        files=files,
        tables=tables,
    )


@cache
def _environment() -> Environment:
    """Return the environment of the page's templates, which compiles each once per process."""
    environment = Environment(
        loader=PackageLoader("lightning_llm.compare.report", "."), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {
        "line": line_of,
        "nats": nats,
        "image": _image,
        "source": lambda gap: minus(gap_text(gap)),
        "minus": minus,
    }
    return environment


def title_of(comparison: Comparison) -> str:
    """Return the report's title."""
    return f"{comparison.factor.name} against {comparison.factor.baseline_label}"


@dataclass(frozen=True)
class Headline:
    """The verdicts in one setting, for the head of the report. `scale`: model size and tokens as text.

    `recipes`: (decision, decision that determines the color, names of the recipes with it).
    """

    setting: str
    scale: str
    recipes: tuple[tuple[Decision, Decision, tuple[str, ...]], ...]


def headlines(comparison: Comparison) -> list[Headline]:
    """Return one headline per setting; qualifications of a verdict are appended to the recipe's name."""
    found = []
    for family in comparison.families:
        verdicts = comparison.verdicts_of(family)
        if not verdicts:
            continue
        groups: dict[tuple[Decision, Decision], list[str]] = {}
        for verdict in verdicts:
            against = verdict.qualified.partition(" (")[2].rstrip(")")
            name = f"{verdict.name} ({against})" if against and verdict.decision != "inconclusive" else verdict.name
            groups.setdefault((verdict.decision, verdict.colour), []).append(name)
        first = verdicts[0]
        ordered = sorted(groups, key=lambda group: (ORDER.index(group[0]), group[0] != group[1]))
        recipes = tuple((*group, tuple(groups[group])) for group in ordered)
        found.append(Headline(family.text, first.scale, recipes))
    return found


def sentence(comparison: Comparison) -> str:
    """Return a sentence on how many verdicts are lossless, lossy and inconclusive."""
    decisions = [verdict.decision for verdict in comparison.verdicts]
    counts = [f"{decisions.count(each)} {each}" for each in ORDER if each in decisions]
    number = len(decisions)
    return f"{number} verdict{'s' * (number != 1)}: {', '.join(counts)}."


def _image(picture: Picture) -> str:
    return f"data:image/svg+xml;base64,{base64.b64encode(picture.svg.encode()).decode()}"


def _with_numbers(text: str, methods: Methods) -> Markup:
    """Return `text` with a numbered link to the list of references for each citation."""
    numbers = {reference.key: number for number, reference in enumerate(methods.references, 1)}
    parts, end = [], 0
    for found in CITATION.finditer(text):
        links = [
            Markup('<a href="#ref-{}">{}</a>{}').format(key, numbers[key], f", {place}" if place else "")
            for key, place in citations_in(found[0])
        ]
        between = Markup("; ") if any(place for _, place in citations_in(found[0])) else Markup(", ")
        parts += [escape(text[end : found.start()]), Markup(" [{}]").format(between.join(links))]
        end = found.end()
    return Markup("").join([*parts, escape(text[end:])])
