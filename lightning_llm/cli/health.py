"""The verb `health`: check and benchmark the ranks and machines of a run; report wrong results and slow ranks."""

import argparse
import json
import os
import sys
from pathlib import Path

import torch

from lightning_llm.base.errors import AgreedError, ConfigError, Problem, RanksFailedError, UnhealthyError, gathered
from lightning_llm.base.hardware import device_name
from lightning_llm.base.imports import slow_imports
from lightning_llm.config.schema import Config
from lightning_llm.config.workspace import config_dir_arguments
from lightning_llm.config.yaml_file import in_memory
from lightning_llm.health.check import check_health
from lightning_llm.health.devices import FULL, SHORT, formats_of, peak_tflops
from lightning_llm.health.ranks import Ranks
from lightning_llm.health.report import HealthReport, print_report, verdict_lines, write_measured
from lightning_llm.health.thresholds import (
    NOT_IN_SHORT,
    OPTION,
    Threshold,
    config_problems,
    device_problems,
    failing_lines,
    read_thresholds,
)
from lightning_llm.parallel.process_group import join_process_group, leave_process_group
from lightning_llm.run.checked_plan import read_arguments
from lightning_llm.run.launch.environment import adopt_world, die_with_launcher, rank_environment, world_problems
from lightning_llm.run.launch.torch_agent import STOP_SECONDS, failures_reported, launch_ranks


def health(arguments: argparse.Namespace) -> int:
    """Measure on all ranks, print the results, and write files for `plan` (cluster/measured.yaml, links.yaml).

    Returns 0, or 1 if a result is wrong, a rank is slow, or a figure is below its limit in `--fail-below`.
    """
    config, thresholds = _asked(arguments)
    if rank_environment() is not None:
        return _rank(config, thresholds, arguments)
    if config.trainer.devices == 1:
        return _measure(config, thresholds, arguments)
    with in_memory(config) as file:
        argv = ["health", "--config", str(file), *config_dir_arguments(), *_options(arguments)]
        trainer = config.trainer
        try:
            with failures_reported(by_ranks=True):
                launch_ranks(trainer.devices, argv, threads=trainer.threads, shutdown_seconds=STOP_SECONDS)
        except RanksFailedError as error:
            return error.code
    return 0


def _asked(arguments: argparse.Namespace) -> tuple[Config, list[Threshold]]:
    """Return the config and the thresholds. Raises ConfigError with the problems of both."""
    problems: list[Problem] = []
    config: Config | None = None
    thresholds: list[Threshold] = []
    if arguments.fail_below is not None:
        with gathered(problems):
            thresholds = read_thresholds(arguments.fail_below)
    if not 0 < arguments.slower_than < float("inf"):
        text = "must be above 0, for example 0.1 for 10 %."
        problems.append(Problem("--slower-than", text, f"{arguments.slower_than:g}"))
    if arguments.output is not None and arguments.output.exists() and not arguments.output.is_dir():
        problems.append(Problem("--output", "must be a folder, not a file. Choose another name.", arguments.output))
    with gathered(problems):
        config = adopt_world(read_arguments(arguments).checked())
        if rank_environment() is None:
            problems += world_problems(config)
        problems += config_problems(thresholds, config.world or config.trainer.devices, config.cluster)
        problems += _short_problems(thresholds) if arguments.short else []
    if problems or config is None:
        raise ConfigError(problems)
    return config, thresholds


def _short_problems(thresholds: list[Threshold]) -> list[Problem]:
    return [
        Problem(OPTION, f"{each.name} is not measured with --short. Remove --short or this threshold.")
        for each in thresholds
        if each.name in NOT_IN_SHORT
    ]


def _options(arguments: argparse.Namespace) -> list[str]:
    """Return the command-line options to pass to the ranks."""
    options = ["--slower-than", str(arguments.slower_than)]
    options += [f"--{name}" for name in ("short", "json") if getattr(arguments, name)]
    given = {"--fail-below": arguments.fail_below, "--output": arguments.output}
    return [*options, *(each for option, path in given.items() if path is not None for each in (option, str(path)))]


def _rank(config: Config, thresholds: list[Threshold], arguments: argparse.Namespace) -> int:
    """Measure as one of several ranks. Exceptions are recorded for the launcher."""
    from torch.distributed.elastic.multiprocessing.errors import record

    die_with_launcher()
    try:
        return int(record(_measure)(config, thresholds, arguments) or 0)
    except UnhealthyError as error:
        error.end_stopped()
        return 1
    except (KeyboardInterrupt, Exception) as error:
        if isinstance(error, ConfigError) or "TORCHELASTIC_ERROR_FILE" not in os.environ:
            raise
        return 130 if isinstance(error, KeyboardInterrupt) else 1  # the launcher reports the first failure


def _measure(config: Config, thresholds: list[Threshold], arguments: argparse.Namespace) -> int:
    """Measure with all ranks; the first prints and writes. Return the exit code, the same on every rank."""
    with slow_imports():
        from lightning_llm.run.opening import choose_device, joined_ranks

    if config.trainer.threads:
        torch.set_num_threads(config.trainer.threads)
    device = choose_device(config)
    if (here := rank_environment()) is not None:
        join_process_group(device, here.world, config.parallel.timeout_seconds)
    try:
        ranks = joined_ranks(config)
        _agree_on_thresholds(ranks, device, thresholds)
        folder = Path(config.run.dir)
        extent = (SHORT if arguments.short else FULL)[device.type]
        report = check_health(ranks, device, extent, folder, arguments.slower_than)
        failing = failing_lines(report, thresholds, config.cluster)
        if ranks.rank == 0:
            output = arguments.output or Path(config.run.root, "health")
            lines = [*_written(report, ranks.local_world, output), *verdict_lines(report, failing)]
            if arguments.json:
                print(json.dumps({**report.as_data(), "below": failing}, indent=1), flush=True)
            else:
                print_report(report)
            print("\n".join(lines), file=sys.stderr if arguments.json else sys.stdout, flush=True)
        ranks.meet()  # if a rank exits with a failure first, a launcher would stop the others too early
        return int(bool(report.wrong or report.slow or failing))
    except UnhealthyError as error:
        if error.reports:
            print(f"error: {error}", file=sys.stderr, flush=True)
        raise  # tells the launcher that the error is already reported
    finally:
        leave_process_group()


def _written(report: HealthReport, devices_per_node: int, output: Path) -> list[str]:
    """Write the files for `plan`; return lines about them, or the reason that they could not be written."""
    try:
        return write_measured(report, devices_per_node, output)
    except OSError as error:
        return [f"note       no files for `plan`: {output} cannot be written: {error.strerror or error}"]


def _agree_on_thresholds(ranks: Ranks, device: torch.device, thresholds: list[Threshold]) -> None:
    """Check on all ranks that `thresholds` apply to their devices. Collective.

    Raises:
        ConfigError: on every rank, with the thresholds that do not apply to the device of some rank.
    """
    peaks = {name: peak_tflops(device, name) for name in formats_of(device)}
    found = ranks.share(device_problems(thresholds, device_name(device), peaks, peaks))
    if problems := list(dict.fromkeys(each for its in found for each in its)):
        raise AgreedError(problems)
