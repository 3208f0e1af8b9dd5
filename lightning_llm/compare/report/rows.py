"""Rows of the report's tables: a verdict's and a baseline's figures as words, by column."""

from collections.abc import Mapping
from dataclasses import dataclass

from lightning_llm.compare.baseline import Baseline
from lightning_llm.compare.statistics.intervals import Decision
from lightning_llm.compare.statistics.stability import Stability, rate_interval, upper_bound
from lightning_llm.compare.table import COLUMNS, baseline_cells, cells
from lightning_llm.compare.verdict import Verdict
from lightning_llm.compare.wording import minus, nats

JUDGED = ("gap", "CI", "pairs", "failed", "stability", "tokens/s", "loss")
"""Columns of the table of verdicts."""
COST = ("SD of a pair, as judged", "A/A", "tokens to loss", "memory", "spikes", "skipped")
"""Columns of the table of noise and cost."""
LONG = ("gap", "CI", "stability", "tokens/s", "loss")
"""Of these, those whose words take a phone's whole width."""


@dataclass(frozen=True)
class Row:
    """One recipe, or the baseline, whose `decision` is None; `figures`: {column: words}, empty where there is none."""

    name: str
    decision: Decision | None
    colour: Decision | None
    against: str
    figures: dict[str, str]


def verdict_row(verdict: Verdict) -> Row:
    """Return the verdict's row."""
    sd = verdict.judged.estimate.sd
    figures = dict(zip(COLUMNS, cells(verdict), strict=True)) | {
        "stability": stability_words(verdict.judged.stability),
        COST[0]: nats(sd) if sd == sd else "",
    }
    against = verdict.qualified.partition(" (")[2].removesuffix(")")
    return Row(verdict.name, verdict.decision, verdict.colour, against, _printed(figures))


def baseline_row(baseline: Baseline) -> Row:
    """Return the baseline's row."""
    figures = dict(zip(COLUMNS, baseline_cells(baseline), strict=True)) | {
        "stability": "",
        COST[0]: "",
    }
    return Row(baseline.label, None, None, "", _printed(figures))


def _printed(figures: Mapping[str, str]) -> dict[str, str]:
    """Return the figures as they are printed: what is not there leaves its cell empty."""
    return {column: "" if words == "-" else minus(words) for column, words in figures.items()}


def stability_words(stability: Stability) -> str:
    """Return the verdict on stability and the failure rate that it allows, short."""
    failed, runs = len(stability.failed), stability.seeds
    if not runs:
        return ""
    if not failed:
        return f"{stability.verdict}, ≤ {100 * upper_bound(0, runs, stability.confidence):.0f} %"
    low, high = rate_interval(failed, runs, stability.confidence)
    return f"{stability.verdict}, {100 * low:.0f} to {100 * high:.0f} %"
