"""The verdicts and their curves as tables: `verdicts.csv`, `curves.csv`, and for a paper `verdicts.tex`."""

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_llm.compare.comparison import Comparison
from lightning_llm.compare.data import finite
from lightning_llm.compare.report.latex import latex_row
from lightning_llm.compare.statistics.paired_curves import SourceGap, paired_curves, source_gaps
from lightning_llm.compare.verdict import Verdict
from lightning_llm.compare.wording import interval_of, nats, short


def sources_of(comparison: Comparison) -> dict[int, dict[str, SourceGap]]:
    """Return {id of a verdict: {source: gap}}."""
    found: dict[int, dict[str, SourceGap]] = {}
    for family in comparison.families:
        verdicts = comparison.verdicts_of(family)
        gaps = source_gaps(verdicts)
        found |= {id(verdict): gap for verdict, gap in zip(verdicts, gaps, strict=True)}
    return found


def verdicts_csv(comparison: Comparison) -> str:
    """Return one line per verdict and one per baseline, numbers in full; empty where there is none."""
    sources = sources_of(comparison)
    rows: list[dict[str, Any]] = []
    for baseline in comparison.baselines:
        rows.append(
            {"recipe": baseline.label, "setting": baseline.family.words, "verdict": "baseline", "loss": baseline.loss,
             "tokens_per_second": baseline.tokens_per_second, "peak_memory_bytes": baseline.peak_memory_bytes}
        )  # fmt: skip
        rows += [_figures(verdict, sources[id(verdict)]) for verdict in comparison.verdicts_of(baseline.family)]
    return _csv(rows)


def _figures(verdict: Verdict, sources: Mapping[str, SourceGap]) -> dict[str, Any]:
    estimate, stability, cost = verdict.judged.estimate, verdict.judged.stability, verdict.cost
    covered = verdict.coverage
    return {
        "recipe": verdict.name,
        "setting": verdict.family.words,
        "verdict": verdict.decision,
        "controlled": verdict.controlled,
        "holds_for": verdict.switch.words if verdict.switch else "",
        "parameters": verdict.parameters,
        "tokens": verdict.tokens,
        "margin": verdict.terms.margin,
        "confidence": verdict.terms.confidence,
        "gap": finite(estimate.gap),
        "ci_low": finite(estimate.low),
        "ci_high": finite(estimate.high),
        "sd": finite(estimate.sd),
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
            f"gap/{source}{suffix}": finite(value)
            for source, gap in sources.items()
            for suffix, value in (("", gap.gap), ("/low", gap.low), ("/high", gap.high))
        },
    }


def curves_csv(comparison: Comparison) -> str:
    """Return one line per verdict and validation: the gap there and its interval, empty where there is none.

    `confidence`: of that interval; of declared looks that of the one the recipe was judged at.
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
                    {"recipe": verdict.name, "setting": family.words, "step": step, "tokens": tokens,
                     "gap": finite(gap), "ci_low": finite(low), "ci_high": finite(high), "pairs": curve.pairs,
                     "confidence": curve.confidence}
                )  # fmt: skip
    names = ["recipe", "setting", "step", "tokens", "gap", "ci_low", "ci_high", "pairs", "confidence"]
    return _csv(rows, names)


def _csv(rows: Sequence[Mapping[str, Any]], names: Sequence[str] | None = None) -> str:
    if names is None:
        by_source = sorted({key for row in rows for key in row if key.startswith("gap/")})
        names = [key for key in max(rows, key=len) if key not in by_source] + by_source
    text = io.StringIO()
    writer = csv.DictWriter(text, names, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def verdicts_latex(comparison: Comparison) -> str:
    r"""Return a `tabular` (booktabs) of recipe, loss, gap, interval, pairs, failures, speed and verdict.

    Settings, where there are several, are rows of their own above their baselines.
    """
    lines: list[str] = []
    for baseline in comparison.baselines:
        verdicts = comparison.verdicts_of(baseline.family)
        if not verdicts:
            continue
        if baseline.family.words:
            lines += [r"\midrule"] if lines else []
            words = latex_row([baseline.family.words]).removesuffix(r" \\")
            lines.append(rf"\multicolumn{{8}}{{l}}{{\emph{{{words}}}}} \\")
        loss = "" if baseline.loss is None else nats(baseline.loss)
        lines.append(latex_row([baseline.label, loss, "", "", str(len(baseline.runs)), "", "", "baseline"]))
        lines += [latex_row(_paper_cells(verdict)) for verdict in verdicts]
    terms, first = comparison.terms, comparison.verdicts[0]
    caption = (
        f"% {first.name} and others at {short(first.parameters)} parameters, {short(first.tokens)} tokens: "
        f"{terms.metric}, margin {terms.margin_words}, {100 * terms.confidence:g} % "
        f"{'repeated' if comparison.design else 'simultaneous'} intervals"
    )
    head = ["recipe", "loss", "gap", "interval", "pairs", "failed", "speed", "verdict"]
    table = [r"\begin{tabular}{lrrrrrrp{3.6cm}}", r"\toprule", latex_row(head), r"\midrule", *lines, r"\bottomrule"]
    return "\n".join([caption, *table, r"\end{tabular}", ""])


def _paper_cells(verdict: Verdict) -> list[str]:
    estimate, stability, speed = verdict.judged.estimate, verdict.judged.stability, verdict.cost.tokens_per_second_ratio
    return [
        verdict.name,
        "" if verdict.loss is None else nats(verdict.loss),
        nats(estimate.gap, signed=True) if estimate.pairs else "",
        "" if estimate.low != estimate.low else interval_of(estimate),
        str(estimate.pairs),
        f"{len(stability.failed)}/{stability.seeds}",
        "" if speed is None else "emulated" if verdict.emulated else f"{speed:.2f}x",
        verdict.qualified,
    ]


def sources_latex(comparison: Comparison) -> str:
    r"""Return a `tabular` (booktabs) of each recipe's gap and interval on each source, if any."""
    gaps = sources_of(comparison)
    sources = sorted({source for found in gaps.values() for source in found})
    if not sources:
        return "% no source was scored by itself\n"
    settings = any(family.words for family in comparison.families)
    rows = [
        [
            verdict.name,
            *([verdict.family.words] if settings else []),
            *(gap_words(gaps[id(verdict)][name]) if name in gaps[id(verdict)] else "" for name in sources),
        ]
        for verdict in comparison.verdicts
    ]
    head = ["recipe", *(["setting"] if settings else []), *sources]
    columns = "l" * (1 + settings) + "r" * len(sources)
    body = [latex_row(head), r"\midrule", *map(latex_row, rows)]
    return "\n".join([rf"\begin{{tabular}}{{{columns}}}", r"\toprule", *body, r"\bottomrule", r"\end{tabular}", ""])


def gap_words(gap: SourceGap) -> str:
    """Return the gap, with its interval where there is one."""
    text = nats(gap.gap, signed=True)
    return f"{text} [{nats(gap.low, signed=True)}, {nats(gap.high, signed=True)}]" if gap.low == gap.low else text
