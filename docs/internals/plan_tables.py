"""Generated tables of docs/reference: layouts, plans against published memory and speed, known issues."""

import re
import sys
from collections.abc import Callable
from inspect import getdoc
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from benchmarks.plan_memory import table as published_memory  # noqa: E402
from lightning_llm.plan.text.notes import RULES  # noqa: E402
from lightning_llm.plan.time.describe import RATIOS  # noqa: E402

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


def layouts() -> str:
    """Return the table of `conf/parallel/*.yaml`: the comment at the top, the ZeRO stage and the degrees."""
    lines = ["| `parallel=` | | `zero_stage` | degrees |", "|---|---|---|---|"]
    files = [(file.read_text(encoding="utf-8"), file) for file in (ROOT / "conf" / "parallel").glob("*.yaml")]
    parsed = [(yaml.safe_load(text), text) for text, _ in files]
    order = ("pp", "cp", "tp", "dp_replicate", "dp_shard")
    for keys, text in sorted(parsed, key=lambda each: (*(axis in each[0] for axis in order), each[0]["name"])):
        comment = " ".join(line.lstrip("# ") for line in text.splitlines() if line.startswith("#"))
        comment = re.sub(r"arXiv (\d{4}\.\d{5})", r"[arXiv \1](https://arxiv.org/abs/\1)", comment)
        degrees = ", ".join(
            f"`{axis}` = {'the rest' if keys[axis] is None else keys[axis]}" for axis in AXES if axis in keys
        )
        lines.append(f"| `{keys['name']}` | {comment} | {keys.get('zero_stage', 0)} | {degrees or 'all 1'} |")
    return "\n".join(lines) + "\n"


def published_speed() -> str:
    """Return the table of published over predicted speed by family of layouts."""
    lines = ["| family | runs | published over predicted | median |", "|---|---:|---|---:|"]
    for ratio in RATIOS.values():
        measured = f"{ratio.low:.2f} to {ratio.high:.2f} | {ratio.median:.2f}" if ratio.runs else "none | "
        lines.append(f"| {ratio.family} | {ratio.runs} | {measured} |")
    return "\n".join(lines) + "\n"


def known_issues() -> str:
    """Return the settings of a machine that `plan` warns of, each with its source, from the docstrings of the rules."""
    lines = ["| setting | source |", "| --- | --- |"]
    for rule in RULES:
        setting, _, source = (getdoc(rule) or "").partition("\n\nSource: ")
        lines.append(f"| {setting.removesuffix('.')} | {' '.join(source.split()).removesuffix('.')} |")
    return "\n".join(lines) + "\n"


SECTIONS: dict[str, Callable[[], str]] = {
    "layouts": layouts,
    "published-memory": published_memory,
    "published-speed": published_speed,
    "known-issues": known_issues,
}
