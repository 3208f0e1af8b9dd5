"""Table of docs/reference/precision_2026.md: verdicts of `recipe=sweep/precision_2026`, as `compare` wrote them."""

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "2026-11-27-cpu-precision_2026.json"
"""The most important keys of the verdicts in compare.json."""


def verdicts() -> str:
    """Return the table of verdicts: the recipe with the smallest gap first."""
    data = json.loads(RESULTS.read_text(encoding="utf-8"))
    columns = ["recipe", "verdict", "at look", "seeds", "gap, nats", "repeated 95 % CI", "more tokens, %", "95 % CI"]
    columns += ["same weights in bf16"]
    rows = [f"| {' | '.join(columns)} |", f"| --- | --- |{' ---: |' * (len(columns) - 2)}"]
    for each in sorted(data["verdicts"], key=lambda verdict: verdict["gap"]):
        low, high = each["ci"]
        cells = [f"`{each['name']}`", each["verdict"], f"{each['look']['number']} of {each['look']['of']}"]
        cells += [str(each["pairs"]), f"{each['gap']:+.4f}", f"[{low:+.4f}, {high:+.4f}]", *_tokens(each)]
        cells.append(f"{each['gap_high_precision']:+.4f}")
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def _tokens(verdict: dict[str, Any]) -> list[str]:
    """Return the further tokens that bf16's loss takes, in percent, and their interval; "beyond": not measured."""
    data = verdict["effective_data"]
    low, high = ("beyond" if each is None else f"{100 * each:+.1f}" for each in data["more_tokens_ci"])
    return [f"{100 * data['more_tokens']:+.1f}", f"[{low}, {high}]"]


SECTIONS = {"precision-2026": verdicts}
