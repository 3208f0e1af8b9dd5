"""Text on pages of A4, set by matplotlib: paragraphs and tables as blocks that stay within the margins."""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import TextToPath

from lightning_llm.compare.report.style import FAINT, INK

PAGE_WIDTH, PAGE_HEIGHT = 8.27, 11.69
"""A4, inches."""
SIDE, TOP = 0.7, 0.7
TEXT_WIDTH, PAGE_ROOM = PAGE_WIDTH - 2 * SIDE, PAGE_HEIGHT - 2 * TOP
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
    """What is set as a whole: its height, inches; and how, given the page's figure and its upper edge from the top.

    `below`: inches of what follows that stay on the page with it; `head`: what is set again above it on a new page.
    """

    height: float
    paint: Callable[[Figure, float], None]
    below: float = 0.0
    head: tuple["Block", ...] = ()


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
        whole = [block]
        if top + block.height + block.below > PAGE_HEIGHT - TOP or not figures:
            figures.append(Figure(figsize=(PAGE_WIDTH, PAGE_HEIGHT)))
            top, whole = TOP, [*block.head, block]
        for each in whole:
            each.paint(figures[-1], top)
            top += each.height
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
    while (fits := max(1, _letters_that_fit(word, font, width))) < len(word):
        end = max((word.rfind(mark, 0, fits) for mark in BREAKS), default=-1) + 1
        end = end if end > fits / 2 else fits
        yield word[:end]
        word = word[end:]
    yield word


def _letters_that_fit(word: str, font: FontProperties, width: float) -> int:
    """Return how many letters of a word take `width` inches at most, measuring few more than these: more are wider."""
    most = 1
    while most < len(word) and width_of(word[:most], font) <= width:
        most *= 2
    return bisect_right(range(1, min(most, len(word)) + 1), width, key=lambda letters: width_of(word[:letters], font))


@lru_cache(maxsize=1 << 14)
def width_of(words: str, font: FontProperties) -> float:
    """Return how wide `words` are, inches; `font` is one that nobody changes."""
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
    """Return a table as wide as the text, a block per line, with its first row again on each page that it goes on to.

    A table that is wider has smaller letters, and then cells of several lines in its widest columns. A row stays on one
    page if that is high enough.

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
    head = _row(lines[0], widths, space, bold, names, PAGE_ROOM)
    height = sum(block.height for block in head)
    again = tuple(replace(block, below=0.0) for block in head) if height < PAGE_ROOM / 2 else ()
    left = PAGE_ROOM - (height if again else 0.0)
    blocks = []
    for row in rows:
        if isinstance(row, str):
            blocks += _heading(row, FontProperties(size=size, style="italic"))
        else:
            blocks += _row(row, widths, space, font, names, left)
    blocks = [replace(block, head=again) for block in blocks]
    if blocks:
        head = [replace(block, below=block.below + blocks[0].height) for block in head]
    return [*head, *blocks]


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
    return [Block(height, painting(line), below=height) for line in wrapped(words, font, TEXT_WIDTH)]


def _row(
    line: Line, widths: Sequence[float], space: float, font: FontProperties, names: int, room: float
) -> list[Block]:
    """Return a row, a block per line; they stay together if they are not higher than `room`, inches."""
    cells = [wrapped(words, font, width + 1e-6) for words, width in zip(line.words, widths, strict=True)]
    size = font.get_size_in_points() * POINT
    lefts = [SIDE + sum(widths[:place]) + place * space for place in range(len(widths))]

    def painting(number: int) -> Callable[[Figure, float], None]:
        def paint(figure: Figure, top: float) -> None:
            for place, (cell, left) in enumerate(zip(cells, lefts, strict=True)):
                if number < len(cell):
                    at, align = (left, "left") if place < names else (left + widths[place], "right")
                    write(figure, at, top, cell[number], font, line.colours.get(place, INK), align)

        return paint

    several = max(1, *map(len, cells))
    whole = size * (several * LEADING + ROW_GAP)
    heights = [size * LEADING] * (several - 1) + [size * (LEADING + ROW_GAP)]
    first, *others = [Block(height, painting(number)) for number, height in enumerate(heights)]
    return [replace(first, below=whole - first.height if whole <= room else 0.0), *others]
