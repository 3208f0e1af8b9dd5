"""The verb `health`: check and benchmark the ranks and machines of a run; report wrong results and slow ranks.

`--fail-below FILE` has minimum values of measured figures, absolute or as a share of the specified peak.
"""

import argparse
import json
import os
import re
import sys
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

from lightning_llm.base.errors import (
    AgreedError,
    ConfigError,
    Problem,
    RanksFailedError,
    UnhealthyError,
    did_you_mean,
    gathered,
)
from lightning_llm.base.hardware import device_name
from lightning_llm.base.process import slow_imports
from lightning_llm.config.config_hash import flatten
from lightning_llm.config.schema import ClusterConfig, Config
from lightning_llm.config.workspace import config_dir_arguments
from lightning_llm.config.yaml_file import in_memory, read_mapping
from lightning_llm.health.check import check_health
from lightning_llm.health.communication import BUS_FACTORS
from lightning_llm.health.devices import FORMATS, FULL, SHORT, formats_of, peak_tflops
from lightning_llm.health.ranks import Ranks
from lightning_llm.health.report import P2P, HealthReport, print_report, verdict_lines, write_measured
from lightning_llm.parallel.process_group import join_process_group, leave_process_group
from lightning_llm.run.checked_plan import read_arguments
from lightning_llm.run.launch.environment import adopt_world, die_with_launcher, rank_environment, world_problems
from lightning_llm.run.launch.torch_agent import STOP_SECONDS, failures_reported, launch_ranks

OPTION = "--fail-below"
GEMMS = {f"gemm.{each}.tflops": each for each in FORMATS}
LINKS = (*(f"{name}.bus_gb_per_second" for name in BUS_FACTORS), f"{P2P}.gb_per_second")
MEMORY = "memory.gb_per_second"
WITHOUT_PEAK = (
    "memory.free_bytes",
    "disk.write_gb_per_second",
    "disk.read_gb_per_second",
    "disk.fsyncs_per_second",
    "disk.free_bytes",
)
NAMES = (*GEMMS, *LINKS, MEMORY, *WITHOUT_PEAK)
"""Figures that can have a threshold."""
NOT_IN_SHORT = tuple(each for each in NAMES if each.startswith((f"{P2P}.", "disk.")))


@dataclass(frozen=True)
class Threshold:
    """Minimum value of one figure."""

    name: str
    """Name of the figure, one of `NAMES`."""
    least: float
    """The minimum: a value in the figure's unit, or a share of its peak from 0 to 1."""
    is_share: bool
    """Whether `least` is a share."""

    def __str__(self) -> str:
        return f"{100 * self.least:g}%" if self.is_share else f"{self.least:g}"


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


def read_thresholds(file: Path) -> list[Threshold]:
    """Return the thresholds in the YAML file `file`, with lines such as `gemm.bf16.tflops: 60%`, dotted or nested.

    Raises:
        ConfigError: the file is invalid; lists all problems.
    """
    tree = read_mapping(file, OPTION, "Write lines of `gemm.bf16.tflops: 60%`.")
    values = flatten(OmegaConf.to_container(tree))  # type: ignore[arg-type]  # a mapping gives a mapping
    found, problems = [], []
    for name, value in values.items():
        if name not in NAMES:
            problems.append(Problem(OPTION, f"{file}: there is no figure '{name}'.{did_you_mean(str(name), NAMES)}"))
        elif (threshold := _threshold(name, value)) is None:
            text = f"{file}: {name} is {value!r}. Give a number above 0, or a share of the peak up to 100%, as 60%."
            problems.append(Problem(OPTION, text))
        else:
            found.append(threshold)
    if problems:
        raise ConfigError(problems)
    return found


def _threshold(name: str, value: Any) -> Threshold | None:
    """Return the threshold in `value`, None if it is not one."""
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf"):
        return Threshold(name, float(value), is_share=False)
    share = re.fullmatch(r"(\d+(\.\d+)?) ?%", value) if isinstance(value, str) else None
    if share is not None and 0 < float(share[1]) <= 100:
        return Threshold(name, float(share[1]) / 100, is_share=True)
    return None


def config_problems(thresholds: list[Threshold], world: int, cluster: ClusterConfig | None) -> list[Problem]:
    """Return a problem for each threshold that cannot be checked with this number of ranks and cluster description.

    These are links of a single rank, and shares of figures without a known peak. `cluster`: None if it is not set.
    """
    problems = []
    for each in thresholds:
        if each.name in LINKS and world == 1:
            problems.append(
                Problem(OPTION, f"{each.name}: a single rank has no links. Set trainer.devices, or remove it.")
            )
        if each.is_share and each.name in WITHOUT_PEAK:
            text = f"{each.name}: is {each}, but has no known peak. Give an absolute figure."
            problems.append(Problem(OPTION, text))
        elif each.is_share and cluster is None and each.name not in GEMMS:
            text = f"{each.name}: is {each} of a figure of cluster=, which is not set. Set it, or give GB/s."
            problems.append(Problem(OPTION, text))
    return problems


def device_problems(
    thresholds: list[Threshold], device_name: str, formats: Collection[str], peaks: dict[str, float | None]
) -> list[Problem]:
    """Return a problem for each threshold of GEMMs that cannot be checked on this device.

    `formats`: the number formats measured there. `peaks`: specified speed by format, None where it is unknown.
    """
    problems = []
    for each in thresholds:
        number_format = GEMMS.get(each.name)
        if number_format is None:
            continue
        if number_format not in formats:
            text = f"{each.name}: {device_name} is measured in {', '.join(formats)} only. Remove it."
            problems.append(Problem(OPTION, text))
        elif each.is_share and peaks[number_format] is None:
            text = f"{each.name}: is {each} of the peak, which is unknown for {device_name}. Give 10^12 FLOP/s."
            problems.append(Problem(OPTION, text))
    return problems


def failing_lines(report: HealthReport, thresholds: list[Threshold], cluster: ClusterConfig | None) -> list[str]:
    """Return a line for each figure of `report` below its threshold, with the rank, pair or disk that it is of."""
    found = []
    for threshold in thresholds:
        for figure in report.figures(cluster):
            peak = figure.peak if threshold.is_share else 1.0
            if figure.name == threshold.name and peak is not None and figure.value < threshold.least * peak:
                of = f" of {peak:g}" if threshold.is_share else ""
                found.append(f"{figure.name} is {figure.value:.4g} on {figure.where}, below {threshold}{of}")
    return found
