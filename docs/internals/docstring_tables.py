"""Generated tables of docs/reference whose rows are the keys that a docstring lists: `- `key`, `other`: meaning.`"""

import re
from collections.abc import Callable
from functools import partial
from inspect import getdoc
from typing import Any

from lightning_llm.compare.comparison import Comparison, verdict_data
from lightning_llm.dry_run.ranks import dry_run
from lightning_llm.plan.memory.rank_bytes import memory_bytes
from lightning_llm.plan.report import plan_facts
from lightning_llm.plan.time.describe import time_facts
from lightning_llm.precision.linear.statistics import figures as health_figures
from lightning_llm.probe.figures import figures as probe_figures

ITEM = re.compile(r"^- ((?:`[\w.]+`,\s+)*`[\w.]+`): (.*(?:\n  .*)*)", re.MULTILINE)


def table_of(documented: Any, column: str = "key") -> str:
    """Return the items of a docstring as a table of two columns. Raises ValueError if it lists none."""
    items = ITEM.findall(getdoc(documented) or "")
    if not items:
        raise ValueError(f"{documented.__qualname__}: its docstring lists no keys as '- `key`: meaning.'")
    rows = [f"| {_cell(keys)} | {_cell(meaning)} |" for keys, meaning in items]
    return "\n".join([f"| {column} | meaning |", "| --- | --- |", *rows, ""])


def _cell(text: str) -> str:
    """Return a text as one cell of a table, with links to arXiv."""
    line = " ".join(text.split()).removesuffix(".").replace("|", "\\|")
    return re.sub(r"arXiv (\d{4}\.\d{4,5})", r"[arXiv \1](https://arxiv.org/abs/\1)", line)


SECTIONS: dict[str, Callable[[], str]] = {
    "compare-keys": partial(table_of, Comparison.as_data),
    "verdict-keys": partial(table_of, verdict_data),
    "plan-keys": partial(table_of, plan_facts),
    "memory-kinds": partial(table_of, memory_bytes, "kind"),
    "time-keys": partial(table_of, time_facts),
    "dry-run-keys": partial(table_of, dry_run, "key of `dry_run`"),
    "health-figures": partial(table_of, health_figures, "figure"),
    "probe-figures": partial(table_of, probe_figures, "figure"),
}
