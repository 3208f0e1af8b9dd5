"""The verb `algoperf`: score runs by time to a target, by the rules of AlgoPerf."""

import argparse
import math
import sys
from collections.abc import Sequence

from lightning_llm.algoperf import CLOCKS, Benchmark, score_runs
from lightning_llm.base.errors import ConfigError, Problem, gathered
from lightning_llm.base.terminal import escaped
from lightning_llm.compare.command import print_escaped, table_console
from lightning_llm.compare.format import as_json
from lightning_llm.compare.runs.find import find_runs
from lightning_llm.compare.runs.losses import LOSS
from lightning_llm.compare.runs.read_runs import read_found
from lightning_llm.compare.runs.usable import without_copies
from lightning_llm.compare.time_to_target import NO_TARGETS, read_targets

FILE = "time_to_target.json"


def algoperf(arguments: argparse.Namespace) -> int:
    """Print the scores of runs and write them next to the runs, or to `--output`; return 0.

    Raises:
        ConfigError: the arguments are invalid; no run can be scored; or some runs cannot, in which case the scores of
            the others are printed and written first.
    """
    return run_algoperf(arguments)


def run_algoperf(arguments: argparse.Namespace, problems: Sequence[Problem] = ()) -> int:
    """Run `algoperf`, also for `compare --time-to-target`; return the exit code.

    `problems`: those that the caller found in the arguments; they are raised together with all others.
    """
    wrong, targets = list(problems), NO_TARGETS
    with gathered(wrong):
        targets = read_targets(arguments.target)
    if wrong:
        raise ConfigError(wrong)
    found = find_runs(arguments.runs)
    runs, unread, *_ = read_found(found)
    runs, copies = without_copies(runs)
    left_out = [*found.problems, *unread, *copies]
    trials = arguments.trials.split(",") if arguments.trials else ()
    try:
        benchmark = score_runs(runs, arguments.metric or LOSS, targets, arguments.baseline, trials)
    except ConfigError as error:
        raise ConfigError([*left_out, *error.problems]) from error
    benchmark.problems = [*left_out, *benchmark.problems]
    if arguments.json:
        print(as_json(benchmark.as_data()))
    else:
        print_benchmark(benchmark)
    folder = arguments.output or found.home / "compare"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / FILE).write_text(as_json(benchmark.as_data()) + "\n", encoding="utf-8")
        print_escaped(f"scores {folder / FILE}", sys.stderr if arguments.json else sys.stdout)
    except OSError as error:
        benchmark.problems.append(
            Problem("--output", f"{folder} cannot be written ({error.strerror}). Choose another.")
        )
    if benchmark.problems:
        raise ConfigError(benchmark.problems)
    return 0


def print_benchmark(benchmark: Benchmark) -> None:
    """Print a row per submission: the median time to each workload's target, and the scores."""
    from rich.table import Table
    from rich.text import Text

    console = table_console()
    workloads = list(benchmark.targets)
    trials = ", ".join(benchmark.trial_keys) or "one run"
    console.print(Text(f"time to {benchmark.metric} of {benchmark.factor.name}; trials: {trials}", style="bold"))
    table = Table(box=None, pad_edge=False, header_style="bold", collapse_padding=True)
    table.add_column(benchmark.factor.name, overflow="fold")
    for workload in workloads:
        table.add_column(f"steps to {benchmark.targets[workload]:g}: {workload}", justify="right")
    for clock in CLOCKS:
        table.add_column(f"score by {clock}", justify="right", no_wrap=True)
    medians = benchmark.medians("steps")
    scored = {clock: benchmark.scores(clock) for clock in CLOCKS}
    for name in benchmark.submissions:
        times = [_steps(medians[name].get(workload, math.inf)) for workload in workloads]
        table.add_row(name, *times, *(f"{scored[clock][name]:.3f}" for clock in CLOCKS))
    console.print(table)
    for note in benchmark.notes():
        console.print(Text(escaped(f"  {note}"), style="dim"), soft_wrap=True)


def _steps(value: float) -> str:
    return f"{value:g}" if math.isfinite(value) else "never"
