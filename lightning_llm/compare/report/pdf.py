"""`report.pdf`: the report on a few pages of A4, set by matplotlib: text, the table of verdicts, pictures, methods."""

import io
from collections.abc import Sequence
from itertools import groupby

from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties

from lightning_llm.compare.comparison import Comparison
from lightning_llm.compare.report.headline import headlines, sentence
from lightning_llm.compare.report.methods import plain
from lightning_llm.compare.report.page import title_of
from lightning_llm.compare.report.picture import Picture
from lightning_llm.compare.report.rows import JUDGED, Row, baseline_row, verdict_row
from lightning_llm.compare.report.small_multiples import MOST_APART
from lightning_llm.compare.report.style import COLOURS, FAINT, INK, SYMBOLS, drawing_style
from lightning_llm.compare.report.supplement import Table
from lightning_llm.compare.report.typesetting import (
    LEADING,
    PAGE_HEIGHT,
    PAGE_WIDTH,
    POINT,
    SIDE,
    TEXT_WIDTH,
    TOP,
    Block,
    Line,
    pages_of,
    table,
    text,
    wrapped,
    write,
)
from lightning_llm.compare.verdict import Verdict
from lightning_llm.compare.wording import minus, nats

MOST_COLUMNS = 5
"""Recipes beside each other in the table of settings."""
SMALLER = 0.85
"""Height of a picture on paper over that on a screen."""


def pdf(comparison: Comparison, pictures: Sequence[Picture], tables: Sequence[Table] = ()) -> bytes:
    """Return the file; `tables`: beside that of the verdicts."""
    from matplotlib.backends.backend_pdf import PdfPages

    buffer = io.BytesIO()
    about = {"Title": title_of(comparison), "CreationDate": None}
    with drawing_style(), PdfPages(buffer, metadata=about) as file:
        for page in pages(comparison, pictures, tables):
            file.savefig(page)
    return buffer.getvalue()


def pages(comparison: Comparison, pictures: Sequence[Picture], tables: Sequence[Table] = ()) -> list[Figure]:
    """Return the pages, to be drawn in `drawing_style`."""
    title = title_of(comparison)
    blocks = [*text(title, size=15, weight="bold"), *text(_terms(comparison)), *_headlines(comparison)]
    to_look_up = [picture for picture in pictures if picture.folded]
    if to_look_up:  # then the tables, too, are for that: what came of it all stands before them
        blocks += _pictures([picture for picture in pictures if not picture.folded])
    blocks += _verdicts(comparison)
    for each in tables:
        blocks += text(each.heading, size=11, weight="bold")
        blocks += table(each.columns, [Line([minus(cell) for cell in row]) for row in each.rows], each.names)
        blocks += text(each.caption, size=7, colour=FAINT)
    blocks += _pictures(to_look_up or pictures)
    methods = comparison.methods
    blocks += text("Methods", size=11, weight="bold")
    for heading, paragraph in methods.paragraphs:
        blocks += text(f"{heading}. {plain(paragraph, methods.references)}", size=8)
    blocks += text("References", size=11, weight="bold")
    for reference in methods.references:
        blocks += text(f"{reference.text} {reference.doi or ''}".strip(), size=7.5)
    return pages_of(blocks)


def _terms(comparison: Comparison) -> str:
    terms = comparison.terms
    metric = f" of {terms.metric}" if "nats" in terms.margin_and_unit else ""
    repeated = " repeated" if comparison.design else ""
    margin = f"Margin {terms.margin_and_unit}{metric}, {100 * terms.confidence:g} %{repeated} intervals."
    return f"{sentence(comparison)} {margin}"


def _headlines(comparison: Comparison) -> list[Block]:
    """Return the verdicts of each setting, a line for each decision; of many settings a table, a row for each."""
    found = headlines(comparison)
    names = list(dict.fromkeys(verdict.name for verdict in comparison.verdicts))
    if len(found) > MOST_APART and len(names) <= MOST_COLUMNS:
        rows = [_setting(family.words, comparison.verdicts_of(family), names) for family in comparison.families]
        return [_space(0.06), *table(("gap and verdict", *names), rows, 1 + len(names)), _space(0.06)]
    blocks = []
    for headline in found:
        where = f"{headline.setting} ({headline.scale})" if headline.setting else headline.scale
        blocks += text(where, size=9, weight="bold", above=0.06)
        for decision, colour, recipes in headline.recipes:
            words = f"{SYMBOLS[decision]} {decision}: {', '.join(recipes)}"
            blocks += text(words, size=9, colour=COLOURS[colour], above=0.0)
    return blocks


def _setting(words: str, verdicts: Sequence[Verdict], names: Sequence[str]) -> Line:
    """Return a row of the table of settings: each recipe's mark and gap, in the colour of its verdict."""
    known = {verdict.name: verdict for verdict in verdicts}
    cells = [
        f"{SYMBOLS[known[name].decision]} {nats(known[name].judged.estimate.gap, signed=True)}" if name in known else ""
        for name in names
    ]
    colours = {place: COLOURS[known[name].colour] for place, name in enumerate(names, 1) if name in known}
    return Line([words, *map(minus, cells)], colours)


def _verdicts(comparison: Comparison) -> list[Block]:
    """Return the table of verdicts, each recipe under its baseline."""
    rows: list[Line | str] = []
    for baseline in comparison.baselines:
        if verdicts := comparison.verdicts_of(baseline.family):
            rows += [baseline.family.words] if baseline.family.words else []
            rows += map(_line, [baseline_row(baseline), *map(verdict_row, verdicts)])
    return [_space(0.06), *table(("recipe", "verdict", *JUDGED), rows, 2), _space(0.1)]


def _space(height: float) -> Block:
    return Block(height, lambda *_: None)


def _line(row: Row) -> Line:
    words = f"{SYMBOLS[row.decision]} {row.decision}" if row.decision else "baseline"
    figures = [row.figures[name] for name in JUDGED]
    faint = {} if row.decision else dict.fromkeys(range(1, 2 + len(figures)), FAINT)
    return Line([row.name, words, *figures], faint | ({1: COLOURS[row.colour]} if row.colour else {}))


def _pictures(pictures: Sequence[Picture]) -> list[Block]:
    """Return the pictures under the headings of their groups, wide ones alone, the others two beside each other."""
    blocks: list[Block] = []
    for group, found in groupby(pictures, key=lambda picture: picture.group):
        members, title = list(found), group
        while members:
            several = 1 if any(picture.width > 6 for picture in members[:2]) else 2
            blocks.append(_side_by_side(members[:several], title))
            members, title = members[several:], ""
    return blocks


def _side_by_side(pictures: Sequence[Picture], title: str) -> Block:
    column = TEXT_WIDTH if pictures[0].width > 6 else TEXT_WIDTH / 2
    small, large = FontProperties(size=7), FontProperties(size=10, weight="bold")
    captions = [wrapped(picture.caption, small, column - 0.15) for picture in pictures]
    head = 0.3 if title else 0.0
    height = min(SMALLER * max(picture.height for picture in pictures), PAGE_HEIGHT - 2 * TOP - 1)
    line = 7 * POINT * LEADING

    def paint(figure: Figure, top: float) -> None:
        write(figure, SIDE, top + 0.05, title, large, INK)
        for place, (picture, caption) in enumerate(zip(pictures, captions, strict=True)):
            start, upper = SIDE + place * column, top + head
            left, right, below, above = picture.margins
            box = (start + left) / PAGE_WIDTH, 1 - (upper + height - below) / PAGE_HEIGHT
            size = (column - left - right - 0.1) / PAGE_WIDTH, (height - below - above) / PAGE_HEIGHT
            picture.paint(figure.add_axes((*box, *size)))
            for number, words in enumerate(caption):
                write(figure, start, upper + height + number * line, words, small, FAINT)

    return Block(head + height + max(map(len, captions)) * line + 0.12, paint)
