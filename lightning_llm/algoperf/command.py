"""The table of `compare --time-to-target`, on a terminal and as `time_to_target.json`."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lightning_llm.algoperf.benchmark import CLOCKS, Benchmark, score_runs
from lightning_llm.base.errors import ConfigError, Problem
from lightning_llm.base.terminal import escaped
from lightning_llm.compare.runs.copies import without_copies
from lightning_llm.compare.runs.ended_jobs import read_found
from lightning_llm.compare.runs.find import find_runs
from lightning_llm.compare.target import Targets

FILE = "time_to_target.json"


def benchmark_named(
    words: Sequence[str],
    metric: str,
    targets: Targets,
    baseline: str | None,
    trial_keys: Sequence[str],
    output: Path | None,
    *,
    show: Callable[[Benchmark], None],
    write: Callable[[Any], str],
    say: Callable[[str], None],
) -> Benchmark:
    """Return the scores of the runs that `words` name; they are shown, and written beside the runs or to `output`.

    Raises:
        ConfigError: nothing can be scored; or some cannot, after the rest was shown and written.
    """
    found = find_runs(words)
    runs, problems, *_ = read_found(found)
    runs, copies = without_copies(runs)
    problems += copies
    try:
        benchmark = score_runs(runs, metric, targets, baseline, trial_keys)
    except ConfigError as error:
        raise ConfigError([*found.problems, *problems, *error.problems]) from error
    benchmark.problems = [*found.problems, *problems, *benchmark.problems]
    show(benchmark)
    folder = output or found.home / "compare"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / FILE).write_text(write(benchmark.as_data()) + "\n", encoding="utf-8")
        say(f"scores {folder / FILE}")
    except OSError as error:
        benchmark.problems.append(Problem("--output", f"{folder} cannot be written to ({error.strerror})."))
    if benchmark.problems:
        raise ConfigError(benchmark.problems)
    return benchmark


def print_benchmark(benchmark: Benchmark) -> None:
    """Print a row per submission: the median time to each workload's target, and the scores."""
    import sys

    from rich.table import Table
    from rich.text import Text

    from lightning_llm.base.terminal import new_console

    console = new_console(markup=False) if sys.stdout.isatty() else new_console(markup=False, width=180, no_color=True)
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
