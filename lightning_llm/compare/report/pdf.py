"""`report.pdf`: the report on a few pages of A4, set by matplotlib: text, the table of verdicts, pictures, methods."""

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import TextToPath

from lightning_llm.compare.comparison import Comparison
from lightning_llm.compare.methods import plain
from lightning_llm.compare.report.headline import headlines, sentence
from lightning_llm.compare.report.page import title_of
from lightning_llm.compare.report.pictures import Picture
from lightning_llm.compare.report.rows import JUDGED, Row, baseline_row, verdict_row
from lightning_llm.compare.report.style import COLOURS, FAINT, INK, SYMBOLS, drawing_style
from lightning_llm.compare.report.supplement import Table
from lightning_llm.compare.wording import minus

PAGE_WIDTH, PAGE_HEIGHT = 8.27, 11.69
"""A4, inches."""
SIDE, TOP = 0.7, 0.7
POINT = 1 / 72
LEADING = 1.35
"""Distance of lines over the size of the letters."""
SMALLER = 0.85
"""Height of a picture on paper over that on a screen."""
_METRICS = TextToPath()


@dataclass(frozen=True)
class Block:
    """What is set as a whole: its height, inches; and how, given the page's figure and its upper edge from the top."""

    height: float
    paint: Callable[[Figure, float], None]


def pdf(comparison: Comparison, pictures: Sequence[Picture], tables: Sequence[Table] = ()) -> bytes:
    """Return the file; `tables`: beside that of the verdicts."""
    from matplotlib.backends.backend_pdf import PdfPages

    title = title_of(comparison)
    blocks = [*text(title, size=15, weight="bold"), *text(_terms(comparison)), *_headlines(comparison)]
    blocks += _table(comparison)
    for table in tables:
        blocks += text(table.heading, size=11, weight="bold")
        blocks += _further(table)
        blocks += text(table.caption, size=7, colour=FAINT)
    blocks += _pictures(pictures)
    methods = comparison.methods
    blocks += text("Methods", size=11, weight="bold")
    for heading, paragraph in methods.paragraphs:
        blocks += text(f"{heading}. {plain(paragraph, methods.references)}", size=8)
    blocks += text("References", size=11, weight="bold")
    for reference in methods.references:
        blocks += text(f"{reference.text} {reference.doi or ''}".strip(), size=7.5)
    buffer = io.BytesIO()
    with drawing_style(), PdfPages(buffer, metadata={"Title": title, "CreationDate": None}) as pages:
        for page in _broken(blocks):
            figure = Figure(figsize=(PAGE_WIDTH, PAGE_HEIGHT))
            top = TOP
            for block in page:
                block.paint(figure, top)
                top += block.height
            pages.savefig(figure)
    return buffer.getvalue()


def _broken(blocks: Sequence[Block]) -> list[list[Block]]:
    """Return the blocks by page."""
    found: list[list[Block]] = [[]]
    used = 0.0
    for block in blocks:
        if found[-1] and used + block.height > PAGE_HEIGHT - 2 * TOP:
            found.append([])
            used = 0.0
        found[-1].append(block)
        used += block.height
    return found


def _terms(comparison: Comparison) -> str:
    terms = comparison.terms
    metric = f" of {terms.metric}" if "nats" in terms.margin_and_unit else ""
    repeated = " repeated" if comparison.design else ""
    margin = f"Margin {terms.margin_and_unit}{metric}, {100 * terms.confidence:g} %{repeated} intervals."
    return f"{sentence(comparison)} {margin}"


def _headlines(comparison: Comparison) -> list[Block]:
    blocks = []
    for headline in headlines(comparison):
        where = f"{headline.setting} ({headline.scale})" if headline.setting else headline.scale
        blocks += text(where, size=9, weight="bold", above=0.06)
        for decision, colour, names in headline.recipes:
            words = f"{SYMBOLS[decision]} {decision}: {', '.join(names)}"
            blocks += text(words, size=9, colour=COLOURS[colour], above=0.0)
    return blocks


def text(words: str, *, size: float = 9, weight: str = "normal", colour: str = INK, above: float = 0.08) -> list[Block]:
    """Return a paragraph, a block per line, so that it may go on on the next page; `above`: inches before it."""
    font = FontProperties(size=size, weight=weight)
    blocks = []
    for number, line in enumerate(wrapped(words, font, PAGE_WIDTH - 2 * SIDE)):
        room = above if number == 0 else 0.0

        def paint(figure: Figure, top: float, line: str = line, room: float = room) -> None:
            _write(figure, SIDE, top + room, line, font, colour)

        blocks.append(Block(room + size * POINT * LEADING, paint))
    return blocks


def wrapped(words: str, font: FontProperties, width: float) -> list[str]:
    """Return `words` in lines of at most `width` inches; a longer word alone in its line."""
    lines: list[str] = []
    for word in words.split():
        longer = f"{lines[-1]} {word}" if lines else word
        if lines and _width(longer, font) <= width:
            lines[-1] = longer
        else:
            lines.append(word)
    return lines


def _width(words: str, font: FontProperties) -> float:
    width, _, _ = _METRICS.get_text_width_height_descent(words, font, ismath=False)
    return float(width) * POINT


def _write(
    figure: Figure, left: float, top: float, words: str, font: FontProperties, colour: str, align: str = "left"
) -> None:
    figure.text(
        left / PAGE_WIDTH, 1 - (top + font.get_size_in_points() * POINT) / PAGE_HEIGHT, words, fontproperties=font,
        color=colour, ha=align, va="baseline", parse_math=False,
    )  # fmt: skip


def _table(comparison: Comparison) -> list[Block]:
    rows: list[Row | str] = []
    for baseline in comparison.baselines:
        if verdicts := comparison.verdicts_of(baseline.family):
            rows += [baseline.family.words] if baseline.family.words else []
            rows += [baseline_row(baseline), *map(verdict_row, verdicts)]
    font = FontProperties(size=7.5)
    names = [row.name for row in rows if isinstance(row, Row)]
    first = max(_width(name, font) for name in names) + 0.1
    cells = {name: [row.figures[name] for row in rows if isinstance(row, Row)] for name in JUDGED}
    widths = {name: max(_width(words, font) for words in [name, *cells[name]]) for name in JUDGED}
    room = PAGE_WIDTH - 2 * SIDE - first - sum(widths.values()) - 0.9
    space, edge, edges = max(0.05, room / len(JUDGED)), SIDE + first + 0.9, {}
    for name in JUDGED:
        edge += widths[name] + space
        edges[name] = edge
    height = font.get_size_in_points() * POINT * 1.7

    def head(figure: Figure, top: float) -> None:
        bold = FontProperties(size=7.5, weight="bold")
        _write(figure, SIDE, top + 0.1, "recipe", bold, INK)
        _write(figure, SIDE + first, top + 0.1, "verdict", bold, INK)
        for name, right in edges.items():
            _write(figure, right, top + 0.1, name, bold, INK, "right")

    def line(row: Row | str) -> Callable[[Figure, float], None]:
        def paint(figure: Figure, top: float) -> None:
            if isinstance(row, str):
                _write(figure, SIDE, top, row, FontProperties(size=7.5, style="italic"), FAINT)
                return
            colour = COLOURS[row.colour] if row.colour else FAINT
            _write(figure, SIDE, top, row.name, font, INK)
            words = f"{SYMBOLS[row.decision]} {row.decision}" if row.decision else "baseline"
            _write(figure, SIDE + first, top, words, font, colour)
            for name, right in edges.items():
                _write(figure, right, top, row.figures[name], font, INK if row.decision else FAINT, "right")

        return paint

    return [Block(height + 0.1, head), *(Block(height, line(row)) for row in rows), Block(0.1, lambda *_: None)]


def _further(table: Table) -> list[Block]:
    """Return a table as lines: names from the left, figures to the right of their columns."""
    font, bold = FontProperties(size=7.5), FontProperties(size=7.5, weight="bold")
    widths = [
        max(_width(minus(each), bold) for each in column) for column in zip(table.columns, *table.rows, strict=True)
    ]
    space = max(0.05, (PAGE_WIDTH - 2 * SIDE - sum(widths)) / len(widths))
    height = font.get_size_in_points() * POINT * 1.7

    def line(words: Sequence[str], font: FontProperties) -> Callable[[Figure, float], None]:
        def paint(figure: Figure, top: float) -> None:
            left = SIDE
            for place, (each, width) in enumerate(zip(words, widths, strict=True)):
                named = place < table.names
                _write(
                    figure, left + (0 if named else width), top, minus(each), font, INK, "left" if named else "right"
                )
                left += width + space

        return paint

    return [Block(height, line(table.columns, bold)), *(Block(height, line(row, font)) for row in table.rows)]


def _pictures(pictures: Sequence[Picture]) -> list[Block]:
    """Return the pictures under the headings of their groups, wide ones alone, the others two beside each other."""
    blocks: list[Block] = []
    for group, found in groupby(pictures, key=lambda picture: picture.group):
        members, title = list(found), group
        while members:
            several = 1 if members[0].width > 6 else 2
            blocks.append(_side_by_side(members[:several], title))
            members, title = members[several:], ""
    return blocks


def _side_by_side(pictures: Sequence[Picture], title: str) -> Block:
    column = PAGE_WIDTH - 2 * SIDE if pictures[0].width > 6 else (PAGE_WIDTH - 2 * SIDE) / 2
    small, large = FontProperties(size=7), FontProperties(size=10, weight="bold")
    captions = [wrapped(picture.caption, small, column - 0.15) for picture in pictures]
    head = 0.3 if title else 0.0
    height = min(SMALLER * max(picture.height for picture in pictures), PAGE_HEIGHT - 2 * TOP - 1)
    line = 7 * POINT * LEADING

    def paint(figure: Figure, top: float) -> None:
        _write(figure, SIDE, top + 0.05, title, large, INK)
        for place, (picture, caption) in enumerate(zip(pictures, captions, strict=True)):
            start, upper = SIDE + place * column, top + head
            left, right, below, above = picture.margins
            box = (start + left) / PAGE_WIDTH, 1 - (upper + height - below) / PAGE_HEIGHT
            size = (column - left - right - 0.1) / PAGE_WIDTH, (height - below - above) / PAGE_HEIGHT
            picture.paint(figure.add_axes((*box, *size)))
            for number, words in enumerate(caption):
                _write(figure, start, upper + height + number * line, words, small, FAINT)

    return Block(head + height + max(map(len, captions)) * line + 0.12, paint)
