"""The verb `evaluate`: validation losses and lm-eval tasks of trained weights. Results are saved with their run."""

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from rich.table import Table

from lightning_llm.base.errors import ConfigError, Problem, RanksFailedError, gathered
from lightning_llm.base.folders import output_file_problems
from lightning_llm.base.terminal import new_console, show_progress
from lightning_llm.evaluate.evaluation import Evaluation, evaluate_models
from lightning_llm.evaluate.merge import Merge, merge
from lightning_llm.evaluate.over_time import Trend, evaluate_over_time, trend_problems, trend_table
from lightning_llm.evaluate.request import LAYOUT_WORD, EvaluationRequest, checked_request
from lightning_llm.run.launch.environment import is_first_rank, rank_environment
from lightning_llm.run.launch.torch_agent import STOP_SECONDS, as_rank, launch_reported
from lightning_llm.run.subject import device_of

GIVE_MEMORY_BACK = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
"""Environment of ranks: malloc returns blocks above this many bytes to the system when they are freed.

Without it glibc keeps twice a shard's memory after gathered weights are freed.
"""


def evaluate(arguments: argparse.Namespace) -> int:
    """Evaluate, print the results and write them to the run's folder; return 0, or the exit code of failed ranks."""
    if arguments.merge is not None:
        return _merge(arguments)
    # argparse adds layout overrides that follow --average or --ensemble to their paths.
    given = [[arguments.path] if arguments.path else [], arguments.average, arguments.ensemble]
    layout = [str(each) for paths in given for each in paths if LAYOUT_WORD.fullmatch(str(each))]
    path, average, ensemble = ([each for each in paths if str(each) not in layout] for paths in given)
    asked: dict[str, Any] = {
        "tasks": arguments.tasks,
        "tasks_only": arguments.tasks_only,
        "data": arguments.data,
        "limit": arguments.limit,
        "average": average,
        "ensemble": ensemble,
        "batch_size": arguments.batch_size,
        "compute_dtype": arguments.compute_dtype,
        "device": arguments.device,
        "layout": [*layout, *arguments.overrides],
        "codes": arguments.codes,
    }
    only = path[0] if path else None
    if rank_environment() is not None:
        if arguments.all_checkpoints:
            text = "starts its own ranks. Run it in one process with trainer.devices=N, not under torchrun or srun."
            raise ConfigError(Problem("--all-checkpoints", text))
        return _rank(only, asked, arguments)
    try:
        if arguments.all_checkpoints:
            return _all_checkpoints(only, arguments, asked)
        done = evaluated(only, output=arguments.output, **asked)
    except RanksFailedError as error:
        return error.code
    _say(done, arguments.json)
    return 0


def _all_checkpoints(path: Path | None, arguments: argparse.Namespace, asked: dict[str, Any]) -> int:
    """Evaluate every checkpoint of a run; print the table over steps and return 0, or 2 if a checkpoint is damaged.

    Raises:
        ConfigError: an argument is invalid, or the run has no checkpoint.
    """
    trend = evaluated_over_time(path, output=arguments.output, **asked)
    if arguments.json:
        print(json.dumps(trend.as_data(), indent=1))
        print_notes(trend)
    else:
        print_trend(trend)
    if trend.damaged:
        raise ConfigError([Problem(str(folder), f"{why}.") for folder, why in trend.damaged.items()])
    return 0


def print_trend(trend: Trend) -> None:
    """Print the table over steps, and its notes on stderr."""
    new_console().print(trend_table(trend))
    print_notes(trend)


def print_notes(trend: Trend) -> None:
    """Print on stderr which checkpoints were not evaluated, and the file of the picture."""
    for line in trend.notes:
        print(line, file=sys.stderr)
    print(f"written    {trend.picture}", file=sys.stderr)


def evaluated_over_time(path: Path | None, *, output: Path | None = None, **asked: Any) -> Trend:
    """Evaluate every checkpoint of the run `path`; `asked` are the arguments of `checked_request`.

    Raises:
        ConfigError: an argument or an input is invalid, or the run has no checkpoint. A damaged checkpoint does not
            raise: it is in the result.
        RanksFailedError: a rank failed (already reported on stderr).
    """
    _refuse_ranks()
    problems = trend_problems(path, average=asked["average"], ensemble=asked["ensemble"], output=output)
    request = None
    if not problems and path is not None:
        with gathered(problems):
            request = checked_request(path, **asked)
    if problems or request is None:
        raise ConfigError(problems)
    return evaluate_over_time(request, lambda each: _evaluate(each, None, asked), partial(print, file=sys.stderr))


def evaluated(path: Path | None, *, output: Path | None = None, **asked: Any) -> Evaluation:
    """Evaluate in this process, or in ranks started for it; `asked` are the arguments of `checked_request`.

    Raises:
        ConfigError: an argument or an input is invalid.
        RanksFailedError: a rank failed (already reported on stderr).
    """
    _refuse_ranks()
    problems = output_file_problems(output.expanduser()) if output else []
    request = None
    with gathered(problems):
        request = checked_request(path, **asked)
    if problems or request is None:
        raise ConfigError(problems)
    return _evaluate(request, output, asked)


def _refuse_ranks() -> None:
    """Raise ConfigError on a rank of torchrun or srun."""
    if (ranks := rank_environment()) is not None:
        text = (
            f"this is rank {ranks.rank} of {ranks.world}, started by torchrun or srun, but evaluate() starts its own "
            "ranks (layout=...). Call it in one process, or run `lightning-llm evaluate PATH parallel=NAME`."
        )
        raise ConfigError(Problem("process", text))


def _evaluate(request: EvaluationRequest, output: Path | None, asked: Mapping[str, Any]) -> Evaluation:
    """Evaluate in this process, or in ranks started for it; `asked` has the arguments that `request` was made of."""
    if request.degrees.world == 1:
        return evaluate_models(request, output)
    trainer, world = request.subjects[0].config.trainer, request.degrees.world
    if trainer.devices != world:
        text = (
            f"must equal trainer.devices={trainer.devices}, the ranks started here. Remove world, change "
            "trainer.devices, or start the ranks of several machines with torchrun or srun."
        )
        raise ConfigError(Problem("world", text, world))
    with tempfile.TemporaryDirectory(prefix="lightning-llm-evaluation-") as folder:
        result = Path(folder, "result.json")
        argv = [*_rank_arguments(request, output, asked), "--result", str(result)]
        launch_reported(
            world, argv, threads=trainer.threads, shutdown_seconds=STOP_SECONDS, environment=GIVE_MEMORY_BACK
        )
        return Evaluation.from_json(json.loads(result.read_text(encoding="utf-8")))


def _rank_arguments(request: EvaluationRequest, output: Path | None, asked: Mapping[str, Any]) -> list[str]:
    """Return the command line of the ranks, with the checkpoints resolved here; ensembles do not use ranks."""
    first, *others = request.members
    argv = ["evaluate", first, *asked["layout"]]
    for key in ("tasks", "data"):
        argv += [f"--{key}={value}" for value in asked[key]]
    argv += ["--average", *others] if others else []
    argv += ["--as", asked["codes"]] if asked["codes"] else []
    argv += ["--tasks-only"] if asked["tasks_only"] else []
    single = {key: asked[key] for key in ("limit", "batch_size", "compute_dtype", "device")} | {"output": output}
    return argv + [f"--{key.replace('_', '-')}={value}" for key, value in single.items() if value is not None]


def _rank(path: Path | None, asked: Mapping[str, Any], arguments: argparse.Namespace) -> int:
    """Evaluate as one of several ranks; the first prints the result, or writes it to a file for the launcher."""
    try:
        done = as_rank(lambda: evaluate_models(checked_request(path, **asked), arguments.output))
    except RanksFailedError as error:
        return error.code
    if done is None or not is_first_rank():
        return 0
    if arguments.result:
        arguments.result.write_text(json.dumps(done.as_json()), encoding="utf-8")
    else:
        _say(done, arguments.json)
    return 0


def _say(done: Evaluation, as_json: bool) -> None:
    if as_json:
        print(json.dumps(done.as_data(), indent=1))
    else:
        print_metrics(done)
    print(f"written    {done.file}", file=sys.stderr)


def print_metrics(done: Evaluation) -> None:
    """Print one line per metric."""
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
    new_console().print(table)
    for line in done.gain.lines() if done.gain else ():
        print(line)


def _merge(arguments: argparse.Namespace) -> int:
    """Estimate the loss of combinations of data sources by averaged weights; print and write it, return 0.

    Raises:
        ConfigError: an argument or the sweep is invalid.
    """
    beside = {
        "PATH": arguments.path,
        "--all-checkpoints": arguments.all_checkpoints,
        "--average": arguments.average,
        "--ensemble": arguments.ensemble,
        "--tasks": arguments.tasks,
        "--data": arguments.data,
        "--output": arguments.output,
    }
    problems = [
        Problem(key, "cannot be used with --merge, which uses the sweep's runs and data. Remove it.")
        for key, value in beside.items()
        if value
    ]
    if not arguments.merge.expanduser().is_dir():
        problems.append(Problem("--merge", "is not a folder. Give the folder of a sweep.", arguments.merge))
    if problems:
        raise ConfigError(problems)
    found = merge(arguments.merge, device_of(arguments.device), show_progress)
    show_progress("")
    if arguments.json:
        print(json.dumps(found.as_data(), indent=1))
    else:
        _print_merge(found)
    print(f"written    {found.file}", file=sys.stderr)
    return 0


def _print_merge(found: Merge) -> None:
    """Print a row per combination, the best proxy first, and the rank correlations."""
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
        "Values of several parts are losses of averaged weights: use them to rank combinations, not as expected losses."
    )
    known = sum(each.true is not None for each in found.candidates)
    if known < 2:
        print(f"no rank correlation: only {known} of these combinations has been trained itself, at least 2 are needed")
        return
    print(f"Spearman correlation of proxy and trained loss over {known} combinations (95 % intervals):")
    for metric in found.metrics:
        print(f"  {metric:<20} {found.correlation(metric).text()}")
    if not math.isnan(found.mean_of_sources):
        print(f"  mean of the held-out sets {found.mean_of_sources:+.2f}")
