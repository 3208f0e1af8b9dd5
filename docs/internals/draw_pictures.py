"""Draw the pictures of docs/pictures: a step, the packages, a verdict, a plan and a ladder.

`python docs/internals/draw_pictures.py [NAME ...]` writes them as SVG. The packages come from
tests/test_architecture.py, the plan from the planner, the ladder from the measured runs in benchmarks/results. The
verdict is a sketch with invented gaps.
"""

import argparse
import ast
import io
from collections.abc import Callable
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from lightning_llm.compare.report.picture import COLOURS, FAINT, INK, MARKERS, SETTINGS

ROOT = Path(__file__).resolve().parents[2]
PICTURES = ROOT / "docs" / "pictures"
RESULTS = ROOT / "benchmarks" / "results"
BLUE, ORANGE, GREEN, GREY, YELLOW = "#dbe9f8", "#fbe3d2", "#dcefe2", "#eeeeee", "#f7f0d0"
BARS = ("#0072b2", "#56b4e9", "#009e73", "#d55e00", "#cc79a7", "#8a6d00", "#999999")


def canvas(width: float, height: float) -> tuple[Figure, Axes]:
    """Return an empty figure of `width` x `height` inches with one unit per inch and no axes."""
    figure = Figure(figsize=(width, height), facecolor="white")
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(0, height))
    axes.axis("off")
    return figure, axes


def box(axes: Axes, x: float, y: float, width: float, height: float, text: str, color: str, **style: object) -> None:
    """Draw a rounded box with centered text; (x, y) is its lower left corner."""
    shape = FancyBboxPatch((x, y), width, height, boxstyle="round,pad=0,rounding_size=0.07", fc=color, ec=FAINT, lw=0.8)
    axes.add_patch(shape)
    axes.text(
        x + width / 2, y + height / 2, text, ha="center", va="center_baseline", color=INK, linespacing=1.35, **style
    )


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], label: str = "", curve: float = 0) -> None:
    """Draw an arrow with a label above its middle."""
    style = f"arc3,rad={curve}"
    axes.add_patch(
        FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=10, lw=1, color=INK, connectionstyle=style)
    )
    if label:
        x, y = (start[0] + end[0]) / 2, (start[1] + end[1]) / 2
        axes.text(x, y + 0.08, label, ha="center", va="bottom", fontsize=8, color=INK)


def step() -> Figure:
    """Draw one optimizer step, in the order of `TrainStep.__call__`."""
    figure, axes = canvas(9.4, 4.5)
    box(axes, 0.2, 3.1, 1.55, 0.9, "set learning rate\nzero gradients", GREY)
    axes.add_patch(
        FancyBboxPatch((2.1, 2.75), 5.1, 1.6, boxstyle="round,pad=0,rounding_size=0.1", fc="#f6f9fd", ec=FAINT, ls="--")
    )
    axes.text(2.25, 4.12, "for each micro-batch", fontsize=9, color=INK, va="center")
    for x, text in (
        (2.3, "forward\n(casts of the recipe)"),
        (3.98, "loss / target\ntokens of the step"),
        (5.66, "backward\n(x loss scale)"),
    ):
        box(axes, x, 2.95, 1.4, 0.85, text, BLUE, fontsize=8.5)
    arrow(axes, (3.7, 3.37), (3.98, 3.37))
    arrow(axes, (5.38, 3.37), (5.66, 3.37))
    arrow(axes, (1.75, 3.55), (2.1, 3.55))
    box(axes, 7.55, 3.1, 1.65, 0.9, "sum gradients\nover ranks", BLUE)
    arrow(axes, (7.2, 3.55), (7.55, 3.55))
    box(axes, 7.55, 1.55, 1.65, 0.9, "unscale\nglobal norm, clip", BLUE)
    arrow(axes, (8.37, 3.1), (8.37, 2.45))
    box(axes, 5.2, 1.55, 1.75, 0.9, "overflow, not finite\nor a spike?", YELLOW)
    arrow(axes, (7.55, 2.0), (6.95, 2.0))
    box(axes, 2.9, 1.55, 1.6, 0.9, "optimizer\nupdate", GREEN, weight="bold")
    arrow(axes, (5.2, 2.0), (4.5, 2.0), "no")
    box(axes, 0.2, 1.55, 2.1, 0.9, "training algorithm\nloss scale, delayed scales", GREEN, fontsize=8.5)
    arrow(axes, (2.9, 2.0), (2.3, 2.0))
    box(axes, 0.2, 0.25, 2.1, 0.75, "log the step's metrics", GREY)
    arrow(axes, (1.25, 1.55), (1.25, 1.0))
    box(axes, 4.0, 0.25, 1.6, 0.75, "skip the update", ORANGE)
    box(axes, 6.6, 0.25, 2.3, 0.75, "stop, with the state\nbefore the step saved", ORANGE, fontsize=8.5)
    arrow(axes, (5.75, 1.55), (5.1, 1.0))
    arrow(axes, (6.4, 1.55), (7.2, 1.0))
    axes.text(6.1, 1.22, "yes", fontsize=8, ha="center", color=INK)
    arrow(axes, (4.0, 0.62), (2.3, 0.62))
    return figure


def packages() -> Figure:
    """Draw the packages on their floors, the highest on top, from the test that checks them."""
    tree = ast.parse((ROOT / "tests" / "test_architecture.py").read_text(encoding="utf-8"))
    floors = next(
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.AnnAssign) and getattr(node.target, "id", "") == "FLOORS" and node.value is not None
    )
    about = {
        "base": "errors, registry, hardware, signals", "linalg": "GEMMs, casts on use", "config": "overrides -> Config",
        "plan": "memory, traffic, time and legality, without torch", "callbacks": "Lightning callbacks named in YAML",
        "cli": "one file per verb", "api": "functions for Python", "__main__": "the command",
    }  # fmt: skip
    colors = [GREY, GREY, YELLOW, BLUE, YELLOW, BLUE, BLUE, GREEN, GREEN, ORANGE, GREY, GREY, GREY]
    high, gap = 0.42, 0.1
    figure, axes = canvas(8.6, len(floors) * (high + gap) + 0.55)
    for number, names in enumerate(floors):
        y = 0.15 + number * (high + gap)
        axes.text(0.32, y + high / 2, str(number), ha="center", va="center", color=FAINT)
        width = 7.85 / len(names)
        for place, name in enumerate(names):
            text = f"{name}: {about[name]}" if name in about and len(names) == 1 else name
            box(axes, 0.6 + place * width, y, width - 0.08, high, text, colors[number % len(colors)], fontsize=8.5)
    axes.text(0.6, 0.3 + len(floors) * (high + gap), "A package imports only from the floors below it.", color=INK)
    return figure


def verdict() -> Figure:
    """Draw how an interval and a margin give a verdict."""
    figure = Figure(figsize=(8.2, 3.1), facecolor="white", layout="constrained")
    axes = figure.add_subplot()
    cases = (
        ("lossless", -0.001, 0.0055, "the whole interval is below the margin"),
        ("lossy", 0.021, 0.006, "the whole interval is above the margin"),
        ("inconclusive", 0.007, 0.010, "the margin is inside: more seeds decide"),
    )
    axes.axvspan(-0.02, 0.01, color="#eaf3fb", zorder=0)
    axes.axvline(0, color=FAINT, lw=1)
    axes.axvline(0.01, color=INK, lw=1.2, ls="--")
    for row, (name, gap, half, text) in enumerate(cases):
        y = len(cases) - row
        color = COLOURS[name]
        axes.plot([gap - half, gap + half], [y, y], color=color, lw=2.4, solid_capstyle="butt")
        axes.plot([gap], [y], MARKERS[name], color=color, ms=8)
        axes.text(0.0335, y + 0.1, name, color=color, weight="bold", va="bottom")
        axes.text(0.0335, y - 0.06, text, color=INK, va="top", fontsize=8.5)
    axes.text(0.0, len(cases) + 0.75, "no gap", ha="center", va="bottom", color=FAINT)
    axes.text(0.01, len(cases) + 0.75, "margin", ha="center", va="bottom", color=INK)
    axes.set(xlim=(-0.016, 0.066), ylim=(0.4, len(cases) + 0.7), yticks=[], xticks=[-0.01, 0, 0.01, 0.02, 0.03])
    axes.set_xlabel(
        "loss of the recipe minus loss of the baseline, nats per token (95 % interval over paired seeds)", loc="left"
    )
    axes.spines["left"].set_visible(False)
    return figure


def plan() -> Figure:
    """Draw the memory and the time of a step that `plan` predicts for one preset."""
    from lightning_llm.config.compose import compose_config
    from lightning_llm.plan.report import plan_facts
    from lightning_llm.plan.resolve import plan_of

    facts = plan_facts(plan_of(compose_config(["recipe=llama3_8b_fsdp2", "cluster=h100_dgx"])))
    figure = Figure(figsize=(8.6, 4.3), facecolor="white")
    figure.subplots_adjust(left=0.03, right=0.97, top=0.93, bottom=0.2, hspace=1.6)
    memory, seconds = figure.subplots(2, 1)
    peak = {name: value / 2**30 for name, value in facts["memory_peak"]["bytes"].items()}
    limit = facts["hardware"]["memory_bytes"] / 2**30
    weights = {"weights, gradients, optimizer": peak["parameters"] + peak["gradients"] + peak["optimizer"]}
    weights |= {"gathered weights, buffers": peak["gathered"] + peak["gather_buffers"] + peak["communication"]}
    weights |= {"activations": peak["activations"], "logits": peak["logits"], "allocator": peak["allocator_reserve"]}
    stacked(memory, weights, "GiB")
    memory.axvline(limit, color=INK, ls="--", lw=1.2)
    memory.text(limit - 0.5, 0.33, f"device: {limit:.0f} GiB", ha="right", va="bottom", color=INK, fontsize=8.5)
    memory.set_title("Peak memory of a rank", loc="left")
    memory.set_xlim(0, limit * 1.02)
    names = {
        "gemm": "GEMMs", "attention": "attention", "memory_bound": "memory-bound operations",
        "gathers": "exposed gathers", "reductions": "exposed reductions", "optimizer": "optimizer",
    }  # fmt: skip
    stacked(seconds, {label: 1000 * facts["step_seconds"][name] for name, label in names.items()}, "ms")
    seconds.set_title("Time of a step at the roofline", loc="left")
    return figure


def stacked(axes: Axes, parts: dict[str, float], unit: str) -> None:
    """Draw one horizontal bar of `parts`, with a legend that has each part's size."""
    left = 0.0
    for color, (name, value) in zip(BARS, parts.items(), strict=False):
        axes.barh(0, value, left=left, height=0.5, color=color, edgecolor="white", label=f"{name}: {value:.1f}")
        left += value
    axes.set(yticks=[], ylim=(-0.3, 0.6))
    axes.set_xlabel(unit, loc="right", labelpad=1)
    axes.spines["left"].set_visible(False)
    axes.legend(loc="upper left", bbox_to_anchor=(-0.01, -0.42), ncols=3, handlelength=1, columnspacing=1.4)


def ladder() -> Figure:
    """Draw measured gaps of two recipes at small sizes; predicted and measured gaps at larger ones."""
    import ladder_tables

    from lightning_llm.ladder.predictions import read_ledger

    tokens = 65536
    rungs = [rung for rung in ladder_tables.measured_ladder().rungs if rung.tokens == tokens]
    predictions = [
        each for each in read_ledger(ladder_tables.PREDICTIONS) if each.claim["tokens"] == tokens and each.outcome
    ]
    figure = Figure(figsize=(8.4, 3.6), facecolor="white", layout="constrained")
    axes = figure.add_subplot()
    axes.axvspan(4e6, 4e7, color="#f4f4f4", zorder=0)
    axes.axhline(0, color=FAINT, lw=1)
    for name, color, marker, shift in (("mxfp4_sr", "#d55e00", "s", 0.95), ("mxfp8", "#0072b2", "o", 1.05)):
        small = [rung for rung in rungs if rung.parameters < 4e6 and rung.differences.get(name)]
        for number, rung in enumerate(small):
            gaps = list(rung.differences[name].values())
            label = f"{name}: pairs of runs that were fitted" if number == 0 else None
            axes.plot([rung.parameters * shift] * len(gaps), gaps, marker, color=color, ms=5, ls="", label=label)
        label = f"{name}: predicted, 95 % interval; measured (filled)"
        for each in (each for each in predictions if each.claim["recipe"] == name):
            low, high = each.outcome["interval"]
            x = each.claim["parameters"] * shift
            axes.plot([x, x], [low, high], color=color, lw=2, label=label)
            axes.plot([x], [each.claim["gap"]], marker, color=color, mfc="white", ms=8)
            axes.plot([x], [each.outcome["gap"]], marker, color=color, ms=5)
            label = None
    axes.set_xscale("log")
    axes.set(
        xlim=(1.7e5, 4e7),
        ylim=(-0.03, 0.056),
        xticks=[2e5, 1e6, 2e6, 8e6, 2e7],
        xticklabels=["0.2M", "1M", "2M", "8M", "20M"],
    )
    axes.minorticks_off()
    axes.set_xlabel("parameters")
    axes.set_ylabel("gap to bf16, nats per token")
    axes.text(4.3e6, 0.055, "predicted before it was run", va="top", fontsize=8.5, color=INK)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.17), ncols=2)
    return figure


DRAWINGS: dict[str, Callable[[], Figure]] = {
    "step": step, "packages": packages, "verdict": verdict, "plan": plan, "ladder": ladder
}  # fmt: skip


def draw(name: str, form: str = "svg") -> bytes:
    """Return a picture as SVG, or in another format of matplotlib."""
    with mpl.rc_context({**SETTINGS, "font.family": "DejaVu Sans"}):
        figure, file = DRAWINGS[name](), io.BytesIO()
        metadata = {"Date": None, "Creator": None} if form == "svg" else None
        figure.savefig(file, format=form, metadata=metadata, dpi=110)
    return file.getvalue()


def main() -> None:
    """Write the pictures that the command line names, or all."""
    parser = argparse.ArgumentParser(description="Draw docs/pictures.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(DRAWINGS)} (all)")
    for name in parser.parse_args().names or DRAWINGS:
        (PICTURES / f"{name}.svg").write_bytes(draw(name))


if __name__ == "__main__":
    main()
