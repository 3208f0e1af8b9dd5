"""The verb `evaluate`: validation losses and lm-eval tasks of weights that are there, kept with their run."""

import argparse
import json
import sys

from rich.console import Console
from rich.table import Table

from lightning_llm.evaluate.evaluation import Evaluation, evaluate_models
from lightning_llm.evaluate.request import checked_request


def evaluate(arguments: argparse.Namespace) -> int:
    """Measure, print, and write the results into the run's folder; return 0."""
    request = checked_request(
        arguments.path,
        tasks=arguments.tasks,
        tasks_only=arguments.tasks_only,
        data=arguments.data,
        limit=arguments.limit,
        average=arguments.average,
        ensemble=arguments.ensemble,
        batch_size=arguments.batch_size,
        compute_dtype=arguments.compute_dtype,
        device=arguments.device,
    )
    done = evaluate_models(request, arguments.output)
    if arguments.json:
        print(json.dumps(done.as_data(), indent=1))
    else:
        print_metrics(done)
    print(f"written    {done.file}", file=sys.stderr)
    return 0


def print_metrics(done: Evaluation) -> None:
    """Print a line per metric."""
    several = done.how == "ensemble"
    found = {f"mean of {combine}" if several else "value": its for combine, its in done.by_combination.items()}
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("metric")
    for name in found:
        table.add_column(name, justify="right")
    table.add_column("standard error", justify="right")
    for metric, each in next(iter(found.values())).items():
        error = each.get("stderr")
        values = [f"{its[metric]['value']:.4f}" for its in found.values()]
        table.add_row(metric, *values, "" if error is None else f"{error:.4f}")
    Console().print(table)
