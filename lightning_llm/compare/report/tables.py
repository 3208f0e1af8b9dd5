"""Tables of a report as data: verdicts and curves as CSV, and further tables (all pairs, those of a supplement)."""

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_llm.compare.comparison import Comparison
from lightning_llm.compare.format import finite, interval_text, nats
from lightning_llm.compare.report.picture import Picture
from lightning_llm.compare.statistics.paired_curves import SourceGap, paired_curves, source_gaps
from lightning_llm.compare.table import pair_cells
from lightning_llm.compare.verdict import Verdict


@dataclass(frozen=True)
class Table:
    """A table of a report: `rows` of text under `columns`; the first `names` columns are names, the others numbers.

    `name`: base name of its files, `name.csv` and `name.tex`; `figures`: one mapping per row for the CSV, with
    unrounded numbers.
    """

    name: str
    heading: str
    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    figures: tuple[Mapping[str, Any], ...]
    names: int = 1

    @property
    def csv(self) -> str:
        """The table as CSV text, with unrounded numbers; cells without a number are empty."""
        return _csv(self.figures, list(self.figures[0]))


@dataclass(frozen=True)
class Supplement:
    """Further parts of a report, such as a ladder adds: `tables`, `pictures`, and `data`, entries of `compare.json`."""

    tables: tuple[Table, ...] = ()
    pictures: tuple[Picture, ...] = ()
    data: Mapping[str, Any] = field(default_factory=dict)


NOTHING = Supplement()


def tables_of(comparison: Comparison) -> list[Table]:
    """Return the report's tables besides that of the verdicts: the table of all pairs, if requested."""
    found = comparison.all_pairs
    if not found:
        return []
    settings = any(each.setting for each in found)
    where = ("setting",) if settings else ()
    level = f"{100 * comparison.terms.confidence:g} %"
    caption = (
        f"Every recipe against every other by loss alone: the gap of the first to the second, {comparison.terms.unit}, "
        f"with {level} simultaneous intervals over all pairs (Tukey), which are wider than those of the verdicts."
    )
    figures = tuple(
        {
            "recipe": each.recipe, "against": each.other, "setting": each.setting, "verdict": each.decision,
            "controlled": each.controlled, "margin": each.margin, "gap": each.gap, "ci_low": each.low,
            "ci_high": each.high, "pairs": each.pairs,
        }
        for each in found
    )  # fmt: skip
    rows = tuple(pair_cells(each, settings=settings) for each in found)
    columns = ("recipe", "against", *where, "verdict", "gap", "interval", "pairs")
    return [Table("pairs", "Each against each", caption, columns, rows, figures, 3 + settings)]


def sources_of(comparison: Comparison) -> dict[int, dict[str, SourceGap]]:
    """Return {id(verdict): {validation source: its gap}} of all verdicts."""
    found: dict[int, dict[str, SourceGap]] = {}
    for family in comparison.families:
        verdicts = comparison.verdicts_of(family)
        gaps = source_gaps(verdicts)
        found |= {id(verdict): gap for verdict, gap in zip(verdicts, gaps, strict=True)}
    return found


def gap_text(gap: SourceGap) -> str:
    """Return a gap as text, with its interval if it has one."""
    text = nats(gap.gap, signed=True)
    return f"{text} {interval_text(gap.low, gap.high)}" if gap.low == gap.low else text


def verdicts_csv(comparison: Comparison) -> str:
    """Return `verdicts.csv`: a line per verdict and per baseline, with unrounded numbers; cells may be empty."""
    sources = sources_of(comparison)
    rows: list[dict[str, Any]] = []
    for baseline in comparison.baselines:
        rows.append(
            {"recipe": baseline.label, "setting": baseline.family.text, "verdict": "baseline", "loss": baseline.loss,
             "tokens_per_second": baseline.tokens_per_second, "peak_memory_bytes": baseline.peak_memory_bytes}
        )  # fmt: skip
        rows += [_figures(verdict, sources[id(verdict)]) for verdict in comparison.verdicts_of(baseline.family)]
    return _csv(rows)


def _figures(verdict: Verdict, sources: Mapping[str, SourceGap]) -> dict[str, Any]:
    estimate, stability, cost = verdict.judged.estimate, verdict.judged.stability, verdict.cost
    covered = verdict.coverage
    return {
        "recipe": verdict.name,
        "setting": verdict.family.text,
        "verdict": verdict.decision,
        "controlled": verdict.controlled,
        "holds_for": verdict.switch.text if verdict.switch else "",
        "parameters": verdict.parameters,
        "tokens": verdict.tokens,
        "margin": verdict.terms.margin,
        "confidence": verdict.terms.confidence,
        "gap": estimate.gap,
        "ci_low": estimate.low,
        "ci_high": estimate.high,
        "sd": estimate.sd,
        "pairs": estimate.pairs,
        "seeds": stability.seeds,
        "failed": len(stability.failed),
        "stability": stability.verdict,
        "aa_floor": verdict.floor.sd,
        "loss": verdict.loss,
        "tokens_to_loss_ratio": cost.tokens_to_loss_ratio,
        "seconds_to_loss_ratio": cost.seconds_to_loss_ratio,
        "tokens_per_second": cost.tokens_per_second,
        "tokens_per_second_ratio": cost.tokens_per_second_ratio,
        "emulated": verdict.emulated,
        "quantized_linears": covered.linears if covered else "",
        "linears": covered.all_linears if covered else "",
        "quantized_blocks": covered.blocks if covered else "",
        "blocks": covered.all_blocks if covered else "",
        "shortfall": covered.shortfall if covered else "",
        "peak_memory_bytes": cost.peak_memory_bytes,
        "spikes": cost.spikes,
        "skipped_steps": cost.skipped_steps,
        **{
            f"gap/{source}{suffix}": value
            for source, gap in sources.items()
            for suffix, value in (("", gap.gap), ("/low", gap.low), ("/high", gap.high))
        },
    }


def curves_csv(comparison: Comparison) -> str:
    """Return `curves.csv`: a line per verdict and validation, with the gap and its interval; cells may be empty.

    Column `confidence`: of that interval; with declared looks that of the look at which the recipe was judged.
    """
    rows: list[dict[str, Any]] = []
    for family in comparison.families:
        verdicts = comparison.verdicts_of(family)
        curves = paired_curves(verdicts)
        for verdict, curve in zip(verdicts, curves, strict=True):
            for step, tokens, gap, low, high in zip(
                curve.steps, curve.tokens, curve.gap, curve.low, curve.high, strict=True
            ):
                rows.append(
                    {"recipe": verdict.name, "setting": family.text, "step": step, "tokens": tokens,
                     "gap": gap, "ci_low": low, "ci_high": high, "pairs": curve.pairs,
                     "confidence": curve.confidence}
                )  # fmt: skip
    names = ["recipe", "setting", "step", "tokens", "gap", "ci_low", "ci_high", "pairs", "confidence"]
    return _csv(rows, names)


def _csv(rows: Sequence[Mapping[str, Any]], names: Sequence[str] | None = None) -> str:
    """Return the rows as CSV with columns `names`; a cell without a finite number is empty."""
    if names is None:
        by_source = sorted({key for row in rows for key in row if key.startswith("gap/")})
        names = [key for key in max(rows, key=len) if key not in by_source] + by_source
    text = io.StringIO()
    writer = csv.DictWriter(text, names, restval="", lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({key: finite(value) if isinstance(value, float) else value for key, value in row.items()})
    return text.getvalue()
