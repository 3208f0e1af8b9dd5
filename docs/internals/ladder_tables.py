"""Tables of docs/reference/ladder_measured.md: the measured ladder and the predictions made on it."""

import json
from pathlib import Path

import numpy as np

from lightning_llm.compare.format import short
from lightning_llm.ladder.fit import effect_at, fit_ladder
from lightning_llm.ladder.measured import Ladder, ladder_of_rows
from lightning_llm.ladder.predictions import read_ledger, tally
from lightning_llm.ladder.refusal import too_few_pairs
from lightning_llm.ladder.report import law_line

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
RUNS = RESULTS / "2026-11-24-cpu-ladder.json"
PREDICTIONS = RESULTS / "2026-11-24-cpu-ladder-predictions.jsonl"


def measured_ladder() -> Ladder:
    """Return the ladder that was run here."""
    data = json.loads(RUNS.read_text(encoding="utf-8"))
    return ladder_of_rows(data["runs"], data["baseline"], data["metric"])


def rungs() -> str:
    """Return the table of rungs: the baseline's loss and each recipe's gap."""
    ladder = measured_ladder()
    columns = ["parameters", "tokens", "seeds", ladder.baseline, *(f"{name}: gap" for name in ladder.recipes)]
    rows = [f"| {' | '.join(columns)} |", f"|{' --- |' * len(columns)}"]
    for rung in ladder.rungs:
        losses = np.array(list(rung.losses.values()))
        cells = [short(rung.parameters), short(rung.tokens), str(len(losses)), f"{losses.mean():.3f}"]
        for name in ladder.recipes:
            pairs = list(rung.differences.get(name, {}).values())
            more = f" ({len(pairs)})" if pairs and len(pairs) != len(losses) else ""
            cells.append(f"{np.mean(pairs):+.4f}{more}" if pairs else "")
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def fits() -> str:
    """Return the fit over all rungs, and each recipe's cost in tokens at the smallest and largest rung."""
    ladder = measured_ladder()
    for name in [name for name in ladder.recipes if too_few_pairs(ladder, name)]:
        for rung in ladder.rungs:
            rung.differences.pop(name, None)
    fit = fit_ladder(ladder)
    corners = [ladder.rungs[0], ladder.rungs[-1]]
    columns = ["recipe", "pairs", "SD of a pair", *(f"at {short(r.parameters)} / {short(r.tokens)}" for r in corners)]
    rows = [
        f"> {law_line(fit)}",
        "",
        f"| {' | '.join(columns)} | grows with D/N: p |",
        f"|{' --- |' * (len(columns) + 1)}",
    ]
    for name, gap in fit.gaps.items():
        effects = [effect_at(fit, name, rung.parameters, rung.tokens).text for rung in corners]
        p = gap.growth[1]
        rows.append(f"| {name} | {gap.df + 3} | {gap.sd:.4f} | {' | '.join(effects)} | {p:.2f} |")
    return "\n".join(rows) + "\n"


def predictions() -> str:
    """Return the ledger as a table, and how many predictions held."""
    ledger = read_ledger(PREDICTIONS)
    rows = ["| predicted, hash | claim | gap: predicted | measured | held |", "| --- | --- | --- | --- | --- |"]
    for each in ledger:
        claim, outcome = each.claim, each.outcome
        said = claim["line"].partition(" (")[0]
        predicted = f"{claim['gap']:+.4f}"
        if outcome is None:
            rows.append(f"| {each.date}, `{each.hash}` | {said} | {predicted} | not run yet | |")
            continue
        low, high = (f"{value:+.4f}" for value in outcome["interval"])
        pairs = f"{outcome['gap']:+.4f} ({len(outcome['seeds'])} pair{'s' * (len(outcome['seeds']) > 1)})"
        held = f"{'yes' if outcome['inside'] else 'no'}, z = {outcome['z']:+.1f}"
        rows.append(f"| {each.date}, `{each.hash}` | {said} | {predicted} [{low}, {high}] | {pairs} | {held} |")
    return "\n".join([*rows, "", tally(ledger) + ".", ""])


SECTIONS = {"ladder-rungs": rungs, "ladder-fits": fits, "ladder-predictions": predictions}
