"""Text on pages of A4, set by matplotlib: paragraphs and tables as blocks that stay within the margins."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import TextToPath

from lightning_llm.compare.report.style import FAINT, INK

PAGE_WIDTH, PAGE_HEIGHT = 8.27, 11.69
"""A4, inches."""
SIDE, TOP = 0.7, 0.7
TEXT_WIDTH = PAGE_WIDTH - 2 * SIDE
POINT = 1 / 72
LEADING = 1.35
"""Distance of lines over the size of the letters."""
TABLE_SIZES = (7.5, 6.5)
"""Of a table's letters, points: the first that it fits the page in, else the last, with cells of several lines."""
GAP = 0.08
"""Between columns at least, inches."""
ROW_GAP = 0.35
"""Below a row, over the size of the letters."""
BREAKS = "._-/=,"
"""Behind which a word that is wider than its line is broken, if it has any of them."""
_METRICS = TextToPath()


@dataclass(frozen=True)
class Block:
    """What is set as a whole: its height, inches; and how, given the page's figure and its upper edge from the top."""

    height: float
    paint: Callable[[Figure, float], None]


@dataclass(frozen=True)
class Line:
    """A row of a table; `colours`: {column: colour}, of those that are not of the ink."""

    words: Sequence[str]
    colours: dict[int, str] = field(default_factory=dict)


def pages_of(blocks: Sequence[Block]) -> list[Figure]:
    """Return the blocks on pages, one after another."""
    figures: list[Figure] = []
    top = PAGE_HEIGHT
    for block in blocks:
        if top + block.height > PAGE_HEIGHT - TOP or not figures:
            figures.append(Figure(figsize=(PAGE_WIDTH, PAGE_HEIGHT)))
            top = TOP
        block.paint(figures[-1], top)
        top += block.height
    return figures


def text(words: str, *, size: float = 9, weight: str = "normal", colour: str = INK, above: float = 0.08) -> list[Block]:
    """Return a paragraph, a block per line, so that it may go on on the next page; `above`: inches before it."""
    font = FontProperties(size=size, weight=weight)
    blocks = []
    for number, line in enumerate(wrapped(words, font, TEXT_WIDTH)):
        room = above if number == 0 else 0.0

        def paint(figure: Figure, top: float, line: str = line, room: float = room) -> None:
            write(figure, SIDE, top + room, line, font, colour)

        blocks.append(Block(room + size * POINT * LEADING, paint))
    return blocks


def wrapped(words: str, font: FontProperties, width: float) -> list[str]:
    """Return `words` in lines of at most `width` inches; a word that is longer goes on in the next line."""
    lines: list[str] = []
    for word in words.split():
        longer = f"{lines[-1]} {word}" if lines else word
        if lines and width_of(longer, font) <= width:
            lines[-1] = longer
        else:
            lines += _pieces(word, font, width)
    return lines


def _pieces(word: str, font: FontProperties, width: float) -> Iterator[str]:
    """Yield a word in pieces of at most `width` inches, of one letter at least."""
    while width_of(word, font) > width and len(word) > 1:
        fits = next((n for n in range(len(word) - 1, 1, -1) if width_of(word[:n], font) <= width), 1)
        end = max((word.rfind(mark, 0, fits) for mark in BREAKS), default=-1) + 1
        end = end if end > fits / 2 else fits
        yield word[:end]
        word = word[end:]
    yield word


def width_of(words: str, font: FontProperties) -> float:
    """Return how wide `words` are, inches."""
    width, _, _ = _METRICS.get_text_width_height_descent(words, font, ismath=False)
    return float(width) * POINT


def write(
    figure: Figure, left: float, top: float, words: str, font: FontProperties, colour: str, align: str = "left"
) -> None:
    """Write a line of words on a page; `left`, `top`: inches from its edges, of the side that `align` names."""
    figure.text(
        left / PAGE_WIDTH, 1 - (top + font.get_size_in_points() * POINT) / PAGE_HEIGHT, words, fontproperties=font,
        color=colour, ha=align, va="baseline", parse_math=False,
    )  # fmt: skip


def table(columns: Sequence[str], rows: Sequence[Line | str], names: int) -> list[Block]:
    """Return a table as wide as the text, a block per row.

    A table that is wider has smaller letters, and then cells of several lines in its widest columns.

    Args:
        rows: a word alone is a heading over the rows below it.
        names: how many columns, from the left, hold text; the others hold figures, which stand to the right.
    """
    lines = [Line(columns), *(row for row in rows if isinstance(row, Line))]
    room = TEXT_WIDTH - GAP * (len(columns) - 1)
    for size in TABLE_SIZES:
        font, bold = FontProperties(size=size), FontProperties(size=size, weight="bold")
        natural = [max(width_of(line.words[place], bold) for line in lines) for place in range(len(columns))]
        if sum(natural) <= room:
            break
    widths = _fitted(natural, room)
    space = GAP + (room - sum(widths)) / max(1, len(columns) - 1)
    blocks = [_row(lines[0], widths, space, bold, names)]
    for row in rows:
        if isinstance(row, str):
            italic = FontProperties(size=size, style="italic")
            blocks += _heading(row, italic)
        else:
            blocks.append(_row(row, widths, space, font, names))
    return blocks


def _fitted(natural: Sequence[float], room: float) -> list[float]:
    """Return widths of columns that take `room` at most: the widest are cut, to one width."""
    kept: list[float] = []  # of columns that stay as wide as they are
    for place, width in enumerate(sorted(natural)):
        if width * (len(natural) - place) > room - sum(kept):
            most = (room - sum(kept)) / (len(natural) - place)
            return [min(each, most) for each in natural]
        kept.append(width)
    return list(natural)


def _heading(words: str, font: FontProperties) -> list[Block]:
    def painting(line: str) -> Callable[[Figure, float], None]:
        return lambda figure, top: write(figure, SIDE, top, line, font, FAINT)

    height = font.get_size_in_points() * POINT * (1 + ROW_GAP)
    return [Block(height, painting(line)) for line in wrapped(words, font, TEXT_WIDTH)]


def _row(line: Line, widths: Sequence[float], space: float, font: FontProperties, names: int) -> Block:
    cells = [wrapped(words, font, width + 1e-6) for words, width in zip(line.words, widths, strict=True)]
    size = font.get_size_in_points() * POINT

    def paint(figure: Figure, top: float) -> None:
        left = SIDE
        for place, (cell, width) in enumerate(zip(cells, widths, strict=True)):
            at, align = (left, "left") if place < names else (left + width, "right")
            for number, words in enumerate(cell):
                write(figure, at, top + number * size * LEADING, words, font, line.colours.get(place, INK), align)
            left += width + space

    return Block(size * (max(map(len, [*cells, [""]])) * LEADING + ROW_GAP), paint)
