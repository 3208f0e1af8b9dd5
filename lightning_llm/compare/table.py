"""The table of verdicts: cells as text, for the terminal and for the report."""

from collections.abc import Mapping
from dataclasses import dataclass

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from lightning_llm.base.terminal import escaped
from lightning_llm.compare.comparison import Baseline, Comparison
from lightning_llm.compare.format import interval_text, minus, nats
from lightning_llm.compare.statistics.all_pairs import PairGap
from lightning_llm.compare.statistics.intervals import Decision
from lightning_llm.compare.statistics.stability import Stability, rate_interval, upper_bound
from lightning_llm.compare.verdict import Verdict
from lightning_llm.compare.verdict_text import line_of

STYLES = {"lossless": "green", "lossy": "red", "inconclusive": "yellow"}
COLUMNS = ("gap", "CI", "pairs", "failed", "A/A", "loss", "tokens to loss", "tokens/s", "memory", "spikes", "skipped")


def print_comparison(comparison: Comparison, console: Console) -> None:
    """Print the table, the verdict lines, the command for more seeds, and the notes."""
    terms, factor = comparison.terms, comparison.factor
    kind = "repeated" if comparison.design else "simultaneous"
    level = f"{100 * terms.confidence:g} % {kind} intervals"
    console.print(
        Text(f"{factor.name} against {factor.baseline_label}", style="bold"),
        Text(f"{terms.metric}, margin {terms.margin_and_unit}, {level}"),
    )
    console.print(_table(comparison))
    for verdict in comparison.verdicts:
        _print(console, Text(line_of(verdict), style=STYLES[verdict.colour]))
    if comparison.all_pairs:
        console.print(Text("every recipe against every other, by loss alone; simultaneous intervals", style="bold"))
        console.print(pairs_table(comparison))
    if advice := comparison.advice:
        more = f"{advice.more_seeds} more seed{'s' * (advice.more_seeds > 1)}, for {', '.join(advice.decides)}"
        _print(console, Text(f"to decide ({more}; repeats nothing):"))
        console.print(Text(escaped(f"  {advice.command}")), soft_wrap=True)
    for note in comparison.notes:
        _print(console, Text(escaped(note), style="dim"))


def _print(console: Console, line: Text) -> None:
    if console.is_terminal:
        console.print(Padding(line, (0, 0, 0, 2), expand=False))
    else:  # unwrapped, for grep and logs
        console.print(Text("  ") + line, soft_wrap=True)


def _table(comparison: Comparison) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", collapse_padding=True)
    settings = any(family.text for family in comparison.families)
    for name in ("recipe", *(("setting",) if settings else ()), "verdict"):
        table.add_column(name, overflow="fold")
    for name in COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    for baseline in comparison.baselines:
        verdicts = comparison.verdicts_of(baseline.family)
        if not verdicts:
            continue
        setting = [baseline.family.text] if settings else []
        table.add_row(baseline.label, *setting, "baseline", *baseline_cells(baseline), style="dim")
        for verdict in verdicts:
            decision = Text(verdict.qualified, style=STYLES[verdict.colour])
            table.add_row(verdict.name, *setting, decision, *cells(verdict))
    return table


def pairs_table(comparison: Comparison) -> Table:
    """Return a table for the terminal with the gap of every recipe to every other, one row each."""
    table = Table(box=None, pad_edge=False, header_style="bold", collapse_padding=True)
    settings = any(each.setting for each in comparison.all_pairs)
    for name in ("recipe", "against", *(("setting",) if settings else ()), "verdict"):
        table.add_column(name, overflow="fold")
    for name in ("gap", "CI", "pairs"):
        table.add_column(name, justify="right", no_wrap=True)
    for each in comparison.all_pairs:
        table.add_row(*pair_cells(each, settings=settings))
    return table


def pair_cells(each: PairGap, *, settings: bool) -> tuple[str, ...]:
    """Return the cells of one row of that table: recipe, the other, verdict and numbers.

    `settings`: add the setting, for a comparison with several.
    """
    setting = [each.setting] if settings else []
    known = each.low == each.low
    decision = f"{each.decision}{'' if each.controlled else ' (not controlled)'}"
    interval = interval_text(each.low, each.high) if known else "-"
    gap = nats(each.gap, signed=True) if each.pairs else "-"
    return (each.recipe, each.other, *setting, decision, gap, interval, str(each.pairs))


def baseline_cells(baseline: Baseline) -> list[str]:
    """Return the baseline's numbers as text, one per column of `COLUMNS`."""
    data = baseline.as_data()
    speed = baseline.tokens_per_second
    diverged = len(baseline.runs) - len(baseline.losses)
    return [
        "", "", str(len(baseline.runs)), f"{diverged}/{len(baseline.runs)}", "", _loss(baseline.loss), "",
        "-" if speed is None else f"{speed:.0f}/s", _memory(baseline.peak_memory_bytes),
        str(data["spikes"]), str(data["skipped_steps"]),
    ]  # fmt: skip


def cells(verdict: Verdict) -> list[str]:
    """Return the numbers of one verdict as text, one per column of `COLUMNS`, for the terminal and the report."""
    judged, cost = verdict.judged, verdict.cost
    estimate, stability = judged.estimate, judged.stability
    speed, times = cost.tokens_per_second_ratio, cost.tokens_to_loss_ratio
    return [
        "-" if not estimate.pairs else nats(estimate.gap, signed=True),
        "-" if estimate.low != estimate.low else interval_text(estimate.low, estimate.high),
        str(estimate.pairs),
        f"{len(stability.failed)}/{stability.seeds}",
        "-" if verdict.floor.sd is None else nats(verdict.floor.sd),
        _loss(verdict.loss),
        "-" if times is None else f"{times:.2f}x",
        "-" if speed is None else f"{speed:.2f}x{' emulated' if verdict.emulated else ''}",
        _memory(cost.peak_memory_bytes),
        str(cost.spikes),
        str(cost.skipped_steps),
    ]


def _loss(loss: float | None) -> str:
    return "-" if loss is None else nats(loss)


def _memory(size: float | None) -> str:
    return "-" if size is None else f"{size / 2**30:.2f} GiB"


JUDGED = ("gap", "CI", "pairs", "failed", "stability", "tokens/s", "loss")
"""Columns of the report's table of verdicts."""
COST = ("SD of a pair, as judged", "A/A", "tokens to loss", "memory", "spikes", "skipped")
"""Columns of the report's table of noise and cost."""
LONG = ("gap", "CI", "stability", "tokens/s", "loss")
"""Columns of the report that take a whole line on a phone."""


@dataclass(frozen=True)
class Row:
    """One row of the report's tables: a recipe, or the baseline with `decision` None.

    `colour`: the decision by which it is colored; `against`: qualifications of the verdict as text; `figures`: {column:
    text, "" without a value}.
    """

    name: str
    decision: Decision | None
    colour: Decision | None
    against: str
    figures: dict[str, str]


def verdict_row(verdict: Verdict) -> Row:
    """Return the row of a verdict in the report's tables."""
    sd = verdict.judged.estimate.sd
    figures = dict(zip(COLUMNS, cells(verdict), strict=True)) | {
        "stability": stability_words(verdict.judged.stability),
        COST[0]: nats(sd) if sd == sd else "",
    }
    against = verdict.qualified.partition(" (")[2].removesuffix(")")
    return Row(verdict.name, verdict.decision, verdict.colour, against, _printed(figures))


def baseline_row(baseline: Baseline) -> Row:
    """Return the row of a baseline in the report's tables."""
    figures = dict(zip(COLUMNS, baseline_cells(baseline), strict=True)) | {
        "stability": "",
        COST[0]: "",
    }
    return Row(baseline.label, None, None, "", _printed(figures))


def _printed(figures: Mapping[str, str]) -> dict[str, str]:
    """Return the figures for print: missing values leave their cell empty."""
    return {column: "" if text == "-" else minus(text) for column, text in figures.items()}


def stability_words(stability: Stability) -> str:
    """Return the verdict on stability as text, with the failure rate that the runs do not exclude."""
    failed, runs = len(stability.failed), stability.seeds
    if not runs:
        return ""
    if not failed:
        return f"{stability.verdict}, ≤ {100 * upper_bound(0, runs, stability.confidence):.0f} %"
    low, high = rate_interval(failed, runs, stability.confidence)
    return f"{stability.verdict}, {100 * low:.0f} to {100 * high:.0f} %"
