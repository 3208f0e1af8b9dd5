"""The verdicts on a terminal."""

from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from lightning_llm.compare.comparison import Comparison
from lightning_llm.compare.wording import short

STYLES = {"lossless": "green", "lossy": "red", "inconclusive": "yellow"}


def print_comparison(comparison: Comparison, console: Console) -> None:
    """Print the table, the verdict lines and the notes."""
    terms, factor = comparison.terms, comparison.factor
    level = f"{100 * terms.confidence:g} % simultaneous intervals"
    console.print(
        Text(f"{factor.name} against {factor.baseline_label}", style="bold"),
        Text(f"{terms.metric}, margin {terms.margin:g} nats, {level}"),
    )
    console.print(_table(comparison.verdicts))
    lines = [Text(row["line"], style=STYLES[row["verdict"]]) for row in comparison.verdicts]
    for line in [*lines, *(Text(note, style="dim") for note in comparison.notes)]:
        if console.is_terminal:
            console.print(Padding(line, (0, 0, 0, 2), expand=False))
        else:  # whole, for grep and logs
            console.print(Text("  ") + line, soft_wrap=True)


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", collapse_padding=True)
    settings = sorted({key for row in rows for key in row["setting"]})
    for name in ("recipe", *settings):
        table.add_column(name.rpartition(".")[2] or name, overflow="fold")
    table.add_column("verdict")
    for name in ("gap", "CI", "pairs", "A/A", "time to loss", "tokens/s", "memory", "spikes", "skipped"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            row["name"],
            *(str(row["setting"].get(key, "")) for key in settings),
            Text(row["verdict"] + ("" if row["controlled"] else " *"), style=STYLES[row["verdict"]]),
            *cells(row),
        )
    if any(not row["controlled"] for row in rows):
        table.caption = "* not controlled: see the line below"
    return table


def cells(row: dict[str, Any]) -> list[str]:
    """Return the figures of one verdict as words: those of the terminal's and of the report's table."""
    low, high = row["ci"]
    times = row["time_to_loss"]
    if times["reached"] and "seconds_ratio" in times:
        reached = f"{times['seconds']:.0f} s ({times['seconds_ratio']:.2f}x)"
    elif times["reached"]:
        reached = f"{short(times['tokens'])} tokens"
    else:
        reached = "not reached"
    speed = row["tokens_per_second_ratio"]
    return [
        "-" if row["gap"] is None else f"{row['gap']:+.4f}",
        "-" if low is None else f"[{low:+.4f}, {high:+.4f}]",
        str(row["pairs"]),
        "-" if row["aa_floor"] is None else f"{row['aa_floor']:.4f}",
        reached,
        "-" if speed is None else f"{speed:.2f}x{' emulated' if row['emulated'] else ''}",
        "-" if row["peak_memory_bytes"] is None else f"{row['peak_memory_bytes'] / 2**30:.2f} GiB",
        str(row["spikes"]),
        str(row["skipped_steps"]),
    ]
