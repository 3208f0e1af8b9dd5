"""The verdicts as tables for a paper: `verdicts.csv` and `verdicts.tex`."""

import csv
import io
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lightning_llm.compare.comparison import Comparison
from lightning_llm.compare.data import finite
from lightning_llm.compare.verdict import Verdict
from lightning_llm.compare.wording import interval_of, nats, short

LATEX = {"&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}", "~": r"\textasciitilde{}",
         "^": r"\textasciicircum{}", "\\": r"\textbackslash{}"}  # fmt: skip


def write_tables(comparison: Comparison, folder: Path) -> None:
    """Write both tables to `folder`. Raises OSError."""
    (folder / "verdicts.csv").write_text(as_csv(comparison), encoding="utf-8")
    (folder / "verdicts.tex").write_text(as_latex(comparison), encoding="utf-8")


def as_csv(comparison: Comparison) -> str:
    """Return one line per verdict and one per baseline, numbers in full; empty where there is none."""
    rows = []
    for baseline in comparison.baselines:
        rows.append(
            {"recipe": baseline.label, "setting": baseline.family.words, "verdict": "baseline", "loss": baseline.loss,
             "tokens_per_second": baseline.tokens_per_second, "peak_memory_bytes": baseline.peak_memory_bytes}
        )  # fmt: skip
        rows += [_figures(verdict) for verdict in comparison.verdicts_of(baseline.family)]
    sources = sorted({key for row in rows for key in row if key.startswith("gap/")})
    names = [key for key in max(rows, key=len) if key not in sources] + sources
    text = io.StringIO()
    writer = csv.DictWriter(text, names, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _figures(verdict: Verdict) -> dict[str, Any]:
    estimate, stability, cost = verdict.judged.estimate, verdict.judged.stability, verdict.cost
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
        "peak_memory_bytes": cost.peak_memory_bytes,
        "spikes": cost.spikes,
        "skipped_steps": cost.skipped_steps,
        **{f"gap/{source}": value for source, value in verdict.gap_by_source.items()},
    }


def as_latex(comparison: Comparison) -> str:
    r"""Return a `tabular` (booktabs) of recipe, setting, loss, gap, interval, pairs, failures and verdict."""
    lines = []
    for baseline in comparison.baselines:
        verdicts = comparison.verdicts_of(baseline.family)
        if not verdicts:
            continue
        loss = "" if baseline.loss is None else nats(baseline.loss)
        lines.append([baseline.label, baseline.family.words, loss, "", "", str(len(baseline.runs)), "", "baseline"])
        for verdict in verdicts:
            estimate, stability = verdict.judged.estimate, verdict.judged.stability
            interval = "" if estimate.low != estimate.low else interval_of(estimate)
            lines.append(
                [verdict.name, verdict.family.words, "" if verdict.loss is None else nats(verdict.loss),
                 nats(estimate.gap, signed=True) if estimate.pairs else "", interval, str(estimate.pairs),
                 f"{len(stability.failed)}/{stability.seeds}", verdict.qualified]
            )  # fmt: skip
    terms, first = comparison.terms, comparison.verdicts[0]
    caption = (
        f"% {first.name} and others at {short(first.parameters)} parameters, {short(first.tokens)} tokens: "
        f"{terms.metric}, margin {terms.margin_words}, {100 * terms.confidence:g} % simultaneous intervals"
    )
    head = ["recipe", "setting", "loss", "gap", "interval", "pairs", "failed", "verdict"]
    body = [_latex_row(line) for line in lines]
    table = [r"\begin{tabular}{llrrrrrl}", r"\toprule", _latex_row(head), r"\midrule", *body, r"\bottomrule"]
    return "\n".join([caption, *table, r"\end{tabular}", ""])


def _latex_row(cells: Iterable[str]) -> str:
    escaped = ("".join(LATEX.get(letter, letter) for letter in cell) for cell in cells)
    return " & ".join(escaped) + r" \\"
