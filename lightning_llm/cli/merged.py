"""`evaluate --merge SWEEP`: proxies of sets of parts of the data, and how they rank against runs on these sets."""

import argparse
import json
import math
import sys

from rich.table import Table

from lightning_llm.base.errors import ConfigError, Problem
from lightning_llm.base.terminal import new_console, show_progress
from lightning_llm.evaluate.merge import Merge, merge
from lightning_llm.probe.subject import device_of


def merged(arguments: argparse.Namespace) -> int:
    """Score all sets, print and write them; return 0. Raises ConfigError with all that is wrong."""
    beside = {
        "PATH": arguments.path,
        "--average": arguments.average,
        "--ensemble": arguments.ensemble,
        "--tasks": arguments.tasks,
        "--data": arguments.data,
        "--output": arguments.output,
    }
    problems = [
        Problem(key, "goes without --merge, which is of a sweep's own runs and data.") for key, v in beside.items() if v
    ]
    if not arguments.merge.expanduser().is_dir():
        problems.append(Problem("--merge", f"{arguments.merge} is no folder of a sweep."))
    if problems:
        raise ConfigError(problems)
    found = merge(arguments.merge, device_of(arguments.device), show_progress)
    show_progress("")
    if arguments.json:
        print(json.dumps(found.as_data(), indent=1))
    else:
        print_merge(found)
    print(f"written    {found.file}", file=sys.stderr)
    return 0


def print_merge(found: Merge) -> None:
    """Print a row per set, the best proxy first, and the rank correlations."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("parts", "seed", *found.metrics, "true val_loss"):
        table.add_column(name, justify="left" if name == "parts" else "right")
    for (seed, part), losses in found.units.items():
        table.add_row(part, str(seed), *(f"{losses[name]:.4f}" for name in found.metrics), f"{losses['val_loss']:.4f}")
    for each in sorted(found.candidates, key=lambda each: each.proxy["val_loss"]):
        true = "" if each.true is None else f"{each.true['val_loss']:.4f}"
        parts = " + ".join(each.parts)
        table.add_row(parts, str(each.seed), *(f"{each.proxy[name]:.4f}" for name in found.metrics), true)
    new_console().print(table)
    print(
        "Of several parts: the loss of their units' average, which ranks sets and is not what a run on them would have."
    )
    known = sum(each.true is not None for each in found.candidates)
    if known < 2:
        print(f"{known} of these sets has a run of its own to hold its proxy against: no rank correlation.")
        return
    print(f"Spearman's correlation of proxy and run over {known} sets (95 % intervals):")
    for metric in found.metrics:
        print(f"  {metric:<20} {found.correlation(metric).words()}")
    if not math.isnan(found.mean_of_sources):
        print(f"  mean of the held-out sets {found.mean_of_sources:+.2f}")
