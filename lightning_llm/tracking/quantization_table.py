"""Table of the measurements of `QuantisationHealth`, the worst tensors first."""

from collections.abc import Mapping, Sequence
from statistics import median

Figures = Mapping[str, float]
Tensors = Mapping[tuple[str, str], Figures]
"""Figures by (module, slot)."""

COLUMNS = (
    ("SQNR dB", "sqnr_db", "{:.1f}"),
    ("underflow %", "underflow_percent", "{:.3g}"),
    ("saturation %", "saturation_percent", "{:.3g}"),
    ("bias", "bias", "{:+.2e}"),
    ("scale log2 from", "scale_log2_min", "{:.1f}"),
    ("to", "scale_log2_max", "{:.1f}"),
    ("changed %", "scales_changed_percent", "{:.3g}"),
    ("NaN/Inf", "non_finite", "{:.0f}"),
)


def worst(tensors: Tensors, count: int) -> list[tuple[str, str]]:
    """Return (module, slot) of the `count` worst tensors: those with NaN or Inf first, then by ascending SQNR."""
    measured = {key: figures for key, figures in tensors.items() if "sqnr_db" in figures or figures.get("non_finite")}
    return sorted(measured, key=lambda key: (-measured[key]["non_finite"], measured[key].get("sqnr_db", 0.0)))[:count]


def table(tensors: Tensors, step: int, count: int) -> str:
    """Return the worst tensors as lines, each with the difference of its SQNR from the median of its slot."""
    chosen = worst(tensors, count)
    if not chosen:
        return f"quantization health at step {step}: every cast was exact"
    medians = slot_medians(tensors)
    head = ["module", "slot", *(title for title, _, _ in COLUMNS), "vs slot dB"]
    rows = [_row(key, tensors[key], medians) for key in chosen]
    title = f"quantization health at step {step}: the {len(rows)} worst of {len(tensors)} tensors, by SQNR"
    return "\n".join([title, *aligned([head, *rows])])


def _row(key: tuple[str, str], figures: Figures, medians: Mapping[str, float]) -> list[str]:
    cells = [form.format(figures[name]) if name in figures else "-" for _, name, form in COLUMNS]
    relative = f"{figures['sqnr_db'] - medians[key[1]]:+.1f}" if "sqnr_db" in figures else "-"
    return [*key, *cells, relative]


def slot_medians(tensors: Tensors) -> dict[str, float]:
    """Return each slot's median SQNR over its modules, in dB."""
    by_slot: dict[str, list[float]] = {}
    for (_, slot), figures in tensors.items():
        if "sqnr_db" in figures:
            by_slot.setdefault(slot, []).append(figures["sqnr_db"])
    return {slot: median(values) for slot, values in by_slot.items()}


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows of cells as lines; the first two columns are left-aligned, numbers right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(w) if i < 2 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
