"""Generated tables of code facts: packages by floor, limits of tests, keys free to differ, GPU checks."""

import ast
import re
import sys
from collections.abc import Callable
from inspect import getdoc
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from gpu_check.checks import CHECKS  # noqa: E402
from lightning_llm.compare.report.write import FILES  # noqa: E402
from lightning_llm.compare.runs.differences import FREE, LAYOUT  # noqa: E402
from lightning_llm.config.schema.model import FEED_FORWARDS, MIXERS, NORMS  # noqa: E402
from tests.parallel.curve_limits import CAST, LIMITS, SHIPPED, Limits  # noqa: E402
from tests.test_architecture import FLOORS  # noqa: E402

HIDDEN = {"model.name", "data.name", "parallel.name", "precision.name", "trainer.name"}
"""Free keys that a user never sets: names of the chosen files."""


def packages() -> str:
    """Return every package with its floor and the first sentence of its docstring, the highest floor first."""
    rows = ["| floor | package | contents |", "|---|---|---|"]
    for floor, names in reversed(list(enumerate(FLOORS))):
        rows += [f"| {floor} | `{name}` | {_summary(name)} |" for name in names]
    return "\n".join([*rows, ""])


def _summary(name: str) -> str:
    folder = ROOT if name == "callbacks" else ROOT / "lightning_llm"
    file = next(file for file in (folder / name / "__init__.py", folder / f"{name}.py") if file.exists())
    text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return " ".join(text.partition("\n\n")[0].split()).removesuffix(".")


def curve_limits() -> str:
    """Return the allowed relative differences of `tp` and `cp` from one rank, by precision."""
    header = [
        "precision",
        "losses",
        "gradient norms",
        "gradients in step 1, after equal losses",
        "gradients",
        "weights",
    ]
    limits = [(f"`{name}`", each) for name, each in LIMITS.items()]
    limits.append(("other recipes, computing in fp32", CAST))
    limits += [(f"`{name}` as shipped", each) for name, each in SHIPPED.items()]
    merged: dict[Limits, list[str]] = {}
    for name, each in limits:
        merged.setdefault(each, []).append(name)
    rows = [[", ".join(names), *(f"{value:g}" for value in vars(each).values())] for each, names in merged.items()]
    return "".join(f"| {' | '.join(row)} |\n" for row in [header, ["---"] * len(header), *rows])


def report_files() -> str:
    """Return the files that `compare` writes, apart from pictures."""
    rows = [f"| `{name}` | {purpose} |" for name, purpose in {"report.html": "the report", **FILES}.items()]
    return "\n".join(["| file | content |", "| --- | --- |", *rows, ""])


def block_kinds() -> str:
    """Return the registered mixers, feed-forward networks and norms, each with the first sentence of its class."""
    rows = ["| part | kind | |", "| --- | --- | --- |"]
    for registry in (MIXERS, FEED_FORWARDS, NORMS):
        for kind in registry:
            text = (getdoc(registry[kind]) or "").partition("\n\n")[0]
            rows.append(f"| {registry.noun} | `{kind}` | {re.split(r'[.](?= [A-Z`]|$)', ' '.join(text.split()))[0]} |")
    return "\n".join([*rows, ""])


def free_keys() -> str:
    """Return the keys that may differ between compared runs, and those that may if both have a rank's bits."""
    groups = tuple(key for key in FREE if key.endswith("."))
    keys = [key for key in FREE if key not in HIDDEN and (key in groups or not key.startswith(groups))]
    rows = [("any runs", keys), ("runs that both train to the bits of a single rank", LAYOUT)]
    lines = ["| between | keys |", "| --- | --- |"]
    for title, names in rows:
        listed = ", ".join(f"`{key}*`" if key.endswith(".") else f"`{key}`" for key in sorted(names))
        lines.append(f"| {title} | {listed} |")
    return "\n".join([*lines, ""])


def gpu_checks() -> str:
    """Return the checks of `make gpu-check`, each with its share of the time in seconds."""
    rows = ["| | checks | share, seconds |", "| --- | --- | --- |"]
    rows += [f"| `{name}` | {check.title} | {check.share:g} |" for name, check in CHECKS.items()]
    return "\n".join([*rows, ""])


SECTIONS: dict[str, Callable[[], str]] = {
    "packages": packages,
    "curve-limits": curve_limits,
    "free-keys": free_keys,
    "report-files": report_files,
    "block-kinds": block_kinds,
    "gpu-checks": gpu_checks,
}
