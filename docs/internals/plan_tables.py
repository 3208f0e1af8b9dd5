"""Generated tables of docs/reference/published_runs.md: plans against published memory and speed."""

import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.plan_memory import table
from lightning_llm.plan.time.describe import RATIOS


def families() -> str:
    """Return the table of published over predicted speed by family of layouts."""
    lines = ["| family | runs | published over predicted | median |", "|---|---:|---|---:|"]
    for ratio in RATIOS.values():
        measured = f"{ratio.low:.2f} to {ratio.high:.2f} | {ratio.median:.2f}" if ratio.runs else "none | "
        lines.append(f"| {ratio.family} | {ratio.runs} | {measured} |")
    return "\n".join(lines) + "\n"


SECTIONS: dict[str, Callable[[], str]] = {"published-memory": table, "published-speed": families}
