"""Step Law compared with the grid of runs that it was fitted to. Nothing runs; the file of runs is not shipped.

It is `data/dense_lr_bs_loss.csv`, or `moe_lr_bs_loss.csv`, of github.com/step-law/steplaw, which has no license.
"""

import csv
import math
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

from benchmarks.rotation import InputError, Row
from lightning_llm.plan.step_law import FITTED_SEQUENCE_LENGTH, law_batch_tokens, law_learning_rate

COLUMNS = ("N", "D", "h", "ffnh", "numl", "lr", "bs", "smooth loss")
"""Parameters without embeddings, tokens, the model's shape, learning rate, sequences per step, and the loss."""
FEWEST = {"dense": 60, "MoE": 40}
"""Runs of a group, of one N, D and shape, that make a grid."""


def group_gaps(file: Path, fewest: int) -> list[float]:
    """Return, per group of at least `fewest` runs, the relative gap of the run nearest the law to the best loss.

    Nearest in the logarithms of learning rate and batch. Raises InputError for a file without `COLUMNS`.
    """
    groups: dict[tuple[str, ...], list[tuple[float, float, float]]] = defaultdict(list)
    with file.open(newline="", encoding="utf-8") as opened:
        reader = csv.DictReader(opened)
        if missing := sorted(set(COLUMNS) - set(reader.fieldnames or ())):
            raise InputError(f"{file} has no column {', '.join(missing)}")
        for row in reader:
            loss = float(row["smooth loss"] or "nan")
            if math.isfinite(loss):
                # of experts, the number active is a shape, too
                shape = tuple(row.get(key, "") for key in ("N", "D", "h", "ffnh", "numl", "Na", "moe_name"))
                groups[shape].append((float(row["lr"]), float(row["bs"]) * FITTED_SEQUENCE_LENGTH, loss))
    gaps = []
    for (parameters, tokens, *_), runs in groups.items():
        if len(runs) < fewest:
            continue
        rate = law_learning_rate(float(parameters), float(tokens))
        batch = law_batch_tokens(float(tokens))
        nearest = min(runs, key=lambda run: math.hypot(math.log(run[0] / rate), math.log(run[1] / batch)))
        gaps.append(nearest[2] / min(loss for *_, loss in runs) - 1)
    return gaps


def measure(file: Path | None = None) -> Iterator[Row]:
    """Yield mean and largest gap over the groups of `file`, in percent of the loss."""
    if file is None:
        yield "step_law: the released grid", None, "not measured: give --csv FILE, of github.com/step-law/steplaw"
        return
    kind = "MoE" if "moe" in file.name else "dense"
    gaps = group_gaps(file, FEWEST[kind])
    if not gaps:
        raise InputError(f"{file} has no group of {FEWEST[kind]} runs or more")
    yield f"step_law, {kind}: groups of {FEWEST[kind]} runs or more", float(len(gaps)), ""
    yield f"step_law, {kind}: nearest run above its group's best, mean, %", 100 * fmean(gaps), "0.09 (README), 0.07"
    yield f"step_law, {kind}: the largest, %", 100 * max(gaps), ""
