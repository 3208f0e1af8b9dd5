"""Outlier channels of the operands of linear layers: the reason for blocks, rotations or unquantized layers.

A channel is a feature: a column of X [M, K], of W [N, K] or of dY [M, N]. Its amax is the largest magnitude over all
rows. Under one scale per tensor the largest channel sets the scale, so the median channel loses log2(max / median)
powers of two of the format's range (as in Dettmers et al. 2022, arXiv 2208.07339, section 3, of activations).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_llm.probe.passes import Passes

OPERANDS = ("x", "w", "dy")
TITLES = {"x": "activations X", "w": "weights W", "dy": "gradients dY"}


@dataclass(frozen=True)
class ChannelFigures:
    """Differences between the channels of an operand: largest amax, and 99th percentile, over the median amax.

    The median is that of the amaxes above 0.
    """

    max_over_median: float
    p99_over_median: float
    channel: int
    """Index of the channel with the largest amax."""
    channels: int

    @classmethod
    def of(cls, operand: Tensor) -> "ChannelFigures | None":
        """Return the figures of `operand` [rows, channels]; None if it is zero or not finite."""
        amax = operand.detach().double().abs().amax(dim=0)
        used = amax[amax > 0]
        if not len(used) or not bool(torch.isfinite(amax).all()):
            return None
        median = used.median()
        quantile = torch.quantile(used, 0.99)
        return cls(float(amax.max() / median), float(quantile / median), int(amax.argmax()), len(amax))


def channel_outliers(model: Passes) -> dict[str, dict[str, dict[str, Any]]]:
    """Return {layer: {"x", "w" or "dy": its `ChannelFigures` as a dict}} of the first batch's unquantized operands.

    `model.high()` must have run. Operands that are zero or not finite are left out.
    """
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for name, layer in model.layers.items():
        kept = model.tensors[name]
        operands = {"x": kept.x, "w": layer.matrix, "dy": kept.dy}
        figures = {key: ChannelFigures.of(each) for key, each in operands.items() if each is not None}
        found[name] = {key: asdict(each) for key, each in figures.items() if each is not None}
    return found


def largest(layers: Mapping[str, Mapping[str, Mapping[str, Any]]], count: int) -> list[tuple[str, str]]:
    """Return the `count` pairs (layer, operand) with the largest ratio of maximum to median, largest first."""
    ranked = [(-its["max_over_median"], layer, key) for layer, each in layers.items() for key, its in each.items()]
    return [(layer, key) for _, layer, key in sorted(ranked)[:count]]


def outlier_rows(layers: Mapping[str, Mapping[str, Mapping[str, Any]]], count: int) -> list[list[str]]:
    """Return the rows of a table of the `count` largest outliers as text; the first row has the column names."""
    rows = [["layer", "operand", "max/median", "99 %/median", "channel"]]
    for layer, key in largest(layers, count):
        its = layers[layer][key]
        where = f"{its['channel']} of {its['channels']}"
        rows.append([layer, key, f"{its['max_over_median']:.1f}", f"{its['p99_over_median']:.1f}", where])
    return rows


def draw_outliers(layers: Mapping[str, Mapping[str, Mapping[str, Any]]], path: Path) -> None:
    """Draw the outliers as an SVG at `path`: a panel per operand, a row per layer; maximum and 99th percentile."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG  # not pyplot: it keeps global state
    from matplotlib.figure import Figure

    names = list(layers)
    figure = Figure(figsize=(12, max(2.5, 0.22 * len(names) + 1.2)), layout="constrained")
    FigureCanvasSVG(figure)
    axes: Sequence[Any] = figure.subplots(1, len(OPERANDS), sharey=True, squeeze=False)[0]
    for axis, key in zip(axes, OPERANDS, strict=True):
        rows = [(row, layers[name][key]) for row, name in enumerate(names) if key in layers[name]]
        _draw_panel(axis, rows)
        axis.set_title(TITLES[key], fontsize=9)
        axis.set_xlabel("amax of a channel / median", fontsize=8)
    axes[0].set_yticks(range(len(names)), names, fontsize=6)
    axes[0].invert_yaxis()
    axes[-1].legend(fontsize=7)
    figure.savefig(path, format="svg")


def _draw_panel(axis: Any, rows: Iterable[tuple[int, Mapping[str, Any]]]) -> None:
    places, found = zip(*rows, strict=True) if rows else ((), ())
    axis.set_xscale("log", base=2)
    axis.axvline(1, color="0.6", linewidth=0.8)
    axis.plot([its["p99_over_median"] for its in found], places, "|", color="C0", label="99th percentile")
    axis.plot([its["max_over_median"] for its in found], places, "o", color="C3", markersize=3.5, label="largest")
    axis.grid(axis="x", linewidth=0.3)
