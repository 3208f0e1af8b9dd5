"""`--fail-below FILE`: the least that figures may be, each absolute or a share of what the device is sold for."""

import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from lightning_llm.base.errors import ConfigError, Problem, did_you_mean
from lightning_llm.config.config_hash import flatten
from lightning_llm.config.schema import ClusterConfig
from lightning_llm.config.yaml_file import read_mapping
from lightning_llm.health.collectives import BUS_FACTORS
from lightning_llm.health.devices import FORMATS
from lightning_llm.health.report import P2P, HealthReport

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
"""Figures that have a threshold."""
NOT_IN_SHORT = tuple(each for each in NAMES if each.startswith((f"{P2P}.", "disk.")))


@dataclass(frozen=True)
class Threshold:
    """The least that figure `name` may be; a share of its peak, from 0 to 1, where it `is_share`."""

    name: str
    least: float
    is_share: bool

    def __str__(self) -> str:
        return f"{100 * self.least:g}%" if self.is_share else f"{self.least:g}"


def read_thresholds(file: Path) -> list[Threshold]:
    """Return the thresholds in `file`: YAML, `gemm.bf16.tflops: 60%`, dotted or nested.

    Raises:
        ConfigError: with all that is wrong with it.
    """
    tree = read_mapping(file, OPTION, "Write lines of `gemm.bf16.tflops: 60%`.")
    values = flatten(OmegaConf.to_container(tree))  # type: ignore[arg-type]  # of a mapping it is one
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
    """Return what `value` says, None where it is no threshold."""
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf"):
        return Threshold(name, float(value), is_share=False)
    share = re.fullmatch(r"(\d+(\.\d+)?) ?%", value) if isinstance(value, str) else None
    if share is not None and 0 < float(share[1]) <= 100:
        return Threshold(name, float(share[1]) / 100, is_share=True)
    return None


def config_problems(thresholds: list[Threshold], world: int, cluster: ClusterConfig | None) -> list[Problem]:
    """Return what no machine could judge: links of one rank, shares of what has no peak."""
    problems = []
    for each in thresholds:
        if each.name in LINKS and world == 1:
            problems.append(
                Problem(OPTION, f"{each.name}: one rank sends nothing. Set trainer.devices, or leave it out.")
            )
        if each.is_share and each.name in WITHOUT_PEAK:
            text = f"{each.name}: is {each}, and nothing says what it could be. Give the figure itself."
            problems.append(Problem(OPTION, text))
        elif each.is_share and cluster is None and each.name not in GEMMS:
            text = f"{each.name}: is {each} of a figure of cluster=, which is none. Choose it, or give GB/s."
            problems.append(Problem(OPTION, text))
    return problems


def device_problems(
    thresholds: list[Threshold], device_name: str, formats: Collection[str], peaks: dict[str, float | None]
) -> list[Problem]:
    """Return what this device cannot be judged by: formats that it does not multiply, shares of an unknown peak."""
    problems = []
    for each in thresholds:
        number_format = GEMMS.get(each.name)
        if number_format is None:
            continue
        if number_format not in formats:
            text = f"{each.name}: {device_name} is measured in {', '.join(formats)}. Leave it out."
            problems.append(Problem(OPTION, text))
        elif each.is_share and peaks[number_format] is None:
            text = f"{each.name}: is {each} of the peak, and no table has that of {device_name}. Give 10^12 FLOP/s."
            problems.append(Problem(OPTION, text))
    return problems


def failing_lines(report: HealthReport, thresholds: list[Threshold], cluster: ClusterConfig | None) -> list[str]:
    """Return a line for each figure that is below its threshold, with where."""
    found = []
    for threshold in thresholds:
        for figure in report.figures(cluster):
            peak = figure.peak if threshold.is_share else 1.0
            if figure.name == threshold.name and peak is not None and figure.value < threshold.least * peak:
                of = f" of {peak:g}" if threshold.is_share else ""
                found.append(f"{figure.name} is {figure.value:.4g} on {figure.where}, below {threshold}{of}")
    return found
