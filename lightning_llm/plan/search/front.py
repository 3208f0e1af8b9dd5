"""The picture of seconds and memory: every layout that fits, and those than which none is both faster and smaller."""

from collections.abc import Sequence
from pathlib import Path

from lightning_llm.base.hardware import GIB
from lightning_llm.plan.search.pricing import Priced
from lightning_llm.plan.search.search import pareto_front
from lightning_llm.plan.search.wording import layout_words

LABELLED = 12
"""How many layouts of the front are numbered, with their words beside the picture."""
NEAR = 0.25
"""From which part of what may be held on that limit is drawn."""


def draw_front(layouts: Sequence[Priced], limit_bytes: int | None, title: str, path: Path) -> None:
    """Draw the seconds of a step over the GiB of a rank to `path`, PNG or SVG by its name."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # not pyplot: it keeps global state
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(xlabel="GiB of the rank that holds most", ylabel="seconds per step", title=title)
    axes.scatter(*_points(layouts), s=10, color="#999999", label=f"{len(layouts):,} layouts that fit")
    front = pareto_front(layouts)
    axes.step(*_points(front), where="pre", color="C0", marker="o", markersize=4, label="none is faster and smaller")
    for number, priced in enumerate(front[:LABELLED], 1):
        place = priced.memory_bytes / GIB, priced.seconds
        axes.annotate(str(number), place, xytext=(5, 4), textcoords="offset points", fontsize=8)
    words = [f"{number}  {layout_words(priced)}" for number, priced in enumerate(front[:LABELLED], 1)]
    axes.text(1.01, 1.0, "\n".join(words), transform=axes.transAxes, va="top", fontsize=8)
    if limit_bytes is not None and max(priced.memory_bytes for priced in layouts) > limit_bytes * NEAR:
        axes.axvline(limit_bytes / GIB, color="C3", linestyle="--", label=f"{limit_bytes / GIB:.1f} GiB may be held")
    axes.set_yscale("log")
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    figure.savefig(path, dpi=120, format=path.suffix.removeprefix("."))


def _points(layouts: Sequence[Priced]) -> tuple[list[float], list[float]]:
    return [priced.memory_bytes / GIB for priced in layouts], [priced.seconds for priced in layouts]
