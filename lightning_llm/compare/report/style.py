"""Colours, marks and letters of the report: told apart by readers who see no red or green, and in black and white."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from lightning_llm.compare.statistics.intervals import Decision

COLOURS: dict[Decision, str] = {"lossless": "#0057b7", "inconclusive": "#6b6f75", "lossy": "#b84300"}
"""On white each has a contrast of at least 4.5, which text needs (WCAG 2.2, 1.4.3)."""
DARK_COLOURS: dict[Decision, str] = {"lossless": "#5aa9ff", "inconclusive": "#c4c8cd", "lossy": "#ff9a5c"}
"""The same on a dark page."""
SYMBOLS: dict[Decision, str] = {"lossless": "✓", "inconclusive": "?", "lossy": "✗"}
MARKERS: dict[Decision, str] = {"lossless": "o", "inconclusive": "D", "lossy": "s"}
INK, FAINT, FLOOR = "#222222", "#777777", "#f0e4b4"
FAILED = "#8e24aa"
Dashes = str | tuple[float, tuple[float, ...]]


@dataclass(frozen=True)
class LineStyle:
    """How one recipe's line is drawn where several share a panel."""

    colour: str
    marker: str
    dashes: Dashes


LINES = (
    LineStyle("#0072b2", "o", "-"),
    LineStyle("#d55e00", "s", "--"),
    LineStyle("#009e73", "D", "-."),
    LineStyle("#cc79a7", "^", ":"),
    LineStyle("#8a6d00", "v", (0, (5, 1))),
    LineStyle("#56b4e9", "P", (0, (3, 1, 1, 1))),
)
"""In turn; the colours are those of Okabe and Ito (Color Universal Design, 2008), the yellow one darker."""

SETTINGS = {
    "font.size": 9.0,
    "axes.titlesize": 9.5,
    "axes.labelsize": 9.0,
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
    "legend.fontsize": 8.0,
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": False,
    "axes.edgecolor": FAINT,
    "svg.hashsalt": "lightning-llm",
    "svg.fonttype": "path",
    "pdf.fonttype": 42,
}


@contextmanager
def drawing_style() -> Iterator[None]:
    """Draw and save in the report's style; the same data give the same file."""
    from matplotlib import rc_context

    with rc_context(SETTINGS):
        yield


def line_style(place: int) -> LineStyle:
    """Return the style of the recipe at `place`."""
    return LINES[place % len(LINES)]
