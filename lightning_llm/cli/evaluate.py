"""The verb `evaluate`: validation losses and lm-eval tasks of weights that are there, kept with their run."""

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.table import Table

from lightning_llm.base.errors import ConfigError, Problem, RanksFailedError, gathered
from lightning_llm.base.terminal import new_console
from lightning_llm.cli.merged import merged
from lightning_llm.cli.output_path import file_problems
from lightning_llm.evaluate.evaluation import Evaluation, evaluate_models
from lightning_llm.evaluate.request import LAYOUT_WORD, Request, checked_request
from lightning_llm.run.launch.environment import is_first_rank, rank_environment
from lightning_llm.run.launch.torch_agent import STOP_SECONDS, as_rank, launch_reported

GIVE_MEMORY_BACK = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
"""Of ranks, above this many bytes at once: glibc else keeps twice a shard's memory for weights gathered and let go."""


def evaluate(arguments: argparse.Namespace) -> int:
    """Measure, print, and write the results into the run's folder; return 0, or what ranks that failed end with."""
    if arguments.merge is not None:
        return merged(arguments)
    # Options that take several paths take the words of the layout behind them, too.
    given = [[arguments.path] if arguments.path else [], arguments.average, arguments.ensemble]
    words = [str(each) for paths in given for each in paths if LAYOUT_WORD.fullmatch(str(each))]
    path, average, ensemble = ([each for each in paths if str(each) not in words] for paths in given)
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
        "layout": [*words, *arguments.overrides],
    }
    only = path[0] if path else None
    if rank_environment() is not None:
        return _rank(only, asked, arguments)
    try:
        done = evaluated(only, output=arguments.output, **asked)
    except RanksFailedError as error:
        return error.code
    _say(done, arguments.json)
    return 0


def evaluated(path: Path | None, *, output: Path | None = None, **asked: Any) -> Evaluation:
    """Measure in this process, or in ranks that are started for it, what `checked_request` takes.

    Raises:
        ConfigError: with all that is wrong.
        RanksFailedError: a rank failed, which is said.
    """
    if (ranks := rank_environment()) is not None:
        text = (
            f"is rank {ranks.rank} of {ranks.world}, started by torchrun or srun, and an evaluation from Python starts "
            "its ranks by itself (layout). Call it in one process, or start lightning-llm evaluate PATH parallel=NAME."
        )
        raise ConfigError(Problem("process", text))
    problems = file_problems(output.expanduser()) if output else []
    request = None
    with gathered(problems):
        request = checked_request(path, **asked)
    if problems or request is None:
        raise ConfigError(problems)
    if request.degrees.world == 1:
        return evaluate_models(request, output)
    trainer, world = request.subjects[0].config.trainer, request.degrees.world
    if trainer.devices != world:
        text = (
            f"is {world}, and {trainer.devices} ranks would be started here. Leave it out, set trainer.devices, or "
            "start the ranks of several machines by torchrun or srun."
        )
        raise ConfigError(Problem("world", text))
    with tempfile.TemporaryDirectory(prefix="lightning-llm-evaluation-") as folder:
        result = Path(folder, "result.json")
        words = [*_words(request, output, asked), "--result", str(result)]
        launch_reported(
            world, words, threads=trainer.threads, shutdown_seconds=STOP_SECONDS, environment=GIVE_MEMORY_BACK
        )
        return Evaluation.from_json(json.loads(result.read_text(encoding="utf-8")))


def _words(request: Request, output: Path | None, asked: Mapping[str, Any]) -> list[str]:
    """Return the command line that asks for the same of the checkpoints found here; ranks judge no ensemble."""
    first, *others = request.members
    words = ["evaluate", first, *asked["layout"]]
    for key in ("tasks", "data"):
        words += [f"--{key}={value}" for value in asked[key]]
    words += ["--average", *others] if others else []
    words += ["--tasks-only"] if asked["tasks_only"] else []
    single = {key: asked[key] for key in ("limit", "batch_size", "compute_dtype", "device")} | {"output": output}
    return words + [f"--{key.replace('_', '-')}={value}" for key, value in single.items() if value is not None]


def _rank(path: Path | None, asked: Mapping[str, Any], arguments: argparse.Namespace) -> int:
    """Measure as one of several ranks; the first says what came of it, or leaves it for the launcher."""
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
    new_console().print(table)
    for line in done.gain.lines() if done.gain else ():
        print(line)
