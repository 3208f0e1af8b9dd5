"""One picture of a report as SVG and PDF, several as panels of one, and the colors and marks they share.

Colors and marks can be distinguished by red-green color-blind readers, and in black and white.
"""

import io
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Literal

from lightning_llm.compare.statistics.intervals import Decision

COLOURS: dict[Decision, str] = {"lossless": "#0057b7", "inconclusive": "#6b6f75", "lossy": "#b84300"}
"""Color by decision. Each has a contrast of at least 4.5 on white, as text requires (WCAG 2.2, 1.4.3)."""
DARK_COLOURS: dict[Decision, str] = {"lossless": "#5aa9ff", "inconclusive": "#c4c8cd", "lossy": "#ff9a5c"}
"""Color by decision on dark pages."""
SYMBOLS: dict[Decision, str] = {"lossless": "✓", "inconclusive": "?", "lossy": "✗"}
MARKERS: dict[Decision, str] = {"lossless": "o", "inconclusive": "D", "lossy": "s"}
INK, FAINT, FLOOR = "#222222", "#777777", "#f0e4b4"
FAILED = "#8e24aa"
Dashes = str | tuple[float, tuple[float, ...]]


@dataclass(frozen=True)
class LineStyle:
    """Color, marker and dashes of one recipe's line in a picture with several."""

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
"""Line styles that recipes get in turn; colors of Okabe and Ito (Color Universal Design, 2008), yellow darker."""

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
    """Context in which matplotlib draws and saves in the report's style; the same data give the same file."""
    from matplotlib import rc_context

    with rc_context(SETTINGS):
        yield


def line_style(place: int) -> LineStyle:
    """Return the line style of the recipe at `place`, counted from 0."""
    return LINES[place % len(LINES)]


WIDTH, HEIGHT = 4.7, 3.1
"""Size of a picture in inches: two fit side by side on a screen, one fills a phone's."""


@dataclass(frozen=True)
class Picture:
    """One picture of a report: `name` of its file, `caption`, and `alt`, a text that describes it.

    `paint`: function that draws it on given matplotlib axes; `group`: pictures of one kind; `width`, `height`: inches.
    """

    name: str
    group: str
    caption: str
    alt: str
    paint: Callable[[Any], None]
    width: float = WIDTH
    height: float = HEIGHT
    narrow: "Picture | None" = None
    """The version for phones, unless the picture is narrow itself."""
    folded: bool = False
    """True if the report shows the picture only on request, as it does with one panel per setting if there are many."""

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


MOST_APART = 3
"""Maximum number of separate pictures of one kind; more of them become panels of one picture."""
WIDE, COLUMNS, COLUMNS_ON_A_PHONE = 7.2, 3, 2
HEAD, BETWEEN = 0.55, 0.38
"""Heights in inches: above the first row of panels, for the legend; between two rows, for titles."""
SMALL = 6.5
"""Font size of a panel's title and numbers, in points."""
MOST_LABELS = 6


@dataclass(frozen=True)
class Panel:
    """One picture that becomes a panel of another, with its title there."""

    title: str
    picture: Picture


def small_multiples(
    about: Picture, panels: Sequence[Panel], shared: Literal["x", "y", ""] = "", threshold: float = math.inf
) -> Picture:
    """Return a picture made of `panels`: each with a title, labels only at the left and the bottom, one legend.

    Args:
        about: has the name, group and caption of the whole; its height is that of a panel.
        shared: the axis that has the same range in all panels, "" for none.
        threshold: value beyond which the shared axis is logarithmic, in all panels if in one.
    """
    described = [f"{each.title}: {each.picture.alt.removeprefix(each.picture.caption).strip()}" for each in panels]
    alt = " ".join([about.caption, *described])

    def made(columns: int, width: float, narrow: Picture | None = None) -> Picture:
        rows = math.ceil(len(panels) / columns)
        height = HEAD + rows * (about.height + BETWEEN) + 0.35
        paint = partial(_paint, panels=panels, columns=columns, height=about.height, shared=shared, threshold=threshold)
        return replace(about, alt=alt, paint=paint, width=width, height=height, narrow=narrow)

    columns = COLUMNS if len(panels) > 4 or len(panels) % 2 else 2
    return made(columns, WIDE, made(COLUMNS_ON_A_PHONE, WIDTH))


def _paint(axes: Any, panels: Sequence[Panel], columns: int, height: float, shared: str, threshold: float) -> None:
    axes.set_axis_off()
    rows = math.ceil(len(panels) / columns)
    whole = HEAD + rows * (height + BETWEEN)
    gap = 0.04 if shared else 0.12
    width = (1 - gap * (columns - 1)) / columns
    made = []
    for place, panel in enumerate(panels):
        row, column = divmod(place, columns)
        below = 1 - (HEAD + (row + 1) * height + row * BETWEEN) / whole
        inset = axes.inset_axes([column * (width + gap), below, width, height / whole])
        panel.picture.paint(inset)
        inset.set_title(panel.title, fontsize=SMALL, loc="left", pad=3)
        inset.tick_params(labelsize=SMALL)
        for text in inset.texts:
            text.set_fontsize(SMALL - 1)
        made.append(inset)
    _legend(axes, made)
    if shared:
        _share(made, shared, threshold)
    _labels(axes, made, columns, shared)


def _labels(axes: Any, insets: Sequence[Any], columns: int, shared: str) -> None:
    """Label the axes once: at the left of all panels, and below the lowest of each column."""
    if label := insets[0].get_ylabel():
        axes.annotate(
            label, (0, 0.5), xycoords="axes fraction", xytext=(-38, 0), textcoords="offset points", rotation=90,
            ha="center", va="center", fontsize=SMALL + 0.5,
        )  # fmt: skip
    for place, inset in enumerate(insets):
        inset.set_ylabel("")
        inset.xaxis.label.set_size(SMALL + 0.5)
        if place % columns and shared:  # of "x" the rows are the same
            inset.tick_params(axis="y", labelleft=False)
        if place + columns < len(insets):
            inset.set_xlabel("")
            inset.tick_params(axis="x", labelbottom=shared != "x")


def _legend(axes: Any, insets: Sequence[Any]) -> None:
    """Draw one legend above all panels, with each label once."""
    known: dict[str, Any] = {}
    for inset in insets:
        handles, labels = inset.get_legend_handles_labels()
        for handle, label in zip(handles, labels, strict=True):
            known.setdefault(label, handle)
        if inset.get_legend() is not None:
            inset.get_legend().remove()
    labels = list(known)[:MOST_LABELS]
    if labels:
        axes.legend(
            [known[label] for label in labels], labels, loc="upper left", bbox_to_anchor=(0, 1), ncols=4,
            borderaxespad=0, fontsize=SMALL + 0.5,
        )  # fmt: skip


def _share(insets: Sequence[Any], axis: str, threshold: float) -> None:
    """Give one axis of all panels the union of their ranges, and a logarithmic scale if one panel has it."""
    scales = {getattr(inset, f"get_{axis}scale")() for inset in insets}
    limits = [getattr(inset, f"get_{axis}lim")() for inset in insets]
    for inset in insets:
        if "symlog" in scales:
            getattr(inset, f"set_{axis}scale")("symlog", linthresh=threshold)
        getattr(inset, f"set_{axis}lim")(min(low for low, _ in limits), max(high for _, high in limits))
