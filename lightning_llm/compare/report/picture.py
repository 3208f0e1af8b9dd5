"""One picture of the report, drawn when it is asked for, as SVG and as PDF."""

import io
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from lightning_llm.compare.report.style import drawing_style

WIDTH, HEIGHT = 4.7, 3.1
"""Of a picture, in inches: two stand side by side on a screen, one fills a phone's."""


@dataclass(frozen=True)
class Picture:
    """One picture: `name` is its file's, `alt` says in words what it shows, `paint` draws it on matplotlib axes.

    `width`, `height`: in inches; `margins`: what axes leave free left, right, below and above, for a page that places
    them itself.
    """

    name: str
    group: str
    caption: str
    alt: str
    paint: Callable[[Any], None]
    width: float = WIDTH
    height: float = HEIGHT
    margins: tuple[float, float, float, float] = (0.75, 0.1, 0.5, 0.3)
    narrow: "Picture | None" = None
    """The same for a phone, where it is not narrow itself."""
    folded: bool = False
    """Whether it is of panels, as many as there are settings: to look things up in."""

    @cached_property
    def svg(self) -> str:
        """The picture as SVG text."""
        return _saved(self._figure, "svg").decode()

    @cached_property
    def pdf(self) -> bytes:
        """The picture as a PDF, for LaTeX."""
        return _saved(self._figure, "pdf")

    @cached_property
    def _figure(self) -> Any:
        """The picture as drawn once, its layout found."""
        from matplotlib.figure import Figure

        with drawing_style():
            figure = Figure(figsize=(self.width, self.height), layout="constrained")
            self.paint(figure.subplots())
            figure.draw_without_rendering()
            figure.set_layout_engine("none")  # which takes longer than all else, and would be asked for each file
        return figure


def _saved(figure: Any, form: str) -> bytes:
    buffer = io.BytesIO()
    date = {"svg": "Date", "pdf": "CreationDate"}[form]
    with drawing_style():
        figure.savefig(buffer, format=form, metadata={date: None})
    return buffer.getvalue()
