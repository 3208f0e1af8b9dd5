"""Tables of measured sweeps, from the verdicts that `compare` wrote: `sweep/precision_2026` and `sweep/moe`."""

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
"""The most important keys of the verdicts in compare.json, a file per sweep."""


def verdicts() -> str:
    """Return the table of verdicts: the recipe with the smallest gap first."""
    data = _read("2026-11-27-cpu-precision_2026.json")
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


def experts() -> str:
    """Return the table of verdicts per model and recipe of `sweep/moe`, with the router's metrics beside bf16's.

    `moe_tiny` has a second set of rows, from eight seeds that no other row uses.
    """
    columns = ["model", "recipe", "verdict", "seeds", "gap, nats", "95 % CI", "`moe/load_max`", "`moe/entropy`"]
    rows = [f"| {' | '.join(columns)} |", f"| --- | --- | --- |{' ---: |' * (len(columns) - 3)}"]
    for data in (_read("2026-11-27-cpu-moe.json"), _read("2026-11-27-cpu-moe_8_seeds.json")):
        rows += _expert_rows(data)
    return "\n".join(rows) + "\n"


def _expert_rows(data: dict[str, Any]) -> list[str]:
    router, rows = {(each["model"], each["recipe"]): each for each in data["router"]}, []
    for baseline in data["baselines"]:
        model, seeds = baseline["model"], f"{min(baseline['seeds'])} to {max(baseline['seeds'])}"
        cells = [f"`{model}`", f"`{baseline['name']}`", "baseline", seeds, "", ""]
        rows.append(f"| {' | '.join([*cells, *_router(router[model, baseline['name']])])} |")
        for each in (each for each in data["verdicts"] if each["model"] == model):
            low, high = each["ci"]
            cells = [f"`{model}`", f"`{each['name']}`", each["verdict"], seeds]
            cells += [f"{each['gap']:+.4f}", f"[{low:+.4f}, {high:+.4f}]", *_router(router[model, each["name"]])]
            rows.append(f"| {' | '.join(cells)} |")
    return rows


def _router(metrics: dict[str, Any]) -> list[str]:
    """Return load_max and entropy, means of the last ten steps over layers and seeds; empty for a dense model."""
    return [f"{metrics[key]:.3f}" if key in metrics else "" for key in ("moe/load_max", "moe/entropy")]


def _read(name: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((RESULTS / name).read_text(encoding="utf-8"))
    return data


SECTIONS = {"precision-2026": verdicts, "sweep-moe": experts}
