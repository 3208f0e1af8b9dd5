"""Outlier channels of the operands of linear layers: figures, amaxes over a training step, a table and a picture."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_llm.precision.linear.module import QuantizedLinear
from lightning_llm.precision.linear.plan import CastRecord, Shard

OPERANDS = {"x": "activations X", "w": "weights W", "dy": "gradients dY"}
SLOTS_OF = {"x": ("fprop.x", "wgrad.x"), "w": ("fprop.w", "dgrad.w"), "dy": ("dgrad.dy", "wgrad.dy")}
TITLE = "outliers, the largest amax of a channel over the median of all channels"

Outliers = Mapping[str, Mapping[str, Mapping[str, Any]]]
"""{layer: {operand: `ChannelFigures` as a dict}}."""


@dataclass(frozen=True)
class ChannelFigures:
    """Differences between the channels of an operand: largest amax, and 99th percentile, over the median amax.

    A channel is a feature: a column of X [M, K], of W [N, K] or of dY [M, N]. Its amax is the largest magnitude over
    all rows. The median is that of the amaxes above 0. Under one scale per tensor the largest channel sets the scale,
    so the median channel loses log2(max / median) powers of two of the format's range (as in Dettmers et al. 2022,
    arXiv 2208.07339, section 3, of activations).
    """

    max_over_median: float
    p99_over_median: float
    channel: int
    """Index of the channel with the largest amax."""
    channels: int

    @classmethod
    def of(cls, operand: Tensor) -> "ChannelFigures | None":
        """Return the figures of `operand` [rows, channels]; None if it is zero or not finite."""
        return cls.from_amax(operand.detach().double().abs().amax(dim=0))

    @classmethod
    def from_amax(cls, amax: Tensor) -> "ChannelFigures | None":
        """Return the figures by the `amax` [channels] of each channel; None if all are zero or one is not finite."""
        amax = amax.double()
        used = amax[amax > 0]
        if not len(used) or not bool(torch.isfinite(amax).all()):
            return None
        median = used.median()
        quantile = torch.quantile(used, 0.99)
        return cls(float(amax.max() / median), float(quantile / median), int(amax.argmax()), len(amax))


class ChannelAmaxes:
    """Amax of every channel of the operands of `layers`, collected from their casts.

    `values`: all of them, fp32, in one vector. Its maximum over ranks is that of the whole step: each rank fills in the
    channels that it has, of the rows that it has.
    """

    def __init__(self, layers: Sequence[QuantizedLinear], device: torch.device):
        self._layers = layers
        widths = [n for each in layers for n in (each.in_features, each.in_features, each.out_features)]
        self.values = torch.zeros(sum(widths), device=device)
        parts = iter(self.values.split(widths))
        self._parts = [{role: next(parts) for role in OPERANDS} for _ in layers]

    def add(self, index: int, seen: CastRecord) -> None:
        """Add the input of a cast of layer number `index`. Of several casts of one operand, the first slot's counts.

        NaN and Inf are left out.
        """
        role = seen.slot.rpartition(".")[2]
        plan = self._layers[index].plan
        if seen.slot != next(slot for slot in SLOTS_OF[role] if plan.casts[slot].quantizes):
            return
        amax = seen.given.detach().abs().amax(dim=0)
        if not bool(torch.isfinite(amax).all()):
            amax = seen.given.detach().nan_to_num(0.0, 0.0, 0.0).abs().amax(dim=0)
        first = plan.shards.get(role, Shard()).origin.column
        part = self._parts[index][role][first : first + len(amax)]
        torch.maximum(part, amax.float(), out=part)

    def figures(self, values: Tensor) -> dict[str, dict[str, dict[str, Any]]]:
        """Return the `Outliers` of all layers, by the `values` of all ranks. Operands without a cast are left out."""
        parts = iter(values.split([len(part) for its in self._parts for part in its.values()]))
        found: dict[str, dict[str, dict[str, Any]]] = {}
        for layer in self._layers:
            measured = {role: ChannelFigures.from_amax(next(parts)) for role in OPERANDS}
            found[layer.name] = {role: asdict(each) for role, each in measured.items() if each is not None}
        return found


def _largest(layers: Outliers, count: int) -> list[tuple[str, str]]:
    """Return the `count` pairs (layer, operand) with the largest ratio of maximum to median, largest first."""
    ranked = [(-its["max_over_median"], layer, key) for layer, each in layers.items() for key, its in each.items()]
    return [(layer, key) for _, layer, key in sorted(ranked)[:count]]


def outlier_rows(layers: Outliers, count: int) -> list[list[str]]:
    """Return the rows of a table of the `count` largest outliers as text; the first row has the column names."""
    rows = [["layer", "operand", "max/median", "99 %/median", "channel"]]
    for layer, key in _largest(layers, count):
        its = layers[layer][key]
        where = f"{its['channel']} of {its['channels']}"
        rows.append([layer, key, f"{its['max_over_median']:.1f}", f"{its['p99_over_median']:.1f}", where])
    return rows


def outlier_metrics(layers: Outliers) -> dict[str, float]:
    """Return {"x/max_over_median": the largest of all layers, "x/max_over_median/layers.3": of a block, ..}.

    A block is a name up to its first number; a layer whose name has none stands for itself.
    """
    found: dict[str, float] = {}
    for name, its in layers.items():
        parts = name.split(".")
        number = next((i for i, part in enumerate(parts, start=1) if part.isdecimal()), len(parts))
        for role, figures in its.items():
            for key in (f"{role}/max_over_median", f"{role}/max_over_median/{'.'.join(parts[:number])}"):
                found[key] = max(found.get(key, 0.0), figures["max_over_median"])
    return found


def draw_outliers(layers: Outliers, path: Path) -> None:
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
        axis.set_title(OPERANDS[key], fontsize=9)
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
