"""`health --fail-below FILE`: minimum values of measured figures, absolute or as a share of the specified peak."""

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
from lightning_llm.health.communication import BUS_FACTORS
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
