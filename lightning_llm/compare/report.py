"""`report.html`: one file with everything in it, to read without the runs at hand."""

import base64
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from lightning_llm.compare.comparison import Comparison
from lightning_llm.compare.figures import COLOURS, draw_curves, draw_intervals, draw_speed
from lightning_llm.compare.table import cells

STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; max-width: 1120px; margin: 2em auto; padding: 0 1em; color: #222 }
table { border-collapse: collapse; margin: 1em 0 } th, td { padding: .3em .7em; border-bottom: 1px solid #ddd }
th { text-align: left } td.number { text-align: right; font-variant-numeric: tabular-nums } img { max-width: 100% }
.warning { background: #fff3cd; padding: .5em 1em } code { font-size: 90% } small { color: #666 }
""" + "".join(f".{verdict} {{ color: {colour} }}\n" for verdict, colour in COLOURS.items())

METHODS = """
<p>Runs of the same seed share initial weights and the order of the data, so they are compared in pairs. A pair's
difference is taken of the tail of the validation loss: the mean over the validations in the last part of the steps
that all runs have. The gap is the mean difference over seeds.</p>
<ul>
<li>Intervals hold together for all recipes that share a baseline: C. W. Dunnett, <i>A multiple comparison procedure
for comparing several treatments with a control</i>, JASA 50 (1955) 1096&ndash;1121, with seeds as blocks; the
multivariate t is integrated by quadrature (about it: A. Genz and F. Bretz, <i>Computation of Multivariate Normal and
t Probabilities</i>, Springer 2009).</li>
<li>The variance is pooled over recipes of like spread, with degrees of freedom by F. E. Satterthwaite, Biometrics
Bull. 2 (1946) 110&ndash;114. A recipe whose spread stands out (F test) keeps its own: M. Hasler and L. A. Hothorn,
<i>Multiple contrast tests in the presence of heteroscedasticity</i>, Biometrical J. 50 (2008) 793&ndash;800.</li>
<li>Lossless: the interval's upper bound is below the margin (non-inferiority: ICH E9, <i>Statistical principles for
clinical trials</i>, 1998, section 3.3.2). Lossy: the lower bound is above it, or a run diverged where the baseline
did not. Otherwise inconclusive; and never lossless where a run is missing whose baseline finished. Seeds are planned
for true gaps of 0 and of three margins at the spread found, for 80 %.</li>
<li>A/A floor: the root mean square difference between runs of one recipe and seed that differ in the order of sums
alone (another micro-batch size, thread count or reduction). It is less than recipes scatter from seed to seed: for one
pair alone three floors stand in, or the other recipes' spread.</li>
</ul>
"""


def write_report(comparison: Comparison, file: Path) -> None:
    """Write the report; the file appears whole."""
    partial = file.with_suffix(".partial")
    partial.write_text(_page(comparison), encoding="utf-8")
    partial.replace(file)


def _page(comparison: Comparison) -> str:
    factor, terms = comparison.factor, comparison.terms
    title = f"{factor.name} against {factor.baseline_label}"
    lead = f"Margin {terms.margin:g} nats per token of {escape(terms.metric)}, {100 * terms.confidence:g} % intervals."
    parts = [f"<h1>{escape(title)}</h1><p>{lead}</p>"]
    if comparison.problems:
        items = "".join(f"<li>{escape(str(problem))}</li>" for problem in comparison.problems)
        parts.append(f"<div class='warning'>Not everything that was given could be used:<ul>{items}</ul></div>")
    parts.append("<h2>Verdicts</h2><ul>")
    parts += [f"<li class='{row['verdict']}'>{escape(row['line'])}</li>" for row in comparison.verdicts]
    parts.append("</ul>" + _table(comparison.verdicts))
    for family in comparison.families:
        rows = [row for row in comparison.verdicts if row["setting"] == family.setting]
        if not rows:
            continue
        setting = ", ".join(f"{key}={value}" for key, value in family.setting.items())
        parts.append(f"<h2>Curves{escape(f' at {setting}') if setting else ''}</h2>")
        parts.append(_image(draw_intervals(rows, factor.baseline_label, terms), "gaps with intervals and the margin"))
        parts.append(_image(draw_curves(family, factor.baseline_label, terms), "validation loss, and differences"))
        if speed := draw_speed(rows, factor.baseline_label, terms):
            parts.append(_image(speed, "gap against speed"))
    parts += [_confounders(comparison.verdicts), _floors(comparison.floors)]
    notes = "".join(f"<li>{escape(note)}</li>" for note in comparison.notes)
    parts.append(f"<h2>To read along</h2><ul>{notes}</ul><h2>Methods</h2>{METHODS}{_runs(comparison)}")
    head = f"<meta charset='utf-8'><title>{escape(title)}</title><style>{STYLE}</style>"
    return f"<!doctype html><html lang='en'><head>{head}</head><body>{''.join(parts)}</body></html>\n"


def _image(svg: str, text: str) -> str:
    # As an image: inline, the ids of several figures would meet in one document.
    data = base64.b64encode(svg.encode()).decode()
    return f"<p><img alt='{escape(text)}' src='data:image/svg+xml;base64,{data}'></p>"


def _table(rows: Sequence[dict[str, Any]]) -> str:
    header = ["recipe", "setting", "verdict", "gap", "CI", "pairs", "A/A floor", "time to the baseline's loss"]
    header += ["tokens/s", "peak memory", "spikes", "skipped steps", "SD of a pair", "gap, high precision"]
    lines = []
    for row in rows:
        setting = ", ".join(f"{key}={value}" for key, value in row["setting"].items())
        high = "" if row["gap_high_precision"] is None else f"{row['gap_high_precision']:+.4f}"
        spread = "" if row["sd"] is None else f"{row['sd']:.4f}"
        verdict = (
            f"<span class='{row['verdict']}'>{row['verdict']}</span>{'' if row['controlled'] else ' (not controlled)'}"
        )
        numbers = "".join(f"<td class='number'>{escape(cell)}</td>" for cell in [*cells(row), spread, high])
        lines.append(f"<tr><td>{escape(row['name'])}</td><td>{escape(setting)}</td><td>{verdict}</td>{numbers}</tr>")
    head = "".join(f"<th>{name}</th>" for name in header)
    about = (
        "<small>Gap, high precision: of the same weights evaluated without casts, damage to the weights alone. Speed, "
        "memory and time are ratios to, and times for, the baseline's runs of the same seeds.</small>"
    )
    return f"<table><tr>{head}</tr>{''.join(lines)}</table>{about}"


def _confounders(rows: Sequence[dict[str, Any]]) -> str:
    lines = [
        f"<tr><td>{escape(row['name'])}</td><td><code>{escape(each['key'])}</code></td>"
        f"<td>{escape(' | '.join(map(str, each['values'])))}</td></tr>"
        for row in rows
        for each in row["confounders"]
    ]
    if not lines:
        return "<h2>Confounders</h2><p>None found: the runs of each pair differ in the factor only.</p>"
    head = "<tr><th>recipe</th><th>key</th><th>values, the baseline's first</th></tr>"
    return (
        f"<h2>Confounders</h2><p>These verdicts are not of the factor alone.</p><table>{head}{''.join(lines)}</table>"
    )


def _floors(floors: Iterable[dict[str, Any]]) -> str:
    lines = []
    for each in floors:
        value = "none" if each["floor"] is None else f"{each['floor']:.5f}"
        same = f"; {each['identical']} runs equal to another to the last bit" if each["identical"] else ""
        differing = f" differing in {', '.join(each['keys'])}" if each["keys"] else ""
        lines.append(f"<li>{value} nats over {each['pairs']} pairs{escape(differing)}{same}</li>")
    return f"<h2>A/A: run-to-run noise</h2><ul>{''.join(lines)}</ul>" if lines else ""


def _runs(comparison: Comparison) -> str:
    lines = "".join(
        f"<tr><td>{escape(comparison.factor.label(run))}</td><td class='number'>{run.seed}</td><td>{escape(run.status)}"
        f"</td><td><code>{escape(str(run.folder))}</code></td></tr>"
        for run in comparison.runs
    )
    return f"<h2>Runs</h2><table><tr><th>level</th><th>seed</th><th>status</th><th>folder</th></tr>{lines}</table>"
