"""Loss curves of a 100M-class model by `lightning-llm train`, same seed and data: every native recipe against bf16."""

import math
import statistics
from collections.abc import Iterator
from functools import partial
from typing import Any

from gpu_check.checks import Call
from gpu_check.journal import Item, Row, guarded, judged, missing
from gpu_check.machine import lacking
from gpu_check.runs import Run, SideBySide, printed, words
from gpu_check.setting import native_recipes

STEPS, LENGTH, SEQUENCES = 200, 1024, 8
LAST = 20
MARGIN = 0.01
"""Larger relative gaps to bf16's final loss are off. One seed is only an indication (`compare`: inconclusive)."""
VOCABULARY = 512


def overrides(recipe: str, call: Call) -> list[str]:
    """Return the overrides of one recipe's run."""
    more = (
        "model=llama_160m", f"model.vocab_size={VOCABULARY}", f"precision={recipe}", "precision.casts=eager",
        "schedule.warmup_steps=20", "optim.learning_rate=6e-4",
    )  # fmt: skip
    return words(call.scratch, recipe, SEQUENCES, LENGTH, STEPS, *more)


def items(call: Call) -> list[Item]:
    """Return an item per native recipe; all runs, including bf16's, run at the same time."""
    names = list(native_recipes())
    if not names:
        return [Item("native recipes", 0, lambda: iter([missing("native recipes", "this machine runs none natively")]))]
    runs = SideBySide(call, "curves", {name: (name, overrides(name, call)) for name in ["bf16", *names]}, ("bf16",))
    return [Item(name, 30, partial(curve, name, runs, call)) for name in names]


def curve(name: str, runs: SideBySide, call: Call) -> Iterator[Row]:
    """Yield a recipe's gap to bf16 at the end, then `compare`'s verdict."""
    base, ours = runs.finished("bf16"), runs.finished(name)
    yield gap(name, ours, base)
    yield from guarded(f"{name}: verdict", verdict, name, ours, base, call)


def gap(name: str, ours: Run, base: Run) -> Row:
    """Return the relative gap of a run's last losses to bf16's; a run that was emulated is off in any case."""
    end, wanted = (statistics.fmean(record["loss"] for record in run.records()[-LAST:]) for run in (ours, base))
    relative, runs = (end - wanted) / wanted, how_it_ran(ours)
    what = f"{name} ({runs}): gap of the last {LAST} of {len(ours.records())} losses to bf16's"
    holds = math.isfinite(relative) and abs(relative) <= MARGIN and runs == "native"
    return judged(what, 100 * relative, "%", holds, f"native, at most {100 * MARGIN:g} % of {wanted:.4f}; one seed")


def how_it_ran(run: Run) -> str:
    """Return the casts reported in a run's summary: native, or that they fell back."""
    return str(run.summary()["precision"]["runs"])


def verdict(name: str, ours: Run, base: Run, call: Call) -> Iterator[Row]:
    """Yield `lightning-llm compare`'s verdict on a run against bf16's: lossless is ok, lossy is off."""
    if gone := lacking(("scipy", "matplotlib", "jinja2")):
        yield missing(f"{name}: verdict", f"{', '.join(gone)} not installed")
        return
    found = printed(
        "compare", "--json", "--baseline", "precision=bf16", "--output", str(call.scratch / f"compare-{name}"),
        str(base.folder), str(ours.folder),
    )["verdicts"]  # fmt: skip
    yield verdict_row(name, how_it_ran(ours), next((row for row in found if row["name"] == name), None))


def verdict_row(name: str, runs: str, verdict: dict[str, Any] | None) -> Row:
    """Return one of `compare`'s verdicts as a row; None if it has none for this run."""
    what = f"{name} ({runs}): compare's gap in nats per token"
    if verdict is None:
        return missing(what, "compare has no verdict on it")
    if runs != "native":
        return judged(what, verdict["gap"], "", False, f"{verdict['verdict']}, and it did not run natively")
    if verdict["verdict"] == "inconclusive":
        return Row(what, verdict["gap"], "", "measured", f"inconclusive: {verdict['reason']}"[:200])
    return judged(what, verdict["gap"], "", verdict["verdict"] == "lossless", verdict["verdict"])
